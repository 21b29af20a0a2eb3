"""Which part of each parameter this process holds, and the way between parts and whole tensors.

Along `pp` a parameter is on one rank, or a tied one on two. There it is cut along `tp` first (one dimension of it, or not
at all), and what is left along `zero3`, by rows. Ranks along `sp` have the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.models.mesh import Axis, Mesh


def part_of(length: int, parts: int, index: int) -> range:
    """Part `index` of `length` things: all parts but the last ones have ceil(length / parts), as in torch.chunk."""
    step = -(-length // parts)
    return range(min(length, index * step), min(length, (index + 1) * step))


def local(tensor: Tensor) -> Tensor:
    """What of a parameter or gradient lies here: a plain tensor over the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part.detach()


@dataclass
class Shards:
    """The layout of one model's parameters over a mesh, by their names in `hf`.

    `dims`: the dimension that is cut over `tp`; a name that is missing is whole there. `partial`: parameters that every
    tp rank has whole and uses for its own heads alone, so that their gradient is the sum over tp ranks. `compute_dtype`:
    what a pass computes in, where that is not the parameters' own dtype. `stages`: the ranks along pp that have a
    parameter; a name that is missing is on all of them. `shapes` are those of all stages.
    """

    mesh: Mesh = field(default_factory=Mesh)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    compute_dtype: torch.dtype | None = None
    stages: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def tied(self) -> list[str]:
        """Parameters of which this stage and another have a copy each, in an order that both know."""
        rank = self.mesh.rank("pp")
        return [name for name, ranks in self.stages.items() if len(ranks) > 1 and rank in ranks]

    @property
    def is_cut(self) -> bool:
        """Whether a process has only parts of the parameters."""
        return self.mesh.size("pp") * self.mesh.size("tp") * self.mesh.size("zero3") > 1

    def shape(self, name: str, parameter: Tensor) -> torch.Size:
        """The shape of the whole parameter."""
        return self.shapes.get(name, parameter.shape)

    def ranges(self, name: str, shape: torch.Size) -> list[range]:
        """The rows (and columns, …) of the whole tensor that lie here."""
        mesh = self.mesh
        own = [range(extent) for extent in shape]
        if name in self.dims:
            dim = self.dims[name]
            own[dim] = part_of(shape[dim], mesh.size("tp"), mesh.rank("tp"))
        if own and mesh.size("zero3") > 1:
            rows = part_of(len(own[0]), mesh.size("zero3"), mesh.rank("zero3"))
            own[0] = range(own[0].start + rows.start, own[0].start + rows.stop)
        return own

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor: a view. A number is not cut."""
        if whole.dim() == 0:
            return whole
        for dim, own in enumerate(self.ranges(name, whole.shape)):
            whole = whole.narrow(dim, own.start, len(own))
        return whole

    def join(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor from its parts (`part` itself where it is whole). Every rank along zero3 and tp must call."""
        if part.dim() == 0:
            return part
        shape = list(self.shape(name, part))
        dim = self.dims.get(name)
        if dim is not None:
            shape[dim] = len(part_of(shape[dim], self.mesh.size("tp"), self.mesh.rank("tp")))
        part = self._join(part, "zero3", 0, shape[0])
        return part if dim is None else self._join(part, "tp", dim, self.shapes[name][dim])

    def _join(self, part: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
        group, parts = self.mesh.group(axis), self.mesh.size(axis)
        if group is None:
            return part
        lengths = [len(part_of(length, parts, index)) for index in range(parts)]
        # the last parts may be shorter, and gloo wants equal ones
        padded = part.new_zeros(max(lengths), *part.movedim(dim, 0).shape[1:])
        padded[: part.shape[dim]] = part.movedim(dim, 0)
        gathered = [torch.empty_like(padded) for _ in range(parts)]
        dist.all_gather(gathered, padded, group)
        joined = torch.cat([g[:n] for g, n in zip(gathered, lengths, strict=True)])
        return joined.movedim(0, dim).contiguous()
