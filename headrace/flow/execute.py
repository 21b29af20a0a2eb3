"""Executing a checked flow in this process: one stage after the other, in an order its edges allow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from headrace.data.batch import Batch
from headrace.errors import RunError
from headrace.flow.compile import CheckedFlow
from headrace.flow.interrupt import InterruptGuard
from headrace.observe.progress import Progress
from headrace.stages import StageContext


def execute(
    flow: CheckedFlow,
    batch: Batch,
    context: StageContext,
    progress: Progress,
    guard: InterruptGuard,
    label: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> Batch:
    """Runs every stage once over `batch` and returns it with all columns the stages wrote.

    `label` replaces the stages' names on the display, and `share` (i, n) says that this is part i of n. A request to
    stop is heeded until the first stage that trains: from there on the step is finished, so that actor and critic
    have always seen the same steps.
    Raises RunError naming the stage when it does not write what it declared. What a stage raises itself passes
    through, with a note that names stage and step.
    """
    training = False
    for stage in flow.stages:
        if not training:
            guard.check()
        training = training or stage.spec.trains
        shown = label or stage.name

        def report(
            fraction: float, shown: str = shown, safe: bool = stage.spec.makes_rows and not training
        ) -> None:
            if safe:  # a rollout may be dropped half-way; an update may not
                guard.check()
            progress.stage(shown, (share[0] + fraction) / share[1])

        context.on_progress = report
        if label is None:
            progress.stage(shown, None)
        started = time.perf_counter()
        try:
            result = stage.function(batch, context)
        except Exception as error:
            error.add_note(f"in stage '{stage.name}' of flow '{flow.name}', step {context.step}")
            raise
        batch = _with_result(batch, result, stage.name)
        missing = sorted(set(stage.spec.writes) - batch.columns)
        if missing:
            raise RunError(f"stage '{stage.name}' declared column {missing[0]!r} but did not write it")
        if label is None:
            context.metrics.add_total(f"time/{stage.name}_s", time.perf_counter() - started)
    return batch


def _with_result(batch: Batch, result: Any, name: str) -> Batch:
    if isinstance(result, Batch):
        return result
    if result is None:
        return batch
    if not isinstance(result, Mapping):
        raise RunError(
            f"stage '{name}' returned a {type(result).__name__}; expected a Batch, a dict of columns or None"
        )
    for column, values in result.items():
        if not isinstance(values, Sequence | Tensor):
            raise RunError(
                f"stage '{name}': column '{column}' has type {type(values).__name__}; expected a list or a tensor"
            )
    try:
        return batch.with_columns(result)
    except ValueError as error:
        raise RunError(f"stage '{name}': {error}") from error
