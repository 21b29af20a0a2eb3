"""A step's rollout made while the step before it trains (rollout.staleness), and kept in checkpoints.

One-step off-policy: the rows of step s + 1 are of the weights after step s - 1. What that does to the loss:
docs/algorithms.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.cluster.wire import Message, pack_columns, plain_bytes, plain_value, unpack_columns
from headrace.data.batch import Batch
from headrace.data.loader import Loader
from headrace.errors import HeadraceError, RunError
from headrace.flow.compile import CheckedFlow
from headrace.flow.execute import begin
from headrace.flow.interrupt import InterruptGuard
from headrace.flow.runtime import Rows, Runtime
from headrace.observe.metrics import MetricSums
from headrace.observe.progress import Progress
from headrace.observe.times import StageTime
from headrace.stages import StageContext

logger = logging.getLogger(__name__)

FILE = "ahead"
"""Of a checkpoint, beside those of the roles."""


class StepRollout:
    """The rollout of one step: under way, over, or failed. `position` is that of the loader before its prompts."""

    def __init__(self, position: dict[str, Any], context: StageContext) -> None:
        self.position, self.context = position, context
        self._running: Any = None
        self._rows: Rows | None = None
        self._error: HeadraceError | None = None

    @classmethod
    def begun(
        cls,
        runtime: Runtime,
        head: CheckedFlow,
        loader: Loader,
        context: StageContext,
        progress: Progress,
        guard: InterruptGuard | None,
    ) -> StepRollout:
        """Draws the prompts and begins; in one process it is then over."""
        made = cls(loader.state_dict(), context)
        prompts = runtime.put(loader.next())
        made._running = (begin(runtime, head, head.stages[0], prompts, context, progress, guard), prompts)
        return made

    @classmethod
    def over(cls, position: dict[str, Any], context: StageContext, rows: Rows) -> StepRollout:
        made = cls(position, context)
        made._rows = rows
        return made

    def rows(self) -> Rows:
        """Waits. Raises what the rollout raised, each time."""
        if self._error is not None:
            raise self._error
        if self._rows is None:
            running, prompts = self._running
            try:
                self._rows = running.finish(prompts)
            except HeadraceError as error:
                self._error = error
                raise
            self._running = None
        return self._rows


class Ahead:
    """The rollouts of a run that makes them one step ahead."""

    def __init__(self, runtime: Runtime, flow: CheckedFlow, loader: Loader) -> None:
        self.runtime, self.loader = runtime, loader
        self.head, self.rest = flow.cut_after_rollout()
        self.next: StepRollout | None = None
        """That of the step after the one that is done or under way."""
        self.late: list[StageTime] = []
        """When the rollout that was last taken ran, if it began in the step before."""
        if flow.placement.world == 1:
            logger.warning("rollout.staleness: in one process a rollout that is made ahead saves no time")

    def take(self, context: StageContext, progress: Progress, guard: InterruptGuard) -> Rows:
        """The rows of the step, whose context gets their metrics.

        Then, while nothing trains, the next step's rollout begins, with the weights of now: in one process it is over
        when this returns. The first step of a run has no rows yet, and makes them with the weights of now as well.
        """
        own = self.next
        late = own is not None
        if own is None:
            own = self._begun(context, context.step, progress, guard)
        # stopped from here on, the step is still to be done with these rows
        rows = own.rows()
        context.metrics.merge(own.context.metrics)
        self.late = own.context.times if late else []
        if not late:
            context.times += own.context.times
        if context.step < context.total_steps:
            guard.check()
            # one that goes on beside the training stages is not broken off: the next checkpoint has its rows
            stop = guard if self.runtime.in_turn else None
            self.next = self._begun(context, context.step + 1, progress, stop)
        else:
            self.next = None
        return rows

    def wait(self) -> None:
        """Until no rollout is under way, so that the weights that generate may be others. Errors are left to `take`."""
        if self.next is not None:
            try:
                self.next.rows()
            except HeadraceError as error:
                logger.error("the rollout of the next step failed: %s", error)

    def restore(self, tensors: Mapping[str, Tensor], context: StageContext) -> None:
        """Takes up the rows that `saved` kept, for the step of `context`."""
        position, sums, batch = _unpacked(tensors)
        context.metrics.merge(sums)
        self.next = StepRollout.over(position, context, self.runtime.put(batch))

    def saved(self, rollout: StepRollout) -> dict[str, Tensor]:
        """The rows of a rollout, as tensors of bytes. Waits for it.

        Raises what it raised, and RunError for a column with values that a file cannot hold.
        """
        rows = rollout.rows()
        batch = self.runtime.fetch(rows, list(rows.columns))
        message = pack_columns({"": batch.lengths, **batch.tokens, **batch.rows})
        header = {
            **message.header,
            "tokens": list(batch.tokens),
            "metrics": rollout.context.metrics.plain(),
            "position": rollout.position,
        }
        parts = [np.frombuffer(plain_bytes(header, "rows made ahead"), np.uint8), *message.buffers]
        return {f"{i:03}": torch.from_numpy(part.copy()) for i, part in enumerate(parts)}

    def _begun(
        self, context: StageContext, step: int, progress: Progress, guard: InterruptGuard | None
    ) -> StepRollout:
        own = replace(context, step=step, metrics=MetricSums(), times=[])
        return StepRollout.begun(self.runtime, self.head, self.loader, own, progress, guard)


def position_before(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Where the loader was before the prompts of rows that `Ahead.saved` kept."""
    position: dict[str, Any] = plain_value(tensors["000"].numpy().tobytes())["position"]
    return position


def _unpacked(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], MetricSums, Batch]:
    header = plain_value(tensors["000"].numpy().tobytes())
    buffers = [tensors[name].numpy() for name in sorted(tensors) if name != "000"]
    columns = unpack_columns(Message(header, buffers))
    lengths = columns.pop("")
    if not isinstance(lengths, Tensor):
        raise RunError("rows made ahead came without their lengths")
    tokens = {name: torch.as_tensor(columns.pop(name)) for name in header["tokens"]}
    metrics = MetricSums.from_plain([tuple(entry) for entry in header["metrics"]])
    return header["position"], metrics, Batch(lengths, tokens, columns)
