"""The advantage stage of a flow, one for every advantage: rewards in, advantages and a loss mask out.

Shapes: R rows (responses), N tokens of all rows together, G prompts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.advantages.grpo import group_stats
from headrace.algorithms.find import find_advantage
from headrace.algorithms.kl import kl
from headrace.algorithms.moments import moments
from headrace.algorithms.overlong import overlong_penalty
from headrace.algorithms.ragged import masked_per_row
from headrace.algorithms.registry import Advantage, Scored
from headrace.data.batch import Batch
from headrace.errors import RunError
from headrace.stages import StageContext, StageSpec


def advantage_stage(name: str) -> AdvantageStage:
    """The flow stage of a registered advantage. Raises ConfigError with the nearest name for an unknown one.

    It reads `reward`, `response_mask`, `finish_reason` and what the advantage declares (`group_id`, `values`,
    `greedy_baseline`), and writes token columns `advantages` and `loss_mask` and, with a critic, `returns`. Greedy
    baseline rows end here: it returns the batch without them.
    """
    return AdvantageStage(find_advantage(name))


class AdvantageStage:
    """See `advantage_stage`."""

    def __init__(self, advantage: Advantage) -> None:
        self.advantage = advantage
        self.__name__ = f"{advantage.name}_advantages"
        a = advantage
        declared = {
            "group_id": a.grouped or a.needs_greedy_baseline,
            "values": a.needs_critic,
            "greedy_baseline": a.needs_greedy_baseline,
        }
        self.__stage_spec__ = StageSpec(
            reads=(
                "reward",
                "response_mask",
                "finish_reason",
                *(c for c, reads in declared.items() if reads),
            ),
            optional=(
                *("logprobs", "reference_logprobs", "num_tokens", "turn_rewards"),
                *(c for c, reads in declared.items() if not reads and c != "values"),
            ),
            writes=("advantages", "loss_mask", *(("returns",) if a.needs_critic else ())),
            sections=("algorithm",),
            drops_rows=a.needs_greedy_baseline,
        )

    def __call__(self, batch: Batch, context: StageContext) -> Batch | dict[str, Any]:
        """The columns it writes, or, where there were greedy rows, the batch without those and with the columns."""
        everything = batch
        valid = counted_rows(batch, context)
        rewards = _rewards(batch) - _overlong(batch, context)
        greedy_rewards = None
        flagged = greedy_rows(batch)
        if self.advantage.needs_greedy_baseline:
            greedy_rewards = _of_greedy_row(rewards, batch["group_id"], flagged, valid)
            valid = valid & torch.isfinite(greedy_rewards)
        if bool(flagged.any()):
            sampled = ~flagged
            batch, valid, rewards = batch.select(sampled), valid[sampled], rewards[sampled]
            greedy_rewards = greedy_rewards[sampled] if greedy_rewards is not None else None
        scored = self._scored(batch, rewards, valid, greedy_rewards, context)
        advantages, returns = self._checked(self.advantage.function(scored, context.config.algorithm), scored)
        self._metrics(advantages, scored, everything, batch, context)
        columns = {"advantages": advantages.float(), "loss_mask": scored.mask}
        if returns is not None:
            columns["returns"] = returns.float()
        return columns if batch is everything else batch.with_columns(columns)

    def _scored(
        self,
        batch: Batch,
        rewards: Tensor,
        valid: Tensor,
        greedy_rewards: Tensor | None,
        context: StageContext,
    ) -> Scored:
        mask = batch["response_mask"] & valid[batch.row_ids()]
        token_rewards = _kl_rewards(batch, mask, context)
        # a response pays the sum of what its tokens pay
        whole = rewards.index_add(0, batch.row_ids(), token_rewards)
        token_rewards = token_rewards + placed_rewards(rewards, batch, mask)
        return Scored(
            rewards=whole,
            token_rewards=token_rewards,
            group_ids=group_ids(batch),
            valid=valid,
            mask=mask,
            offsets=batch.offsets,
            values=batch["values"] if self.advantage.needs_critic else None,
            greedy_rewards=greedy_rewards,
            ranks=context.ranks,
        )

    def _checked(self, result: Any, scored: Scored) -> tuple[Tensor, Tensor | None]:
        """(advantages [N], 0 outside the mask; returns [N] or None) of what the function returned."""
        rows, tokens = len(scored.valid), len(scored.mask)
        name = f"advantage '{self.advantage.name}'"
        returns = None
        if self.advantage.needs_critic:
            if not isinstance(result, tuple | list) or [_shape(x) for x in result] != [(tokens,)] * 2:
                raise RunError(
                    f"{name} returned {_shapes(result)}; declared with needs_critic, it must return (advantages,"
                    f" returns), each a tensor of one value a token [N] ({tokens},)"
                )
            result, returns = result
        if _shape(result) not in ((rows,), (tokens,)):
            raise RunError(
                f"{name} returned {_shapes(result)}; it must return a tensor of one value a response [R] ({rows},) or"
                f" a token [N] ({tokens},)"
            )
        if len(result) == rows:
            result = result[scored.row_ids()]
        bad = scored.mask & ~torch.isfinite(result)
        if bool(bad.any()):
            token = int(bad.nonzero()[0])
            raise RunError(
                f"{name} gave {result[token].item()} to row {int(scored.row_ids()[token])}, which counts; a reward may"
                " be NaN where scored.valid is false, so leave those rows out of every mean"
            )
        return torch.where(scored.mask, result, 0.0), returns

    def _metrics(
        self, advantages: Tensor, scored: Scored, everything: Batch, batch: Batch, context: StageContext
    ) -> None:
        m = context.metrics
        if self.advantage.grouped:
            m.merge(group_stats(_rewards(batch), scored.group_ids, scored.valid))
        if self.advantage.needs_greedy_baseline:
            greedy = _rewards(everything)[greedy_rows(everything)]
            greedy = greedy[~torch.isnan(greedy)]
            m.add("reward/greedy_mean", float(greedy.sum()), len(greedy))
        if context.config.algorithm.overlong_fraction > 0:
            penalty = _overlong(batch, context)[scored.valid]
            m.add("reward/overlong_penalty", float(penalty.sum()), len(penalty))
        found = moments(advantages[scored.mask], context.ranks)
        if found.count:
            context.add_once("advantage/mean", found.mean)
            context.add_once("advantage/std", found.std())


grpo_advantages = advantage_stage("grpo")
gae_advantages = advantage_stage("gae")


def counted_rows(batch: Batch, context: StageContext) -> Tensor:
    """[R] bool: rows with a reward (None is NaN here), and not cut off where that is masked.

    The others enter neither the loss nor a baseline.
    """
    counted = ~torch.isnan(_rewards(batch))
    if context.config.algorithm.mask_truncated:
        counted = counted & torch.tensor([reason != "length" for reason in batch["finish_reason"]])
    return counted


def greedy_rows(batch: Batch) -> Tensor:
    """[R] bool: rows that are a prompt's greedy baseline, not samples of the policy."""
    if "greedy_baseline" not in batch:
        return torch.zeros(batch.num_rows, dtype=torch.bool)
    return torch.as_tensor(batch["greedy_baseline"], dtype=torch.bool)


