"""The processes that one model runs on: a grid `pp x dp_replicate x zero3 x sp x tp`, and what they say to each
other.

Ranks along `dp_replicate` and `zero3` hold different rows (they are *data-parallel*); ranks along `pp`, `sp` and `tp`
hold the same rows. A mesh of one process has no groups, and every exchange gives back what it was given.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headrace.errors import ConfigError
from headrace.stages import DataRanks

Axis = Literal["pp", "dp_replicate", "zero3", "sp", "tp"]
DATA_AXES: tuple[Axis, ...] = ("dp_replicate", "zero3")
ALL_AXES: tuple[Axis, ...] = ("pp", *DATA_AXES, "sp", "tp")


@dataclass(frozen=True)
class Parallelism:
    """How many processes there are along each axis.

    `dp_replicate`: whole copies of the model. `zero3`: each weight, gradient and optimizer moment cut over so many
    data-parallel ranks. `tp`: each layer's heads, MLP columns and vocabulary cut over so many ranks. `pp`: the layers, in
    order, over so many ranks, and with `pp_chunks` above 1 in so many turns: of 8 layers in 2 x 2, the first rank has
    1, 2, 5 and 6 (interleaved, training/timetable.py). `sp`: the tokens of each micro-batch shared out over so many ranks
    (models/sequence_parallel.py).
    """

    dp_replicate: int = 1
    zero3: int = 1
    tp: int = 1
    pp: int = 1
    pp_chunks: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        wrong = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) < 1]
        if wrong:
            raise ConfigError([f"parallelism: {text} must be at least 1" for text in wrong])
        if self.pp_chunks > 1 and self.pp == 1:
            raise ConfigError(f"parallelism: pp_chunks={self.pp_chunks} is for pp above 1")

    @property
    def size(self) -> int:
        return self.pp * self.dp_replicate * self.zero3 * self.sp * self.tp


class Mesh:
    """This process's place in the grid. Ranks count along `tp` first, then `sp`, `zero3`, `dp_replicate`, `pp`.

    Made by the processes in `ranks` at the same time, and by no others.
    """

    def __init__(
        self,
        parallelism: Parallelism | None = None,
        device: torch.device | str = "cpu",
        ranks: Sequence[int] | None = None,
    ) -> None:
        """`ranks`: global ranks, ascending, that fill the grid (default: all). Raises ConfigError unless they do."""
        self.parallelism = parallelism or Parallelism()
        self.device = torch.device(device)
        p = self.parallelism
        self.device_mesh: DeviceMesh | None = None
        if p.size == 1:
            return
        if not dist.is_initialized():
            raise ConfigError(f"parallelism: {p.size} processes are asked for, and no process group is there")
        ranks = range(dist.get_world_size()) if ranks is None else ranks
        if len(ranks) != p.size:
            raise ConfigError(
                f"parallelism: pp={p.pp} x dp_replicate={p.dp_replicate} x zero3={p.zero3} x sp={p.sp} x tp={p.tp}"
                f" is {p.size} processes, and there are {len(ranks)}"
            )
        if any(a >= b for a, b in itertools.pairwise(ranks)):
            # torch sorts the ranks of a group, and a rank's index in it must be its index on the axis
            raise ConfigError(f"parallelism: the ranks of a mesh must ascend, and {list(ranks)} do not")
        grid = torch.tensor(list(ranks)).view(p.pp, p.dp_replicate, p.zero3, p.sp, p.tp)
        if dist.get_rank() not in ranks:
            raise ConfigError(f"parallelism: rank {dist.get_rank()} is none of the mesh's {list(ranks)}")
        self.device_mesh = _device_mesh(self.device.type, grid)

    def size(self, axis: Axis) -> int:
        return int(getattr(self.parallelism, axis))

    def rank(self, axis: Axis) -> int:
        """This process's number along an axis."""
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank(axis)

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """The processes along an axis through this one; None where it is alone there."""
        if self.device_mesh is None or self.size(axis) == 1:
            return None
        return self.device_mesh.get_group(axis)

    @property
    def is_last(self) -> bool:
        """Whether this process has the last layers and the head, and so the outputs."""
        return self.rank("pp") == self.size("pp") - 1

    def from_last(self, value: Any) -> Any:
        """The `value` of the last of the ranks along pp. For small plain (JSON) values."""
        group = self.group("pp")
        if group is None:
            return value
        return gather_plain(value, group)[-1]

    def all_reduce(
        self,
        tensor: Tensor,
        axes: Sequence[Axis] = DATA_AXES,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> Tensor:
        """Combines `tensor` over all ranks along `axes`, in place, and returns it."""
        for axis in axes:
            group = self.group(axis)
            if group is not None:
                dist.all_reduce(tensor, op, group)
        return tensor

    @property
    def data_rank(self) -> int:
        """This process's number among those with other rows, as `gather` orders them."""
        return self.rank("dp_replicate") * self.size("zero3") + self.rank("zero3")

    @property
    def data_size(self) -> int:
        """How many processes (or groups of such) have rows of their own."""
        return self.size("dp_replicate") * self.size("zero3")

    @property
    def copy(self) -> int:
        """This process's number among those that hold the same parts of a model: along `dp_replicate` and `sp`."""
        return self.rank("dp_replicate") * self.size("sp") + self.rank("sp")

    def most(self, number: int) -> int:
        """The largest `number` of all data-parallel ranks."""
        if self.device_mesh is None:
            return number
        counts = torch.tensor([number], device=self.device)
        return int(self.all_reduce(counts, DATA_AXES, dist.ReduceOp.MAX))

    def gather(self, value: Any) -> list[Any]:
        """`value` of every data-parallel rank, in the same order everywhere. For small plain (JSON) values."""
        gathered = [value]
        for axis in reversed(DATA_AXES):
            group = self.group(axis)
            if group is not None:
                gathered = [item for part in gather_plain(gathered, group) for item in part]
        return gathered


class MeshRanks(DataRanks):
    """The data-parallel ranks of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.index, self.count = mesh.data_rank, mesh.data_size

    def total(self, values: Sequence[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._mesh.device)
        added: list[float] = self._mesh.all_reduce(numbers).tolist()
        return added

    def gather(self, value: Any) -> list[Any]:
        return self._mesh.gather(value)


def gather_plain(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The plain value of every rank of `group` (None: of all ranks), sent as JSON, which cannot run code when read."""
    on_gpu = "nccl" in str(dist.get_backend(group))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    text = json.dumps(value).encode()
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=group)
    mine = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = [torch.empty(len(mine), dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(rows, mine.to(device), group=group)
    return [
        json.loads(row[: int(size)].cpu().numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


def _device_mesh(device_type: str, grid: Tensor) -> DeviceMesh:
    """The mesh of `grid` [one dimension for each axis, global ranks], with groups that its own ranks make alone.

    torch's own constructor wants every rank of the world at every mesh, and a worker group has only its own ranks.
    Each group has the ranks that differ in one coordinate; all ranks make theirs in the order of the axes. torch names a
    group by its ranks and by how many groups the process has: those of a mesh must have made equally many before.
    """
    here = (grid == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for axis in range(grid.dim()):
        index = (*here[:axis], slice(None), *here[axis + 1 :])
        groups.append(dist.new_group(grid[index].tolist(), use_local_synchronization=True))
    return DeviceMesh.from_group(groups, device_type, grid, mesh_dim_names=ALL_AXES)
