"""Importing the Python file or module of the user's that a setting names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from headrace.errors import ConfigError


def import_source(
    source: str, key: str, *, prefix: str, spec: str | None = None, once: bool = False
) -> ModuleType:
    """The module `source` names: path/to/file.py or package.module.

    `key` is the setting and `spec` its whole value, for errors; `prefix` goes before the name a file gets among
    the modules. With `once` a file that was imported before is not run again. Raises ConfigError naming the key
    when the file or module is missing or fails to import.
    """
    spec = spec or source
    is_file = source.endswith(".py") or "/" in source or "\\" in source
    if is_file:
        return _import_file(Path(source).expanduser(), key, spec, prefix, once)
    return _import_module(source, key, spec)


def _import_file(path: Path, key: str, spec: str, prefix: str, once: bool) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{key}: '{spec}': there is no file '{path}' (looked from {Path.cwd()})")
    path = path.resolve()
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    name = f"{prefix}_{path.stem}_{digest}"
    if once and name in sys.modules:
        return sys.modules[name]
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


def _import_module(source: str, key: str, spec: str) -> ModuleType:
    _add_to_path(Path.cwd())  # a console script, unlike `python -m`, does not see the working folder
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or source
        if source == missing or source.startswith(f"{missing}."):
            file = "path/to/file.py" + (":function" if ":" in spec else "")
            raise ConfigError(
                f"{key}: '{spec}': there is no module '{missing}'; for a file write {file}"
            ) from error
        raise ConfigError(f"{key}: importing '{source}' failed: {described(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: importing '{source}' failed: {described(error)}") from error


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
    return Path(__file__).parent in Path(filename).parents
