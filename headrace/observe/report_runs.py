"""What a report says about runs, read from their directories: metrics, settings and samples, in bounded amounts.

Everything here was written by a model or by hand and may be odd: null metrics, half a last line, huge samples.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.config_explain import all_keys
from headrace.config_load import read_settings
from headrace.errors import ConfigError, DataError
from headrace.observe.machine import ENVIRONMENT
from headrace.observe.run_dir import RunDirectory

EVAL_SAMPLES = "eval_samples.jsonl"  # every evaluation's samples, the same prompts each time

MOST_POINTS = 1000  # of a curve; a longer one keeps the lowest and the highest value of each part
MOST_BYTES = 64 << 20  # of one samples file that are looked at
MOST_SETS = 8  # evaluations of a run, and steps of its training samples, that are shown
MOST_SAMPLES = 60  # of one evaluation or step
MOST_TEXT = 2_000_000  # characters of all samples of a page
LONGEST_TEXT, SHORTEST_TEXT = 6000, 200  # characters of one text that are kept, as the page has room

Curve = list[tuple[int, float | None]]


@dataclass
class SampleSet:
    """Samples of one evaluation or one training step; `found` counts those in the file."""

    kind: str  # "evaluation" or "training"
    step: int
    samples: list[dict[str, Any]]
    found: int


@dataclass
class ReportRun:
    """One run as far as it has got. `lines` are metrics.jsonl's, one a step, in order of steps."""

    name: str
    path: Path
    lines: list[dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    environment: dict[str, Any]
    samples: list[SampleSet] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """(step, value) where each metric was logged, in order of first appearance; None: it was not finite."""
        out: dict[str, Curve] = {}
        for line in self.lines:
            for name, value in line.items():
                if name not in ("step", "time"):
                    out.setdefault(name, []).append((line["step"], number(value)))
        return out

    def curve(self, metric: str) -> Curve:
        return self.curves.get(metric, [])

    def metrics(self) -> list[str]:
        return list(self.curves)

    def first_and_last(self, metric: str) -> tuple[tuple[int, float], tuple[int, float]] | None:
        """(step, value) of the first and the last finite value; None where there is none."""
        points = [(step, value) for step, value in self.curve(metric) if value is not None]
        return (points[0], points[-1]) if points else None

    def mean(self, metric: str) -> float | None:
        values = [value for _, value in self.curve(metric) if value is not None]
        return sum(values) / len(values) if values else None

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)

    def setting(self, name: str) -> Any:
        section, _, key = name.partition(".")
        return self.settings.get(section, {}).get(key)


