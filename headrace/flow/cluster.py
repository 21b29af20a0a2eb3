"""The runtime of several processes: roles live in worker groups, rows in the workers, and orders come from here."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.files import has_size
from headrace.checkpoint.resume import Checkpoint
from headrace.cluster.group import Call, WorkerGroup, fetch, fetch_row
from headrace.cluster.handle import Handle
from headrace.cluster.placement import ModelSize, Parallelism, Placement, fit_violations
from headrace.cluster.pulse import BrokenOff
from headrace.cluster.workers import Executor
from headrace.config import Config
from headrace.data.batch import Batch
from headrace.errors import ConfigError, RunError, WorkerError
from headrace.flow.compile import CheckedFlow
from headrace.flow.graph import Stage
from headrace.flow.interrupt import Interrupted
from headrace.flow.memory_ranks import LEAST, estimate_cluster
from headrace.flow.prepare import updates_of
from headrace.flow.remote import check_functions, describe_function, describe_role, loaded_problems
from headrace.flow.rollout_group import RolloutGroup
from headrace.flow.runtime import LocalRuntime, Rows, Runtime, Started, Writer, named_roles
from headrace.models.inventory import read_inventory
from headrace.models.shape import read_shape
from headrace.observe.metrics import MetricSums
from headrace.observe.run_dir import RunDirectory
from headrace.rewards.stage import RewardStage
from headrace.roles.actor import Actor
from headrace.roles.role import LanguageModelRole, Role
from headrace.stages import StageContext

logger = logging.getLogger(__name__)

WORKER = "headrace.roles.worker:RoleWorker"
GROUP = "group_id"
"""Rows of one prompt stay on one data-parallel rank, since advantages compare them."""
GROUP_READS = (GROUP, "reward", "finish_reason", "greedy_baseline")


class ClusterRuntime(Runtime):
    """Functions of the flow (rewards, advantages) run beside the `home` role: the actor, or else the one that learns."""

    in_turn = False

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.groups: dict[str, WorkerGroup] = {}
        self.roles: dict[str, Role] = {}
        self.trained: dict[str, Role] = {}
        self.rollouts: dict[str, RolloutGroup] = {}
        self.home: WorkerGroup | None = None
        self._updates: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._brought: tuple[Handle, Handle] | None = None

    def prepare(self, flow: CheckedFlow, total_steps: int, skip: Iterable[Role] = ()) -> None:
        roles, trained = named_roles(flow)
        passed = list(skip)
        for name, role in roles.items():
            if role in passed:
                continue
            group = WorkerGroup(self.executor, role.name, name)
            preparation = {
                "name": name,
                "trains": flow.trains(role),
                "supervised": flow.supervised,
                "total_updates": updates_of(flow, role, total_steps),
            }
            description = describe_role(role, flow.config, **preparation)
            count = len(group.ranks)
            logger.info("loading the %s in %d process%s", name.replace("_", " "), count, "es" * (count != 1))
            group.create(WORKER, **description)
            self.groups[name] = group
            places = self.executor.placement.roles
            if isinstance(role, Actor) and "rollout" in places and places["rollout"] != places[role.name]:
                self.rollouts[name] = RolloutGroup(self.executor, group, WORKER, description)
            self._names[id(role)] = name
        if not self.roles:
            self.roles, self.trained = roles, trained
            self.home = self.groups[self._names[id(home_of(flow))]]
        functions = {
            _function_name(flow, stage): describe_function(stage)
            for stage in flow.stages
            if stage.role is None
        }
        self._home.call("add_functions", arguments={"functions": functions})

    @property
    def _home(self) -> WorkerGroup:
        if self.home is None:
            raise RuntimeError("prepare() has not been called")
        return self.home

    def keep_logs(self, folder: Path) -> None:
        self.executor.move_logs(folder)

    def put(self, batch: Batch) -> Rows:
        """Prompts get the number of their group, since each worker sees only some of them; rows have it already."""
        plain = {name: _plain(column) for name, column in batch.rows.items()}
        if "prompt_ids" in plain:
            plain[GROUP] = torch.arange(batch.num_rows)
        together = GROUP if GROUP in batch else None
        return self._home.put(Batch(batch.lengths, batch.tokens, plain), together)

    def start(self, flow: CheckedFlow, stage: Stage, rows: Rows, context: StageContext) -> Started:
        given = _handle(rows)
        if stage.role is not None and stage.spec.trains:
            stage.role.trained_away()
        method = stage.role is not None
        name = self._names[id(stage.role)] if method else None
        group = self._home if name is None else self.groups[name]
        rollout = self.rollouts.get(name or "") if stage.spec.makes_rows else None
        if rollout is not None:
            rollout.refresh(self._updates.get(rollout.actor.name, 0), context.metrics)
            group = rollout.group
        function = stage.function.__name__ if method else _function_name(flow, stage)
        call = group.start(
            "stage",
            given,
            reads=columns_read(stage, given),
            together=GROUP if GROUP in given else None,
            arguments={
                "function": function,
                "method": method,
                "context": _plain_context(context),
            },
            label=f"stage '{stage.name}' of flow '{flow.name}', step {context.step} ({group.name})",
        )
        return _Remote(self, stage, call, context, rollout)

    def settle(self, rows: Handle, metrics: MetricSums | None = None) -> Handle:
        """New rows, shared out evenly by tokens over the home role's ranks: there they stay for the rest of the step."""
        result = self._home.call("stay", rows, together=GROUP if GROUP in rows else None)
        if metrics is not None:
            metrics.add_total("cluster/rows_bytes", result.moved_bytes)
        return rows if result.handle is None else result.handle

    def fetch(self, rows: Rows, names: Iterable[str], row: int | None = None) -> Batch:
        handle = _handle(rows).select(names)
        if row is None:
            return fetch(self.executor, handle)
        return fetch_row(self.executor, self._brought_together(handle), row)

    def _brought_together(self, handle: Handle) -> Handle:
        """Columns shared out in one way, for rows to have one number: what came of another group's was moved."""
        if len({stored.layout.number for stored in handle.stored.values()}) == 1:
            return handle
        if self._brought is None or self._brought[0] != handle:
            self._brought = handle, self.settle(handle)
        return self._brought[1]

    def varied_groups(self, rows: Rows, context: StageContext) -> list[int]:
        reads = [name for name in GROUP_READS if name in rows]
        arguments = {"context": _plain_context(context)}
        call = self._home.start(
            "varied_groups", _handle(rows), reads=reads, together=GROUP, arguments=arguments
        )
        return sorted(group for groups in call.result().values for group in groups)

    def join_groups(self, parts: Sequence[tuple[Rows, Mapping[int, int]]]) -> Rows:
        for rows, numbers in parts:
            arguments = {"numbers": list(numbers.items())}
            self._home.start("hold_groups", _handle(rows), together=GROUP, arguments=arguments).result()
        joined = self._home.call("held_groups").handle
        if joined is None:
            raise RuntimeError("no rows were held")
        return self.settle(joined)

    # state

    def numbers(self) -> dict[str, dict[str, Any]]:
        found = {name: self.groups[name].call("numbers").values[0] for name in self.trained}
        self._updates = {name: int(numbers["updates"]) for name, numbers in found.items()}
        return found

    def weights(self) -> dict[str, dict[str, Any]]:
        return {name: self.groups[name].call("weights").values[0] for name in self.roles}

    def writers(self) -> dict[str, Writer]:
        return {name: partial(self._write, name) for name in self.trained}

    def _write(self, name: str, path: Path) -> None:
        """All ranks write at the same time, each its own part; over when the last is on the disk."""
        written = self.groups[name].call("save_state", arguments={"path": str(path.resolve())}).every_value
        wrong = [f"{part['name']}: {part['wrong']}" for part in written if "wrong" in part]
        wrong += [
            f"{part['name']} is not here as a rank wrote it"
            for part in written
            if "size" in part and not has_size(path.with_name(part["name"]), part["size"])
        ]
        if wrong:
            raise OSError("; ".join(wrong))

    def load(self, name: str, checkpoint: Checkpoint) -> None:
        files = [str(file.resolve()) for file in checkpoint.files(name)]
        arguments = {"paths": files, "numbers": checkpoint.state["roles"][name]}
        self.groups[name].call("load_state", arguments=arguments)

    def save_model(self, role: Role, path: Path) -> Path:
        group = self.groups[self._names[id(role)]]
        wrong = group.call("save_model", arguments={"path": str(path.resolve())}).every_value
        for cause in wrong:
            if cause is not None:
                raise RunError(cause)
        role.trained_at = path.resolve()
        return path


