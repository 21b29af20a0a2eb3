"""What a report says in words and tables: what each run is, its numbers, and how runs differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from headrace.observe.report_charts import documented
from headrace.observe.report_runs import (
    MOST_POINTS,
    OTHER_TIMES,
    ReportRun,
    clean_text,
    differing_settings,
    number,
)
from headrace.observe.run_dir import RunDirectory
from headrace.observe.summary import format_duration, format_metric, format_number

LONGEST_SETTING = 2000  # characters


def headlines(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """The numbers to look at first: a label, and for each run the text, and before → after where there are both."""
    # an accuracy on pairs is another thing than one of answers: it begins at one half
    rows = [
        ("Held-out accuracy", [None if _on_pairs(run) else _change(run, "eval/accuracy") for run in runs]),
        (
            "Held-out pairs in order",
            [_change(run, "eval/accuracy") if _on_pairs(run) else None for run in runs],
        ),
        ("Held-out margin", [_change(run, "eval/margin") for run in runs]),
        *_pass_at_k(runs),
        ("Held-out reward", [_change(run, "eval/reward_mean") for run in runs]),
        ("Reward", [_change(run, "reward/mean") for run in runs]),
        ("Loss", [next(filter(None, (_change(run, m) for m in LOSSES)), None) for run in runs]),
        ("Turns in an episode", [_change(run, "agent/turns_mean") for run in runs]),
        ("Response length", [_change(run, "rollout/response_tokens_mean") for run in runs]),
        ("Tokens/s generated", [_mean(run, "rollout/tokens_per_s") for run in runs]),
        ("Steps", [{"after": str(run.last_step)} if run.last_step else None for run in runs]),
        ("Time", [{"after": format_duration(s)} if (s := duration_s(run)) else None for run in runs]),
    ]
    if any(cell for label, cells in rows if label == "Held-out accuracy" for cell in cells):
        rows = [row for row in rows if row[0] != "Held-out reward"]
    return [{"label": label, "cells": cells} for label, cells in rows if any(cells)]


# of which a run has one; the policy loss of RL says nothing
LOSSES = ("sft/loss", "reward_model/loss", "dpo/loss")


def _on_pairs(run: ReportRun) -> bool:
    return "eval/margin" in run.metrics()


def _pass_at_k(runs: Sequence[ReportRun]) -> list[tuple[str, list[dict[str, str] | None]]]:
    """The row of the largest k that was measured, if that is more than 1."""
    start = "eval/pass_at_"
    ks = {m[len(start) :] for run in runs for m in run.metrics() if m.startswith(start)}
    k = max((int(k) for k in ks if k.isdecimal()), default=1)
    return [(f"Held-out pass@{k}", [_change(run, f"{start}{k}") for run in runs])] if k > 1 else []


def _change(run: ReportRun, metric: str) -> dict[str, str] | None:
    ends = run.first_and_last(metric)
    if ends is None:
        return None
    (first, before), (last, after) = ends
    cell = {"after": format_any(metric, after), "metric": metric}
    errors = dict(run.curve(f"{metric}_stderr"))
    if (error := errors.get(last)) is not None:
        # a narrow table may break it before ±
        cell["after"] += f" ±\N{NO-BREAK SPACE}{format_any(metric, error)}"
    return cell if first == last else {"before": format_any(metric, before), **cell}


def _mean(run: ReportRun, metric: str) -> dict[str, str] | None:
    value = run.mean(metric)
    return None if value is None else {"after": format_any(metric, value), "metric": metric}


def duration_s(run: ReportRun) -> float:
    """Seconds spent in steps and evaluations; the time between a run and its resumption does not count."""
    return sum(value for name in OTHER_TIMES for _, value in run.curve(name) if value is not None)


def format_any(metric: str, value: float) -> str:
    """A metric's value for people, also of a metric that is not documented here."""
    unit, _ = documented(metric)
    if unit == "bytes":
        return format_bytes(value)
    name = metric.removeprefix("eval/") if metric.startswith("eval/agent/") else metric
    return format_metric(name, value) if unit else format_number(value)


def format_bytes(value: float) -> str:
    """Three digits and a unit of 1024: 512 MiB, 1.50 GiB."""
    size = abs(value)
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 0.9995 * 2**power:
            return f"{format_number(value / 2**power)} {unit}"
    return f"{value:.0f} B"


