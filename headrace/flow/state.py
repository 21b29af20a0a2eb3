"""What of a run a checkpoint holds: trained roles, everything else with a state, random numbers, results so far.

`mark` notes the small things whenever a step is done; `save` writes them with the weights, which must not have
changed since. So an interrupted step leaves a checkpoint of the step before it, whatever it had begun.
"""

from __future__ import annotations

import inspect
import json
import logging
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from headrace.checkpoint.files import write_tensors
from headrace.checkpoint.fingerprint import change, refused_changes, run_fingerprint
from headrace.checkpoint.resume import Checkpoint, require_members
from headrace.checkpoint.rng import load_rng_state, rng_state
from headrace.checkpoint.save import CheckpointStore
from headrace.data.fingerprint import data_fingerprint
from headrace.data.loader import Loader
from headrace.errors import ConfigError, HeadraceError, RunError
from headrace.flow.ahead import FILE, Ahead, StepRollout, position_before
from headrace.flow.compile import CheckedFlow
from headrace.flow.runtime import Runtime, Writer, named_roles
from headrace.observe.metrics import MetricSums
from headrace.rewards.stage import RewardStage
from headrace.roles.role import Role
from headrace.stages import StageContext

logger = logging.getLogger(__name__)


EVALUATION = tuple(
    f"eval.{key}" for key in ("path", "subset", "split", "limit_rows", "temperature", "samples_per_prompt")
)


