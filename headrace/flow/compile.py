"""Checking a flow before anything starts: names, order, columns, settings, batch arithmetic. All violations at once."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.agents.episode import EPISODE_COLUMNS
from headrace.algorithms.find import algorithm_problems
from headrace.algorithms.registry import ADVANTAGES
from headrace.algorithms.stages import AdvantageStage
from headrace.cluster.layouts import placement_of, resolve
from headrace.cluster.placement import Placement
from headrace.config import Config, setting_violations, step_violations
from headrace.config_load import from_mapping, set_values
from headrace.config_places import cluster_settings
from headrace.errors import ConfigError
from headrace.flow.graph import Graph, Stage
from headrace.flow.staleness import staleness_violations
from headrace.rewards.stage import RewardStage
from headrace.roles.actor import Actor
from headrace.roles.role import ReaderRole, Role

DATA_COLUMNS = {"prompt_ids", "prompt_id", "prompt"}
SUPERVISED_COLUMNS = {"input_ids", "response_mask"}
ONE_DEVICE = resolve()
PAIR_COLUMNS = SUPERVISED_COLUMNS | {"pair_id", "is_chosen"}


@dataclass(frozen=True)
class CheckedFlow:
    """A checked flow: its stages in an order that respects every edge, and the resolved settings."""

    name: str
    config: Config
    stages: tuple[Stage, ...]
    data_columns: tuple[str, ...] = ()
    placement: Placement = ONE_DEVICE

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
        return any(s.spec.supervised for s in self.stages)

    @property
    def paired(self) -> bool:
        """True for a flow over pairs of a chosen and a rejected response (reward-model, dpo)."""
        return _paired(self.stages)

    @property
    def reader(self) -> ReaderRole | None:
        """The role whose tokenizer reads the data: the one that is trained, else the first that has a tokenizer."""
        readers = [role for role in self.roles if isinstance(role, ReaderRole)]
        return min(readers, key=lambda role: not self.trains(role), default=None)

    def trains(self, role: Role) -> bool:
        """True when a stage of this flow updates the weights of `role`."""
        return any(s.role is role and s.spec.trains for s in self.stages)

    @property
    def filters_groups(self) -> bool:
        """True for a flow that replaces groups without spread (algorithm.filter_groups)."""
        learns = any(s.spec.trains and not s.spec.supervised for s in self.stages)
        return learns and self.config.algorithm.filter_groups

    def cut_after(self, column: str) -> tuple[CheckedFlow, CheckedFlow]:
        """(the stages that write `column` and all they depend on, the other stages), each in order."""
        above = ancestors(self.stages)
        writers = {s.name for s in self.stages if column in s.spec.writes}
        first = writers.union(*(above[name] for name in writers))
        return (
            replace(self, stages=tuple(s for s in self.stages if s.name in first)),
            replace(self, stages=tuple(s for s in self.stages if s.name not in first)),
        )

    @property
    def works_ahead(self) -> bool:
        """True for a flow whose rollout is made a step ahead (rollout.staleness)."""
        learns = any(s.spec.trains and not s.spec.supervised for s in self.stages)
        return learns and self.generates and self.config.rollout.staleness > 0

    def cut_after_rollout(self) -> tuple[CheckedFlow, CheckedFlow]:
        """(the stages that make rows, the other stages)."""
        return (
            replace(self, stages=tuple(s for s in self.stages if s.spec.makes_rows)),
            replace(self, stages=tuple(s for s in self.stages if not s.spec.makes_rows)),
        )

    def check_data(self, columns: set[str], source: str) -> list[str]:
        """Violations of what stages ask of the own columns of the data set named `source`."""
        available = set(columns) | DATA_COLUMNS
        out = [
            f"flow '{self.name}': {source} has no column '{name}'{_nearest(name, available)}"
            for name in self.data_columns
            if name not in available
        ]
        for stage in self.stages:
            if isinstance(stage.function, RewardStage):
                out += stage.function.check(available, source)
            available |= written_columns(stage, self.config)
        return out


def examine_graph(flow: Graph, cluster: Any = None) -> tuple[CheckedFlow, list[str]]:
    """The flow as far as it can be ordered, and all violations that can be known without data, models or weights."""
    problems = list(flow.notes)
    problems += _name_violations(flow)
    config = _merged_config(flow, problems)
    if cluster is not None:
        config = _with_layout(config, cluster, problems)
    ordered = _in_order(flow, problems)
    if ordered:
        problems += _column_violations(ordered, set(flow.data_columns), config)
    problems += setting_violations(config)
    problems += _environment_violations(flow, config)
    learns = any(s.spec.trains and not s.spec.supervised for s in flow.stages)
    if learns:
        problems += algorithm_problems(config.algorithm)
        problems += step_violations(config, grouped=any(f.advantage.grouped for f in _advantages(flow)))
        problems += _penalty_violations(flow, config)
        problems += _filter_violations(ordered, config)
    placement = _placement(flow, config, problems)
    if learns:
        problems += staleness_violations(ordered, config, placement)
    stages = tuple(ordered or flow.stages)
    return CheckedFlow(flow.name, config, stages, flow.data_columns, placement), problems


def _with_layout(config: Config, cluster: Any, problems: list[str]) -> Config:
    values = set_values(config)
    values["cluster"] = {**values.get("cluster", {}), **(cluster_settings(cluster) or {"layout": cluster})}
    try:
        return from_mapping(values)
    except ConfigError as error:
        problems += error.violations
        return config


def _placement(flow: Graph, config: Config, problems: list[str]) -> Placement:
    """Where the roles run. Without anything said about a cluster or of one of the roles: this process."""
    c = config.cluster
    own = list(dict.fromkeys(s.role for s in flow.stages if s.role is not None))
    described = {role.name: role.place for role in own}
    for role in own:
        if role.place != described[role.name]:
            problems.append(
                f"flow '{flow.name}': two models are its {role.name}, and they were described with places that differ:"
                f" {role.place.entry()} and {described[role.name].entry()}"
            )
    said = c.layout is not None or (c.num_gpus or 0) > 1
    if not said and not c.parallelism and not any(place.entry() for place in described.values()):
        return ONE_DEVICE
    roles = {role.name for role in own}
    if any(s.spec.makes_rows for s in flow.stages):
        roles.add("rollout")
    kinds = sorted({role.device_name.partition(":")[0] for role in own} - {"auto"})
    device = config.run.device if config.run.device != "auto" or len(kinds) != 1 else kinds[0]
    # a cluster that is joined has its devices elsewhere
    available = None if os.environ.get("RAY_ADDRESS") else torch.cuda.device_count()
    try:
        placement = placement_of(c, sorted(roles), device, available, described).generating()
    except ConfigError as error:
        problems += error.violations
        return ONE_DEVICE
    if placement.world > 1 and len(kinds) > 1:
        names = [f"{role.name} {role.device_name}" for role in own]
        problems.append(
            f"run.device: the models of a cluster are on one kind of device, not {', '.join(names)}"
        )
    return placement if said or placement.world > 1 else ONE_DEVICE


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean '{close[0]}'?" if close else f"; there are {', '.join(sorted(known)) or 'none'}"


def _name_violations(flow: Graph) -> list[str]:
    out: list[str] = []
    names = [s.name for s in flow.stages]
    if not names:
        out.append(f"flow '{flow.name}' has no stages")
    for name in sorted({n for n in names if names.count(n) > 1}):
        out.append(f"stage '{name}' is added {names.count(name)} times; names must differ")
    for name in dict.fromkeys(names):
        if not re.fullmatch(r"[^/\s]+", name) or name in ("step", "eval"):
            out.append(
                f"stage {name!r}: the name becomes part of metric 'time/<stage>_s', so it must have no spaces or slashes"
                " and be other than 'step' and 'eval'"
            )
    for stage in flow.stages:
        for needed in stage.depends_on:
            if needed not in names:
                out.append(
                    f"stage '{stage.name}' depends on '{needed}', which does not exist{_nearest(needed, names)}"
                )
    return out


def _merged_config(flow: Graph, problems: list[str]) -> Config:
    """The flow's configuration with every stage's settings in it, and the advantage that its stage computes."""
    every, values = flow.config.model_dump(), set_values(flow.config)
    given: dict[tuple[str, str], tuple[str, Any]] = {}
    for stage in flow.stages:
        for name, value in stage.settings.items():
            section = next((s for s in stage.spec.sections if name in every[s]), None)
            if section is None:
                known = {k for s in stage.spec.sections for k in every[s]}
                problems.append(f"stage '{stage.name}': unknown setting '{name}'{_nearest(name, known)}")
                continue
            before = given.setdefault((section, name), (stage.name, value))
            if before[1] != value:
                problems.append(
                    f"{section}.{name}: stage '{before[0]}' sets {before[1]!r} and stage '{stage.name}' {value!r}"
                )
            values.setdefault(section, {})[name] = value
    for function in _advantages(flow):
        chosen = values.setdefault("algorithm", {}).setdefault("advantage", function.advantage.name)
        if chosen != function.advantage.name and chosen in ADVANTAGES:
            problems.append(
                f"algorithm.advantage: is '{chosen}', but a stage of flow '{flow.name}' computes"
                f" '{function.advantage.name}'; leave the setting out, or use advantage_stage('{chosen}')"
            )
    try:
        return from_mapping(values)
    except ConfigError as error:
        problems += error.violations
        return flow.config


def _advantages(flow: Graph) -> list[AdvantageStage]:
    return [s.function for s in flow.stages if isinstance(s.function, AdvantageStage)]


def _in_order(flow: Graph, problems: list[str]) -> list[Stage]:
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


def written_columns(stage: Stage, config: Config) -> set[str]:
    """The columns a stage writes: those it declares, and those of episodes where it plays some."""
    plays = stage.spec.makes_rows and isinstance(stage.role, Actor) and stage.role.plays(config)
    return {*stage.spec.writes, *(EPISODE_COLUMNS if plays else ())}


def _column_violations(ordered: list[Stage], data_columns: set[str], config: Config) -> list[str]:
    """What each stage reads must be written by a stage it depends on, directly or through others."""
    out: list[str] = []
    supervised = any(s.spec.supervised for s in ordered)
    given = PAIR_COLUMNS if _paired(ordered) else SUPERVISED_COLUMNS if supervised else DATA_COLUMNS
    source = data_columns | given
    writers: dict[str, list[str]] = {}
    for stage in ordered:
        for column in sorted(written_columns(stage, config)):
            writers.setdefault(column, []).append(stage.name)
    above = ancestors(ordered)
    for stage in ordered:
        has = source | {c for c, names in writers.items() if above[stage.name] & set(names)}
        for column in sorted(set(stage.spec.reads) - has):
            where = (
                f"stage '{writers[column][0]}' writes it: add it to depends_on"
                if column in writers
                else "no stage of this flow writes it (a column of the data is named by Flow(data_columns=...))"
            )
            out.append(f"stage '{stage.name}' reads column '{column}', which it does not have; {where}")
        for column in sorted(set(stage.spec.optional) - has):
            loose = [w for w in writers.get(column, []) if stage.name not in above[w] and w != stage.name]
            if loose:
                out.append(
                    f"stage '{stage.name}' uses column '{column}' where there is one, and stage '{loose[0]}' writes it:"
                    " add it to depends_on"
                )
    for column, names in writers.items():
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                if first != second and first not in above[second] and second not in above[first]:
                    out.append(
                        f"stages '{first}' and '{second}' both write column '{column}' and neither comes after the other"
                    )
    return out


def _paired(stages: Iterable[Stage]) -> bool:
    return any("pair_id" in s.spec.reads for s in stages)


def ancestors(ordered: Iterable[Stage]) -> dict[str, set[str]]:
    """Every stage that comes before a stage by its edges, directly or through others."""
    above: dict[str, set[str]] = {}
    for stage in ordered:
        above[stage.name] = {a for d in stage.depends_on for a in above.get(d, set()) | {d}}
    return above


def _environment_violations(flow: Graph, config: Config) -> list[str]:
    """What is wrong with the environment of the flow's rollout, where there is one."""
    out: list[str] = []
    for role in dict.fromkeys(s.role for s in flow.stages if s.spec.makes_rows):
        try:
            if isinstance(role, Actor):
                role.find_environment(config)
            plays = isinstance(role, Actor) and role.plays(config)
        except ConfigError as error:
            out += error.violations
            continue
        greedy = [f.advantage.name for f in _advantages(flow) if f.advantage.needs_greedy_baseline]
        if plays and greedy:
            out.append(
                f"algorithm.advantage: '{greedy[0]}' compares with a greedy response, which episodes with an environment"
                " (agent.environment) have none of; use another algorithm, such as rloo"
            )
    return out


