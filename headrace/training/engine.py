"""The training contract: what a training engine does with a batch, whatever it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from headrace.data.batch import Batch
from headrace.observe.metrics import MetricSums


@dataclass
class TokenOutputs:
    """What a model says about a micro-batch: token columns [N], and `scores` [R], one a row; float32.

    Defined where `response_mask` is true, 0 elsewhere. `logprobs` and `entropy` are those of the distribution at
    the sampling temperature, in nats; `values` are the critic's estimates made before the token is seen; `scores`
    are a reward model's, at each row's last token.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None


@dataclass
class TrainingState:
    """All that training of one model continues from: named tensors, and plain values for JSON.

    `tensors`: `weight/<parameter>` (float32, or the parameter's own dtype where it trains without a master) and
    Adam's `exp_avg/…`, `exp_avg_sq/…` and `step/…`; none for frozen parameters. They are live: copy or write them
    before the next update.
    """

    tensors: Mapping[str, Tensor]
    numbers: dict[str, Any]


class Loss(Protocol):
    """A loss over one micro-batch: a *sum* over its tokens, each weighted by token column `loss_weight`, or over its
    pairs, weighted by a row column of that name (a micro-batch holds whole pairs, see Batch.pieces).

    The weights are computed once over the whole update (algorithms/reduction.py), so the sum of the micro-batch
    losses, and its gradient, do not depend on how the update was cut. Metrics named in `per_update` are such
    sums: they are averaged over updates, all others over what they count themselves. Entropy is computed only for
    a loss that `needs_entropy`.
    """

    per_update: tuple[str, ...]
    needs_entropy: bool

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, MetricSums]: ...


class TrainingEngine(Protocol):
    def outputs(self, batch: Batch, *, with_entropy: bool = False) -> TokenOutputs:
        """Token outputs without gradients, for any number of rows (micro-batched inside)."""
        ...

    def update(self, batch: Batch, loss: Loss) -> MetricSums:
        """One optimizer update over all rows of `batch`, which has column `loss_weight`."""
        ...

    def state_dict(self) -> TrainingState: ...

    def load_state_dict(self, state: TrainingState) -> None:
        """Continues exactly where `state` was taken. Raises ConfigError when it is another model's.

        Of tensors that can be read in slices (training/slices.py) each process reads its own alone.
        """
        ...
