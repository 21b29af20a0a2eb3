"""The probability ratio of the new to the old policy."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs), any shape; the gradient flows into logprobs alone.

    The difference is clamped to ±20 before `exp`, so the ratio stays finite (2e-9 … 5e8); beyond, its gradient is 0.
    """
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
