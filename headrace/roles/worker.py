"""One role of a run in one worker process, with the functions of the flow that run beside it.

The controller holds the description of the role; what is made here holds its model. Every rank of the role's group
gets the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.algorithms.find import algorithm_problems
from headrace.algorithms.kl_controller import KLController
from headrace.algorithms.spread import numbered_groups, varied_groups
from headrace.algorithms.stages import advantage_stage
from headrace.checkpoint.files import sync_folder, write_tensors
from headrace.checkpoint.parts import TensorParts, part_path
from headrace.checkpoint.rng import seed_all
from headrace.cluster.mesh import mesh_of, model_ranks
from headrace.cluster.placement import Parallelism
from headrace.cluster.worker import Outcome, Site, load_factory
from headrace.config import Config, ModelConfig
from headrace.config_load import from_mapping
from headrace.data.batch import Batch
from headrace.errors import ConfigError, RunError
from headrace.models.mesh import Mesh, MeshRanks
from headrace.observe.metrics import MetricSums
from headrace.rewards.stage import RewardStage
from headrace.roles.actor import Actor
from headrace.roles.reward_model import RewardModel
from headrace.roles.role import Role, weights_of
from headrace.stages import StageContext, column_stage, spec_of
from headrace.training.engine import TrainingState
from headrace.training.turns import TURNS
from headrace.training.weight_sync import WeightSync

ROW = "_row"
"""Column of a stage's rows that numbers them, so that it shows which of them a result was made from."""


