"""The advantage stages of a flow: rewards in, advantages and a loss mask out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.advantages.gae import gae
from headrace.algorithms.advantages.grpo import group_stats, grpo
from headrace.algorithms.advantages.whiten import whiten
from headrace.algorithms.kl import kl
from headrace.data.batch import Batch
from headrace.stages import StageContext, stage


def counted_rows(batch: Batch, context: StageContext) -> Tensor:
    """[R] bool: rows with a reward (None is NaN here), and not cut off where that is masked.

    The others enter neither the loss nor a baseline.
    """
    counted = ~torch.isnan(torch.as_tensor(batch["reward"], dtype=torch.float64))
    if context.config.algorithm.mask_truncated:
        counted = counted & torch.tensor([reason != "length" for reason in batch["finish_reason"]])
    return counted


def loss_mask(batch: Batch, context: StageContext) -> Tensor:
    """[N] bool: the sampled tokens of the rows that count."""
    return batch["response_mask"] & counted_rows(batch, context)[batch.row_ids()]


@stage(
    reads=("reward", "group_id", "response_mask", "finish_reason"),
    writes=("advantages", "loss_mask"),
    sections=("algorithm",),
)
def grpo_advantages(batch: Batch, context: StageContext) -> dict[str, Any]:
    """Group-relative advantages, the same for every token of a response (algorithms/advantages/grpo.py)."""
    rewards = torch.as_tensor(batch["reward"], dtype=torch.float64)
    valid, groups = counted_rows(batch, context), batch["group_id"]
    per_row = grpo(rewards, groups, valid=valid, normalize_std=context.config.algorithm.normalize_std)
    zero_spread = group_stats(rewards, groups, valid)
    for name, value in zero_spread.items():
        context.metrics.add(name, value, 1)
    mask = loss_mask(batch, context)
    advantages = torch.where(mask, per_row.float()[batch.row_ids()], 0.0)
    _advantage_metrics(advantages, mask, context)
    return {"advantages": advantages, "loss_mask": mask}


@stage(
    reads=("reward", "values", "response_mask", "finish_reason"),
    optional=("logprobs", "reference_logprobs", "turn_rewards"),
    writes=("advantages", "returns", "loss_mask"),
    sections=("algorithm",),
)
def gae_advantages(batch: Batch, context: StageContext) -> dict[str, Any]:
    """GAE over response tokens: the reward at the last one (what a turn of an episode earned, at that turn's last one),
    the KL penalty (kl_placement 'reward') at each."""
    algorithm = context.config.algorithm
    mask = loss_mask(batch, context)
    rewards = torch.zeros(batch.num_tokens)
    if algorithm.kl_placement == "reward" and algorithm.kl_coefficient > 0:
        penalty = kl(batch["logprobs"], batch["reference_logprobs"], algorithm.kl_estimator)
        rewards = torch.where(mask, -algorithm.kl_coefficient * penalty, rewards)
        context.metrics.add(
            "reward/kl_penalty", float(torch.where(mask, penalty, 0.0).sum()), int(mask.sum())
        )
    rewards += placed_rewards(batch, mask)
    advantages, returns = gae(
        rewards, batch["values"], mask, batch.offsets, algorithm.gamma, algorithm.gae_lambda
    )
    if algorithm.whiten_advantages:
        advantages = whiten(advantages, mask)
    _advantage_metrics(advantages, mask, context)
    return {"advantages": advantages, "returns": returns, "loss_mask": mask}


def placed_rewards(batch: Batch, mask: Tensor) -> Tensor:
    """[N] float32: each row's reward at its last true position; of that, what column `turn_rewards` places at the turns
    of an episode stays where it is. A row without a true position, or without a reward, has none."""
    rest = torch.as_tensor(batch["reward"], dtype=torch.float64)
    placed = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if "turn_rewards" in batch:
        placed = torch.where(mask, batch["turn_rewards"].double(), 0.0)
        rest = rest.index_add(0, batch.row_ids(), -placed)
    last = last_masked_token(mask, batch)
    scored = last >= 0
    placed[last[scored]] += rest[scored]
    return placed.float()


def last_masked_token(mask: Tensor, batch: Batch) -> Tensor:
    """[R] int64: flat index of each row's last true position, -1 where there is none."""
    positions = torch.where(mask, torch.arange(batch.num_tokens), torch.tensor(-1))
    out = torch.full((batch.num_rows,), -1, dtype=torch.int64)
    return out.scatter_reduce(0, batch.row_ids(), positions, "amax")


def _advantage_metrics(advantages: Tensor, mask: Tensor, context: StageContext) -> None:
    kept = advantages[mask].double()
    if kept.numel():
        context.metrics.add("advantage/mean", float(kept.mean()), 1)
        context.metrics.add("advantage/std", float(kept.std(correction=0)), 1)
