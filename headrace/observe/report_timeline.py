"""The timeline of a report: which group of devices ran which stage when, in one step of each run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.observe.report_runs import (
    ReportRun,
    clean_text,
    number,
    record_of,
    stage_means,
    step_of,
    whole_lines,
)
from headrace.observe.run_dir import RunDirectory
from headrace.observe.summary import format_number

LAST_STEPS = 50  # at the end of a run, among which the typical one is looked for
MOST_BARS = 400  # of one picture; the longest are kept
MOST_SECONDS = 1e9  # of a step; beyond it a line is broken
LONGEST_NAME = 60  # characters of a stage or group
COLOURS = 8

# of a picture, in pixels: a row is the group's name and its bars, one line of them for each that runs at a time
NAME_HEIGHT, BAR_HEIGHT, GAP, AXIS_HEIGHT = 18, 18, 8, 22
SLACK = 0.002  # of the step's time by which bars may overlap before they get lines of their own


@dataclass(frozen=True)
class Bar:
    """One stage on one group, in seconds since the step's beginning (below 0 where a host's clock is behind)."""

    stage: str
    group: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimes:
    """The bars of one step, in order of their beginnings, and the step's seconds."""

    step: int
    seconds: float
    bars: tuple[Bar, ...]

    @property
    def start(self) -> float:
        return min(0.0, *(bar.begin_s for bar in self.bars))

    @property
    def span(self) -> float:
        """Seconds that a picture covers: the whole step and every bar."""
        end = max(self.seconds, *(bar.end_s for bar in self.bars))
        return max(end - self.start, 1e-6)

    def busy(self, group: str) -> float:
        """The part of the step in which the group ran at least one stage, from 0 to 1."""
        total, reached = 0.0, -math.inf
        for bar in (bar for bar in self.bars if bar.group == group):
            total += max(0.0, bar.end_s - max(bar.begin_s, reached))
            reached = max(reached, bar.end_s)
        return total / self.span


def read_timeline(run: ReportRun) -> list[StepTimes]:
    """The first finished step with times and the last LAST_STEPS, in order; [] where none were written.

    A line that is no stage's time is passed over, with a note.
    """
    path = RunDirectory(run.path).timeline
    if not path.is_file():
        return []
    if not os.access(path, os.R_OK):
        run.notes.append(f"{path.name} cannot be read (permission denied).")
        return []
    # a step that has not been logged is not finished, and may lack stages
    durations = {line["step"]: number(line.get("time/step_s")) for line in run.lines}
    steps: dict[int, list[bytes]] = {}
    previous: int | None = None
    broken = 0
    for line in whole_lines(path, run.notes):
        step = step_of(line)
        if step is None:
            broken += bool(line.strip())
            continue
        # a resumed run writes a step's times again
        if step != previous:
            steps[step] = []
        steps[step].append(line)
        previous = step
    found = []
    finished = sorted(steps.keys() & durations.keys())
    for step in [*finished[: max(0, min(1, len(finished) - LAST_STEPS))], *finished[-LAST_STEPS:]]:
        bars = [bar for line in steps[step] if (bar := _bar(line)) is not None]
        broken += len(steps[step]) - len(bars)
        if bars:
            ordered = tuple(sorted(bars, key=lambda bar: (bar.begin_s, bar.end_s)))
            found.append(StepTimes(step, durations[step] or 0.0, ordered))
    if broken:
        run.notes.append(
            f"{path.name}: {broken} {'line that is' if broken == 1 else 'lines that are'} no stage's time"
            f" {'was' if broken == 1 else 'were'} passed over."
        )
    return found


def _bar(line: bytes) -> Bar | None:
    record = record_of(line) or {}
    stage, group = record.get("stage"), record.get("group")
    begin, end = number(record.get("begin_s")), number(record.get("end_s"))
    if not isinstance(stage, str) or not isinstance(group, str) or begin is None or end is None:
        return None
    return Bar(stage, group, begin, end) if -MOST_SECONDS < begin <= end < MOST_SECONDS else None


