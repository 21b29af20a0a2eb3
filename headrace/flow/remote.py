"""What workers are told of roles and functions: plain descriptions, from which they make their own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.algorithms.stages import AdvantageStage
from headrace.checkpoint.fingerprint import resolved_path
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.flow.graph import Stage
from headrace.rewards.stage import RewardStage
from headrace.rewards.verifiers import VERIFIERS
from headrace.roles.role import ReaderRole, Role


def describe_role(role: Role, config: Config, **preparation: Any) -> dict[str, Any]:
    """The arguments of RoleWorker. Raises ConfigError for a role that has its weights in this process already."""
    problems = loaded_problems(role)
    if problems:
        raise ConfigError(problems)
    return {
        "role": _path_of(type(role), f"the class of the {role.name}"),
        "key": role.key,
        "model": {k: resolved_path(f"model.{k}", v) for k, v in role.model_config.model_dump().items()},
        "config": {
            section: {key: resolved_path(f"{section}.{key}", value) for key, value in values.items()}
            for section, values in config.model_dump().items()
        },
        **preparation,
    }


def loaded_problems(role: Role) -> list[str]:
    """What is wrong with a role that has its weights in this process already."""
    if not isinstance(role, ReaderRole) or not role.is_loaded:
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
    plain = inspect.unwrap(function)
    return {
        "kind": "function",
        "function": _path_of(plain, f"stage '{stage.name}'"),
        "reads": list(stage.spec.reads),
        "writes": list(stage.spec.writes),
    }


def _spec_of_reward(name: str, function: Callable[..., Any]) -> str:
    """The text that a configuration would name the reward function by."""
    if name in VERIFIERS:
        return name
    return resolved_path("reward.function", name) if ":" in name else _path_of(function, "reward.function")


def _path_of(thing: Any, what: str) -> str:
    """`package.module:Name` or `path/to/file.py:Name` of a function or class. Raises ConfigError where it has none."""
    qualified = getattr(thing, "__qualname__", None)
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    found: Any = module
    for part in (qualified or "<locals>").split("."):
        found = getattr(found, part, None)
    if module is None or found is not thing:
        raise ConfigError(
            f"{what}: {thing!r} is no function of a module, and workers are other processes that have to import it; put"
            " it into a file and name it as path/to/file.py:function"
        )
    file = getattr(module, "__file__", None)
    importable = module.__spec__ is not None and module.__name__ != "__main__"
    if importable and not _was_loaded_from_file(module.__name__):
        return f"{module.__name__}:{qualified}"
    if file is None:
        raise ConfigError(f"{what}: it was typed into a session; put it into a file and name that")
    return f"{Path(file).resolve()}:{qualified}"


def _was_loaded_from_file(name: str) -> bool:
    """Whether a module's name means nothing to another process (see config_import)."""
    return name.startswith("headrace_")
