"""The reward stage of a flow: a user's function over completions and data columns."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from typing import Any

import torch

from headrace.algorithms.moments import moments
from headrace.config import RewardConfig
from headrace.data.batch import Batch
from headrace.errors import ConfigError, RewardError
from headrace.rewards.functions import RewardFunction
from headrace.stages import StageContext, StageSpec

logger = logging.getLogger(__name__)

CORRECT = 1.0  # in evaluation, a response with at least this reward is correct


class RewardStage:
    """Writes `reward` (float64 [R]; NaN where the function returned None) and one `reward/part/<name>` metric a part.

    `add_model_score` adds column `reward_model_score` to it; what an environment gave (column `environment_reward`, where
    there is one) is added always. What is wrong with `function` itself is kept in
    `problems`, which compiling a flow reports together with everything else.
    """

    def __init__(
        self,
        function: str | Callable[..., Any] | None,
        *,
        settings: RewardConfig | None = None,
        add_model_score: bool = False,
    ) -> None:
        self.problems: list[str] = []
        self.function: RewardFunction | None = None
        concurrency = (settings or RewardConfig()).max_concurrency
        if function is not None:
            try:
                self.function = RewardFunction.resolve(function, max_concurrency=concurrency)
            except ConfigError as error:
                self.problems = error.violations
        self.add_model_score = add_model_score
        reads = ("completion", *(("reward_model_score",) if add_model_score else ()))
        self.__stage_spec__ = StageSpec(
            reads=reads, optional=("environment_reward", "greedy_baseline"), writes=("reward",)
        )
        self.__name__ = "reward"

    def check(self, columns: Collection[str], source: str = "") -> list[str]:
        """Violations of what the function asks for, given the columns there will be of the data named `source`."""
        return self.function.check(set(columns), source) if self.function is not None else []

    def __call__(self, batch: Batch, context: StageContext) -> dict[str, Any]:
        rewards = torch.zeros(batch.num_rows, dtype=torch.float64)
        # a greedy baseline is scored like a sample, and is none
        greedy = batch["greedy_baseline"].tolist() if "greedy_baseline" in batch else [False] * batch.num_rows
        sampled = [not own for own in greedy]
        if self.function is not None:
            columns = {
                name: column.tolist() if isinstance(column, torch.Tensor) else column
                for name, column in batch.rows.items()
            }
            try:
                result = self.function.score(columns, batch.num_rows)
            except RewardError as error:
                where = "evaluation on held-out data" if context.evaluation else f"step {context.step}"
                raise RewardError(f"{where}: {error}") from error.__cause__
            rewards = torch.tensor(
                [float("nan") if r is None else float(r) for r in result.rewards], dtype=torch.float64
            )
            for name, values in result.parts.items():
                given = [float(v) for v, own in zip(values, sampled, strict=True) if own and v is not None]
                prefix = "eval" if context.evaluation else "reward"
                safe = re.sub(r"[^\w.-]+", "_", name) or "_"  # a metric name has no spaces or further slashes
                context.metrics.add(f"{prefix}/part/{safe}", sum(given), len(given))
        if self.add_model_score:
            rewards = rewards + batch["reward_model_score"].double()
        if "environment_reward" in batch:
            rewards = rewards + batch["environment_reward"]
        own = rewards[torch.tensor(sampled, dtype=torch.bool)]
        _reward_metrics(own, context, can_be_right=not self.add_model_score)
        return {"reward": rewards}


def _reward_metrics(rewards: torch.Tensor, context: StageContext, *, can_be_right: bool) -> None:
    """`can_be_right`: whether a reward of CORRECT means something, as it does not with a model's score in it."""
    m, valid = context.metrics, rewards[~torch.isnan(rewards)]
    total, count = float(valid.sum()), valid.numel()
    if context.evaluation:
        m.add("eval/reward_mean", total, count)
        if can_be_right:
            m.add("eval/accuracy", float((valid >= CORRECT).sum()), count)
        m.add_total("eval/rows", len(rewards))
        return
    m.add("reward/mean", total, count)
    m.add("reward/excluded_fraction", len(rewards) - count, len(rewards))
    if not count and len(rewards):
        logger.warning(
            "step %d: all %d rewards are None, so there is nothing to learn from", context.step, len(rewards)
        )
    found = moments(valid, context.ranks)
    if found.count:
        context.add_once("reward/std", found.std())
        m.add_max("reward/max", found.high)
        m.add_min("reward/min", found.low)
