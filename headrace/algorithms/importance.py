"""Importance weights between the distribution that sampled a token and the trainer's own.

Rollout and trainer compute the same model by other kernels, or with other weights where samples are late. The
tokens come from the rollout's distribution mu, the gradient is meant for the trainer's pi; w = pi / mu corrects that
(Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; truncation: Ionides 2008,
doi 10.1198/106186008X320456; leaving out weights: Ling Team 2025, arXiv 2510.18855, which has a lower bound besides).

Shapes: M tokens that count in the loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@torch.no_grad()
def importance_weights(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    rows: Tensor,
    num_rows: int,
    mode: ImportanceMode,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weight to be used [M], weight before the cap [M], above the cap [M] bool), detached.

    With d_t = trainer_logprobs - rollout_logprobs of token t, both before the step's first update:
        token:     w_t = exp(d_t)
        sequence:  w_t = exp(sum of d over the tokens of t's row), the same for every token of a row
        truncate:  min(w, cap);   mask: w where w <= cap, else 0
    A token of weight 0 stays in the denominator of the loss, so nothing else weighs more for it. The exponent is
    clamped to ±20.

    logprobs [M] float, natural log; rows [M] int64 in 0 … num_rows - 1 (whole rows: a row cut in two would have two
    products). Raises ValueError for another mode.
    """
    kind, _, action = mode.partition("_")
    if kind not in ("token", "sequence") or action not in ("truncate", "mask"):
        raise ValueError(f"unknown importance weights '{mode}'")
    d = (trainer_logprobs - rollout_logprobs).double()
    if kind == "sequence":
        d = d.new_zeros(num_rows).index_add(0, rows, d)[rows]
    weight = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    above = weight > cap
    used = weight.clamp(max=cap) if action == "truncate" else torch.where(above, 0.0, weight)
    dtype = trainer_logprobs.dtype
    return used.to(dtype), weight.to(dtype), above
