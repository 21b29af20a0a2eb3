"""The actor's loss: a registered token loss, KL to the reference and entropy, with their metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.find import find_loss
from headrace.algorithms.gap import logprob_gap
from headrace.algorithms.importance import importance_weights
from headrace.algorithms.kl import kl
from headrace.algorithms.registry import LossInputs, LossTerms
from headrace.config import AlgorithmConfig
from headrace.data.batch import Batch
from headrace.errors import RunError
from headrace.observe.metrics import MetricSums
from headrace.training.engine import TokenOutputs


class PolicyLoss:
    """Sum over tokens of `loss_weight` x (w x token loss + kl_coefficient x KL - entropy_coefficient x entropy).

    The token loss is the one registered as `algorithm.loss`, w the importance weight (1 unless
    `algorithm.importance_weights` says otherwise). Reads token columns `advantages`, `loss_mask`, `loss_weight`,
    `rollout_logprobs`, and, where they exist, `logprobs` (the trainer's own before the step; without it the update is
    the step's only one and the ratio is 1 by construction) and `reference_logprobs`. `kl_coefficient` replaces the
    configured one.
    """

    per_update: tuple[str, ...] = ("actor/loss", "actor/policy_loss")
    needs_entropy = True

    def __init__(
        self, algorithm: AlgorithmConfig, *, measure_gap: bool, kl_coefficient: float | None = None
    ) -> None:
        self.algorithm = algorithm
        self.measure_gap = measure_gap
        self.kl_coefficient = algorithm.kl_coefficient if kl_coefficient is None else kl_coefficient
        self.loss = find_loss(algorithm.loss)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, MetricSums]:
        a = self.algorithm
        if outputs.logprobs is None or outputs.entropy is None:
            raise ValueError("the policy loss needs log-probabilities and entropy")
        # masked tokens leave before any arithmetic: a NaN among them would reach the gradient even at weight 0
        kept = batch["loss_mask"].nonzero().flatten()
        logprobs, entropy, weight = outputs.logprobs[kept], outputs.entropy[kept], batch["loss_weight"][kept]
        old = batch["logprobs"][kept] if "logprobs" in batch else logprobs.detach()
        rows = batch.row_ids().to(kept.device)[kept]
        inputs = LossInputs(logprobs, old, batch["advantages"][kept], rows, batch.num_rows)
        terms = self._checked(self.loss(inputs, a), len(kept))
        metrics = MetricSums()
        count = len(logprobs)
        policy_weight = weight
        if a.importance_weights != "off":
            used, before, above = importance_weights(
                old,
                rollout_reference(batch)[kept],
                rows,
                batch.num_rows,
                a.importance_weights,
                a.importance_cap,
            )
            policy_weight = weight * used
            metrics.add("importance/weight_mean", before.sum(), count)
            metrics.add("importance/capped_fraction", above.sum(), count)
        policy_loss = (policy_weight * terms.loss).sum()
        total = policy_loss
        if "reference_logprobs" in batch:
            divergence = kl(logprobs, batch["reference_logprobs"][kept], a.kl_estimator)
            if a.kl_placement == "loss":
                total = total + self.kl_coefficient * (weight * divergence).sum()
            metrics.add("actor/kl", divergence.detach().sum(), count)
        if a.entropy_coefficient:
            total = total - a.entropy_coefficient * (weight * entropy).sum()
        metrics.add("actor/loss", total.detach(), 0)
        metrics.add("actor/policy_loss", policy_loss.detach(), 0)
        metrics.add("actor/entropy", entropy.detach().sum(), count)
        metrics.add("actor/ratio_mean", terms.ratio.sum(), count)
        metrics.add("actor/clip_fraction", terms.clipped.sum(), count)
        for name, values in terms.extra.items():
            metrics.add(name, values.detach().sum(), count)
        if self.measure_gap:
            metrics.merge(
                logprob_gap(outputs.logprobs.detach(), rollout_reference(batch), batch["loss_mask"])
            )
        return total, metrics

    def _checked(self, terms: LossTerms, count: int) -> LossTerms:
        """Raises RunError unless the loss returned what it must."""
        if not isinstance(terms, LossTerms):
            raise RunError(
                f"loss '{self.algorithm.loss}' returned a {type(terms).__name__}; wanted LossTerms"
            )
        fields = {"loss": terms.loss, "ratio": terms.ratio, "clipped": terms.clipped, **terms.extra}
        for name, value in fields.items():
            if not isinstance(value, Tensor) or value.shape != (count,):
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise RunError(
                    f"loss '{self.algorithm.loss}': `{name}` is {got}; wanted a tensor of one value a token, ({count},)"
                )
        if terms.clipped.dtype != torch.bool:
            raise RunError(f"loss '{self.algorithm.loss}': `clipped` is {terms.clipped.dtype}; wanted bool")
        return terms


def rollout_reference(batch: Batch) -> Tensor:
    """The rollout's log-probabilities at temperature only, which is what the trainer recomputes."""
    name = "rollout_untruncated_logprobs"
    return batch[name] if name in batch else batch["rollout_logprobs"]
