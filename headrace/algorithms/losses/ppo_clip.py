"""The clipped policy loss of PPO (Schulman et al. 2017, arXiv 1707.06347), with asymmetric and dual clip."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.algorithms.losses.ratio import probability_ratio
from headrace.algorithms.registry import LossInputs, LossTerms, register_loss
from headrace.config import AlgorithmConfig


class PPOClipOutput(NamedTuple):
    loss: Tensor  # [N], differentiable in logprobs
    ratio: Tensor  # [N], detached
    clipped: Tensor  # [N] bool: the clip bound decided the loss, so the token has no gradient
    dual_clipped: Tensor  # [N] bool: the dual clip decided it, likewise


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PPOClipOutput:
    """Loss per token, to be minimised, with r = exp(logprobs - old_logprobs) and advantage A.

        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))                 (PPO, eq. 7, sign turned)
        and where A < 0 and `dual_clip` is c:  loss = min(loss, -c A)

    Unequal bounds are DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476, section 3.1); the second line is
    dual clip (Ye et al. 2020, arXiv 1912.09729, eq. 5), which bounds the loss of a token that became far more
    likely although it was bad. Inside the bounds the gradient with respect to logprobs is -A r; where a clip
    decides it is 0. logprobs - old_logprobs is clamped to ±20 before `exp`, so r stays finite
    (2e-9 … 5e8); beyond, the gradient is 0.

    All tensors [N] float; only logprobs receives a gradient (through old_logprobs and advantages none flows).
    Raises ValueError unless 0 <= clip_low <= 1, clip_high >= 0 and dual_clip > 1.
    """
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(f"wanted 0 <= clip_low <= 1 and clip_high >= 0; got {clip_low} and {clip_high}")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
    advantages = advantages.detach()
    ratio = probability_ratio(logprobs, old_logprobs)
    unbounded = -advantages * ratio
    bounded = -advantages * ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = bounded > unbounded.detach()
    loss = torch.where(clipped, bounded, unbounded)
    if dual_clip is None:
        dual_clipped = torch.zeros_like(clipped)
    else:
        ceiling = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (ceiling < loss.detach())
        loss = torch.where(dual_clipped, ceiling, loss)
    return PPOClipOutput(loss, ratio.detach(), clipped, dual_clipped)


@register_loss("ppo_clip")
def ppo_clip_loss(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """`ppo_clip` with the clip bounds of the settings; `actor/dual_clip_fraction` where there is a dual clip."""
    out = ppo_clip(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    extra = {} if settings.dual_clip is None else {"actor/dual_clip_fraction": out.dual_clipped}
    return LossTerms(out.loss, out.ratio, out.clipped, extra)
