"""What a person sees while a run goes: a display that redraws, one line a step, or nothing. All on stderr."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TextIO

from headrace.observe.metrics import check_names
from headrace.observe.summary import format_duration, format_metric, sparkline

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

Mode = Literal["auto", "live", "plain", "off"]

# what is shown: label, column width of the plain line, and the metrics it may come from (the first present)
_SHOWN: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("reward", 7, ("reward/mean",)),
    ("KL", 7, ("actor/kl",)),
    ("loss", 7, ("actor/loss", "sft/loss", "reward_model/loss", "dpo/loss")),
    ("accuracy", 8, ("reward_model/accuracy", "dpo/accuracy")),
    ("margin", 7, ("reward_model/margin", "dpo/margin")),
    ("perplexity", 10, ("sft/perplexity",)),
    ("gap", 7, ("gap/abs_logprob_mean",)),
    ("response", 8, ("rollout/response_tokens_mean",)),
    ("tok/s", 6, ("rollout/tokens_per_s",)),
    ("eval", 6, ("eval/accuracy", "eval/reward_mean")),
)
_RECENT_STEPS = 20
_HEADER_EVERY = 25
_PLAIN_EVERY_S = 1.0
_SILENT_S = 30.0


class Progress:
    """Counts steps and estimates the time left. This class itself shows nothing (mode `off`)."""

    def __init__(self, total_steps: int, title: str, *, step: int = 0) -> None:
        """`step`: how many are done already, in a run that is resumed."""
        self.total_steps = total_steps
        self.title = title
        self.step = step
        self._started = time.monotonic()
        self._marks: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS + 1)

    def start(self) -> None:
        """Starts the clock; the display appears."""
        self._started = time.monotonic()

    def update(self, step: int, metrics: Mapping[str, float], stage: str | None = None) -> None:
        """A step is done: `step` counts from 1, 0 is before the first. Metrics that are absent are not shown.

        Raises ValueError for an undocumented metric name.
        """
        check_names(metrics)
        if not self._marks and step > 0:
            # a resumed run does not begin at step 1, and step 0 (an evaluation before the run) is no step
            self._marks.append((step - 1, self._started))
        self._marks.append((step, time.monotonic()))
        self.step = step

    def stage(self, name: str | None, fraction: float | None = None) -> None:
        """The stage that runs now, and how much of it (0..1) is done."""

    def message(self, text: str) -> None:
        """A line for the reader that stays, apart from what redraws."""

    def stop(self) -> None:
        """The display ends; safe to call twice."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def remaining_s(self) -> float | None:
        """Seconds left at the speed of the last steps; None before the first step."""
        if not self._marks:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        if last <= first:
            return None
        per_step = (ended - began) / (last - first)
        return max(per_step * (self.total_steps - last) - (time.monotonic() - ended), 0.0)

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class PlainProgress(Progress):
    """Aligned lines, for logs and CI: one a step, at most one a second; a header line now and then.

    In a long step a line every half a minute says how far its stage is.
    """

    def __init__(self, total_steps: int, title: str, stream: TextIO | None = None, *, step: int = 0) -> None:
        super().__init__(total_steps, title, step=step)
        self._stream = stream
        self._columns: list[str] = []
        self._lines = 0
        self._printed_s = self._written_s = -math.inf
        self._stopped = False

    def start(self) -> None:
        super().start()
        done = f", {self.step} of them done before" if self.step else ""
        self.message(f"{self.title}: {self.total_steps} step{'s' if self.total_steps != 1 else ''}{done}")

    def update(self, step: int, metrics: Mapping[str, float], stage: str | None = None) -> None:
        super().update(step, metrics, stage)
        shown = _shown(metrics)
        evaluated = any(name.startswith("eval/") for name in metrics)
        if not evaluated and step != self.total_steps and self.elapsed_s - self._printed_s < _PLAIN_EVERY_S:
            return
        self._printed_s = self.elapsed_s
        columns = [label for label, _, _ in _SHOWN if label in shown or label in self._columns]
        steps = 2 * len(str(self.total_steps)) + 1
        if columns != self._columns or self._lines % _HEADER_EVERY == 0:
            self._columns, self._lines = columns, 0
            self._write({"step": (steps, "step")} | {c: (_width(c), c) for c in columns}, "time", "left")
        cells = {"step": (steps, f"{step}/{self.total_steps}")}
        cells |= {label: (_width(label), shown.get(label, "-")) for label in columns}
        left = self.remaining_s
        self._write(cells, format_duration(self.elapsed_s), "-" if left is None else format_duration(left))
        self._lines += 1

    def _write(self, cells: Mapping[str, tuple[int, str]], elapsed: str, left: str) -> None:
        texts = [f"{text:>{width}}" for width, text in cells.values()]
        self.message(" ".join([*texts, f"{elapsed:>6}", f"{left:>6}"]))

    def stage(self, name: str | None, fraction: float | None = None) -> None:
        if name is None or fraction is None or self.elapsed_s - self._written_s < _SILENT_S:
            return
        step = (
            f"step {self.step + 1}/{self.total_steps}"
            if self.step < self.total_steps
            else "after the last step"
        )
        self.message(f"{step}: {name} {100 * fraction:.0f}% done, {format_duration(self.elapsed_s)}")

    def message(self, text: str) -> None:
        self._written_s = self.elapsed_s
        # looked up at each line, so that whoever redirects stderr gets it
        stream = self._stream or sys.stderr
        stream.write(text + "\n")
        stream.flush()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.message(
                f"{self.title}: {self.step}/{self.total_steps} steps in {format_duration(self.elapsed_s)}"
            )