def numbers_table(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    """Every metric as text, the same that the charts show: first, lowest, highest and last value in each run."""
    logged = sorted(dict.fromkeys(metric for run in runs for metric in run.metrics()))
    return [
        {
            "metric": metric,
            "unit": documented(metric)[0],
            "meaning": documented(metric)[1],
            "runs": [_four(run, metric) for run in runs],
        }
        for metric in logged
    ]


def _four(run: ReportRun, metric: str) -> list[str]:
    values = [value for _, value in run.curve(metric) if value is not None]
    if not values:
        return ["not finite" if run.curve(metric) else "–"] * 4
    return [format_any(metric, v) for v in (values[0], min(values), max(values), values[-1])]


def facts(run: ReportRun) -> dict[str, Any]:
    """What the run is, as pairs of a label and a text, and its settings."""
    s, e = run.setting, run.environment
    kind = _kind(run)
    data = s("eval.path") if kind == "evaluation" and s("eval.path") else s("data.path")
    machine = f"{e['processor']}, {e.get('cpu_cores')} cores" if e.get("processor") else None
    if e.get("gpus") and s("run.device") != "cpu":
        machine = str(e["gpus"][0] if isinstance(e["gpus"], list) else e["gpus"])
    memory = number(e.get("memory_bytes"))
    planned = s("train.steps")
    steps = (
        f"{run.last_step} of {planned}"
        if isinstance(planned, int) and planned != run.last_step
        else run.last_step
    )
    unfinished = kind != "evaluation" and isinstance(planned, int) and run.last_step < planned
    known = {
        "What": KINDS.get(kind, kind.upper()),
        "Model": s("model.path"),
        "Data": data,
        "Held-out data": s("eval.path") if data != s("eval.path") else None,
        "Reward": " + ".join(str(r) for r in (s("reward.function"), s("reward.model")) if r) or None,
        "Steps": None
        if kind == "evaluation"
        else f"{steps}{' (still going, or stopped early)' if unfinished else ''}",
        "Batch": _batch(run, kind),
        "Checkpoints": _checkpoints(run),
        "Began": _moment(run.lines[0].get("time")),
        "Last logged": _moment(run.lines[-1].get("time")),
        "Machine": machine,
        "Memory": format_bytes(memory) if memory else None,
        "Versions": ", ".join(f"{name} {e[name]}" for name in VERSIONS if e.get(name)) or None,
        "Directory": run.path,
    }
    return {
        "name": run.name,
        "kind": kind,
        "facts": {label: value for label, value in known.items() if value is not None},
        "changed": differing_settings(run),
        "settings": run.settings,
    }


KINDS = {
    "training": "Training",
    "evaluation": "Evaluation",
    "sft": "Supervised fine-tuning",
    "reward_model": "Reward model",
}
VERSIONS = ("headrace", "torch", "transformers", "python")


def _kind(run: ReportRun) -> str:
    """What was done: the kind of training, evaluation, or the algorithm."""
    logged = run.metrics()
    for area in ("sft", "dpo", "reward_model"):
        if any(metric.startswith(f"{area}/") for metric in logged):
            return area
    if run.last_step == 0:
        return "evaluation"
    return str(run.setting("algorithm.name") or "training")


def _batch(run: ReportRun, kind: str) -> str | None:
    if kind in ("reward_model", "dpo"):
        pairs = run.setting("train.samples_per_update")
        return f"{pairs} pairs an update" if isinstance(pairs, int) else None
    prompts, samples = run.setting("train.prompts_per_step"), run.setting("rollout.samples_per_prompt")
    if kind in ("sft", "evaluation") or not isinstance(prompts, int) or not isinstance(samples, int):
        return None
    return f"{prompts} prompts × {samples} samples a step"


def _checkpoints(run: ReportRun) -> str | None:
    """The steps of which there are checkpoints, and which of them evaluated best."""
    folder = RunDirectory(run.path).checkpoints
    steps = sorted(int(p.name[5:]) for p in folder.glob("step_*") if p.name[5:].isdecimal())
    if not steps:
        return None
    try:
        best = (folder / "best").read_text(encoding="utf-8").strip().removeprefix("step_")
    except (OSError, ValueError):
        best = ""
    return "after step " + ", ".join(f"{s}{' (best)' if str(s) == best else ''}" for s in steps)


def _moment(value: Any) -> str | None:
    try:
        return datetime.fromisoformat(value).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, TypeError):
        return None


def title(runs: Sequence[ReportRun]) -> str:
    if len(runs) > 3:
        return f"{len(runs)} runs compared"
    *first, last = (run.name for run in runs)
    return f"{', '.join(first)} and {last}" if first else last


def notes(runs: Sequence[ReportRun]) -> list[str]:
    several = len(runs) > 1
    out = [f"{run.name}: {note}" if several else note for run in runs for note in run.notes]
    if any(len(run.curve(metric)) > MOST_POINTS for run in runs for metric in run.metrics()):
        out.append(
            f"Curves of more than {MOST_POINTS} points are thinned; the lowest and highest value of each part are kept."
        )
    for run in runs:
        for s in run.samples:
            if s.found > len(s.samples):
                out.append(
                    f"{run.name}, {s.kind}, step {s.step}: {len(s.samples)} of {s.found} samples are shown."
                )
    return out


def setting_text(value: Any) -> str:
    """A setting as YAML would have it, on one line, with everything invisible made visible."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return clean_text(text, LONGEST_SETTING)