@dataclass
class _Remote:
    """A stage that workers carry out."""

    runtime: ClusterRuntime
    stage: Stage
    call: Call
    context: StageContext
    rollout: RolloutGroup | None = None
    span: tuple[str, float, float] = ("", 0.0, 0.0)

    def finish(self, rows: Rows) -> Rows:
        try:
            result = self.call.result(self._report)
        except BrokenOff:
            if self.rollout is not None:
                self.rollout.generated()
            raise Interrupted from None
        ends = [began + seconds for began, seconds in zip(result.began, result.seconds, strict=True)]
        self.span = (self.call.group.group, min(result.began), max(ends))
        m = self.context.metrics
        for value in result.values:
            m.merge(MetricSums.from_plain(value["metrics"]))
        m.add_total("cluster/controller_s", result.controller_s)
        m.add_total("cluster/controller_bytes", result.controller_bytes)
        m.add_total("cluster/rows_bytes", result.moved_bytes)
        made = result.handle
        if self.rollout is not None:
            self.rollout.generated()
        if made is None or not result.written:
            return rows
        if result.new_rows:
            return self.runtime.settle(made, m)
        return _handle(rows).merged(made, result.written)

    def _report(self, fraction: float | None) -> bool:
        """Shows how far the workers are. Returns whether they are to stop, where the stage may be dropped half-way."""
        if fraction is None and not self.stage.spec.makes_rows:
            return False
        try:
            self.context.on_progress(fraction or 0.0)
        except Interrupted:
            return True
        return False