class LiveProgress(Progress):
    """A panel at the bottom of the terminal: bar, time left, stage, the main metrics and their course."""

    def __init__(
        self, total_steps: int, title: str, console: Console | None = None, *, step: int = 0
    ) -> None:
        from rich.console import Console

        super().__init__(total_steps, title, step=step)
        self.console = console or Console(stderr=True, force_terminal=True)
        self._lock = threading.Lock()  # the display redraws from its own thread
        self._shown: dict[str, str] = {}
        self._evaluated_at: int | None = None
        self._history: list[float] = []
        self._stage: tuple[str, float | None] | None = None
        self._stopped = False
        self._live: Live | None = None
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def start(self) -> None:
        from rich.live import Live

        super().start()
        streams = (sys.stdout, sys.stderr)
        # stdout goes through the display only when it is the same terminal: a piped stdout must stay a pipe
        self._live = Live(
            console=self.console,
            get_renderable=self.render,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        self._live.start()
        self._move_log_handlers(streams)

    def _move_log_handlers(self, terminal: tuple[TextIO, TextIO]) -> None:
        """Log handlers hold the stream they were made with; written to directly it would tear the display."""
        loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
        for logger in loggers:
            for handler in getattr(logger, "handlers", ()):  # place holders in the tree have none
                if isinstance(handler, logging.StreamHandler) and handler.stream in terminal:
                    self._moved.append((handler, handler.stream))
                    handler.setStream(sys.stderr)

    def update(self, step: int, metrics: Mapping[str, float], stage: str | None = None) -> None:
        with self._lock:
            super().update(step, metrics, stage)
            # an evaluation is shown until the next one; everything else is this step's
            shown = _shown(metrics)
            if "eval" in shown:
                self._evaluated_at = step
            elif "eval" in self._shown:
                shown["eval"] = self._shown["eval"]
            self._shown = shown
            course = next((metrics[name] for name in ("reward/mean", "sft/loss") if name in metrics), None)
            if course is not None:
                self._history.append(course)
            self._stage = (stage, None) if stage else None

    def stage(self, name: str | None, fraction: float | None = None) -> None:
        with self._lock:
            self._stage = (name, fraction) if name else None

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        if self._live is None:
            return
        with self._lock:
            self._stage, self._stopped = None, True
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()
        self._live.stop()
        self._live = None

    def render(self) -> RenderableType:
        """The panel as it looks now."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        with self._lock:
            width = min(self.console.width, 110)
            parts = [self._bar(width - 4), self._numbers(width - 4)]
            title = Text(self.title, style="bold", no_wrap=True, overflow="ellipsis")
            return Panel(Group(*parts), title=title, title_align="left", width=width, border_style="dim")

    def _bar(self, width: int) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left = self.remaining_s
        times = format_duration(self.elapsed_s)
        if self.step < self.total_steps and not self._stopped:
            times += " · estimating" if left is None else f" · {format_duration(left)} left"
        count = f"step {self.step}/{self.total_steps}"
        stage = ""
        if self._stage is not None:
            name, fraction = self._stage
            stage = f"  {name}" if fraction is None else f"  {name} {100 * fraction:.0f}%"
        bar = max(width - len(count) - 24 - 22, 6)
        grid = Table.grid(padding=(0, 1))
        # fixed widths: a long stage name is cut and squeezes nothing else
        grid.add_column(no_wrap=True, width=len(count))
        grid.add_column(width=bar)
        grid.add_column(no_wrap=True, overflow="ellipsis", width=max(width - len(count) - bar - 2, 1))
        done = ProgressBar(total=max(self.total_steps, 1), completed=self.step, width=bar)
        grid.add_row(Text(count, style="bold"), done, Text.assemble((times, "default"), (stage, "cyan")))
        return grid

    def _numbers(self, width: int) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        if not self._shown:
            return Text("waiting for the first step", style="dim")
        columns = 4 if width >= 100 else 3
        grid = Table.grid(padding=(0, 1))
        for _ in range(columns):
            grid.add_column(no_wrap=True, overflow="ellipsis", width=(width - columns) // columns)
        cells = [
            Text.assemble((f"{label} ", "dim"), (self._with_unit(label, text), "bold"))
            for label, text in self._shown.items()
        ]
        for first in range(0, len(cells), columns):
            grid.add_row(*cells[first : first + columns])
        if len(self._history) < 2:
            return grid
        from rich.console import Group

        label = "reward" if "reward" in self._shown else "loss"
        course = Text.assemble(
            (f"{label} ", "dim"), (sparkline(self._history, width - len(label) - 1), "green")
        )
        return Group(course, grid)

    def _with_unit(self, label: str, text: str) -> str:
        if label == "eval" and self._evaluated_at not in (None, self.step):
            return f"{text} (step {self._evaluated_at})"
        return f"{text} tokens" if label == "response" else f"{text} nats" if label in ("KL", "gap") else text


def make_progress(mode: Mode, total_steps: int, title: str, *, step: int = 0) -> Progress:
    """The display for run.progress: `auto` is live when stderr is a terminal that can redraw, else plain.

    `step`: how many steps are done already, in a run that is resumed.
    """
    if mode == "off":
        return Progress(total_steps, title, step=step)
    if mode == "live" or (mode == "auto" and _can_redraw()):
        return LiveProgress(total_steps, title, step=step)
    return PlainProgress(total_steps, title, step=step)


def _can_redraw() -> bool:
    if not sys.stderr.isatty():
        return False
    from rich.console import Console

    console = Console(stderr=True)
    return not console.is_dumb_terminal and console.encoding.startswith("utf")


def _shown(metrics: Mapping[str, float]) -> dict[str, str]:
    """Label → formatted value of the metrics that are shown and present."""
    out = {}
    for label, _, names in _SHOWN:
        name = next((n for n in names if n in metrics), None)
        if name is not None:
            out[label] = format_metric(name, metrics[name])
    return out


def _width(label: str) -> int:
    return next(width for name, width, _ in _SHOWN if name == label)
