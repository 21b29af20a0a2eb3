"""The training state of a model on a mesh: whole tensors, each put together when it is asked for, and what of them a
process writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.models.mesh import ALL_AXES, gather_plain
from headrace.models.shards import Shards
from headrace.training.slices import Slice

CUTTING_AXES = ("pp", "zero3", "tp")
"""Along the others every rank has the same of each parameter."""

Kind = tuple[torch.Size, torch.dtype]


class GatheredTensors(Mapping[str, Tensor]):
    """`<kind>/<parameter>` → the whole tensor, from the parts of all ranks along zero3, tp and pp.

    Every rank has to ask for the same names in the same order; each then has that one whole tensor, which lives as long
    as the caller keeps it. On a mesh of one process these are the tensors themselves.
    """

    def __init__(self, parts: Mapping[str, Tensor], shards: Shards) -> None:
        self._parts, self._shards = parts, shards

    def owned(self) -> dict[str, Slice]:
        """What this process writes of the tensors: all of the mesh together write each element once.

        Asks no other process. Copies of a part are shared out: over `dp_replicate` (and whatever else leaves parameters
        as they are) by bytes, so that all replicas write at the same time; what every tp rank has whole is the first
        one's, a tied parameter the first stage's.
        """
        mesh = self._shards.mesh
        is_first = mesh.rank("tp") == 0
        own: dict[str, Slice] = {}
        here, replicas = 0, 1
        for axis in ALL_AXES:
            if axis not in CUTTING_AXES:
                here, replicas = here * mesh.size(axis) + mesh.rank(axis), replicas * mesh.size(axis)
        given = [0] * replicas
        for key, part in self._parts.items():
            name = key.partition("/")[2]
            has_part_alone = part.dim() > 0 and name in self._shards.dims
            if self._shards.stages.get(name, (0,))[0] != mesh.rank("pp") or not (is_first or has_part_alone):
                continue
            if mesh.rank("zero3") and not part.dim():
                continue
            if (mesh.rank("zero3") or mesh.rank("tp")) and not part.numel():
                continue
            replica = given.index(min(given))
            given[replica] += part.nbytes
            if replica == here:
                own[key] = self._slice(name, part)
        return own

    def _slice(self, name: str, part: Tensor) -> Slice:
        if not part.dim():
            return Slice.all_of(part)
        whole = self._shards.shape(name, part)
        return Slice(part, tuple(own.start for own in self._shards.ranges(name, whole)), whole)

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        """Shape and dtype of every whole tensor of any stage, in the order of the whole model."""
        own = {
            key: (self._slice(key.partition("/")[2], part).whole, part.dtype)
            for key, part in self._parts.items()
        }
        if self._shards.mesh.size("pp") == 1:
            return own
        plain = {key: [list(shape), str(dtype).removeprefix("torch.")] for key, (shape, dtype) in own.items()}
        every = gather_plain(plain, self._shards.mesh.group("pp"))
        kinds = {
            key: (torch.Size(shape), getattr(torch, dtype))
            for stage in every
            for key, (shape, dtype) in stage.items()
        }
        order = {name: number for number, name in enumerate(self._shards.shapes)}
        return {key: kinds[key] for key in sorted(kinds, key=lambda key: order[key.partition("/")[2]])}

    def __getitem__(self, key: str) -> Tensor:
        name = key.partition("/")[2]
        if self._shards.mesh.size("pp") == 1:
            return self._shards.join(name, self._parts[key])
        kind = self._kinds[key]
        mesh, source = self._shards.mesh, self._shards.stages[name][0]
        if mesh.rank("pp") == source:
            whole = self._shards.join(name, self._parts[key]).contiguous()
        else:
            whole = torch.empty(kind[0], dtype=kind[1], device=mesh.device)
        dist.broadcast(whole, group=mesh.group("pp"), group_src=source)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, key: object) -> bool:
        return key in self._kinds
