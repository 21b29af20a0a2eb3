"""How far the trainer's log-probabilities are from those the tokens were sampled with."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.observe.metrics import MetricSums

MAX_LOG_RATIO = 20.0


@torch.no_grad()
def logprob_gap(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> MetricSums:
    """The gap over the masked tokens of a batch, as sums that pool over micro-batches and ranks.

    With d = trainer_logprobs - rollout_logprobs:
    - `gap/abs_logprob_mean`: mean |d|, nats;
    - `gap/abs_logprob_max`: largest |d|, nats;
    - `gap/kl`: mean of exp(d) - 1 - d, nats: the k3 estimate of KL(rollout || trainer), for the rollout
      sampled the tokens (see kl.py). d is clamped to ±20 inside `exp`.

    All [N]; mask bool. Values under mask False are never read; a NaN under True makes the metrics NaN.
    Without a masked token there are no metrics. Computed in float64.
    """
    metrics = MetricSums()
    d = trainer_logprobs[mask].double() - rollout_logprobs[mask].double()
    if d.numel() == 0:
        return metrics
    metrics.add("gap/abs_logprob_mean", d.abs().sum(), d.numel())
    metrics.add_max("gap/abs_logprob_max", d.abs().max())
    metrics.add("gap/kl", (d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() - d).sum(), d.numel())
    return metrics
