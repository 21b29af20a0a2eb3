"""CISPO: the clipped ratio is a weight and not an objective (MiniMax 2025, arXiv 2506.13585, section 3.1)."""

from __future__ import annotations

from headrace.algorithms.losses.ratio import probability_ratio
from headrace.algorithms.registry import LossInputs, LossTerms, register_loss
from headrace.config import AlgorithmConfig


@register_loss("cispo")
def cispo(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """Policy gradient with a bounded importance weight (sign turned).

        L_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(token t)

    with r the ratio of new to old probability and sg the stop-gradient. The gradient is
    -clip(r_t) A_t grad log pi: unlike with a clipped objective no token loses its gradient, however far it moved.
    `clipped` marks tokens whose weight a bound changed. `clip_low` 1 is no lower bound, which is the paper's choice;
    the upper one is tuned there and not stated.
    """
    ratio = probability_ratio(inputs.logprobs.detach(), inputs.old_logprobs)
    weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return LossTerms(-weight * inputs.advantages.detach() * inputs.logprobs, ratio, weight != ratio)