def read_run(path: Path, name: str | None = None) -> ReportRun:
    """Reads a run directory. Raises DataError when it is none, or when nothing has been logged in it yet."""
    run = RunDirectory(path)
    if not run.path.is_dir():
        raise DataError(f"{path}: no such directory; give the directory of a run (run.dir/run.name)")
    try:
        lines = one_a_step(run.read_metrics())
    except UnicodeDecodeError as error:
        raise DataError(f"{run.metrics}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise DataError(f"{run.metrics}: cannot be read ({error.strerror})") from error
    if not lines:
        raise DataError(f"{run.metrics}: nothing has been logged yet, so there is nothing to report")
    notes: list[str] = []
    try:
        settings = {
            section: dict(values) if isinstance(values, Mapping) else {"": values}
            for section, values in read_settings(run.config).items()
        }
    except ConfigError as error:
        settings = {}
        notes.append(f"The configuration could not be read: {error}")
    out = ReportRun(name or run.path.resolve().name, run.path, lines, settings, _environment(run), [], notes)
    out.samples = [
        *read_samples(run.path / EVAL_SAMPLES, "evaluation", notes),
        *read_samples(run.samples, _kind_of_samples(lines), notes),
    ]
    return out


def _kind_of_samples(lines: Sequence[Mapping[str, Any]]) -> str:
    """samples.jsonl of `headrace eval` holds the evaluation's own; of a training run, those it learned from."""
    return "evaluation" if len(lines) == 1 and lines[0]["step"] == 0 else "training"


def _environment(run: RunDirectory) -> dict[str, Any]:
    try:
        found = json.loads((run.path / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def one_a_step(lines: Sequence[Any]) -> list[dict[str, Any]]:
    """One line a step, in order; where a resumed run logged a step again, the later values win."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        step = line.get("step") if isinstance(line, dict) else None
        if isinstance(step, int) and not isinstance(step, bool):
            steps[step] = {**steps.get(step, {}), **line}
    return [steps[step] for step in sorted(steps)]


def number(value: Any) -> float | None:
    """A finite float, or None for everything else (null: measured and not finite)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond a float's range
        return None


def thin(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """At most `most` points: first and last, and the lowest and highest of each of the equal parts between."""
    if len(curve) <= most:
        return curve
    parts = max(1, (most - 2) // 2)
    inner = curve[1:-1]
    kept = [curve[0]]
    for i in range(parts):
        part = inner[len(inner) * i // parts : len(inner) * (i + 1) // parts]
        known = [p for p in part if p[1] is not None]
        ends = {min(known, key=_value), max(known, key=_value)} if known else {part[0]}
        kept += sorted(ends)
    return [*kept, curve[-1]]


def _value(point: tuple[int, float | None]) -> float:
    return point[1] if point[1] is not None else math.nan


def stage_means(run: ReportRun, most: int = 200) -> tuple[list[int], dict[str, list[float]]]:
    """Seconds of each stage over the steps: means of at most `most` parts of neighbouring steps.

    Returns the first step of each part and, by stage, the mean seconds a step; a stage that did not run counts 0.
    """
    names = [m for m in run.metrics() if re.fullmatch(r"time/.+_s", m) and m not in OTHER_TIMES]
    lines = [line for line in run.lines if any(name in line for name in names)]
    count = min(most, len(lines))
    bounds = [len(lines) * i // count for i in range(count + 1)] if count else []
    parts = [lines[a:b] for a, b in itertools.pairwise(bounds)]
    means = {
        name[len("time/") : -len("_s")]: [
            sum(number(line.get(name)) or 0.0 for line in part) / len(part) for part in parts
        ]
        for name in names
    }
    return [part[0]["step"] for part in parts], means


OTHER_TIMES = ("time/step_s", "time/eval_s", "time/checkpoint_s")  # not the time of a stage


def read_samples(path: Path, kind: str, notes: list[str]) -> list[SampleSet]:
    """First, last and evenly spread evaluations or steps of a samples file; [] where there is none."""
    if not path.is_file():
        return []
    if not os.access(path, os.R_OK):
        notes.append(f"{path.name} cannot be read (permission denied).")
        return []
    steps: dict[int, list[bytes]] = {}
    previous: int | None = None
    for line in whole_lines(path, notes):
        step = step_of(line)
        if step is None:
            continue
        # a resumed run writes a step's samples again
        if step != previous:
            steps[step] = []
        steps[step].append(line)
        previous = step
    sets = []
    for step in spread(sorted(steps), MOST_SETS):
        samples = _one_each([s for s in map(_sample, steps[step]) if s is not None])
        if samples:
            sets.append(SampleSet(kind, step, samples[:MOST_SAMPLES], len(samples)))
    if len(steps) > MOST_SETS:
        notes.append(f"{path.name}: {MOST_SETS} of its {len(steps)} steps are shown.")
    return sets


def _one_each(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples by prompt and index, each once: a resumed run may have written some again."""
    last = {(s["prompt_id"], s["sample_index"], s["prompt"]): s for s in samples}
    return [last[key] for key in sorted(last)]


def whole_lines(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Whole lines; of a very large file, those of its beginning and of its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= MOST_BYTES:
            yield from file
            return
        notes.append(f"{path.name} is {size >> 20} MiB; only its beginning and its end were read.")
        while file.tell() < MOST_BYTES // 2 and (line := file.readline()):
            yield line
        file.seek(max(file.tell(), size - MOST_BYTES // 2))
        file.readline()
        yield from file


def step_of(line: bytes) -> int | None:
    """The step of a line, without parsing its texts where it begins as headrace writes it."""
    match = re.match(rb'\s*\{"step": ?(\d{1,15}),', line)
    if match is not None:
        return int(match[1])
    record = record_of(line)
    step = None if record is None else record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def record_of(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _sample(line: bytes) -> dict[str, Any] | None:
    record = record_of(line)
    if record is None:
        return None
    order = {k: record[k] if isinstance(record.get(k), int) else 0 for k in ("prompt_id", "sample_index")}
    return {
        **order,
        "prompt": _text(record.get("prompt")),
        "completion": _episode(record.get("episode")) or _text(record.get("completion")),
        "reward": number(record.get("reward")),
        "finish_reason": clean_text(_text(record.get("finish_reason")), 40),
        "num_tokens": number(record.get("num_tokens")),
    }


def _episode(messages: Any) -> str:
    """The turns after the prompt as one text, each below its role; "" where there are no several."""
    if not isinstance(messages, list) or len(messages) < 2 or not all(isinstance(m, dict) for m in messages):
        return ""
    return "\n\n".join(f"{_text(m.get('role'))}:\n{_text(m.get('content'))}" for m in messages)


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def room_for_texts(runs: Sequence[ReportRun]) -> int:
    """Characters that each text may keep so that all of them fit a page."""
    count = sum(2 * len(s.samples) for run in runs for s in run.samples)
    return max(SHORTEST_TEXT, min(LONGEST_TEXT, MOST_TEXT // max(1, count)))


def clean_text(text: str, most: int = LONGEST_TEXT) -> str:
    """The text with everything invisible made visible, cut in the middle to about `most` characters with a note.

    Control characters and marks that change the direction of writing become ‹U+202E›, lone surrogates U+FFFD.
    """
    if len(text) > most:
        head = most * 2 // 3
        tail = most - head
        left_out = len(text) - head - tail
        text = f"{text[:head]}\n[… {left_out:,} of {len(text):,} characters left out …]\n{text[-tail:]}"
    return _CONTROLS.sub(_visible, text)


# control, direction and other invisible characters; not tab, newline and the joiners that emoji and scripts need
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    lost = 0xD800 <= code <= 0xDFFF or code in (0xFFFE, 0xFFFF)
    return "\ufffd" if lost else f"‹U+{code:04X}›"


def differing_settings(run: ReportRun) -> list[tuple[str, Any, Any]]:
    """(key, value, default) of every setting that is not its default, in the order of the file."""
    keys = all_keys()
    out = []
    for section, values in run.settings.items():
        for key, value in values.items():
            info = keys.get(f"{section}.{key}")
            if info is None or info.default != value:
                out.append((f"{section}.{key}".rstrip("."), value, None if info is None else info.default))
    return out


def settings_that_differ(runs: Sequence[ReportRun]) -> list[tuple[str, list[Any]]]:
    """(key, value in each run) of every setting that is not the same in all runs."""
    keys = dict.fromkeys(
        f"{section}.{key}" for run in runs for section, values in run.settings.items() for key in values
    )
    rows = [(key, [run.setting(key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values[1:])]
