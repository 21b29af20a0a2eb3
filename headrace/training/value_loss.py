"""The critic's loss and the supervised loss."""

from __future__ import annotations

from torch import Tensor

from headrace.algorithms.losses.nll import nll
from headrace.algorithms.losses.value import value_loss
from headrace.data.batch import Batch
from headrace.observe.metrics import MetricSums
from headrace.training.engine import TokenOutputs


class ValueLoss:
    """Sum over tokens of `loss_weight` x clipped squared error; reads `values` (before the step) and `returns`."""

    per_update: tuple[str, ...] = ("critic/loss",)
    needs_entropy = False

    def __init__(self, value_clip: float | None) -> None:
        self.value_clip = value_clip

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, MetricSums]:
        if outputs.values is None:
            raise ValueError("the value loss needs a model with a scalar head")
        kept = batch["loss_mask"].nonzero().flatten()
        # masked tokens leave before any arithmetic: a NaN among them would reach the gradient even at weight 0
        loss, clipped = value_loss(
            outputs.values[kept], batch["values"][kept], batch["returns"][kept], clip=self.value_clip
        )
        total = (batch["loss_weight"][kept] * loss).sum()
        metrics = MetricSums()
        metrics.add("critic/loss", total.detach(), 0)
        if self.value_clip is not None:
            metrics.add("critic/clip_fraction", clipped.sum(), len(loss))
        return total, metrics


class SupervisedLoss:
    """Sum over response tokens of `loss_weight` x negative log-likelihood, in nats."""

    per_update: tuple[str, ...] = ()
    needs_entropy = False

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, MetricSums]:
        if outputs.logprobs is None:
            raise ValueError("the supervised loss needs log-probabilities")
        mask = batch["response_mask"]
        loss = nll(outputs.logprobs[mask])
        total = (batch["loss_weight"][mask] * loss).sum()
        metrics = MetricSums()
        metrics.add("sft/loss", loss.detach().sum(), len(loss))
        return total, metrics
