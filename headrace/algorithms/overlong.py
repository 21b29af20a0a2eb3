"""The soft penalty on long responses (DAPO: Yu et al. 2025, arXiv 2503.14476, section 3.4, eq. 13)."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(num_tokens: Tensor, max_new_tokens: int, fraction: float) -> Tensor:
    """What is taken off the reward of a response of `num_tokens` [R] tokens; [R] float64, from 0 to 1.

    With L = max_new_tokens and C = fraction x L, the length over which the penalty rises:
        0 up to L - C tokens, then (tokens - (L - C)) / C, so 1 at L tokens.
    All 0 where `fraction` is 0.
    """
    length = num_tokens.double()
    if fraction == 0:
        return length.new_zeros(length.shape)
    ramp = fraction * max_new_tokens
    return ((length - (max_new_tokens - ramp)) / ramp).clamp(0.0, 1.0)