def _plain_context(context: StageContext) -> dict[str, Any]:
    return {
        "step": context.step,
        "total_steps": context.total_steps,
        "evaluation": context.evaluation,
        "kl_coefficient": context.kl_coefficient,
    }


def _function_name(flow: CheckedFlow, stage: Stage) -> str:
    return f"{flow.name}/{stage.name}"


def home_of(flow: CheckedFlow) -> Role:
    """The role beside which functions of the flow run."""
    actors = [role for role in flow.roles if isinstance(role, Actor)]
    return next(iter([*actors, *(role for role in flow.roles if flow.trains(role)), *flow.roles]))


def columns_read(stage: Stage, given: Handle) -> list[str]:
    """The columns that a stage gets: all where it makes rows of rows, those that it names where it does not."""
    spec = stage.spec
    if spec.makes_rows or spec.drops_rows:
        return list(given.stored)
    wanted = {*spec.reads, *spec.optional}
    if isinstance(stage.function, RewardStage):
        wanted |= {name for name, kind in given.columns.items() if kind != "token"}
    if spec.trains:
        wanted |= {GROUP, "sample_index"}
    return [name for name in given.stored if name in wanted]


def _handle(rows: Rows) -> Handle:
    if not isinstance(rows, Handle):
        raise TypeError("these rows lie in this process")
    return rows


