"""The losses over preference pairs: a reward model's and DPO's, with their metrics.

Shapes: R rows of a micro-batch, two a pair; P = R / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.losses.preference import bradley_terry, dpo_reward
from headrace.data.batch import Batch
from headrace.observe.metrics import MetricSums
from headrace.stages import ALONE, DataRanks
from headrace.training.engine import TokenOutputs


class PreferenceLoss:
    """Sum over pairs of row column `loss_weight` x -log sigmoid(reward of chosen - reward of rejected).

    `prefix` names the metrics. Reads row columns `pair_id` and `is_chosen`; the rewards [R] are those of `rewards`.
    """

    per_update: tuple[str, ...] = ()
    needs_entropy = False

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def rewards(self, outputs: TokenOutputs, batch: Batch) -> Tensor:
        """Here a reward model's scores: float32 [R]."""
        if outputs.scores is None:
            raise ValueError("the reward model's loss needs the scores of rows")
        return outputs.scores

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, MetricSums]:
        rewards = self.rewards(outputs, batch)
        chosen_rows, rejected_rows = (rows.to(rewards.device) for rows in pair_rows(batch))
        chosen, rejected = rewards[chosen_rows], rewards[rejected_rows]
        loss = bradley_terry(chosen, rejected)
        total = (batch["loss_weight"][chosen_rows] * loss).sum()
        return total, pair_metrics(self.prefix, loss.detach(), chosen.detach(), rejected.detach())

    def measure(self, outputs: TokenOutputs, batch: Batch) -> MetricSums:
        """The metrics alone, for a batch that is not learned from; none on a pipeline rank without outputs."""
        if outputs.logprobs is None and outputs.scores is None:
            return MetricSums()
        _, metrics = self(outputs, batch.with_columns({"loss_weight": pair_weights(batch)}))
        return metrics


class DPOLoss(PreferenceLoss):
    """The same, where the reward of a response is beta x the sum over its tokens of log(policy / reference).

    Reads token columns `response_mask` and `reference_logprobs` too. Rafailov et al. 2023,
    https://arxiv.org/abs/2305.18290, eq. 7.
    """

    def __init__(self, prefix: str, beta: float) -> None:
        super().__init__(prefix)
        self.beta = beta

    def rewards(self, outputs: TokenOutputs, batch: Batch) -> Tensor:
        """float64 [R]: a difference of long sums, of which float32 would keep few digits."""
        if outputs.logprobs is None:
            raise ValueError("the DPO loss needs log-probabilities")
        kept = batch["response_mask"].nonzero().flatten()
        ratio = (outputs.logprobs[kept] - batch["reference_logprobs"][kept]).double()
        rows = batch.row_ids().to(kept.device)[kept]
        return dpo_reward(ratio.new_zeros(batch.num_rows).index_add(0, rows, ratio), self.beta)


def pair_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected row of each pair: int64 [P] each, on the CPU, by ascending `pair_id`.

    Raises ValueError unless every pair has one of each.
    """
    pairs, is_chosen = batch["pair_id"].cpu(), batch["is_chosen"].cpu()
    order = torch.argsort(pairs, stable=True)
    chosen, rejected = order[is_chosen[order]], order[~is_chosen[order]]
    if not torch.equal(pairs[chosen], pairs[rejected]):
        raise ValueError("a batch of pairs needs one chosen and one rejected row for every pair_id")
    return chosen, rejected


def pair_weights(batch: Batch, ranks: DataRanks = ALONE) -> Tensor:
    """The weight of each row's pair, float32 [R]: one over the number of pairs of the whole update, on all `ranks`."""
    (rows,) = ranks.total([batch.num_rows])
    return torch.full((batch.num_rows,), 2.0 / max(1.0, rows))


def pair_metrics(prefix: str, loss: Tensor, chosen: Tensor, rejected: Tensor) -> MetricSums:
    """Means over P pairs; a pair with equal rewards counts as half right."""
    margin = chosen - rejected
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    metrics, count = MetricSums(), len(loss)
    for name, values in (
        ("loss", loss),
        ("accuracy", right),
        ("margin", margin),
        ("chosen_reward", chosen),
        ("rejected_reward", rejected),
    ):
        metrics.add(f"{prefix}/{name}", values.sum(), count)
    return metrics