def group_ids(batch: Batch) -> Tensor:
    """[R] int64: which rows share a prompt; every row its own where that is not known."""
    if "group_id" not in batch:
        return torch.arange(batch.num_rows)
    return torch.as_tensor(batch["group_id"])


def placed_rewards(rewards: Tensor, batch: Batch, mask: Tensor) -> Tensor:
    """[N] float64: each row's reward [R] at its last true position; of that, what column `turn_rewards` places at the
    turns of an episode stays where it is. A row without a true position has none."""
    rest, placed = rewards, torch.zeros(batch.num_tokens, dtype=torch.float64)
    if "turn_rewards" in batch:
        placed = torch.where(mask, batch["turn_rewards"].double(), 0.0)
        rest = rest.index_add(0, batch.row_ids(), -placed)
    last = last_masked_token(mask, batch)
    scored = last >= 0
    placed[last[scored]] += rest[scored]
    return placed


def last_masked_token(mask: Tensor, batch: Batch) -> Tensor:
    """[R] int64: flat index of each row's last true position, -1 where there is none."""
    positions = torch.where(mask, torch.arange(batch.num_tokens), torch.tensor(-1))
    out = torch.full((batch.num_rows,), -1, dtype=torch.int64)
    return out.scatter_reduce(0, batch.row_ids(), positions, "amax")


def _rewards(batch: Batch) -> Tensor:
    return torch.as_tensor(batch["reward"], dtype=torch.float64)


def _overlong(batch: Batch, context: StageContext) -> Tensor:
    """[R] float64: the length penalty of each response."""
    if "num_tokens" in batch:
        length = torch.as_tensor(batch["num_tokens"])
    else:
        length = masked_per_row(batch["response_mask"], batch.offsets)
    config = context.config
    return overlong_penalty(length, config.rollout.max_new_tokens, config.algorithm.overlong_fraction)


def _kl_rewards(batch: Batch, mask: Tensor, context: StageContext) -> Tensor:
    """[N] float64: minus coefficient x KL at masked tokens, with `kl_placement` "reward"; else 0."""
    algorithm, coefficient = context.config.algorithm, context.kl_coefficient
    nothing = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if algorithm.kl_placement != "reward" or coefficient == 0:
        return nothing
    penalty = kl(batch["logprobs"].double(), batch["reference_logprobs"].double(), algorithm.kl_estimator)
    penalty = torch.where(mask, penalty, 0.0)
    context.metrics.add("reward/kl_penalty", float(penalty.sum()), int(mask.sum()))
    return -coefficient * penalty


def _of_greedy_row(rewards: Tensor, groups: Tensor, flagged: Tensor, valid: Tensor) -> Tensor:
    """[R] float64: the reward of the greedy row of each row's group; NaN where it has none that counts."""
    ids, index = torch.unique(groups, return_inverse=True)
    of_group = torch.full((len(ids),), torch.nan, dtype=torch.float64)
    usable = flagged & valid
    of_group[index[usable]] = rewards[usable]
    return of_group[index]


def _shape(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, Tensor) else None


def _shapes(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"({', '.join(_shapes(y) for y in x)})"
    return f"a tensor {_shape(x)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