def _plain(value: Any) -> Any:
    """Tuples as lists, in columns of Python values: what JSON has."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def check_placement(flow: CheckedFlow) -> None:
    """Raises ConfigError with all heads and layers that degrees do not divide, rows that ranks cannot share, models that
    workers cannot have, and memory that there is not."""
    placement = flow.placement
    if placement.world == 1:
        return
    problems: list[str] = check_functions(flow)
    sizes: dict[str, ModelSize] = {}
    for role in flow.roles:
        names = (role.name, "rollout") if isinstance(role, Actor) else (role.name,)
        degrees = [placement.roles[name].parallelism for name in names if name in placement.roles]
        try:
            size = _model_size(role, degrees)
        except ConfigError as error:
            problems += error.violations
            continue
        if size is not None:
            sizes[role.name] = size
        problems += loaded_problems(role)
    problems += _adapter_problems(flow)
    rows = {}
    if flow.generates:
        sizes |= {"rollout": sizes["actor"]} if "actor" in sizes else {}
        rows["rollout"] = ("train.prompts_per_step", flow.config.train.prompts_per_step)
    problems += fit_violations(placement, sizes, rows)
    if "rollout" in placement.roles:
        rollout, actor = placement.roles["rollout"], placement.roles["actor"]
        if rollout != actor and flow.config.lora.rank:
            problems.append(
                "lora.rank: an actor with adapters generates in the layout that it trains in so far, and by"
                f" {actor.key} it would train in {actor.parallelism} and generate in {rollout.parallelism}"
            )
    if not problems:
        problems += estimate_cluster(flow, lambda dp: LEAST).refusals()
    if problems:
        raise ConfigError(problems)


def _model_size(role: Role, degrees: Sequence[Parallelism]) -> ModelSize | None:
    c = role.model_config
    if c.path is None:
        return None
    shape = read_shape(str(c.path), role.key, c.trust_remote_code)
    if shape is None:
        return None
    size = ModelSize(shape.heads, shape.kv_heads, shape.layers)
    if all(p.tp * p.zero3 == 1 for p in degrees):
        return size
    scalar = not isinstance(role, LanguageModelRole)
    found = read_inventory(str(c.path), role.key, scalar=scalar, trust_remote_code=c.trust_remote_code)
    if found is None:
        return size
    return replace(
        size,
        mlp_columns=found.mlp_columns,
        tp_problems=found.tp_problems,
        zero3_problems=found.zero3_problems,
    )


def _adapter_problems(flow: CheckedFlow) -> list[str]:
    """Adapters work where every rank has the whole model."""
    if not flow.config.lora.rank:
        return []
    cut = {
        flow.placement.roles[r.name].key: p
        for r in flow.roles
        if flow.trains(r) and (p := flow.placement.roles[r.name].parallelism).zero3 * p.tp * p.pp > 1
    }
    return [f"{key}: {p} cuts a model that lora.rank gives adapters; use dp alone" for key, p in cut.items()]


def open_runtime(
    placement: Placement, config: Config, directory: RunDirectory | None, held: ExitStack
) -> Runtime:
    """The runtime of a placement, its processes running as long as `held`.

    Logs go to the run's directory: at once where it exists, else (a configuration that turns out wrong leaves none) when
    `keep_logs` says so.
    """
    if placement.world == 1:
        return LocalRuntime()
    from headrace.cluster.ray import RayExecutor

    logs = (
        directory.logs if directory is not None else held.enter_context(_untaken_logs(Path(config.run.dir)))
    )
    executor = RayExecutor(placement, logs, timeout_s=config.cluster.timeout_s)
    held.enter_context(executor)
    return ClusterRuntime(executor)


@contextlib.contextmanager
def _untaken_logs(parent: Path) -> Iterator[Path]:
    """A folder for logs, removed at the end where no run directory has taken it over.

    What a rank that failed has written there stays: the error names it.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        logs, named = Path(tempfile.mkdtemp(prefix=".logs-", dir=parent)), False
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write to {parent} ({error.strerror})") from error
    try:
        yield logs
    except WorkerError:
        named = True
        raise
    finally:
        if not named:
            shutil.rmtree(logs, ignore_errors=True)
