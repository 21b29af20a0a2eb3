"""The plain policy gradient (REINFORCE: Williams 1992, doi 10.1007/BF00992696)."""

from __future__ import annotations

import torch

from headrace.algorithms.losses.ratio import probability_ratio
from headrace.algorithms.registry import LossInputs, LossTerms, register_loss
from headrace.config import AlgorithmConfig


@register_loss("policy_gradient")
def policy_gradient(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """L_t = -A_t log pi(token t): its gradient is -A_t grad log pi. Nothing is clipped.

    It knows nothing of the old policy, so it is right for the first update of a step only: leave
    `train.samples_per_update` and `train.passes_per_step` as they are. `ratio` is there to be watched.
    """
    loss = -inputs.advantages.detach() * inputs.logprobs
    ratio = probability_ratio(inputs.logprobs.detach(), inputs.old_logprobs)
    return LossTerms(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))
