"""From a YAML file and `section.key=value` overrides to a checked Config, reporting everything wrong at once.

YAML is read by the core schema of YAML 1.2: 1e-5 is a number, `off` and `no` are text, 007 is text, dates are text.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from headrace.config import SHORTHAND, Command, Config, violations
from headrace.config_algorithm import under_another_name
from headrace.config_aliases import nearest_keys, suggest
from headrace.config_explain import KeyInfo, all_keys, sections
from headrace.config_places import cluster_settings
from headrace.errors import ConfigError

Settings = dict[str, dict[str, Any]]

# Settings that may name a local file or folder, found beside the YAML file when not in the current directory.
PATH_KEYS = (
    "model.path",
    "model.tokenizer",
    "model.chat_template",
    "data.path",
    "eval.path",
    "reward.function",
    "agent.environment",
    "reward.model",
    "critic.path",
    "reference.path",
    "algorithm.plugin",
    "cluster.layout",
)

MOST_VALUES = 100_000  # of one YAML text, aliases written out
LONGEST_NAME, LONGEST_PATH = 255, 3000  # bytes; more is no path on any file system in use

_SCALARS: tuple[tuple[str, str, list[str]], ...] = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    """Safe YAML, core schema scalars, duplicate keys refused."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None,
                        None,
                        f"'{key_node.value}' is given twice, first in line {seen[key_node.value]}",
                        key_node.start_mark,
                    )
                seen[key_node.value] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the texts that _Loader would read as something else."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds these line separators in unquoted text; in double quotes it escapes them
    style = '"' if any(c in text for c in "\r\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


def load_config(
    yaml_path: str | Path | None,
    overrides: Sequence[str] = (),
    command: Command | None = "train",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """The configuration of a run: the file, then `overrides` (`section.key=value`), then `settings` by section.

    `settings` come from flags (see config_aliases.apply_aliases). `command` None leaves out the checks of what a
    command needs. Raises ConfigError with every problem found, one sentence each.
    """
    problems: list[str] = []
    raw: dict[str, Any] = {}
    if yaml_path is not None:
        raw = _read_yaml(Path(yaml_path), problems)
        if problems:
            # what the command needs may well stand in the file that could not be read
            command = None
    layered, used = _normalise(raw, problems)
    if yaml_path is not None:
        _resolve_paths(layered, Path(yaml_path).parent)
    from_overrides: Settings = {}
    for override in overrides:
        _apply_override(override, from_overrides, problems, used)
    for section, values in (settings or {}).items():
        for key, value in values.items():
            if from_overrides.get(section, {}).get(key, value) != value:
                problems.append(
                    f"{section}.{key}: set to {from_overrides[section][key]!r} and by a flag to {value!r}; give one"
                )
    for layer in (from_overrides, settings or {}):
        name = layer.get("algorithm", {}).get("name")
        if name is not None and "algorithm" in layered:
            layered["algorithm"] = under_another_name(layered["algorithm"], name)
        for section, values in layer.items():
            layered.setdefault(section, {}).update(values)
    return _validate(layered, command, problems, used)


def from_mapping(raw: Mapping[str, Any], command: Command | None = None) -> Config:
    """A Config from sections of settings (or section shorthand), checked for `command` unless that is None.

    Raises ConfigError with every problem found.
    """
    problems: list[str] = []
    layered, used = _normalise(raw, problems)
    return _validate(layered, command, problems, used)


def set_values(config: Config) -> dict[str, dict[str, Any]]:
    """The settings that were given or assigned, by section."""
    sections = {name: getattr(config, name).model_dump(exclude_unset=True) for name in Config.model_fields}
    return {name: values for name, values in sections.items() if values}


def config_to_yaml(config: Config) -> str:
    """Every setting as YAML text; reading it back gives an equal configuration."""
    dumped: str = yaml.dump(
        config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110
    )
    return dumped


def read_settings(path: Path) -> dict[str, Any]:
    """The sections of a YAML file as they are written, unchecked. Raises ConfigError when it cannot be read."""
    problems: list[str] = []
    raw = _read_yaml(path, problems)
    if problems:
        raise ConfigError(problems)
    return {str(section): value for section, value in raw.items()}


def parse_value(key: str, text: str) -> Any:
    """The value of setting `key` typed as `text` on a command line.

    Text settings take the text as it is (so `data.template={question}` needs no quotes), except null or nothing
    for None, and a text wholly in quotes, which is read as YAML. Other settings are read as YAML.
    Raises ConfigError for text that is no YAML.
    """
    info = all_keys().get(key)
    if info is not None and info.is_text:
        if text in ("null", "~") or (info.optional and not text):
            return None  # refused by the model where the setting needs a value, as in a file
        if not (len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""):
            return text
    try:
        return _load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {_short.repr(text)} cannot be read: {_yaml_problem(error)}") from error


def _read_yaml(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else f"does not exist (looked in {Path.cwd()})"
        problems.append(f"{path}: the configuration file {what}")
        return {}
    try:
        loaded = _load_yaml(path.read_text(encoding="utf-8-sig"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark is not None else ":"
        problems.append(f"{path}{line} {_yaml_problem(error)}")
        return {}
    except (UnicodeDecodeError, OSError) as error:
        problems.append(f"{path}: cannot be read as UTF-8 text: {error}")
        return {}
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        problems.append(
            f"{path}: expected sections such as 'model:' and 'data:', found a {type(loaded).__name__}"
        )
        return {}
    return loaded


def _load_yaml(text: str) -> Any:
    """Raises YAMLError, and nothing else, for text that is no YAML."""
    try:
        loaded = yaml.load(text, Loader=_Loader)
        _expanded_size(loaded, {})
        return loaded
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, KeyError, AttributeError) as error:
        # what PyYAML's constructors raise for a value that its tag does not fit, such as !!int x, or a vast number
        raise yaml.YAMLError(f"a value does not fit its type: {_short.repr(str(error))}") from error


def _expanded_size(value: Any, known: dict[int, int]) -> int:
    """Values in `value` with every alias written out; `known` has the sizes by id, 0 for those that hold this one.

    Raises YAMLError for more than `MOST_VALUES`, or for a value inside itself: a few lines may stand for billions.
    """
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if id(value) in known:
        if not known[id(value)]:
            raise yaml.YAMLError("a value holds itself by an alias")
        return known[id(value)]
    known[id(value)] = 0
    size = 1 + sum(_expanded_size(v, known) for v in (value.values() if isinstance(value, dict) else value))
    if size > MOST_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES:,} values")
    known[id(value)] = size
    return size


def _yaml_problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None)
    return str(problem) if problem else " ".join(str(error).split())


def _normalise(raw: Mapping[Any, Any], problems: list[str]) -> tuple[Settings, set[str]]:
    """Known settings by section; also the keys that mistyped names probably stand for."""
    out: Settings = {}
    meant: set[str] = set()
    for section, value in raw.items():
        _add_section(str(section), value, out, problems, meant)
    return out, meant


def _add_section(section: str, value: Any, out: Settings, problems: list[str], meant: set[str]) -> None:
    if section not in sections():
        problems.append(_unknown_section(section, meant))
    elif isinstance(value, Mapping):
        target = out.setdefault(section, {})
        value = (cluster_settings(value) if section == "cluster" else None) or value
        for key, setting in value.items():
            name = f"{section}.{key}"
            if name in all_keys():
                target[str(key)] = setting
            else:
                meant.update(nearest_keys(name))
                problems.append(f"{name}: unknown key{suggest(name)}")
    elif isinstance(value, str) and section in SHORTHAND:
        out.setdefault(section, {})[SHORTHAND[section]] = value
    elif value is not None:
        example = next(k for k in all_keys() if k.startswith(section + "."))
        problems.append(f"{section}: expected keys under it, such as {example}, got {value!r}")


def _unknown_section(name: str, meant: set[str]) -> str:
    """A name at top level that is no section: a setting that lost its section, or a mistyped section."""
    if name in all_keys():
        section, _, key = name.partition(".")
        meant.add(name)
        return f"{name}: in a file, write '{key}:' under '{section}:'"
    if name not in {info.key for info in all_keys().values()}:
        close = difflib.get_close_matches(name, sections(), n=1, cutoff=0.6)
        if close:
            meant.update(k for k in all_keys() if k.startswith(close[0] + "."))
            return f"{name}: unknown section; did you mean {close[0]}?"
    hint = suggest(name)
    if hint:
        meant.update(nearest_keys(name))
        return f"{name}: unknown key{hint}"
    return f"{name}: unknown section; the sections are {', '.join(sections())}"


def _apply_override(text: str, out: Settings, problems: list[str], meant: set[str]) -> None:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        problems.append(f"{text}: expected section.key=value, such as train.steps=100")
        return
    try:
        if "." in name:
            section, _, key = name.partition(".")
            if section in sections():
                _add_section(section, {key: parse_value(name, value)}, out, problems, meant)
            else:
                meant.update(nearest_keys(name))
                hint = suggest(name) or f"; the sections are {', '.join(sections())}"
                problems.append(f"{name}: unknown key{hint}")
        elif name in SHORTHAND and not value.lstrip().startswith("{"):
            _add_section(
                name,
                {SHORTHAND[name]: parse_value(f"{name}.{SHORTHAND[name]}", value)},
                out,
                problems,
                meant,
            )
        else:
            _add_section(name, parse_value(name, value), out, problems, meant)
    except ConfigError as error:
        problems += error.violations


def _resolve_paths(layered: Settings, folder: Path) -> None:
    """Points relative paths at the YAML file's folder where they exist there and not in the current directory."""
    for name in PATH_KEYS:
        section, _, key = name.partition(".")
        value = layered.get(section, {}).get(key)
        if not isinstance(value, str) or not value or not _may_be_path(value):
            continue
        file, separator, function = _split_function(value)
        path = Path(file).expanduser()
        if not path.is_absolute() and not path.exists() and (folder / path).exists():
            layered[section][key] = f"{folder / path}{separator}{function}"


def _may_be_path(text: str) -> bool:
    """False for a text that no file can be named by, on which the file system's own functions raise."""
    raw = text.encode(errors="surrogatepass")
    return b"\0" not in raw and len(raw) <= LONGEST_PATH and max(map(len, raw.split(b"/"))) <= LONGEST_NAME


def _split_function(value: str) -> tuple[str, str, str]:
    """("path/to/file.py", ":", "function"), or the value and two empty texts."""
    file, separator, function = value.rpartition(":")
    return (file, separator, function) if file.endswith(".py") else (value, "", "")


def _validate(layered: Settings, command: Command | None, problems: list[str], meant: set[str]) -> Config:
    """Checks types and limits, then what the command needs on everything that was readable."""
    problems = list(problems)
    bad: set[str] = set()
    for section, values in layered.items():
        for key, value in values.items():
            info = all_keys()[f"{section}.{key}"]
            # pydantic would read true as 1
            if isinstance(value, bool) and bool not in info.kinds:
                bad.add(info.name)
                problems.append(_wrong_value(info, value))
            elif info.name in (*PATH_KEYS, "run.dir") and isinstance(value, str) and not _may_be_path(value):
                bad.add(info.name)
                problems.append(f"{info.name}: {_short.repr(value)} is too long or odd to be a path")
    try:
        config = Config.model_validate(_without(layered, bad))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name = ".".join(str(part) for part in detail["loc"][:2])
            if name not in bad:
                bad.add(name)
                section, _, key = name.partition(".")
                own = detail["msg"].removeprefix("Value error, ") if detail["type"] == "value_error" else None
                said = _wrong_value(all_keys()[name], layered[section][key])
                problems.append(f"{name}: {own}" if own else said)
        config = Config.model_validate(_without(layered, bad))
    if command is not None:
        doubtful = bad | meant
        problems += [v for v in violations(config, command) if not any(name in v for name in doubtful)]
    if problems:
        raise ConfigError(problems)
    return config


def _without(layered: Settings, bad: set[str]) -> Settings:
    return {s: {k: v for k, v in values.items() if f"{s}.{k}" not in bad} for s, values in layered.items()}


def _wrong_value(info: KeyInfo, value: Any) -> str:
    got = str(value).lower() if isinstance(value, bool) else _short.repr(value)
    choices = [kind for kind in info.kinds if isinstance(kind, str)]
    meant = value.strip().lower() if isinstance(value, str) else ""
    if close := difflib.get_close_matches(meant, choices):
        swapped = [c for c in close if sorted(c) == sorted(meant)]  # gpro is rather grpo than gspo
        got += f"; did you mean '{(swapped or close)[0]}'?"
    unquoted = info.kinds[0] is str and value is not None and not isinstance(value, str)
    return f"{info.name}: expected {info.expected}, got {got}{' (put it in quotes)' if unquoted else ''}"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
