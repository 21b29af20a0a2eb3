"""Negative log-likelihood, the loss of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor


def nll(logprobs: Tensor) -> Tensor:
    """-logprobs [N], in nats per token; perplexity is the exponential of its mean."""
    return -logprobs
