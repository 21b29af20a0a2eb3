"""The boxes that real tensors hold: what DTensors of FSDP2 and tensor parallelism say, exchanged over all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from headrace.errors import RunError
from headrace.reshard.box import Box

Described = dict[str, tuple[tuple[int, ...], str, Box]]
"""Parameter name → (global shape, dtype as `bfloat16`, the box this rank holds)."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank: a DTensor's local part, anything else as it is. Never waits for a collective."""
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def box_of(name: str, tensor: torch.Tensor) -> Box:
    """The box this rank holds of a tensor; all of it for a plain one.

    Placements are applied left to right with `torch.chunk`'s uneven split; a strided shard, which is what FSDP2 makes
    of a dimension that tensor parallelism has split already, after the other shards of its dimension. RunError when
    torch reports another box, or the memory has another shape: then the part is no box (an uneven strided shard), or
    there is a partial sum.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise RunError(f"parameter {name}: this rank is not in the mesh of its DTensor")
    start, stop = [0] * tensor.dim(), list(tensor.shape)
    shards = [(a, p) for a, p in enumerate(tensor.placements) if isinstance(p, Shard | _StridedShard)]
    shards.sort(key=lambda shard: isinstance(shard[1], _StridedShard))  # stable: the strided ones last
    for axis, placement in shards:
        d = placement.dim
        length = stop[d] - start[d]
        size = -(-length // tensor.device_mesh.size(axis))
        begin = min(size * coordinate[axis], length)
        start[d], stop[d] = start[d] + begin, start[d] + min(begin + size, length)
    box = Box(tuple(start), tuple(stop))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    held = tuple(tensor.to_local().shape)
    same = box.shape == tuple(shape) == held and (box.numel == 0 or box.start == tuple(offset))
    if not same or any(p.is_partial() for p in tensor.placements):
        raise RunError(
            f"parameter {name}: placements {tensor.placements} on a mesh {tuple(tensor.device_mesh.shape)} of shape"
            f" {tuple(tensor.shape)} give {box}, but torch reports shape {tuple(shape)} at {tuple(offset)} and the rank"
            f" holds {held}. Only parts that are one box can be moved: make the dimension divisible by the degrees"
        )
    return box


def describe_local(tensors: Mapping[str, torch.Tensor]) -> Described:
    """What this rank holds of each tensor."""
    return {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), box_of(name, tensor))
        for name, tensor in tensors.items()
    }


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a small tensor must lie so that the group can send it."""
    on_gpu = "nccl" in str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def gather_descriptions(
    own: Described, tied: Mapping[str, str], group: dist.ProcessGroup | None
) -> dict[int, tuple[Described, dict[str, str]]]:
    """Global rank → (what it holds, which of its names share storage), the same on all ranks. Sent as JSON."""
    if not dist.is_initialized():
        return {0: (own, dict(tied))}
    device = wire_device(group)
    entries = {n: [shape, dtype, box.start, box.stop] for n, (shape, dtype, box) in own.items()}
    text = json.dumps([entries, dict(tied)]).encode()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in ranks]
    dist.all_gather(rows, mine.to(device), group=group)
    found = {}
    for rank, row, size in zip(ranks, rows, sizes, strict=True):
        described, names = json.loads(row[: int(size)].cpu().numpy().tobytes())
        found[rank] = ({n: _entry(*entry) for n, entry in described.items()}, names)
    return found


def _entry(shape: Any, dtype: str, start: Any, stop: Any) -> tuple[tuple[int, ...], str, Box]:
    return tuple(shape), dtype, Box(tuple(start), tuple(stop))
