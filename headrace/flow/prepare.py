"""What comes before a run: data read and checked, models described, checked and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.errors import ConfigError, DataError, RunError
from headrace.flow.compile import CheckedFlow
from headrace.flow.source import PreparedData, prepare_data
from headrace.models.adapter_folder import weights_source
from headrace.roles.actor import Actor
from headrace.roles.critic import Critic
from headrace.roles.role import Role
from headrace.training.torch_engine import TorchEngine
from headrace.training.turns import TURNS

if TYPE_CHECKING:
    from headrace.flow.run import Evaluation


def refuse_own_inputs(config: Config) -> None:
    """run.overwrite must not delete what the run reads. Raises ConfigError naming the key."""
    if not config.run.overwrite or config.run.name is None:
        return
    own = (Path(config.run.dir) / config.run.name).resolve()
    given = {
        "model.path": config.model.path,
        "critic.path": config.critic.path,
        "reference.path": config.reference.path,
        "reward.model": config.reward.model,
        "data.path": config.data.path,
        "eval.path": config.eval.path,
    }
    models = {
        k: p for k, p in given.items() if k not in ("data.path", "eval.path") and p and Path(p).is_dir()
    }
    given |= {f"{key} (the adapter's base)": weights_source(str(p), key) for key, p in models.items()}
    problems = [
        f"{key}: '{path}' lies in {own}, which run.overwrite would delete; choose another run.name"
        for key, path in given.items()
        if path is not None and Path(path).exists() and Path(path).resolve().is_relative_to(own)
    ]
    if problems:
        raise ConfigError(problems)


def prepare_both(
    flow: CheckedFlow, dataset: Any, evaluation: Evaluation | None
) -> tuple[PreparedData, PreparedData | None]:
    """Training and held-out data. Raises ConfigError with what is wrong with either."""
    held_out, problems = None, []
    if evaluation is not None:
        try:
            held_out = prepare_data(evaluation.flow, evaluation.dataset, key="eval")
        except ConfigError as error:
            problems = error.violations
    try:
        data = prepare_data(flow, dataset)
    except ConfigError as error:
        problems = list(dict.fromkeys([*error.violations, *problems]))
    if problems:
        raise DataError(problems)
    return data, held_out


def check_roles(flows: Sequence[CheckedFlow]) -> None:
    """What can be known about every model without its weights. Raises ConfigError with all violations."""
    problems = role_problems(flows)
    if problems:
        raise ConfigError(problems)


def role_problems(flows: Sequence[CheckedFlow]) -> list[str]:
    """What is wrong with models, as far as that shows without their weights; the one that reads the data apart."""
    roles = list(dict.fromkeys(role for flow in flows for role in flow.roles))
    reader = flows[0].reader
    try:
        return [p for role in roles if role is not reader for p in role.problems(reader)]
    except ConfigError as error:  # the reader's tokenizer
        return error.violations


def prepare_roles(flow: CheckedFlow, total_steps: int, skip: Iterable[Any] = ()) -> None:
    """Loads every role of the flow; the one that generates comes first, since others may copy it."""
    passed = list(skip)
    TURNS.begin(flow.config.train.offload_parameters)
    for role in sorted(flow.roles, key=lambda r: not isinstance(r, Actor)):
        if role not in passed:
            TURNS.bring(_engine_before(role) or _engine_before(role.start))
            role.prepare(
                flow.config,
                total_updates=updates_of(flow, role, total_steps),
                trains=flow.trains(role),
                supervised=flow.supervised,
            )
            if TURNS.active:
                TURNS.add(role.engine)


def _engine_before(role: Role | None) -> TorchEngine | None:
    """The engine of a role that was prepared before, in this run or an earlier one."""
    try:
        return None if role is None else role.engine
    except (RuntimeError, RunError):
        return None


def updates_of(flow: CheckedFlow, role: Role, total_steps: int) -> int:
    """The optimizer updates of a role in a run of `total_steps`."""
    critics = any(isinstance(other, Critic) for other in flow.roles)
    # while the critic warms up the actor rests, which must not shift its schedule
    resting = flow.config.critic.warmup_steps if critics and isinstance(role, Actor) else 0
    return max(1, total_steps - resting) * (flow.config.updates_per_step if flow.generates else 1)
