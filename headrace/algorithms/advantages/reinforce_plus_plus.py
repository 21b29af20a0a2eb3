"""REINFORCE++ and its variant with the group's mean as baseline (Hu 2025, arXiv 2501.03262)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.advantages.gae import gae
from headrace.algorithms.advantages.groups import group_rewards, scatter_advantages
from headrace.algorithms.advantages.whiten import whiten
from headrace.algorithms.registry import Scored, register_advantage
from headrace.config import AlgorithmConfig


@register_advantage("reinforce_plus_plus")
@torch.no_grad()
def reinforce_plus_plus(scored: Scored, settings: AlgorithmConfig) -> Tensor:
    """The return from each token on, normalised over all tokens of the step; [N] float32.

        A_t = r(response) - beta * sum over i >= t of KL(i),  then  A <- (A - mean(A)) / std(A)

    over the masked tokens of all valid rows. The KL is in the token rewards (`algorithm.kl_placement` "reward", as
    this preset has it). `algorithm.gamma` below 1 discounts per token; `algorithm.whiten_advantages` false leaves the
    normalisation out.
    """
    returns, _ = gae(  # with no values and lambda 1, the advantage is the return
        scored.token_rewards,
        torch.zeros_like(scored.token_rewards),
        scored.mask,
        scored.offsets,
        settings.gamma,
        1.0,
    )
    return _normalised(returns, scored, settings)


@register_advantage("reinforce_plus_plus_baseline", grouped=True)
@torch.no_grad()
def reinforce_plus_plus_baseline(scored: Scored, settings: AlgorithmConfig) -> Tensor:
    """The reward minus its group's mean, normalised over all tokens of the step; [N] float32.

        A_i = r_i - mean of its group,  then  A <- (A - mean(A)) / std(A)

    Unlike in GRPO the scale is one for the whole step, so an easy prompt is not blown up. Every token of a response
    has its advantage, and the statistics are over masked tokens, as in `reinforce_plus_plus`. The paper's KL is a
    term of the loss with estimator k2, as this preset has it.
    """
    groups = group_rewards(scored.rewards, scored.group_ids, scored.valid)
    centred = scatter_advantages(scored.rewards, groups, groups.rewards - groups.mean[groups.index])
    return _normalised(torch.where(scored.mask, centred[scored.row_ids()], 0.0), scored, settings)


def _normalised(advantages: Tensor, scored: Scored, settings: AlgorithmConfig) -> Tensor:
    advantages = advantages.float()
    return whiten(advantages, scored.mask, scored.ranks) if settings.whiten_advantages else advantages
