"""Leave-one-out advantages (RLOO: Ahmadian et al. 2024, arXiv 2402.14740; Kool et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.advantages.groups import group_rewards, scatter_advantages


@torch.no_grad()
def rloo(rewards: Tensor, group_ids: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Advantage of each sample: its reward minus the mean reward of the *other* valid samples of its group.

    Equal to n / (n - 1) * (reward - group mean) for n valid rows. Arguments, exclusions and zeros as in
    `grpo`: rows that are not valid, groups of equal rewards and groups with one valid row get exactly 0.
    """
    groups = group_rewards(rewards, group_ids, valid)
    n = groups.count.double()
    factor = n / (n - 1).clamp(min=1)
    advantage = factor[groups.index] * (groups.rewards - groups.mean[groups.index])
    return scatter_advantages(rewards, groups, advantage)
