"""Tools a model may call: ordinary functions, found by name, with arguments checked against their types.

What the model writes is only ever read as JSON. It is never evaluated, and it can reach nothing but the functions
given here.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from headrace.agents.environment import Environment, Step
from headrace.errors import ConfigError
from headrace.rewards.functions import FAILURES

logger = logging.getLogger(__name__)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = f'{OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}'
MOST_CALLS = 16  # in one response; the rest are answered with an error
LONGEST_CALL = 100_000  # characters


class ToolError(Exception):
    """A call that cannot be served; the message is what the model gets to read."""


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it: a name and arguments, or what is wrong with it."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """What the model gets to read. `error` is None when the tool gave it."""

    text: str
    error: str | None = None


def parse_calls(text: str) -> list[ToolCall]:
    """The tool calls of a response, in order: JSON objects between <tool_call> and </tool_call>.

    A malformed one (not JSON, not closed, without a name) is a ToolCall with `error`.
    """
    calls: list[ToolCall] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        start += len(OPEN)
        end = text.find(CLOSE, start)
        if end < 0:
            calls.append(ToolCall(error=f"the tool call does not end with {CLOSE}"))
            break
        calls.append(_parse_call(text[start:end]))
        at = end + len(CLOSE)
    return calls


def _parse_call(text: str) -> ToolCall:
    if len(text) > LONGEST_CALL:
        return ToolCall(error=f"the tool call is longer than {LONGEST_CALL} characters")
    try:
        call = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return ToolCall(
            error=f"the tool call is not JSON: {error.msg} at character {error.pos + 1}; write {FORM}"
        )
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return ToolCall(error=f"the tool call is not usable: {what}; write {FORM}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error=f"the tool call has no name; write {FORM}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], error=f"the arguments are no JSON object; write {FORM}")
    unknown = sorted(call.keys() - {"name", "arguments"})
    if unknown:
        return ToolCall(call["name"], error=f"the tool call has the unknown key '{unknown[0]}'; write {FORM}")
    return ToolCall(call["name"], arguments)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


class Tools:
    """A registry of functions by their names. Every parameter needs a type; a docstring tells the model what it does.

    Arguments must have the types as they are (no text for a number), none may be missing or unknown. What a function
    returns is shown as text, or as JSON where it is a dict, a list or a bool. Raises ConfigError for a function that
    cannot be a tool, and for two of one name.
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._arguments: dict[str, type[BaseModel]] = {}
        self._seen: set[tuple[str, str]] = set()
        for function in functions:
            name = getattr(function, "__name__", type(function).__name__)
            if name in self._functions:
                raise ConfigError(f"tool '{name}': there are two of this name; rename one")
            self._functions[name] = function
            self._arguments[name] = _arguments_of(function, name)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as JSON schemas, in the form that chat models are trained with."""
        out: list[dict[str, Any]] = []
        for name, function in self._functions.items():
            schema = self._arguments[name].model_json_schema()
            parameters = {k: schema[k] for k in ("type", "properties", "required", "$defs") if k in schema}
            description = inspect.getdoc(function) or ""
            out.append(
                {
                    "type": "function",
                    "function": {"name": name, "description": description, "parameters": parameters},
                }
            )
        return out

    def instructions(self) -> str:
        """A text for the system message: which tools there are, and how to call them."""
        listed = "\n".join(json.dumps(schema) for schema in self.schemas())
        return f"You may call these tools:\n{listed}\nTo call one, write {FORM}"

    def run(self, call: ToolCall) -> ToolResult | Awaitable[ToolResult]:
        """The result of a call; awaitable where the function is async. Exceptions of the function become errors."""
        function = self._functions.get(call.name)
        if call.error is not None:
            return self._failed(call.error)
        if function is None:
            return self._failed(
                f"there is no tool '{call.name}'; the tools are {', '.join(self._functions) or 'none'}"
            )
        try:
            arguments = self._arguments[call.name].model_validate(dict(call.arguments or {}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return self._failed(f"argument '{where}' of {call.name}: {first['msg']}")
        values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        try:
            value = function(**values)
        except FAILURES as error:
            return self._raised(call.name, error)
        return self._later(call.name, value) if inspect.isawaitable(value) else self._shown(value)

    async def _later(self, name: str, value: Awaitable[Any]) -> ToolResult:
        try:
            return self._shown(await value)
        except FAILURES as error:
            return self._raised(name, error)

    def _raised(self, name: str, error: BaseException) -> ToolResult:
        if isinstance(error, ToolError):
            return self._failed(str(error))
        kind = type(error).__name__
        if (name, kind) not in self._seen:  # once: a model may cause it thousands of times
            self._seen.add((name, kind))
            logger.warning("tool '%s' raised %s: %s (the model is told; said once)", name, kind, error)
        return self._failed(f"{kind}: {error}")

    def _failed(self, message: str) -> ToolResult:
        return ToolResult(f"error: {message}", message)

    def _shown(self, value: Any) -> ToolResult:
        as_json = isinstance(value, Mapping | list | tuple | bool)
        return ToolResult(json.dumps(value, default=str) if as_json else str(value))


def _arguments_of(function: Callable[..., Any], name: str) -> type[BaseModel]:
    try:
        parameters = inspect.signature(function).parameters.values()
        called = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(called)
    except (ValueError, TypeError, NameError) as error:
        raise ConfigError(f"tool '{name}': its parameters cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool '{name}': '{parameter}' cannot be filled by name; name every argument")
        if parameter.name not in hints:
            raise ConfigError(f"tool '{name}': give the argument '{parameter.name}' a type, such as str")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    model: type[BaseModel] = create_model(
        f"{name}_arguments", __config__=ConfigDict(extra="forbid", strict=True), **fields
    )
    return model


class ToolEnvironment(Environment):
    """Runs the tool calls of each response and ends the episode at the first response without one.

    Subclasses set `tools`. The final answer is scored by reward.function, or by overriding `finish`; `show` is what
    the model reads for a result. The metrics are agent/part/tool_calls and agent/part/tool_errors.
    """

    tools: Tools = Tools()
    role = "tool"

    def step(self, response: str) -> Step | Awaitable[Step]:
        calls = parse_calls(response)
        if not calls:
            return self.finish(response)
        results = [self.tools.run(call) for call in calls[:MOST_CALLS]]
        if any(inspect.isawaitable(result) for result in results):
            return self._later(results, len(calls))
        return self._answer([r for r in results if isinstance(r, ToolResult)], len(calls))

    def finish(self, response: str) -> Step | Awaitable[Step]:
        """The last step, for a response that calls no tool."""
        return Step(done=True)

    def show(self, result: str) -> str:
        """The text of one result. Chat templates mark it themselves; without one, mark it here."""
        return result

    async def _later(self, results: list[ToolResult | Awaitable[ToolResult]], made: int) -> Step:
        return self._answer([r if isinstance(r, ToolResult) else await r for r in results], made)

    def _answer(self, results: list[ToolResult], made: int) -> Step:
        if made > len(results):
            message = f"more than {MOST_CALLS} calls in one response"
            results = [*results, ToolResult(f"error: {message}; the rest were not run", message)]
        errors = sum(result.error is not None for result in results)
        return Step(
            [self.show(result.text) for result in results],
            metrics={"tool_calls": len(results), "tool_errors": errors},
        )
