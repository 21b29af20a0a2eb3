"""GSPO: ratio and clip of whole responses (Zheng et al. 2025, arXiv 2507.18071, section 4)."""

from __future__ import annotations

import torch

from headrace.algorithms.losses.ratio import probability_ratio
from headrace.algorithms.registry import LossInputs, LossTerms, register_loss
from headrace.config import AlgorithmConfig


@register_loss("gspo")
def gspo(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """The clipped objective with the length-normalised ratio of the response (eq. 5, sign turned).

        s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) = exp(mean over the response's tokens of the log-ratio)
        L_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high)),   s_t = sg(s_i) pi(t) / sg(pi(t))

    s_t is s_i in value and gives each token its own gradient, s_i grad log pi(t): the paper's token form (eq. 13),
    whose gradient is that of the response's form where a response has one advantage, and which allows
    others. A bound decides for all tokens of a response with one advantage together. The reduction
    "sequence_mean", which the preset has, makes it the paper's objective. `ratio` is s_i.
    """
    advantages = inputs.advantages.detach()
    log_ratio = (inputs.logprobs - inputs.old_logprobs).detach()
    s = probability_ratio(inputs.row_mean(log_ratio)[inputs.rows], torch.zeros_like(log_ratio))
    with_gradient = s * (inputs.logprobs - inputs.logprobs.detach()).exp()
    bounded = -advantages * s.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    clipped = bounded > -advantages * s
    return LossTerms(torch.where(clipped, bounded, -advantages * with_gradient), s, clipped)
