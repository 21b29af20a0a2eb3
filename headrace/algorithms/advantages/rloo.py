"""REINFORCE leave-one-out (RLOO: Ahmadian et al. 2024, arXiv 2402.14740; Kool et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.advantages.groups import group_rewards, scatter_advantages
from headrace.algorithms.registry import Scored, register_advantage
from headrace.config import AlgorithmConfig


@register_advantage("rloo", grouped=True)
@torch.no_grad()
def rloo(scored: Scored, settings: AlgorithmConfig) -> Tensor:
    """The reward minus the mean of the *other* valid samples of the prompt; [R] float64.

        A_i = r_i - 1 / (k - 1) * sum over j != i of r_j  =  k / (k - 1) * (r_i - mean of the group)

    with k the valid samples of the group. Unlike the group's mean, this baseline does not depend on the sample, so
    the gradient is unbiased. 0 in rows that are not valid, and exactly 0 in groups of equal rewards or of one.
    """
    groups = group_rewards(scored.rewards, scored.group_ids, scored.valid)
    k = groups.count[groups.index].double()
    others = (k * groups.mean[groups.index] - groups.rewards) / (k - 1).clamp(min=1)
    return scatter_advantages(scored.rewards, groups, groups.rewards - others)