class RoleWorker:
    """The factory's arguments are what `describe_role` of flow/remote.py says of a role."""

    def __init__(
        self,
        site: Site,
        *,
        role: str,
        name: str,
        key: str,
        model: Mapping[str, Any],
        config: Mapping[str, Any],
        trains: bool,
        supervised: bool,
        total_updates: int,
        weights_from: str | None = None,
    ) -> None:
        """Loads the model onto the group's mesh. `role` is the path of its class, `package.module:Name`.

        `weights_from` names the actor that a model which only generates gets its weights from, by `sync_weights`.
        """
        self.site = site
        self.mesh = shared_mesh(site)
        self.ranks = MeshRanks(self.mesh)
        self.config: Config = from_mapping(config)
        problems = algorithm_problems(self.config.algorithm)  # imports the plugin
        if problems:
            raise ConfigError(problems)
        seed_all(self.config.run.seed)
        self.role: Role = load_factory(role)(ModelConfig(**model), site.device)
        self.role.key = key
        self.role.mesh = self.mesh
        self.name = name
        self.trains = trains
        self.functions: dict[str, Any] = {}
        self._held: list[Batch] = []
        self._sync: WeightSync | None = None
        self.weights_from = weights_from
        if weights_from is not None and isinstance(self.role, Actor):
            self.role.make_empty()
        TURNS.begin(self.config.train.offload_parameters)
        TURNS.bring(None)
        self.role.prepare(self.config, total_updates=total_updates, trains=trains, supervised=supervised)
        if TURNS.active and weights_from is None:  # else its weights are another's, or there all the time
            TURNS.add(self.role.engine)
        _ROLES[name] = self.role

    def add_functions(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """Makes functions of the flow from their descriptions (see flow/remote.py)."""
        for name, description in functions.items():
            self.functions[name] = make_function(description, self.config)

    # stages

    def stage(self, batch: Batch, *, function: str, method: bool, context: Mapping[str, Any]) -> Outcome:
        """Carries out a stage on this rank's rows: a method of the role, or one of the functions."""
        made = self._context(context)
        if method:
            self._take_turn()
        carried_out = getattr(self.role, function) if method else self.functions[function]
        numbered = Batch(
            batch.lengths, batch.tokens, {**batch.rows, ROW: torch.arange(batch.num_rows, dtype=torch.int64)}
        )
        returned = carried_out(numbered, made)
        if self.site.device.startswith("cuda"):
            made.metrics.add_max("memory/peak_device_bytes", torch.cuda.max_memory_allocated())
        value = {"metrics": made.metrics.plain()}
        if not isinstance(returned, Batch):
            return Outcome(returned, value)
        return _outcome(numbered, returned, value)

    def stay(self, batch: Batch) -> None:
        """Does nothing: a call with rows brings them here."""

    def varied_groups(self, batch: Batch, *, context: Mapping[str, Any]) -> Outcome:
        return Outcome(value=varied_groups(batch, self._context(context)))

    def hold_groups(self, batch: Batch, *, numbers: Sequence[tuple[int, int]]) -> None:
        """Keeps the rows of some groups, numbered anew, until `held_groups`."""
        self._held.append(numbered_groups(batch, dict(numbers)))

    def held_groups(self) -> Batch:
        """All rows that are held, which then are so no longer."""
        held, self._held = self._held, []
        return Batch.concat(held)

    def _take_turn(self) -> None:
        """Has on the device the weights that the role works with, and no others."""
        if TURNS.active:
            role = self.role if self.weights_from is None else _ROLES.get(self.weights_from)
            TURNS.bring(None if role is None else role.engine)

    def _context(self, context: Mapping[str, Any]) -> StageContext:
        return StageContext(
            self.config,
            context["step"],
            context["total_steps"],
            MetricSums(),
            evaluation=context["evaluation"],
            on_progress=self.site.pulse.point,
            kl=KLController(context["kl_coefficient"]),
            ranks=self.ranks,
        )

    # weights of a rollout with a layout of its own

    def make_sync(
        self, *, source: Mapping[str, Any], target: Mapping[str, Any], hosts: Sequence[int]
    ) -> None:
        """Every rank of the actor and of its rollout calls; one that has parts of both does so once, for the rollout."""
        trained = _ROLES.get(self.weights_from) if self.weights_from is not None else self.role
        generates = self.role if self.weights_from is not None else None
        self._sync = WeightSync(
            model_ranks(source["ranks"], Parallelism(**source["parallelism"])),
            model_ranks(target["ranks"], Parallelism(**target["parallelism"])),
            None if trained is None else trained.engine.model,
            None if generates is None else generates.engine.model,
            hosts=hosts,
        )

    def sync_weights(self, *, version: int) -> Outcome:
        """Brings the actor's weights of now to its rollout. The value says what that took, on this rank."""
        if self._sync is None:
            raise RuntimeError("make_sync() has not been called")
        self._take_turn()
        report = self._sync.run()
        if isinstance(self.role, Actor) and self.weights_from is not None:
            self.role.set_weight_version(version)
        return Outcome(
            value={
                "moved": report.bytes_moved,
                "minimum": report.bytes_minimum,
                "extra": report.peak_extra_bytes,
                "seconds": report.ms / 1000,
            }
        )

    def free_weights(self) -> None:
        if self._sync is not None:
            # views would keep the memory of weights that leave the device
            self._sync.free(views=TURNS.active)

    # state

    def numbers(self) -> dict[str, Any] | None:
        """The plain part of the training state; None for a frozen role."""
        return self.role.state_dict().numbers if self.trains else None

    def weights(self) -> dict[str, Any]:
        self._take_turn()
        return weights_of(self.role)

    def save_state(self, path: str) -> dict[str, Any]:
        """Writes what this rank owns of the role's tensors to its own part of `path`, and waits for no other rank.

        Returns the file's `name` with its `size`, or with what went `wrong`.
        """
        file = part_path(Path(path), self.site.group_rank, len(self.site.ranks))
        try:
            write_tensors(file, self.role.state_dict().tensors)
            sync_folder(file.parent)
        except OSError as error:
            return {"name": file.name, "wrong": error.strerror or str(error)}
        return {"name": file.name, "size": file.stat().st_size}

    def load_state(self, paths: Sequence[str], numbers: Mapping[str, Any]) -> None:
        """Continues where the state was saved, whatever layout that had. Raises ConfigError for another model's."""
        self._take_turn()
        with TensorParts([Path(path) for path in paths]) as tensors:
            self.role.load_state_dict(TrainingState(tensors, dict(numbers)))

    def save_model(self, path: str) -> str | None:
        """Writes the model as a Hugging Face folder, from the group's first rank. Returns what went wrong."""
        if isinstance(self.role, Actor | RewardModel):
            self._take_turn()
            try:
                self.role.save(path, writes=self.site.group_rank == 0)
            except RunError as error:
                return str(error)
        return None


def _outcome(given: Batch, returned: Batch, value: Any) -> Outcome:
    """A Batch that a stage returned: columns over the rows it was given, or other rows with those they were made from."""
    if ROW not in returned:
        return Outcome(returned, value)
    parents = torch.as_tensor(returned[ROW])
    rest = returned.without_columns([ROW])
    if torch.equal(parents, torch.as_tensor(given[ROW])) and torch.equal(rest.lengths, given.lengths):
        columns = {**rest.tokens, **rest.rows}
        return Outcome({n: c for n, c in columns.items() if n not in given or given[n] is not c}, value)
    return Outcome(rest, value, parents.tolist())


def make_function(description: Mapping[str, Any], config: Config) -> Any:
    """A stage function from its description. Raises ConfigError where it cannot be imported here."""
    kind = description["kind"]
    if kind == "advantage":
        return advantage_stage(description["name"])
    if kind == "reward":
        made = RewardStage(
            description["function"],
            settings=config.reward,
            add_model_score=description["add_model_score"],
        )
        if made.problems:
            raise ConfigError(made.problems)
        return made
    function = load_factory(description["function"])
    if spec_of(function) is not None:
        return function
    return column_stage(function, tuple(description["reads"]), tuple(description["writes"]))


_ROLES: dict[str, Role] = {}
"""The roles of this process by name, for a rollout that shares devices with its actor."""

_MESHES: dict[tuple[tuple[int, ...], Parallelism], Mesh] = {}


def shared_mesh(site: Site) -> Mesh:
    """The mesh of an object's group; roles of one group and parallelism share it, and its process groups."""
    key = (site.ranks, site.parallelism)
    if key not in _MESHES:
        _MESHES[key] = mesh_of(site)
    return _MESHES[key]