def typical(steps: Sequence[StepTimes]) -> StepTimes:
    """The step of median duration (the shorter of the middle two) among the last LAST_STEPS."""
    ordered = sorted(steps[-LAST_STEPS:], key=lambda s: (s.span, s.step))
    return ordered[(len(ordered) - 1) // 2]


def timelines(runs: Sequence[ReportRun]) -> dict[str, Any] | None:
    """What the page shows: a legend, and pictures of a typical, the first and the last step of each run.

    None where no run has times; only the typical step where no run has several.
    """
    found = [(run.name, steps) for run in runs if (steps := read_timeline(run))]
    if not found:
        return None
    # the colours of the chart of stage times
    names = list(dict.fromkeys(name for run in runs for name in stage_means(run)[1]))
    drawn = dict.fromkeys(bar.stage for _, steps in found for step in steps for bar in step.bars)
    names += [name for name in drawn if name not in names]
    colours = {name: i % COLOURS for i, name in enumerate(names)}
    several = any(len(steps) > 1 for _, steps in found)
    pictures: list[dict[str, Any]] = []
    for name, steps in found:
        recent = len(steps[-LAST_STEPS:])
        median = f"the median of the last {recent} steps" if recent > 1 else "the only one with times"
        chosen = [("typical", typical(steps), median)]
        if several:
            chosen += [("first", steps[0], "the first step"), ("last", steps[-1], "the last step")]
        groups = list(dict.fromkeys(bar.group for _, step, _ in chosen for bar in step.bars))
        pictures.append(
            {
                "run": name,
                "pictures": [
                    {"choice": choice, **picture(step, groups, colours), "which": which}
                    for choice, step, which in chosen
                ],
            }
        )
    shown = dict.fromkeys(name for one in pictures for p in one["pictures"] for name in p["stages"])
    return {
        "legend": [(readable(name), colours[name]) for name in names if name in shown],
        "choices": ["typical", "first", "last"] if several else [],
        "runs": pictures,
    }


def picture(step: StepTimes, groups: Sequence[str], colours: dict[str, int]) -> dict[str, Any]:
    """A step as rows of bars: places along the axis in percent of the step, heights in pixels."""
    kept = set(sorted(step.bars, key=lambda bar: bar.begin_s - bar.end_s)[:MOST_BARS])
    rows, top = [], 0
    for group in groups:
        lines = _lines_of([bar for bar in step.bars if bar.group == group and bar in kept], SLACK * step.span)
        bars = [
            {
                "x": _percent(bar.begin_s - step.start, step.span),
                "width": _percent(bar.end_s - bar.begin_s, step.span),
                "y": top + NAME_HEIGHT + i * (BAR_HEIGHT + 2),
                "colour": colours[bar.stage],
                "text": f"{readable(bar.stage)}: {_seconds(bar.end_s - bar.begin_s)},"
                f" from {_seconds(bar.begin_s)} to {_seconds(bar.end_s)}",
            }
            for i, line in enumerate(lines)
            for bar in line
        ]
        busy = f"{100 * step.busy(group):.0f}%"
        height = max(1, len(lines)) * (BAR_HEIGHT + 2) - 2
        top += NAME_HEIGHT
        rows.append({"group": readable(group), "y": top, "height": height, "busy": busy, "bars": bars})
        top += height + GAP
    return {
        "step": step.step,
        "seconds": _seconds(step.span),
        "rows": rows,
        "ticks": [
            (_percent(tick - step.start, step.span), text)
            for tick, text in _ticks(step.start, step.start + step.span)
        ],
        "bottom": top,
        "height": top + AXIS_HEIGHT,
        "bar_height": BAR_HEIGHT,
        "stages": list(dict.fromkeys(bar.stage for bar in step.bars if bar in kept)),
        "left_out": max(0, len(step.bars) - MOST_BARS),
    }


def _lines_of(bars: Iterable[Bar], slack: float) -> list[list[Bar]]:
    """The bars of a group on as few lines as show each of those that overlap; most groups need one."""
    lines: list[list[Bar]] = []
    for bar in bars:
        free = next((line for line in lines if line[-1].end_s <= bar.begin_s + slack), None)
        if free is None:
            lines.append([bar])
        else:
            free.append(bar)
    return lines


def _ticks(low: float, high: float, wanted: int = 6) -> list[tuple[float, str]]:
    """About `wanted` round numbers of seconds from `low` to `high`, with their texts."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    every = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    digits = max(0, -math.floor(math.log10(every) + 1e-9))
    first, last = math.ceil(low / every - 1e-6), math.floor(high / every + 1e-6)
    return [(i * every, f"{i * every:.{digits if i else 0}f} s") for i in range(first, last + 1)]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f}".rstrip("0").rstrip(".") + "%"


def _seconds(value: float) -> str:
    return f"{format_number(value)} s"


def readable(name: str) -> str:
    """A name on one line, cut at its end, with everything invisible made visible."""
    text = " ".join(clean_text(name, 10 * LONGEST_NAME).split())
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"
