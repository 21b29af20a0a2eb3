"""What workers are told of roles and functions: plain descriptions, from which they make their own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.algorithms.stages import AdvantageStage
from headrace.checkpoint.fingerprint import resolved_path
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.flow.compile import CheckedFlow
from headrace.flow.graph import Stage
from headrace.rewards.stage import RewardStage
from headrace.rewards.verifiers import VERIFIERS
from headrace.roles.actor import Actor
from headrace.roles.role import ReaderRole, Role

FROM_FILES = "headrace_"
"""How the names of modules begin that were loaded from a file (config_import.py); no other process knows them."""


def describe_role(role: Role, config: Config, **preparation: Any) -> dict[str, Any]:
    """The arguments of RoleWorker. Raises ConfigError for a role that has its weights in this process already."""
    problems = loaded_problems(role)
    if problems:
        raise ConfigError(problems)
    path = (role if role.start is None or role.is_away else role.start).source
    model = {**role.model_config.model_dump(), "path": path}
    if isinstance(role, Actor) and role.environment is not None:
        # the only way to it for other processes
        agent = {"environment": environment_path(role.environment)}
    else:
        agent = {}
    sections = config.model_dump()
    sections["agent"] |= agent
    return {
        "role": _path_of(type(role), f"the class of the {role.name}"),
        "key": role.key,
        "model": {k: resolved_path(f"model.{k}", v) for k, v in model.items()},
        "config": {
            section: {key: resolved_path(f"{section}.{key}", value) for key, value in values.items()}
            for section, values in sections.items()
        },
        **preparation,
    }


def check_functions(flow: CheckedFlow) -> list[str]:
    """Violations: what of a flow workers could not import, since it is no function of a module or file."""
    out: list[str] = []
    for stage in flow.stages:
        try:
            if stage.role is None:
                describe_function(stage)
            elif isinstance(stage.role, Actor) and stage.role.environment is not None:
                environment_path(stage.role.environment)
        except ConfigError as error:
            out += error.violations
    return list(dict.fromkeys(out))


def environment_path(make: str | Callable[..., Any]) -> str:
    """What `agent.environment` would say of an environment given in Python. Raises ConfigError where it cannot."""
    return make if isinstance(make, str) else _path_of(make, "agent.environment")


def loaded_problems(role: Role) -> list[str]:
    """What is wrong with a role that has its weights in this process already."""
    if not isinstance(role, ReaderRole) or not role.is_loaded or role.trained_at is not None:
        return []
    return [
        f"{role.key}: the {role.name} is loaded in this process, and the workers of a cluster load their own; give the"
        " path of a saved model"
    ]


def describe_function(stage: Stage) -> dict[str, Any]:
    """What `make_function` of roles/worker.py makes the stage's function of. Raises ConfigError where workers cannot."""
    function = stage.function
    if isinstance(function, AdvantageStage):
        return {"kind": "advantage", "name": function.advantage.name}
    if isinstance(function, RewardStage):
        own = function.function
        return {
            "kind": "reward",
            "function": None if own is None else _spec_of_reward(own.name, own.function),
            "add_model_score": function.add_model_score,
        }
    return {
        "kind": "function",
        "function": _path_of(function, f"stage '{stage.name}'"),
        "reads": list(stage.spec.reads),
        "writes": list(stage.spec.writes),
    }


def _spec_of_reward(name: str, function: Callable[..., Any]) -> str:
    """The text that a configuration would name the reward function by."""
    if name in VERIFIERS:
        return name
    return resolved_path("reward.function", name) if ":" in name else _path_of(function, "reward.function")


def _path_of(thing: Any, what: str) -> str:
    """`package.module:Name` or `path/to/file.py:Name` of a function or class. Raises ConfigError where it has none.

    What a decorator or `column_stage` wrapped counts where the wrapping itself has no name of its own.
    """
    found = _module_of(thing)
    while found is None and (inner := getattr(thing, "__wrapped__", None)) is not None:
        thing = inner
        found = _module_of(thing)
    if found is None:
        raise ConfigError(
            f"{what}: {_described(thing)} cannot be imported by workers, which are other processes; make it a function of"
            " a file or module (def at the top level), and give it, or its name path/to/file.py:function"
        )
    spec, file, name = found.__spec__, getattr(found, "__file__", None), thing.__qualname__
    if spec is not None and not spec.name.startswith(FROM_FILES):
        return f"{spec.name}:{name}"  # of a script started by `python -m package.script`, too
    if file is None or not Path(file).is_file():
        raise ConfigError(f"{what}: '{name}' was typed into a session; put it into a file and name that")
    return f"{Path(file).resolve()}:{name}"


def _module_of(thing: Any) -> ModuleType | None:
    """The module in which `thing` is found by its own name."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    found: Any = module
    for part in (getattr(thing, "__qualname__", None) or "<locals>").split("."):
        found = getattr(found, part, None)
    return module if found is thing else None


def _described(thing: Any) -> str:
    """What kind of function this is that no other process can have."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    if "<lambda>" in name:
        return "a lambda"
    if inspect.ismethod(thing):
        return f"the method '{name}' of an object"
    if "<locals>" in name:
        return f"'{name.rpartition('.')[2]}', which is defined inside a function,"
    return f"an object of type {name}" if not inspect.isroutine(thing) else f"'{name}'"
