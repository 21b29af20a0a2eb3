"""Checking a flow before anything starts: names, order, columns, settings, batch arithmetic. All violations at once."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headrace.config import Config, step_violations
from headrace.errors import ConfigError
from headrace.flow.graph import Flow, Stage
from headrace.rewards.stage import RewardStage
from headrace.roles.role import Role

if TYPE_CHECKING:
    from headrace.flow.run import Evaluation, RunResult

DATA_COLUMNS = {"prompt_ids", "prompt_id", "prompt"}
SUPERVISED_COLUMNS = {"input_ids", "response_mask"}


@dataclass(frozen=True)
class CompiledFlow:
    """A checked flow: its stages in an order that respects every edge, and the resolved settings."""

    name: str
    config: Config
    stages: tuple[Stage, ...]

    @property
    def roles(self) -> list[Role]:
        """Every role of the flow, once, in order of first use."""
        found: list[Role] = []
        for stage in self.stages:
            if stage.role is not None and stage.role not in found:
                found.append(stage.role)
        return found

    @property
    def generates(self) -> bool:
        """True for a flow that generates its own rows."""
        return any(s.spec.makes_rows for s in self.stages)

    @property
    def supervised(self) -> bool:
        """True for a flow over given responses (sft)."""
        return any(s.function.__name__ == "supervised_update" for s in self.stages)

    def trains(self, role: Role) -> bool:
        return any(s.role is role and s.function.__name__.endswith("update") for s in self.stages)

    def check_data(self, columns: set[str]) -> list[str]:
        """Violations of what stages ask of the data set's own columns."""
        available = set(columns) | DATA_COLUMNS
        out: list[str] = []
        for stage in self.stages:
            if isinstance(stage.function, RewardStage):
                out += stage.function.check(available)
            available |= set(stage.spec.writes)
        return out

    def run(
        self, dataset: Any, steps: int | None = None, *, evaluation: Evaluation | None = None
    ) -> RunResult:
        """Runs the flow over `dataset` for `steps` (default: train.steps, else train.epochs).

        Raises ConfigError before any weights are loaded when the data do not fit; RunError when a step fails.
        """
        from headrace.flow.run import run_flow

        return run_flow(self, dataset, steps, evaluation)


def compile_flow(flow: Flow, cluster: Any = None) -> CompiledFlow:
    """See Flow.compile."""
    problems = list(flow.notes)
    if cluster is not None:
        problems.append("compile(cluster=...): this version runs in one process; leave the cluster out")
    problems += _name_violations(flow)
    config = _merged_config(flow, problems)
    ordered = _in_order(flow, problems)
    if ordered:
        problems += _column_violations(ordered)
    methods = {s.function.__name__ for s in flow.stages}
    if "update" in methods:
        problems += step_violations(config, grouped="grpo_advantages" in methods)
    if problems:
        raise ConfigError(problems)
    return CompiledFlow(flow.name, config, tuple(ordered))


def _name_violations(flow: Flow) -> list[str]:
    out: list[str] = []
    names = [s.name for s in flow.stages]
    if not names:
        out.append(f"flow '{flow.name}' has no stages")
    for name in sorted({n for n in names if names.count(n) > 1}):
        out.append(f"stage '{name}' is added {names.count(name)} times; names must differ")
    for stage in flow.stages:
        for needed in stage.depends_on:
            if needed not in names:
                close = difflib.get_close_matches(needed, names, 1)
                hint = f"; did you mean '{close[0]}'?" if close else f"; there are {', '.join(names)}"
                out.append(f"stage '{stage.name}' depends on '{needed}', which does not exist{hint}")
    return out


def _merged_config(flow: Flow, problems: list[str]) -> Config:
    """The flow's configuration with every stage's settings in it."""
    values = flow.config.model_dump()
    given: dict[tuple[str, str], tuple[str, Any]] = {}
    for stage in flow.stages:
        for name, value in stage.settings.items():
            section = next((s for s in stage.spec.sections if name in values[s]), None)
            if section is None:
                known = [k for s in stage.spec.sections for k in values[s]]
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                problems.append(f"stage '{stage.name}': unknown setting '{name}'{hint}")
                continue
            before = given.setdefault((section, name), (stage.name, value))
            if before[1] != value:
                problems.append(
                    f"{section}.{name}: stage '{before[0]}' sets {before[1]!r} and stage '{stage.name}' {value!r}"
                )
            values[section][name] = value
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        for item in error.errors():
            problems.append(f"{'.'.join(str(p) for p in item['loc'])}: {item['msg']}, got {item['input']!r}")
        return flow.config


def _in_order(flow: Flow, problems: list[str]) -> list[Stage]:
    """Stages in dependency order (as added, where free); reports a cycle by its members."""
    done: list[Stage] = []
    names = {s.name for s in flow.stages}
    waiting = list(flow.stages)
    while waiting:
        finished = {s.name for s in done}
        ready = [s for s in waiting if all(d in finished or d not in names for d in s.depends_on)]
        if not ready:
            problems.append(f"stages {', '.join(s.name for s in waiting)} depend on each other in a circle")
            return []
        done.append(ready[0])
        waiting.remove(ready[0])
    return done


def _column_violations(ordered: list[Stage]) -> list[str]:
    """What each stage reads must be written by a stage it depends on, directly or through others."""
    out: list[str] = []
    first_reads = set(ordered[0].spec.reads)
    source = SUPERVISED_COLUMNS if first_reads & SUPERVISED_COLUMNS else DATA_COLUMNS
    before: dict[str, set[str]] = {}
    ancestors: dict[str, set[str]] = {}
    writers: dict[str, list[str]] = {}
    for stage in ordered:
        above = {a for d in stage.depends_on for a in ancestors.get(d, set()) | {d}}
        ancestors[stage.name] = above
        available = source | {c for a in above for c in before.get(a, set())}
        for column in sorted(set(stage.spec.reads) - available):
            known = sorted({c for s in ordered for c in s.spec.writes if c == column})
            owners = [s.name for s in ordered if column in s.spec.writes]
            where = (
                f"stage '{owners[0]}' writes it: add it to depends_on"
                if known
                else "no stage of this flow writes it"
            )
            out.append(f"stage '{stage.name}' reads column '{column}', which it does not have; {where}")
        before[stage.name] = set(stage.spec.writes)
        for column in stage.spec.writes:
            for other in writers.get(column, []):
                if other not in above:
                    out.append(
                        f"stages '{other}' and '{stage.name}' both write column '{column}' and neither comes after the"
                        " other"
                    )
            writers.setdefault(column, []).append(stage.name)
    return out
