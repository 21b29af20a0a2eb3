"""REINFORCE's advantage with the mean of the step as baseline (Williams 1992, doi 10.1007/BF00992696)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.moments import moments
from headrace.algorithms.registry import Scored, register_advantage
from headrace.config import AlgorithmConfig


@register_advantage("batch_mean")
@torch.no_grad()
def batch_mean(scored: Scored, settings: AlgorithmConfig) -> Tensor:
    """A_i = r_i - mean of the valid rewards of the step; [R] float64, 0 in rows that are not valid.

    A row's own reward is in the mean, which scales the expected gradient by (1 - 1 / valid rows) and does not turn
    it.
    """
    out = torch.zeros_like(scored.rewards)
    kept = scored.rewards[scored.valid]
    found = moments(kept, scored.ranks)
    if found.high > found.low:  # the mean of equal numbers may differ from them in the last bit
        out[scored.valid] = kept - found.mean
    return out
