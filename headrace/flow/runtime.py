"""Where the stages of a run are carried out: the contract, and the runtime of a single process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from headrace.algorithms.spread import numbered_groups, varied_groups
from headrace.checkpoint.files import write_tensors
from headrace.checkpoint.resume import Checkpoint
from headrace.cluster.handle import Handle
from headrace.data.batch import Batch
from headrace.errors import RunError
from headrace.flow.compile import CheckedFlow
from headrace.flow.graph import Stage
from headrace.flow.prepare import prepare_roles
from headrace.roles.actor import Actor
from headrace.roles.reward_model import RewardModel
from headrace.roles.role import Role, weights_of
from headrace.stages import StageContext
from headrace.training.engine import TrainingState
from headrace.training.turns import TURNS

Rows = Batch | Handle
"""The rows of a step: here, or where workers hold them."""

Writer = Callable[[Path], None]
"""Writes one file, or its parts beside it, and raises OSError where that fails."""


class Started(Protocol):
    """A stage that is being carried out."""

    span: tuple[str, float, float]
    """The group of devices, and when it began and ended, in seconds since 1970; known once it is over."""

    def finish(self, rows: Rows) -> Rows:
        """Waits; returns `rows` with what the stage wrote, or the rows that it made. Its metrics are in its context."""


class Runtime(Protocol):
    """Roles are named as in RunState: actor, critic, …"""

    in_turn: bool
    """Whether a stage is over when `start` returns."""

    def prepare(self, flow: CheckedFlow, total_steps: int, skip: Iterable[Role] = ()) -> None:
        """Loads the roles of a flow, except those of a flow prepared before. Raises ConfigError."""

    def keep_logs(self, folder: Path) -> None:
        """Has the logs of the workers, where there are any, in `folder` of the run directory."""

    def put(self, batch: Batch) -> Rows:
        """Rows of a data set, or rows of a step that were fetched, given to where they are worked on."""

    def start(self, flow: CheckedFlow, stage: Stage, rows: Rows, context: StageContext) -> Started: ...

    def fetch(self, rows: Rows, names: Iterable[str], row: int | None = None) -> Batch:
        """Columns of all rows, or of one, in this process."""

    def varied_groups(self, rows: Rows, context: StageContext) -> list[int]:
        """The numbers, ascending, of the groups of rows whose rewards differ."""

    def join_groups(self, parts: Sequence[tuple[Rows, Mapping[int, int]]]) -> Rows:
        """Of each (rows, group → new number) the rows of those groups, all together."""

    def numbers(self) -> dict[str, dict[str, Any]]:
        """The plain part of the training state of every trained role."""

    def weights(self) -> dict[str, dict[str, Any]]:
        """Of every role: `dtype`, and `frozen`, a hash of what is not trained (None: everything is)."""

    def writers(self) -> dict[str, Writer]:
        """Of every trained role, what writes its tensors for a checkpoint."""

    def load(self, name: str, checkpoint: Checkpoint) -> None:
        """Continues a trained role from a checkpoint. Raises ConfigError when that is another model's."""

    def save_model(self, role: Role, path: Path) -> Path:
        """Writes a trained model as a Hugging Face folder. Raises RunError when that fails."""


class LocalRuntime(Runtime):
    """Everything in this process: roles hold their models themselves, rows are batches, stages follow each other."""

    in_turn = True

    def __init__(self) -> None:
        self.roles: dict[str, Role] = {}
        self.trained: dict[str, Role] = {}

    def prepare(self, flow: CheckedFlow, total_steps: int, skip: Iterable[Role] = ()) -> None:
        prepare_roles(flow, total_steps, skip)
        if not self.roles:
            self.roles, self.trained = named_roles(flow)
            for role in self.trained.values():
                role.trained_here()

    def keep_logs(self, folder: Path) -> None:
        pass

    def put(self, batch: Batch) -> Rows:
        return batch

    def start(self, flow: CheckedFlow, stage: Stage, rows: Rows, context: StageContext) -> Started:
        began = time.time()
        if stage.role is not None and TURNS.active:
            TURNS.bring(stage.role.engine)
        result = stage.function(local_batch(rows), context)
        return _Done(stage, result, ("all", began, time.time()))

    def fetch(self, rows: Rows, names: Iterable[str], row: int | None = None) -> Batch:
        batch = local_batch(rows)
        return batch if row is None else batch.select([row])

    def varied_groups(self, rows: Rows, context: StageContext) -> list[int]:
        return varied_groups(local_batch(rows), context)

    def join_groups(self, parts: Sequence[tuple[Rows, Mapping[int, int]]]) -> Rows:
        return Batch.concat([numbered_groups(local_batch(rows), numbers) for rows, numbers in parts])

    def numbers(self) -> dict[str, dict[str, Any]]:
        return {name: role.state_dict().numbers for name, role in self.trained.items()}

    def weights(self) -> dict[str, dict[str, Any]]:
        return {name: weights_of(role) for name, role in self.roles.items()}

    def writers(self) -> dict[str, Writer]:
        return {
            name: partial(write_tensors, tensors=role.state_dict().tensors)
            for name, role in self.trained.items()
        }

    def load(self, name: str, checkpoint: Checkpoint) -> None:
        if TURNS.active:
            TURNS.bring(self.trained[name].engine)
        with checkpoint.tensors(name) as tensors:
            self.trained[name].load_state_dict(TrainingState(tensors, checkpoint.state["roles"][name]))

    def save_model(self, role: Role, path: Path) -> Path:
        if not isinstance(role, Actor | RewardModel):
            raise TypeError(f"{role} has no model to save")
        return role.save(path)


class _Done:
    """A stage that was carried out in this process."""

    def __init__(self, stage: Stage, result: Any, span: tuple[str, float, float]) -> None:
        self.stage, self.result, self.span = stage, result, span

    def finish(self, rows: Rows) -> Rows:
        return _with_result(local_batch(rows), self.result, self.stage.name)


def named_roles(flow: CheckedFlow) -> tuple[dict[str, Role], dict[str, Role]]:
    """The flow's roles by name, and those of them that it trains; a second one of a name is actor-2."""
    return _named(flow.roles), _named([role for role in flow.roles if flow.trains(role)])


def _named(roles: list[Role]) -> dict[str, Role]:
    out: dict[str, Role] = {}
    for role in roles:
        number = sum(other.name == role.name for other in out.values()) + 1
        out[role.name if number == 1 else f"{role.name}-{number}"] = role
    return out


def local_batch(rows: Rows) -> Batch:
    """Rows that are in this process. Raises TypeError for a handle."""
    if not isinstance(rows, Batch):
        raise TypeError("these rows lie in workers")
    return rows


def _with_result(batch: Batch, result: Any, name: str) -> Batch:
    if isinstance(result, Batch):
        return result
    if result is None:
        return batch
    if not isinstance(result, Mapping):
        raise RunError(
            f"stage '{name}' returned a {type(result).__name__}; expected a Batch, a dict of columns or None"
        )
    for column, values in result.items():
        if not isinstance(values, Sequence | Tensor):
            raise RunError(
                f"stage '{name}': column '{column}' has type {type(values).__name__}; expected a list or a tensor"
            )
    try:
        return batch.with_columns(result)
    except ValueError as error:
        raise RunError(f"stage '{name}': {error}") from error