def _penalty_violations(flow: Graph, config: Config) -> list[str]:
    """A KL that is asked for must find its columns, or it would silently be none."""
    if config.algorithm.kl_coefficient == 0:
        return []
    written = {c for s in flow.stages for c in s.spec.writes}
    needed = ["reference_logprobs"] + (["logprobs"] if config.algorithm.kl_placement == "reward" else [])
    return [
        f"algorithm.kl_coefficient: {config.algorithm.kl_coefficient} needs column '{column}', which no stage of flow"
        f" '{flow.name}' writes; add a stage such as {example}, or set it to 0"
        for column, example in zip(needed, ("reference.logprobs", "actor.logprobs"), strict=False)
        if column not in written
    ]


def _filter_violations(ordered: list[Stage], config: Config) -> list[str]:
    """Filtering groups runs the stages up to the reward again, so there must be such, and they must not train."""
    if not config.algorithm.filter_groups or not ordered:
        return []
    written = {c for s in ordered for c in s.spec.writes}
    out = [
        f"algorithm.filter_groups: needs column '{column}', which no stage of this flow writes; set it to false"
        for column in ("reward", "group_id")
        if column not in written
    ]
    above = ancestors(ordered)
    before = {name for s in ordered if "reward" in s.spec.writes for name in above[s.name]}
    out += [
        f"algorithm.filter_groups: stage '{s.name}' trains and comes before the reward, so it cannot be repeated;"
        " move it behind the reward, or set it to false"
        for s in ordered
        if s.spec.trains and s.name in before
    ]
    return out
