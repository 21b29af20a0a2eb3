"""Finding a reward function from what `reward.function` says."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

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
    is_file = source.endswith(".py") or "/" in source or "\\" in source
    module = (
        _import_file(Path(source).expanduser(), spec, key) if is_file else _import_module(source, spec, key)
    )
    return _find(module, name, source, key, what)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def _import_file(path: Path, spec: str, key: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{key}: '{spec}': there is no file '{path}' (looked from {Path.cwd()})")
    path = path.resolve()
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    name = f"headrace_reward_{path.stem}_{digest}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{key}: '{path}' is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(module_spec)
    _add_to_path(path.parent)  # so that the file can import its neighbours, now and later
    sys.modules[name] = module  # dataclasses and pickling look their module up here
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{key}: importing '{path}' failed: {described(error)}") from error
    return module


def _import_module(source: str, spec: str, key: str) -> ModuleType:
    _add_to_path(Path.cwd())  # a console script, unlike `python -m`, does not see the working folder
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or source
        if source == missing or source.startswith(f"{missing}."):
            raise ConfigError(
                f"{key}: '{spec}': there is no module '{missing}'; for a file write path/to/file.py:function"
            ) from error
        raise ConfigError(f"{key}: importing '{source}' failed: {described(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: importing '{source}' failed: {described(error)}") from error


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


def _add_to_path(folder: Path) -> None:
    """Appends, so that nothing already importable is hidden."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def described(error: BaseException) -> str:
    """Type, message and the line it came from."""
    frames = inspect.getinnerframes(error.__traceback__, context=0) if error.__traceback__ else []
    outside = [f for f in frames if not f.filename.startswith("<frozen") and not _is_ours(f.filename)]
    place = f" ({outside[-1].filename}, line {outside[-1].lineno})" if outside else ""
    return f"{type(error).__name__}: {shortened(str(error))}{place}"


def shortened(text: str, limit: int = 300) -> str:
    """Beginning and end of a long text."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def _is_ours(filename: str) -> bool:
    return Path(filename).parent == Path(__file__).parent
