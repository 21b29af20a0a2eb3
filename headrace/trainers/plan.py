"""`headrace plan`: what a run would do and take, after the checks of a real one. Starts and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from headrace.config import Config
from headrace.data.dataset import HFDataset
from headrace.data.loader import Loader
from headrace.errors import ConfigError, DataError
from headrace.flow.compile import CheckedFlow
from headrace.flow.memory import estimate_memory, load_of
from headrace.flow.memory_terms import Estimate, Load, Part, tokens_at_once
from headrace.flow.prepare import check_roles, prepare_both, refuse_own_inputs
from headrace.flow.run import Evaluation, steps_of
from headrace.flow.source import ROWS_READ, PreparedData, first_rows
from headrace.models.weight_files import refuse_broken_weights
from headrace.observe.report_facts import format_bytes
from headrace.observe.run_dir import RunDirectory
from headrace.roles.actor import Actor
from headrace.trainers.launch import dataset_of, held_out_of, supervised_flow, training_flow
from headrace.trainers.plan_resume import UNKNOWN, Continuation, check_continuation, planned_checkpoint
from headrace.trainers.preference import PreferenceCommand, preference_flow

PlannedCommand = Literal["train", "sft"] | PreferenceCommand


@dataclass
class Plan:
    """A checked run. `rows` and `held_out_rows` are those of the whole data sets, `data` may hold the first of them."""

    flow: CheckedFlow
    evaluation: Evaluation | None
    data: PreparedData
    held_out: PreparedData | None
    rows: int
    held_out_rows: int
    steps_per_epoch: int
    steps: int
    load: Load
    memory: Estimate
    resumed: Continuation | None = None

    @property
    def config(self) -> Config:
        return self.flow.config

    @property
    def updates(self) -> int:
        """Optimizer updates of the actor, or the reward model, in the whole run."""
        if not self.flow.generates:
            return self.steps
        return max(0, self.steps - self.resting) * self.config.updates_per_step

    @property
    def resting(self) -> int:
        """Steps in which only the critic learns."""
        critic = any(role.name == "critic" for role in self.flow.roles)
        return min(self.config.critic.warmup_steps, self.steps) if critic else 0

    @property
    def evaluations(self) -> int:
        """Of the whole run: before, between and after."""
        if self.evaluation is None:
            return 0
        every = self.evaluation.every_steps
        between = (self.steps - 1) // every if every else 0
        return 2 + between


def make_plan(config: Config, command: PlannedCommand = "train") -> Plan:
    """Checks configuration, reward, data and models as the command would, without weights.

    Of a data set of more than `ROWS_READ` rows, the first are tokenized and checked and the others counted. Raises
    ConfigError with all violations, and for a run whose weights and optimizer alone exceed the memory.
    """
    dataset, held_out = dataset_of(config), held_out_of(config)
    if command == "train":
        flow, evaluation = training_flow(
            config, Actor(config.model, config.run.device), config.reward.function, dataset, held_out
        )
    elif command == "sft":
        flow, evaluation = supervised_flow(config, Actor(config.model, config.run.device), dataset, held_out)
    else:
        flow, evaluation = preference_flow(config, command, held_out)
    checkpoint = planned_checkpoint(config)
    rows, first = _first_rows(config, dataset, "data")
    if checkpoint is not None:
        first = dataset  # all rows are compared with those of the checkpoint
    held_rows, held_first = (
        _first_rows(config, evaluation.dataset, "eval") if evaluation is not None else (0, None)
    )
    shown = (
        Evaluation(evaluation.flow, held_first, evaluation.every_steps) if evaluation is not None else None
    )
    data, held = prepare_both(flow, first, shown)
    if len(data.dataset) < data.rows_per_step and rows > ROWS_READ:
        data, held = prepare_both(flow, dataset, shown)  # the first rows do not fill a step, all may
    loader = Loader(
        data.dataset,
        data.rows_per_step,
        shuffle=config.data.shuffle and checkpoint is not None,
        seed=config.run.seed,
        key=data.rows_key,
    )
    check_roles([flow] + ([evaluation.flow] if evaluation is not None else []))
    refuse_broken_weights(
        {
            (str(role.model_config.path), role.key): role.name == "reward_model" and not flow.trains(role)
            for role in flow.roles
            if role.model_config.path is not None and role.start is None
        }
    )
    if checkpoint is None:
        RunDirectory.check(config.run.dir, config.run.name, overwrite=config.run.overwrite)
        refuse_own_inputs(config)
    usable = (
        rows
        if len(data.dataset) == len(data.dataset.rows)
        else rows * len(data.dataset) // len(data.dataset.rows)
    )
    per_epoch = max(1, usable // loader.rows_per_step)
    steps = config.train.steps or steps_of(config.train.epochs, per_epoch)
    resumed = None if checkpoint is None else check_continuation(checkpoint, flow, loader, steps)
    load = load_of(flow, data, held)
    memory = estimate_memory(flow, load)
    refusals = memory.refusals()
    if refusals:
        raise ConfigError(refusals)
    return Plan(flow, evaluation, data, held, rows, held_rows, per_epoch, steps, load, memory, resumed)


def _first_rows(config: Config, dataset: HFDataset, key: str) -> tuple[int, HFDataset]:
    try:
        return first_rows(config, dataset, key)
    except DataError:
        return 0, dataset  # reported with everything else that is wrong


def plan_text(plan: Plan) -> str:
    """The plan for people."""
    return "\n".join(line.rstrip() for part in _parts(plan) for line in [*part, ""])[:-1] + "\n"


def _parts(plan: Plan) -> Iterator[list[str]]:
    yield [f"{plan.flow.name} on {plan.memory.device}: {plan.config.model.path}"]
    yield _titled("stages", _stages(plan))
    yield _titled("data", [("training", _data_line(plan)), *_held_out(plan)])
    yield _titled("batch", _batch(plan))
    yield _titled("schedule", _schedule(plan))
    if plan.resumed is not None:
        yield _titled("resume", [("continues", plan.resumed.text), ("not checked", UNKNOWN)])
    yield _titled("memory", _memory(plan))
    verdict = plan.memory.warning()
    yield [verdict or "Nothing was started and nothing was written."]


def _titled(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [title, *(f"  {name:<{width}}  {text}" for name, text in rows)]


def _stages(plan: Plan) -> list[tuple[str, str]]:
    rows = []
    for stage in plan.flow.stages:
        spec = stage.spec
        what = "trains " + stage.role.name if spec.trains and stage.role is not None else ""
        arrow = f"{', '.join(spec.reads) or '(the completion)'} → {', '.join(spec.writes) or 'new weights'}"
        rows.append((stage.name, f"{arrow}{f'  [{what}]' if what else ''}"))
    return rows


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
    at_once = f"{tokens_at_once(c, plan.load):,} tokens at most in one forward and backward pass"
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
        ("generated", f"{plan.load.rows_at_once} sequences at the same time"),
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
    e = plan.memory
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
    e = plan.memory
    return {
        "flow": plan.flow.name,
        "stages": [
            {
                "name": s.name,
                "reads": list(s.spec.reads),
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
        "memory": {
            "device": e.device,
            "total_bytes": e.total,
            "free_bytes": e.free,
            "peak_bytes": e.peak,
            "least_bytes": e.least_bytes,
            "always": {part.what: part.bytes for part in e.always},
            "phases": {name: {part.what: part.bytes for part in parts} for name, parts in e.phases.items()},
            "unknown": e.unknown,
        },
    }


def run_plan(config: Config, command: PlannedCommand, as_json: bool) -> str:
    """What the command prints."""
    import json

    plan = make_plan(config, command)
    return json.dumps(plan_json(plan), indent=2) + "\n" if as_json else plan_text(plan)
