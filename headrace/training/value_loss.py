"""The critic's loss and the supervised loss."""

from __future__ import annotations

from torch import Tensor

from headrace.algorithms.losses.nll import nll
from headrace.algorithms.losses.value import value_loss
from headrace.data.batch import Batch
from headrace.observe.metrics import MetricSums
from headrace.training.engine import TokenOutputs
from headrace.training.policy_loss import masked_sum, weighted_sum


class ValueLoss:
    """Sum over tokens of `loss_weight` x clipped squared error; reads `values` (before the step) and `returns`."""

    per_update: tuple[str, ...] = ("critic/loss",)

    def __init__(self, value_clip: float | None) -> None:
        self.value_clip = value_clip

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, MetricSums]:
        if outputs.values is None:
            raise ValueError("the value loss needs a model with a scalar head")
        loss, clipped = value_loss(outputs.values, batch["values"], batch["returns"], clip=self.value_clip)
        total = weighted_sum(batch["loss_weight"], loss)
        metrics = MetricSums()
        metrics.add("critic/loss", total.detach(), 0)
        if self.value_clip is not None:
            metrics.add(
                "critic/clip_fraction",
                masked_sum(batch["loss_mask"], clipped.float()),
                int(batch["loss_mask"].sum()),
            )
        return total, metrics


class SupervisedLoss:
    """Sum over response tokens of `loss_weight` x negative log-likelihood, in nats."""

    per_update: tuple[str, ...] = ()

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, MetricSums]:
        if outputs.logprobs is None:
            raise ValueError("the supervised loss needs log-probabilities")
        loss = nll(outputs.logprobs)
        total = weighted_sum(batch["loss_weight"], loss)
        mask = batch["response_mask"]
        metrics = MetricSums()
        metrics.add("sft/loss", masked_sum(mask, loss), int(mask.sum()))
        return total, metrics
