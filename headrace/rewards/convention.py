"""How a reward function wants to be called, read from its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from headrace.errors import ConfigError
from headrace.rewards.loading import KEY, did_you_mean

BATCHED_NAMES = ("completions", "responses", "texts")
# names that mean the completion wherever they stand, so that `def score(prompt, completion)` works too
ANYWHERE_NAMES = ("completion", "completions", "response", "responses")


@dataclass(frozen=True)
class Convention:
    """One reward function's way of being called."""

    completion: str | None  # its parameter for the completion(s); None: the first of *args
    completion_by_position: bool
    batched: bool  # lists of all rows instead of one call per row
    positional: tuple[str, ...]  # further positional-only parameters, in order
    required: tuple[str, ...]  # parameters without a default, the completion aside
    optional: tuple[str, ...]  # parameters whose default gives way to a column of that name
    takes_all: bool  # **kwargs

    def columns(self, available: set[str]) -> dict[str, str]:
        """Parameter → column, for those parameters that have one."""
        out = {}
        for name in (*self.required, *self.optional):
            if name in available:
                out[name] = name
            elif self.batched and name.endswith("s") and name[:-1] in available:
                out[name] = name[:-1]
        if self.takes_all:
            taken = {"completion", *out, *((self.completion,) if self.completion else ())}
            out |= {name: name for name in sorted(available - taken)}
        return out

    def arguments(
        self, completion: Any, columns: Mapping[str, str], value: Callable[[str], Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of one call; `value(column)` gives what a column contributes."""
        by_name = {parameter: value(column) for parameter, column in columns.items()}
        positional = []
        if self.completion_by_position:
            positional.append(completion)
        elif self.completion is not None:
            by_name[self.completion] = completion
        # an optional one without a column ends the positional part: its default then holds
        for name in self.positional:
            if name not in by_name:
                break
            positional.append(by_name.pop(name))
        return positional, by_name


def read_convention(function: Callable[..., Any], name: str) -> Convention:
    """Raises ConfigError naming `reward.function` when the function cannot take a completion."""
    if inspect.isclass(function):
        raise ConfigError(f"{KEY}: '{name}' is a class; give a function or an instance of it")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{KEY}: the parameters of '{name}' cannot be read; wrap it in `def score(completion): …`"
        ) from error
    bound = set(function.keywords) if isinstance(function, functools.partial) else set()
    named = [p for p in parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    free = [p for p in named if p.name not in bound]
    by_position = [p for p in free if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)

    first_parameter = by_position[0] if by_position else None
    completion = first_parameter
    if first_parameter is None or first_parameter.name not in ANYWHERE_NAMES:
        named_so = [p for n in ANYWHERE_NAMES for p in free if p.name == n and p.default is Parameter.empty]
        completion = named_so[0] if named_so else first_parameter
    if completion is None and not takes_any:
        raise ConfigError(
            f"{KEY}: '{name}' takes no completion; write it as `def {_identifier(name)}(completion, …)`, where further"
            " parameters name columns of the data"
        )
    others = [p for p in free if p is not completion]
    first = completion is first_parameter  # both None: the first of *args
    if completion is not None and completion.kind is Parameter.POSITIONAL_ONLY and not first:
        raise ConfigError(
            f"{KEY}: '{name}' takes the completion by position only, but not first; put it first"
        )
    return Convention(
        completion=None if completion is None else completion.name,
        completion_by_position=first,
        batched=completion is not None and completion.name in BATCHED_NAMES,
        positional=tuple(p.name for p in others if p.kind is Parameter.POSITIONAL_ONLY),
        required=tuple(p.name for p in others if p.default is Parameter.empty),
        optional=tuple(p.name for p in others if p.default is not Parameter.empty),
        takes_all=any(p.kind is Parameter.VAR_KEYWORD for p in parameters),
    )


def unknown_columns(convention: Convention, name: str, available: set[str], source: str = "") -> list[str]:
    """One sentence for every required parameter that no column of `available` fills; `source`: whose columns they are."""
    where = f"of {source}" if source else "here"
    known = convention.columns(available)
    return [
        f"{KEY}: '{name}' asks for '{p}', which is no column {where}{did_you_mean(p, available)}"
        f" (columns: {', '.join(sorted(available)) or 'none'})"
        for p in convention.required
        if p not in known
    ]


def _identifier(name: str) -> str:
    last = name.rpartition(":")[2].rpartition(".")[2]
    return last if last.isidentifier() else "score"
