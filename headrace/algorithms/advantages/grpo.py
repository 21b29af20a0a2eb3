"""Group-relative advantages (GRPO: Shao et al. 2024, arXiv 2402.03300, section 4.1.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.advantages.groups import group_rewards, scatter_advantages
from headrace.algorithms.registry import Scored, register_advantage
from headrace.config import AlgorithmConfig
from headrace.observe.metrics import MetricSums


@torch.no_grad()
def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    valid: Tensor | None = None,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each sample: (reward - mean of its group) / (std of its group + eps).

    The paper writes std without saying which; this is the *sample* standard deviation (n - 1), as in TRL.
    With `normalize_std=False` the division is left out (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).

    rewards [R]; group_ids [R] any integers, in any order; valid [R] bool (None: all). Rows that are not
    valid enter no mean and no deviation and get 0, whatever their reward holds. A group whose valid rewards
    are equal gets exactly 0, and so does a group with one valid row: there is nothing to compare it with.
    Computed in float64; returns [R] in rewards' dtype (float32 for integers).
    Raises ValueError when shapes differ or a valid row's reward is not finite.
    """
    groups = group_rewards(rewards, group_ids, valid)
    advantage = groups.rewards - groups.mean[groups.index]
    if normalize_std:
        advantage = advantage / (groups.std[groups.index] + eps)
    return scatter_advantages(rewards, groups, advantage)


@register_advantage("grpo", grouped=True)
def grpo_advantage(scored: Scored, settings: AlgorithmConfig) -> Tensor:
    """[R] float64 by `grpo`, with `algorithm.normalize_std`."""
    return grpo(scored.rewards, scored.group_ids, valid=scored.valid, normalize_std=settings.normalize_std)


def group_stats(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> MetricSums:
    """`reward/zero_spread_group_fraction`: how many of the groups with a valid row have equal valid rewards.

    Where nothing is taken off the rewards (a KL, a length penalty), every group-relative advantage of such a
    group is 0, so it teaches nothing; a group with one valid row is one of them. Empty where no row is valid.
    Arguments and errors as in `grpo`.
    """
    metrics = MetricSums()
    groups = group_rewards(rewards, group_ids, valid)
    scored = groups.count > 0
    if bool(scored.any()):
        flat = scored & ~groups.varies
        metrics.add("reward/zero_spread_group_fraction", int(flat.sum()), int(scored.sum()))
    return metrics
