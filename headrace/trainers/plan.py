"""`headrace plan`: what a run would do and take, after the checks of a real one. Starts and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from headrace.config import Config
from headrace.data.dataset import HFDataset
from headrace.data.loader import Loader
from headrace.data.prompts import PromptDataset
from headrace.errors import ConfigError, DataError
from headrace.flow.cluster import home_of
from headrace.flow.cluster_plan import ClusterPlan, plan_cluster
from headrace.flow.compile import CheckedFlow
from headrace.flow.edges import RowLimits
from headrace.flow.memory import estimate_memory, load_of
from headrace.flow.memory_terms import Estimate, Load
from headrace.flow.prepare import check_roles, prepare_both, refuse_own_inputs
from headrace.flow.run import Evaluation, steps_of
from headrace.flow.source import ROWS_READ, PreparedData, first_rows
from headrace.models.weight_files import refuse_broken_weights
from headrace.observe.run_dir import RunDirectory
from headrace.roles.actor import Actor
from headrace.trainers.launch import dataset_of, held_out_of, supervised_flow, training_flow
from headrace.trainers.plan_resume import Continuation, check_continuation, planned_checkpoint
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
    memory: Estimate | None
    """Of a run on one device; that of others is in `cluster`."""
    cluster: ClusterPlan | None = None
    resumed: Continuation | None = None

    @property
    def config(self) -> Config:
        return self.flow.config

    @property
    def device_kind(self) -> str | None:
        return None if self.cluster is None else self.cluster.placement.device

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
    memory, cluster = None, None
    load = load_of(flow, data, held)
    if flow.placement.world == 1:
        memory = estimate_memory(flow, load)
        refusals = memory.refusals()
    else:
        load = load_of(flow, data, held, flow.placement.roles[home_of(flow).name].parallelism.dp)
        cluster = plan_cluster(flow, partial(load_of, flow, data, held), _limits(flow, data))
        refusals = cluster.memory.refusals()
    if refusals:
        raise ConfigError(refusals)
    return Plan(
        flow, evaluation, data, held, rows, held_rows, per_epoch, steps, load, memory, cluster, resumed
    )


def _limits(flow: CheckedFlow, data: PreparedData) -> RowLimits:
    """The most there is of a training step's rows."""
    longest = data.dataset.longest_tokens
    if isinstance(data.dataset, PromptDataset):
        c = flow.config
        return RowLimits(c.train.prompts_per_step, c.samples_per_step, longest, c.rollout.max_new_tokens)
    rows = data.rows_per_step * (2 if flow.paired else 1)
    return RowLimits(rows, rows, 0, longest)


def _first_rows(config: Config, dataset: HFDataset, key: str) -> tuple[int, HFDataset]:
    try:
        return first_rows(config, dataset, key)
    except DataError:
        return 0, dataset  # reported with everything else that is wrong
