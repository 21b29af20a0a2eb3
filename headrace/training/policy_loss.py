"""The actor's loss: clipped policy gradient, KL to the reference and entropy, with their metrics."""

from __future__ import annotations

from torch import Tensor

from headrace.algorithms.gap import logprob_gap
from headrace.algorithms.kl import kl
from headrace.algorithms.losses.ppo_clip import ppo_clip
from headrace.config import AlgorithmConfig
from headrace.data.batch import Batch
from headrace.observe.metrics import MetricSums
from headrace.training.engine import TokenOutputs


class PolicyLoss:
    """Sum over tokens of `loss_weight` x (clipped loss + kl_coefficient x KL - entropy_coefficient x entropy).

    Reads token columns `advantages`, `loss_mask`, `loss_weight`, `rollout_logprobs`, and, where they exist,
    `logprobs` (the trainer's own before the step; without it the update is the step's only one and the ratio is 1
    by construction) and `reference_logprobs`.
    """

    per_update: tuple[str, ...] = ("actor/loss", "actor/policy_loss")
    needs_entropy = True

    def __init__(self, algorithm: AlgorithmConfig, *, measure_gap: bool) -> None:
        self.algorithm = algorithm
        self.measure_gap = measure_gap

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, MetricSums]:
        a = self.algorithm
        if outputs.logprobs is None or outputs.entropy is None:
            raise ValueError("the policy loss needs log-probabilities and entropy")
        # masked tokens leave before any arithmetic: a NaN among them would reach the gradient even at weight 0
        kept = batch["loss_mask"].nonzero().flatten()
        logprobs, entropy, weight = outputs.logprobs[kept], outputs.entropy[kept], batch["loss_weight"][kept]
        old = batch["logprobs"][kept] if "logprobs" in batch else logprobs.detach()
        clip = ppo_clip(
            logprobs,
            old,
            batch["advantages"][kept],
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            dual_clip=a.dual_clip,
        )
        policy_loss = (weight * clip.loss).sum()
        total = policy_loss
        metrics = MetricSums()
        count = len(logprobs)
        if "reference_logprobs" in batch:
            divergence = kl(logprobs, batch["reference_logprobs"][kept], a.kl_estimator)
            if a.kl_placement == "loss":
                total = total + a.kl_coefficient * (weight * divergence).sum()
            metrics.add("actor/kl", divergence.detach().sum(), count)
        if a.entropy_coefficient:
            total = total - a.entropy_coefficient * (weight * entropy).sum()
        metrics.add("actor/loss", total.detach(), 0)
        metrics.add("actor/policy_loss", policy_loss.detach(), 0)
        metrics.add("actor/entropy", entropy.detach().sum(), count)
        metrics.add("actor/ratio_mean", clip.ratio.sum(), count)
        metrics.add("actor/clip_fraction", clip.clipped.sum(), count)
        if a.dual_clip is not None:
            metrics.add("actor/dual_clip_fraction", clip.dual_clipped.sum(), count)
        if self.measure_gap:
            metrics.merge(
                logprob_gap(outputs.logprobs.detach(), rollout_reference(batch), batch["loss_mask"])
            )
        return total, metrics


def rollout_reference(batch: Batch) -> Tensor:
    """The rollout's log-probabilities at temperature only, which is what the trainer recomputes."""
    name = "rollout_untruncated_logprobs"
    return batch[name] if name in batch else batch["rollout_logprobs"]
