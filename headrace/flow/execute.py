"""Executing a checked flow: stages in an order its edges allow, those without a path between them at the same time
where the runtime can."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from headrace.errors import RunError
from headrace.flow.compile import CheckedFlow, ancestors
from headrace.flow.graph import Stage
from headrace.flow.interrupt import InterruptGuard
from headrace.flow.runtime import Rows, Runtime, Started
from headrace.observe.progress import Progress
from headrace.observe.times import StageTime
from headrace.stages import StageContext


def execute(
    runtime: Runtime,
    flow: CheckedFlow,
    rows: Rows,
    context: StageContext,
    progress: Progress,
    guard: InterruptGuard,
    label: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> Rows:
    """Runs every stage once over `rows` and returns them with all columns the stages wrote.

    A stage begins when those it depends on are over. `label` replaces the stages' names on the display, and `share`
    (i, n) says that this is part i of n. A request to stop is heeded until the first stage that trains: from there on
    the step is finished, so that actor and critic have always seen the same steps.
    Raises RunError naming the stage when it does not write what it declared. What a stage raises itself passes
    through, with a note that names stage and step.
    """
    training = False
    above = ancestors(flow.stages)
    running: dict[str, Running] = {}
    for stage in flow.stages:
        for name in [n for n in running if n in above[stage.name]]:
            rows = running.pop(name).finish(rows)
        now = begin(runtime, flow, stage, rows, context, progress, None if training else guard, label, share)
        training = training or stage.spec.trains
        if runtime.in_turn:
            rows = now.finish(rows)
        else:
            running[stage.name] = now
    for now in running.values():
        rows = now.finish(rows)
    return rows


def begin(
    runtime: Runtime,
    flow: CheckedFlow,
    stage: Stage,
    rows: Rows,
    context: StageContext,
    progress: Progress,
    guard: InterruptGuard | None,
    label: str | None = None,
    share: tuple[int, int] = (0, 1),
) -> Running:
    """Begins one stage; see `execute`. `guard` is None once a request to stop is no longer heeded."""
    if guard is not None:
        guard.check()
    shown = label or stage.name
    stoppable = stage.spec.makes_rows and not stage.spec.trains

    def report(fraction: float) -> None:
        if guard is not None and stoppable:  # a rollout may be dropped half-way; an update may not
            guard.check()
        progress.stage(shown, (share[0] + fraction) / share[1])

    context.on_progress = report
    if label is None:
        progress.stage(shown, None)
    running = Running(flow, stage, context, timed=label is None)
    running.begin(runtime, rows)
    return running


class Running:
    """One stage of one step, from its start to its columns."""

    def __init__(self, flow: CheckedFlow, stage: Stage, context: StageContext, timed: bool) -> None:
        self.flow, self.stage, self.context, self.timed = flow, stage, context, timed
        self.began = time.time()
        self.started: Started | None = None

    def begin(self, runtime: Runtime, rows: Rows) -> None:
        with self._named():
            self.started = runtime.start(self.flow, self.stage, rows, self.context)

    def finish(self, rows: Rows) -> Rows:
        if self.started is None:
            raise RuntimeError(f"stage '{self.stage.name}' was not begun")
        with self._named():
            rows = self.started.finish(rows)
        missing = [column for column in sorted(self.stage.spec.writes) if column not in rows]
        if missing:
            raise RunError(f"stage '{self.stage.name}' declared column {missing[0]!r} but did not write it")
        if self.timed:
            group, began, ended = self.started.span
            self.context.times.append(StageTime(self.stage.name, group, began, ended))
            # from the order on, so that rows on their way count too
            self.context.metrics.add_total(f"time/{self.stage.name}_s", max(0.0, ended - self.began))
        return rows

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(
                f"in stage '{self.stage.name}' of flow '{self.flow.name}', step {self.context.step}"
            )
            raise
