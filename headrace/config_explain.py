"""What settings there are: the table behind `headrace config --explain` and behind every message about a key."""

from __future__ import annotations

import functools
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import annotated_types
from pydantic.fields import FieldInfo

from headrace.config import Config
from headrace.errors import ConfigError


@dataclass(frozen=True)
class KeyInfo:
    """One setting: `name` is dotted, `expected` reads after "expected ", `kinds` are the Python types it takes."""

    name: str
    expected: str
    default: Any
    unit: str
    meaning: str
    kinds: tuple[Any, ...]
    optional: bool

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def key(self) -> str:
        return self.name.partition(".")[2]

    @property
    def is_text(self) -> bool:
        mapping = any(typing.get_origin(kind) is dict for kind in self.kinds)
        return (not mapping and str in self.kinds) or all(isinstance(kind, str) for kind in self.kinds)


@functools.cache
def all_keys() -> dict[str, KeyInfo]:
    """Every setting by its dotted name, in the order of the sections."""
    out: dict[str, KeyInfo] = {}
    for section, section_field in Config.model_fields.items():
        for key, field in section_model(section_field).model_fields.items():
            name = f"{section}.{key}"
            kinds, optional = _kinds(field.annotation)
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            out[name] = KeyInfo(
                name,
                _expected(field, kinds, optional),
                field.get_default(),
                str(extra.get("unit", "")),
                field.description or "",
                kinds,
                optional,
            )
    return out


def sections() -> list[str]:
    return list(Config.model_fields)


def section_model(field: FieldInfo) -> Any:
    return field.annotation


def _kinds(annotation: Any) -> tuple[tuple[Any, ...], bool]:
    """The types an annotation allows (a Literal gives its choices), and whether None is one of them."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        members = typing.get_args(annotation)
        kinds = tuple(k for m in members if m is not type(None) for k in _kinds(m)[0])
        return kinds, type(None) in members
    if origin is Literal:
        return typing.get_args(annotation), False
    return (annotation,), False


def _expected(field: FieldInfo, kinds: tuple[Any, ...], optional: bool) -> str:
    kind = kinds[0]
    if isinstance(kind, str):
        text = f"one of {', '.join(kinds)}" if len(kinds) > 1 else f"'{kind}'"
    elif kind is bool:
        text = "true or false"
    elif kind in (int, float):
        text = ("a whole number" if kind is int else "a number") + _range(field.metadata)
    elif kind is str:
        text = "text"
        pattern = next((m.pattern for m in field.metadata if getattr(m, "pattern", None)), None)
        if pattern:
            text = f"text such as {field.description}"
        elif any(typing.get_origin(other) is dict for other in kinds):
            text = "text or a mapping"
    elif typing.get_origin(kind) is dict:
        text = "a mapping"
    else:
        text = "a list of " + {str: "texts", int: "whole numbers"}[typing.get_args(kind)[0]]
    return f"{text}, or null" if optional else text


def _range(metadata: list[Any]) -> str:
    parts: list[str] = []
    for limit in metadata:
        match limit:
            case annotated_types.Gt():
                parts.append(f"above {limit.gt}")
            case annotated_types.Ge():
                parts.append(f"of at least {limit.ge}")
            case annotated_types.Lt():
                parts.append(f"below {limit.lt}")
            case annotated_types.Le():
                parts.append(f"up to {limit.le}")
    return " " + " and ".join(parts) if parts else ""


def explain(section: str | None = None, flags: Mapping[str, str] | None = None) -> str:
    """The documented list of settings: all, of one section, or one key (`train.steps`).

    `flags` maps other names of a key (command-line flags) to its dotted name; they are listed with it.
    Raises ConfigError for a section or key that does not exist.
    """
    if section in all_keys():
        info = all_keys()[str(section)]
        return "\n".join(_explain_key(info, [f for f, to in (flags or {}).items() if to == info.name])) + "\n"
    if section is not None and section not in sections():
        raise ConfigError(f"{section}: unknown section; the sections are {', '.join(sections())}")
    lines: list[str] = []
    for name in sections() if section is None else [section]:
        lines += [name, "=" * len(name)]
        for info in all_keys().values():
            if info.section == name:
                lines += _explain_key(info, [f for f, target in (flags or {}).items() if target == info.name])
        lines.append("")
    return "\n".join(lines)


def _explain_key(info: KeyInfo, flags: list[str]) -> list[str]:
    default = "null" if info.default is None else str(info.default)
    if isinstance(info.default, bool):
        default = str(info.default).lower()
    kind = info.expected.removeprefix("text such as ") if info.meaning in info.expected else info.expected
    unit = f" [{info.unit}]" if info.unit else ""
    lines = [f"{info.name} = {default}{unit}   ({kind})"]
    if info.meaning not in info.expected:
        lines += textwrap.wrap(info.meaning, 96, initial_indent="    ", subsequent_indent="    ")
    if flags:
        lines.append("    flags: " + ", ".join(flags))
    return lines
