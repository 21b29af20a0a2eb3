"""What `headrace plan` prints and writes: words for people, numbers with their units for machines, a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.flow.graph import Stage
from headrace.flow.memory_terms import Estimate, Part, tokens_at_once
from headrace.observe.report_facts import format_bytes
from headrace.trainers.plan import Plan, PlannedCommand, make_plan
from headrace.trainers.plan_cluster import (
    aligned,
    cluster_json,
    cluster_sections,
    cluster_title,
    memory_sections,
)
from headrace.trainers.plan_resume import UNKNOWN
from headrace.trainers.plan_svg import plan_svg

NOTHING = "Nothing was started and nothing was written."


def plan_text(plan: Plan) -> str:
    """The plan for people."""
    return "\n".join(line.rstrip() for part in _parts(plan) for line in [*part, ""])[:-1] + "\n"


def _parts(plan: Plan) -> Iterator[list[str]]:
    where = cluster_title(plan.cluster) if plan.cluster is not None else _one(plan).device
    yield [f"{plan.flow.name} on {where}: {plan.config.model.path}"]
    yield _titled("stages", _stages(plan))
    yield _titled("data", [("training", _data_line(plan)), *_held_out(plan)])
    yield _titled("batch", _batch(plan))
    yield _titled("schedule", _schedule(plan))
    if plan.resumed is not None:
        yield _titled("resume", [("continues", plan.resumed.text), ("not checked", UNKNOWN)])
    if plan.cluster is None:
        yield _titled("memory", _memory(plan))
    else:
        for title, rows in (*cluster_sections(plan.cluster), *memory_sections(plan.cluster)):
            yield [title, *(f"  {line}" for line in aligned(rows))]
    verdict = (_one(plan) if plan.cluster is None else plan.cluster.memory).warning()
    yield [verdict or NOTHING]


def _one(plan: Plan) -> Estimate:
    """The memory of a run on one device."""
    if plan.memory is None:
        raise TypeError("this run is on several devices")
    return plan.memory


def _titled(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [title, *(f"  {name:<{width}}  {text}" for name, text in rows)]


def _stages(plan: Plan) -> list[tuple[str, str]]:
    rows = []
    for stage in plan.flow.stages:
        spec = stage.spec
        what = "trains " + stage.role.name if spec.trains and stage.role is not None else ""
        arrow = f"{', '.join(_reads(plan, stage)) or '(the completion)'} → {', '.join(spec.writes) or 'new weights'}"
        rows.append((stage.name, f"{arrow}{f'  [{what}]' if what else ''}"))
    return rows


def _reads(plan: Plan, stage: Stage) -> list[str]:
    """The columns that a stage needs, and those that it uses because another stage writes them."""
    written = {name for s in plan.flow.stages for name in s.spec.writes}
    return [*stage.spec.reads, *(name for name in stage.spec.optional if name in written)]


def _data_line(plan: Plan) -> str:
    d = plan.data.dataset
    checked = "" if len(d.rows) == plan.rows else f"; the first {len(d.rows):,} were tokenized and checked"
    lost = f", {d.dropped} dropped, {d.truncated} cut" if d.dropped or d.truncated else ""
    return f"{plan.rows:,} rows of {d.name}{checked}{lost}; longest sequence {plan.load.longest:,} tokens"


def _held_out(plan: Plan) -> list[tuple[str, str]]:
    if plan.held_out is None:
        return [("held out", "none (eval.path)")]
    what = f"{plan.held_out_rows:,} rows of {plan.held_out.dataset.name}, evaluated {plan.evaluations} times"
    if plan.flow.paired:
        return [("held out", what)]
    each = plan.held_out_rows * plan.config.eval.samples_per_prompt
    tokens = each * plan.config.rollout.max_new_tokens
    return [
        (
            "held out",
            f"{what}: {each:,} responses each time, at most {tokens:,} tokens",
        )
    ]


def _batch(plan: Plan) -> list[tuple[str, str]]:
    c = plan.config
    rank = "" if plan.cluster is None else " on a rank"
    at_once = (
        f"{tokens_at_once(c, plan.load, plan.device_kind):,} tokens at most in one forward and backward pass"
    )
    if not plan.flow.generates:
        rows = plan.data.rows_per_step
        update = f"{rows} pairs = {2 * rows} sequences" if plan.flow.paired else f"{rows} sequences"
        return [("an update", update), ("micro-batch", at_once)]
    per_update = c.train.samples_per_update or c.samples_per_step
    samples = c.samples_per_step
    most = samples * plan.load.longest
    return [
        (
            "a step",
            f"{c.train.prompts_per_step} prompts x {c.rollout.samples_per_prompt} samples = {samples} samples",
        ),
        (
            "updates",
            f"{_count(c.train.passes_per_step, 'pass', 'passes')} x"
            f" {_count(samples // per_update, 'update', 'updates')} of {per_update} samples ="
            f" {c.updates_per_step} a step",
        ),
        (
            "tokens",
            f"at most {most:,} a step, {samples * c.rollout.max_new_tokens:,} of them sampled",
        ),
        ("micro-batch", at_once),
        (
            "generated",
            f"{plan.load.rows_at_once} sequences at the same time{rank}",
        ),
    ]


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _schedule(plan: Plan) -> list[tuple[str, str]]:
    t = plan.config.train
    about = "" if len(plan.data.dataset.rows) == plan.rows else "about "
    epochs = plan.steps / plan.steps_per_epoch
    rate = f"{t.schedule} {t.learning_rate:g}"
    if t.warmup_updates:
        rate += f" after a rise over {t.warmup_updates} updates"
    if t.schedule != "constant":
        rate += f", falling to {t.learning_rate * t.min_learning_rate_fraction:g}"
    rest = f"; the actor rests for the first {plan.resting} steps" if plan.resting else ""
    return [
        ("steps", f"{plan.steps:,} ({about}{plan.steps_per_epoch:,} an epoch, so {epochs:.3g} epochs){rest}"),
        ("updates", f"{plan.updates:,} of the {_learner(plan)}"),
        ("learning rate", rate),
    ]


def _learner(plan: Plan) -> str:
    """What the run is about: the actor, or the reward model where there is none."""
    return next((r.name for r in plan.flow.roles if r.name == "actor"), "reward model")


def _memory(plan: Plan) -> list[tuple[str, str]]:
    e = _one(plan)
    rows = [(part.what, _size(part)) for part in e.always]
    for name, parts in e.phases.items():
        total = format_bytes(sum(p.bytes for p in parts))
        rows.append((f"during {name}", f"{total:>10}{'   the largest phase' if name == e.phase else ''}"))
        rows += [(f"  {part.what}", _size(part)) for part in parts]
    rows += [(f"{name}", "   unknown: no config.json and weights to count") for name in e.unknown]
    rows.append(
        (
            "at most",
            f"{format_bytes(e.peak):>10}   of {format_bytes(e.total)}, {format_bytes(e.free)} free now",
        )
    )
    return rows


def _size(part: Part) -> str:
    return f"{format_bytes(part.bytes):>10}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan for machines: the same numbers under names with their units."""
    return {
        "flow": plan.flow.name,
        "stages": [
            {
                "name": s.name,
                "reads": _reads(plan, s),
                "writes": list(s.spec.writes),
                "trains": s.spec.trains,
            }
            for s in plan.flow.stages
        ],
        "rows": plan.rows,
        "rows_checked": len(plan.data.dataset.rows),
        "held_out_rows": plan.held_out_rows,
        "steps_per_epoch": plan.steps_per_epoch,
        "steps": plan.steps,
        "updates": plan.updates,
        "evaluations": plan.evaluations,
        "resume": None
        if plan.resumed is None
        else {
            "checkpoint": str(plan.resumed.checkpoint.path),
            "step": plan.resumed.checkpoint.step,
            "steps_left": plan.resumed.steps_left,
        },
        "longest_sequence_tokens": plan.load.longest,
        **(
            {"memory": _memory_json(_one(plan))}
            if plan.cluster is None
            else {"cluster": cluster_json(plan.cluster)}
        ),
    }


def _memory_json(e: Estimate) -> dict[str, Any]:
    return {
        "device": e.device,
        "total_bytes": e.total,
        "free_bytes": e.free,
        "peak_bytes": e.peak,
        "least_bytes": e.least_bytes,
        "always": {part.what: part.bytes for part in e.always},
        "phases": {name: {part.what: part.bytes for part in parts} for name, parts in e.phases.items()},
        "unknown": e.unknown,
    }


def run_plan(config: Config, command: PlannedCommand, json_to: str | None, svg_to: str | None) -> str:
    """What the command prints. `json_to`: a file, or "" for JSON instead of the text. Raises ConfigError."""
    plan = make_plan(config, command)
    as_json = json.dumps(plan_json(plan), indent=2) + "\n"
    written = []
    for flag, name, text in (
        ("--json", json_to, as_json),
        ("--svg", svg_to, plan_svg(plan.flow, plan.cluster)),
    ):
        if name:
            try:
                Path(name).write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{flag}: '{name}' cannot be written: {error.strerror or error}") from error
            written.append(name)
    if json_to == "":
        return as_json
    said = plan_text(plan)
    return said.replace(NOTHING, f"Nothing was started; written: {', '.join(written)}.") if written else said
