"""The gradients of an update over a mesh: summed over the ranks that had other rows or tokens, and their one global norm.

The loss of an update is a sum over all its rows (docs/architecture.md), so gradients are summed and never averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from headrace.models.mesh import ALL_AXES, DATA_AXES, Axis
from headrace.models.shards import Shards

BUCKET_BYTES = 64 << 20  # of gradients that cross in one message


def exchange_gradients(
    own: Mapping[str, Tensor | None], weights: Sequence[Tensor], shards: Shards
) -> dict[str, Tensor]:
    """Every process's gradients (float32, of its shards) → those of the whole update, where any process has one.

    `weights`: the shards themselves, in the same order. The two copies of a tied parameter get one gradient. FSDP has
    summed over `zero3` already. Every process has to call.
    """
    mesh = shards.mesh
    if mesh.parallelism.size == 1:
        return {name: grad for name, grad in own.items() if grad is not None}
    # a rank without rows has none, and adding nothing must not become a gradient of 0 that decays unused weights
    has = torch.tensor([grad is not None for grad in own.values()], dtype=torch.int32, device=mesh.device)
    mesh.all_reduce(has, (*DATA_AXES, "sp"), ReduceOp.MAX)
    tied = torch.tensor([name in shards.tied for name in own], device=mesh.device)
    has[tied] = _with_other_stage(has[tied], shards)
    everywhere: dict[str, Tensor] = {}
    for (name, grad), weight, used in zip(own.items(), weights, has.tolist(), strict=True):
        if used:
            everywhere[name] = torch.zeros_like(weight, dtype=torch.float32) if grad is None else grad
    _sum(shards, list(everywhere.values()), "dp_replicate")
    _sum(shards, list(everywhere.values()), "sp")
    _sum(shards, [grad for name, grad in everywhere.items() if name in shards.partial], "tp")
    for name in shards.tied:
        if name in everywhere:
            everywhere[name] = _with_other_stage(everywhere[name], shards)
    return everywhere


def _with_other_stage(own: Tensor, shards: Shards) -> Tensor:
    """The sum of what the first and the last rank along pp have of a tied parameter: the same bits on both."""
    mesh = shards.mesh
    if own.numel() == 0 or not shards.tied:
        return own
    peer = 0 if mesh.is_last else mesh.size("pp") - 1
    own, others = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
    group = mesh.group("pp")
    swap = [
        dist.P2POp(dist.isend, own, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, others, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    return own + others


def _sum(shards: Shards, gradients: list[Tensor], axis: Axis) -> None:
    """All-reduces in place, several gradients in one message."""
    if shards.mesh.group(axis) is None:
        return
    bucket: list[Tensor] = []
    for i, grad in enumerate(gradients):
        bucket.append(grad)
        if i + 1 < len(gradients) and sum(g.nbytes for g in bucket) < BUCKET_BYTES:
            continue
        flat = shards.mesh.all_reduce(torch.cat([g.flatten() for g in bucket]), [axis])
        for g, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            g.copy_(part.view_as(g))
        bucket = []


def global_norm(gradients: Mapping[str, Tensor], shards: Shards) -> float:
    """L2 norm of the whole gradient, the same number on every process; what several hold alike counts once."""
    mesh = shards.mesh
    if mesh.parallelism.size == 1:
        return float(torch.nn.utils.get_total_norm(list(gradients.values())))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for name, grad in gradients.items():
        square = torch.linalg.vector_norm(grad).double().square()
        counts_here = name in shards.dims or mesh.rank("tp") == 0
        counts_here &= shards.stages.get(name, (mesh.rank("pp"),))[0] == mesh.rank("pp")
        # one that is not finite counts wherever it is: all have to hear of it
        total += square if counts_here else torch.where(square.isfinite(), 0.0, square)
    total = torch.where(total.isfinite() & (mesh.copy > 0), 0.0, total)
    return float(mesh.all_reduce(total, ALL_AXES).sqrt())
