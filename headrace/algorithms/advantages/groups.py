"""Statistics of rewards over the groups of samples that share a prompt.

Shapes: R rows (samples), G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Float64 statistics over the *valid* rows of every group; where there are none, the mean is 0."""

    index: Tensor  # [R] int64: the group of each row, 0 … G - 1
    valid: Tensor  # [R] bool
    rewards: Tensor  # [R] float64, 0 where not valid
    count: Tensor  # [G] int64
    mean: Tensor  # [G]
    std: Tensor  # [G] sample standard deviation (n - 1); 0 with fewer than two rows or equal rewards
    varies: Tensor  # [G] bool: at least two rows, not all of the same reward


def group_rewards(rewards: Tensor, group_ids: Tensor, valid: Tensor | None) -> Groups:
    """rewards [R]; group_ids [R] any integers, in any order; valid [R] bool (None: all rows).

    Raises ValueError when shapes differ or a valid row's reward is not finite, naming the row.
    """
    if valid is None:
        valid = torch.ones(rewards.shape, dtype=torch.bool, device=rewards.device)
    if rewards.dim() != 1 or group_ids.shape != rewards.shape or valid.shape != rewards.shape:
        raise ValueError(
            "rewards, group_ids and valid must be [R] alike; got"
            f" {tuple(rewards.shape)}, {tuple(group_ids.shape)} and {tuple(valid.shape)}"
        )
    bad = valid & ~torch.isfinite(rewards)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"the reward of row {row} is {rewards[row].item()}; mark that row as not valid")

    r = torch.where(valid, rewards.detach().double(), 0.0)
    ids, index = torch.unique(group_ids.to(rewards.device), return_inverse=True)
    zeros = r.new_zeros(len(ids))
    count = torch.zeros_like(zeros, dtype=torch.int64).index_add_(0, index, valid.to(torch.int64))
    mean = zeros.index_add(0, index, r) / count.clamp(min=1)
    deviation = torch.where(valid, r - mean[index], 0.0)
    variance = zeros.index_add(0, index, deviation.square()) / (count - 1).clamp(min=1)
    # asked of the rewards themselves: the mean of equal numbers may differ from them in the last bit
    low = torch.where(valid, r, torch.inf)
    high = torch.where(valid, r, -torch.inf)
    low = zeros.new_full(zeros.shape, torch.inf).scatter_reduce(0, index, low, "amin")
    high = zeros.new_full(zeros.shape, -torch.inf).scatter_reduce(0, index, high, "amax")
    varies = high > low
    return Groups(index, valid, r, count, mean, torch.where(varies, variance.sqrt(), 0.0), varies)


def scatter_advantages(rewards: Tensor, groups: Groups, advantage: Tensor) -> Tensor:
    """advantage [R] in rewards' dtype (float32 for integers); 0 in invalid rows and groups without spread."""
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return torch.where(groups.valid & groups.varies[groups.index], advantage, 0.0).to(dtype)