@runtime_checkable
class Stateful(Protocol):
    """A thing of the run whose state a checkpoint keeps. `state_dict()` gives plain values for JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunState:
    """The state of one run, between its flow and its checkpoints."""

    def __init__(
        self,
        flow: CheckedFlow,
        loader: Loader,
        total_steps: int,
        runtime: Runtime,
        ahead: Ahead | None = None,
    ) -> None:
        self.flow, self.loader, self.runtime, self.ahead = flow, loader, runtime, ahead
        self.total_steps = total_steps
        self._things: dict[str, Stateful] = {}
        stages = " → ".join(stage.name for stage in flow.stages)
        self._fingerprint = run_fingerprint(
            flow.config, f"{flow.name}: {stages}", total_steps, data_fingerprint(loader.dataset)
        )
        self._weights: dict[str, dict[str, Any]] = {}
        self._mark: dict[str, Any] = {}
        self._mark_rollout: StepRollout | None = None
        self._mark_numbers: dict[str, dict[str, Any]] = {}
        self._saved: dict[str, Any] | None = None
        self._restored = False
        self._saved_things: dict[str, dict[str, Any]] | None = None
        for stage in flow.stages:
            owner = _behind(stage.function)
            # a module's state is no plain values; it is taken for a judge with weights of its own
            if isinstance(owner, Stateful) and not isinstance(owner, Role | torch.nn.Module):
                self.register(f"stage {stage.name}", owner)

    def register(self, name: str, thing: Stateful) -> None:
        """Has `thing` saved with the run, and restored: now, where the run was restored already.

        A stage that is an object with a state, or a method of one, is registered by itself.
        """
        self._things[name] = thing
        if self._saved_things is not None:
            self._restore_thing(name, self._saved_things)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises ConfigError with each change that would make another run of this one. Needs no models."""
        require_members(checkpoint)
        problems = refused_changes(
            checkpoint.state["fingerprint"], self._fingerprint, self.flow.config.checkpoint.allow_changed
        )
        if problems:
            raise ConfigError(problems)

    def same_evaluation(self, checkpoint: Checkpoint) -> bool:
        """Whether evaluations of then and now can be compared."""
        before, now = checkpoint.state["fingerprint"]["settings"], self._fingerprint["settings"]
        return all(before.get(key) == now[key] for key in EVALUATION)

    def roles_loaded(self) -> None:
        """Notes the frozen weights; to be called once, when the roles are as the run starts."""
        self._weights = self.runtime.weights()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Puts every role and thing where it was. Raises ConfigError when they are another run's."""
        saved, allowed = checkpoint.state, self.flow.config.checkpoint.allow_changed
        roles, trained = named_roles(self.flow)
        problems = []
        for name, role in roles.items():
            now = self._weights[name]
            if saved["frozen"].get(name, now["frozen"]) != now["frozen"] and role.key not in allowed:
                problems.append(
                    f"{role.key}: the frozen weights of the {name} are not those that the run started with;"
                    f" put them back, or add '{role.key}' to checkpoint.allow_changed"
                )
            dtype, before = now["dtype"], saved["dtypes"].get(name)
            if before is not None and before != dtype and "model.dtype" not in allowed:
                problems.append(change("model.dtype", before, dtype, quoted=False))
        if problems:
            raise ConfigError(problems)
        for name in trained:
            if name not in saved["roles"]:
                logger.warning("%s: nothing of it is in %s; it starts anew", name, checkpoint.path)
                continue
            self.runtime.load(name, checkpoint)
        self._saved_things = saved["things"]
        for name in self._things:
            self._restore_thing(name, saved["things"])
        position = saved["loader"]
        if f"{FILE}.safetensors" in saved["sizes"]:
            position = self._restore_rollout(checkpoint, position)
        self._restore_position(position)
        load_rng_state(saved["rng"])
        self._restored = True

    def _restore_rollout(self, checkpoint: Checkpoint, position: dict[str, Any]) -> dict[str, Any]:
        """Takes up the rows that were made ahead, where nothing has changed. Returns where the data are read on."""
        with checkpoint.tensors(FILE) as tensors:
            if self.ahead is None or self.flow.config.checkpoint.allow_changed:
                logger.info("the rows that were made ahead are made anew")
                return position_before(tensors)
            context = StageContext(self.flow.config, checkpoint.step + 1, self.total_steps, MetricSums())
            self.ahead.restore(tensors, context)
        return position

    def _restore_thing(self, name: str, saved: dict[str, dict[str, Any]]) -> None:
        if name in saved:
            self._things[name].load_state_dict(saved[name])
        else:
            logger.warning("%s: the checkpoint has no state of it; it starts anew", name)

    def _restore_position(self, saved: dict[str, Any]) -> None:
        try:
            self.loader.load_state_dict(saved)
        except ConfigError as error:
            if not self.flow.config.checkpoint.allow_changed:
                raise
            # every change was allowed by name, or `check` would have refused it
            self.loader.move_near(saved)
            logger.warning("the position in the data is about where it was, not exactly: %s", error)

    def mark(self, step: int, **results: Any) -> None:
        """Notes that `step` is done, with plain values for JSON besides. Raises ConfigError for a state that is not."""
        try:
            things = json.loads(json.dumps({n: thing.state_dict() for n, thing in self._things.items()}))
        except TypeError as error:
            raise ConfigError(f"a state_dict() of this flow cannot be written as JSON: {error}") from error
        self._mark = {
            "step": step,
            "things": things,
            "loader": self.loader.state_dict(),
            "rng": rng_state(),
            **results,
        }
        self._mark_rollout = None if self.ahead is None else self.ahead.next
        self._mark_numbers = self.runtime.numbers()
        if self._restored:  # what was just read need not be written again
            self._saved, self._restored = self._mark, False

    @property
    def can_be_saved(self) -> bool:
        """Whether the weights are still those of the mark."""
        return self._mark_numbers == self.runtime.numbers()

    def save(self, store: CheckpointStore, best: int | None) -> Path | None:
        """Writes the marked state, unless that is done already. Raises RunError when it cannot be written."""
        if self._saved is self._mark:
            return None
        if not self.can_be_saved:
            step = self._mark["step"]
            raise RunError(f"no checkpoint of step {step} can be written, since the step after it had begun")
        state = {
            "torch": torch.__version__,
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            **self._mark,
            "roles": self._mark_numbers,
            "dtypes": {name: weights["dtype"] for name, weights in self._weights.items()},
            "frozen": {n: w["frozen"] for n, w in self._weights.items() if w["frozen"] is not None},
            "fingerprint": self._fingerprint,
        }
        writers = {**self.runtime.writers(), **self._rollout_writer(state)}
        path = store.write(self._mark["step"], state, writers, best)
        self._saved = self._mark
        return path

    def _rollout_writer(self, state: dict[str, Any]) -> dict[str, Writer]:
        """What writes the rows of the next step, where they are made ahead.

        Where making them failed, they are made again by the run that goes on, and `state` is as before their prompts.
        """
        rollout = self._mark_rollout
        if self.ahead is None or rollout is None:
            return {}
        try:
            rollout.rows()
        except HeadraceError:
            state["loader"] = rollout.position
            return {}
        return {FILE: partial(write_tensors, tensors=self.ahead.saved(rollout))}


def _behind(function: Any) -> Any:
    """The user's object behind a stage: a reward function, a function of columns, or whose method it is."""
    if isinstance(function, RewardStage):
        function = function.function.function if function.function is not None else None
    function = inspect.unwrap(function) if callable(function) else function
    return getattr(function, "__self__", function)
