"""Executing a checked flow in this process: one stage after the other, in an order its edges allow."""

from __future__ import annotations

import time

from headrace.data.batch import Batch
from headrace.errors import RunError
from headrace.flow.compile import CompiledFlow
from headrace.flow.interrupt import InterruptGuard
from headrace.observe.progress import Progress
from headrace.stages import StageContext


def execute(
    flow: CompiledFlow,
    batch: Batch,
    context: StageContext,
    progress: Progress,
    guard: InterruptGuard,
    label: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> Batch:
    """Runs every stage once over `batch` and returns it with all columns the stages wrote.

    `label` replaces the stages' names on the display, and `share` (i, n) says that this is part i of n.
    Raises RunError naming the stage when it does not write what it declared.
    """
    for stage in flow.stages:
        guard.check()
        shown = label or stage.name

        def report(fraction: float, shown: str = shown, safe: bool = stage.spec.makes_rows) -> None:
            if safe:  # a rollout may be dropped half-way; an update may not
                guard.check()
            progress.stage(shown, (share[0] + fraction) / share[1])

        context.on_progress = report
        if label is None:
            progress.stage(shown, None)
        started = time.perf_counter()
        result = stage.function(batch, context)
        if isinstance(result, Batch):
            batch = result
        elif result is not None:
            batch = batch.with_columns(result)
        missing = sorted(set(stage.spec.writes) - batch.columns)
        if missing:
            raise RunError(f"stage '{stage.name}' declared column {missing[0]!r} but did not write it")
        if label is None:
            context.metrics.add(f"time/{stage.name}_s", time.perf_counter() - started)
    return batch
