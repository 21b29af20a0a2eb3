"""The training state of a model on a mesh, as whole tensors: each is put together when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.models.mesh import gather_plain
from headrace.models.shards import Shards

Kind = tuple[torch.Size, torch.dtype]


class GatheredTensors(Mapping[str, Tensor]):
    """`<kind>/<parameter>` → the whole tensor, from the parts of all ranks along zero3, tp and pp.

    Every rank has to make it, and to ask for the same names in the same order; each then has that one whole tensor,
    which lives as long as the caller keeps it. On a mesh of one process these are the tensors themselves.
    """

    def __init__(self, parts: Mapping[str, Tensor], shards: Shards) -> None:
        self._parts, self._shards = parts, shards
        self.kinds: Mapping[str, Kind] = {key: self._kind(key, part) for key, part in parts.items()}
        """Shape and dtype of every whole tensor, without putting one together."""
        if shards.mesh.size("pp") > 1:
            self.kinds = self._of_all_stages()

    def _kind(self, key: str, part: Tensor) -> Kind:
        name = key.partition("/")[2]
        return (self._shards.shape(name, part) if part.dim() else part.shape), part.dtype

    def _of_all_stages(self) -> dict[str, Kind]:
        """`kinds` of what any stage has, in the order of the whole model."""
        plain = {
            key: [list(shape), str(dtype).removeprefix("torch.")]
            for key, (shape, dtype) in self.kinds.items()
        }
        every = gather_plain(plain, self._shards.mesh.group("pp"))
        kinds = {
            key: (torch.Size(shape), getattr(torch, dtype))
            for stage in every
            for key, (shape, dtype) in stage.items()
        }
        order = {name: number for number, name in enumerate(self._shards.shapes)}
        return {key: kinds[key] for key in sorted(kinds, key=lambda key: order[key.partition("/")[2]])}

    def __getitem__(self, key: str) -> Tensor:
        name, kind = key.partition("/")[2], self.kinds[key]
        if self._shards.mesh.size("pp") == 1:
            return self._shards.join(name, self._parts[key])
        mesh, source = self._shards.mesh, self._shards.stages[name][0]
        if mesh.rank("pp") == source:
            whole = self._shards.join(name, self._parts[key]).contiguous()
        else:
            whole = torch.empty(kind[0], dtype=kind[1], device=mesh.device)
        dist.broadcast(whole, group=mesh.group("pp"), group_src=source)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def __contains__(self, key: object) -> bool:
        return key in self.kinds
