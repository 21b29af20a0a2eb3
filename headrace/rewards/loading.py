"""Finding a reward function from what `reward.function` says."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from headrace.config_import import import_source
from headrace.errors import ConfigError
from headrace.rewards.verifiers import VERIFIERS

KEY = "reward.function"


def load_function(spec: str) -> Callable[..., Any]:
    """The callable named by "path/to/file.py:name", "package.module:name" or a short name such as `exact_match`.

    `name` may have dots (an attribute of an object in the module). Raises ConfigError naming `reward.function`
    when the file or module is missing, fails to import, or has no such callable.
    """
    if spec in VERIFIERS:
        return VERIFIERS[spec]
    return load_callable(spec, KEY, "function", VERIFIERS)


def load_callable(spec: str, key: str, what: str, short_names: Iterable[str] = ()) -> Callable[..., Any]:
    """The callable named by "path/to/file.py:name" or "package.module:name"; errors name the setting `key`.

    `what` is what it should be ("function", "class"); `short_names` are what could have been meant instead.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        known = sorted(short_names)
        others = f" or one of {', '.join(known)}{did_you_mean(spec, known)}" if known else ""
        between = "," if known else " or"
        raise ConfigError(
            f"{key}: '{spec}' must be path/to/file.py:{what}{between} package.module:{what}{others}"
        )
    module = import_source(source, key, prefix="headrace_reward", spec=spec)
    return _find(module, name, source, key, what)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def _find(module: ModuleType, dotted: str, source: str, key: str, what: str) -> Callable[..., Any]:
    found: Any = module
    for part in dotted.split("."):
        names = vars(found) if isinstance(found, ModuleType) else dict(inspect.getmembers(found))
        if part not in names:
            functions = [n for n, v in names.items() if callable(v) and not n.startswith("_")]
            raise ConfigError(f"{key}: '{source}' has no '{dotted}'{did_you_mean(part, functions)}")
        found = names[part]
    if not callable(found):
        raise ConfigError(f"{key}: '{dotted}' in '{source}' has type {type(found).__name__}; wanted a {what}")
    return found
