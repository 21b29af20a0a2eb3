"""ReMax: the prompt's greedy response is the baseline (Li et al. 2023, arXiv 2310.10505)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.registry import Scored, register_advantage
from headrace.config import AlgorithmConfig


@register_advantage("remax", needs_greedy_baseline=True)
@torch.no_grad()
def remax(scored: Scored, settings: AlgorithmConfig) -> Tensor:
    """A_i = r(prompt, response_i) - r(prompt, greedy response); [R] float64, 0 in rows that are not valid.

    The greedy response is the most likely token each time, from the weights that sampled the others. It needs no
    second sample, so one per prompt is enough. Raises ValueError without greedy rewards.
    """
    if scored.greedy_rewards is None:
        raise ValueError("remax needs the rewards of greedy responses")
    return torch.where(scored.valid, scored.rewards - scored.greedy_rewards, 0.0)
