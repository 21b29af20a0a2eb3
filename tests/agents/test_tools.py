"""Tool calls: read as JSON, checked against the function's types, never evaluated."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.agents.environment import Step
from headrace.agents.tools import ToolCall, ToolEnvironment, ToolError, ToolResult, Tools, parse_calls
from headrace.errors import ConfigError

CALLED: list[Any] = []


def repeat(text: str, times: int = 2) -> str:
    """The text several times."""
    CALLED.append((text, times))
    return text * times


def lookup(key: str) -> dict[str, int]:
    if key == "broken":
        raise KeyError(key)
    if key == "refused":
        raise ToolError("not that one")
    return {"a": 1}


async def fetch(page: int) -> str:
    await asyncio.sleep(0)
    return f"page {page}"


TOOLS = Tools(repeat, lookup, fetch)


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def result_of(text: str) -> ToolResult:
    (parsed,) = parse_calls(text)
    result = TOOLS.run(parsed)
    assert isinstance(result, ToolResult)
    return result


def test_calls_are_found_in_order_whatever_stands_around_them() -> None:
    text = f"I look.\n{call('repeat', {'text': 'a'})} and\n<tool_call>\n{json.dumps({'name': 'x'})}\n</tool_call>!"
    assert parse_calls(text) == [ToolCall("repeat", {"text": "a"}), ToolCall("x", {})]
    assert parse_calls("no call </tool_call> here") == []


def test_a_call_runs_the_function() -> None:
    assert result_of(call("repeat", {"text": "ab", "times": 3})) == ToolResult("ababab")
    assert result_of(call("repeat", {"text": "ab"})) == ToolResult("abab")
    assert result_of(call("lookup", {"key": "k"})) == ToolResult('{"a": 1}')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>{oops}</tool_call>", "is not JSON: Expecting property name"),
        ("<tool_call></tool_call>", "is not JSON"),
        ("<tool_call>" + '{"name": "repeat"', "does not end with </tool_call>"),
        ("<tool_call>[1]</tool_call>", "has no name"),
        ('<tool_call>{"name": 3}</tool_call>', "has no name"),
        ('<tool_call>{"name": "repeat", "arguments": "ab"}</tool_call>', "no JSON object"),
        ('<tool_call>{"name": "repeat", "args": {}}</tool_call>', "unknown key 'args'"),
        ('<tool_call>{"name": "a", "name": "b"}</tool_call>', "given twice"),
        ('<tool_call>{"name": "repeat", "arguments": {"times": NaN}}</tool_call>', "NaN is no JSON number"),
        ("<tool_call>" + "[" * 50_000 + "</tool_call>", "nested too deeply"),
        ("<tool_call>" + " " * 100_001 + "</tool_call>", "longer than 100000"),
        ('<tool_call>{"name": "repeat", "arguments": {"times": ' + "9" * 5000 + "}}</tool_call>", "not usable"),
        (call("repeet", {}), "no tool 'repeet'; the tools are repeat, lookup, fetch"),
        (call("repeat", {}), "argument 'text' of repeat: Field required"),
        (call("repeat", {"text": 5}), "argument 'text' of repeat: Input should be a valid string"),
        (call("repeat", {"text": "a", "times": "3"}), "argument 'times' of repeat: Input should be a valid integer"),
        (call("repeat", {"text": "a", "n": 1}), "argument 'n' of repeat: Extra inputs"),
        (call("lookup", {"key": "broken"}), "KeyError: 'broken'"),
        (call("lookup", {"key": "refused"}), "not that one"),
        (call("__import__", {"name": "os"}), "no tool '__import__'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_to_the_model(text: str, said: str) -> None:
    CALLED.clear()
    result = result_of(text)
    assert result.error is not None
    assert said in result.error
    assert result.text == f"error: {result.error}"
    assert len(result.text) < 300
    assert CALLED == []


@settings(max_examples=200)
@given(st.text(alphabet='<>/_tolca{}[]":, 1e9\\n', max_size=60).map(lambda t: f"<tool_call>{t}</tool_call>"))
def test_no_text_breaks_the_parser(text: str) -> None:
    assert all(isinstance(c, ToolCall) for c in parse_calls(text))


class Play(ToolEnvironment):
    tools = TOOLS

    def show(self, result: str) -> str:
        return f"[{result}]"


def test_the_environment_answers_calls_and_ends_without_one() -> None:
    step = Play().step(call("repeat", {"text": "a"}) + call("nothing", {}))
    assert step == Step(
        ["[aa]", "[error: there is no tool 'nothing'; the tools are repeat, lookup, fetch]"],
        metrics={"tool_calls": 2, "tool_errors": 1},
    )
    assert Play().step("done") == Step(done=True)


def test_async_tools_are_awaited() -> None:
    step = Play().step(call("fetch", {"page": 7}) + call("repeat", {"text": "a"}))
    assert inspect.isawaitable(step)

    async def get() -> Step:
        return await step

    assert asyncio.run(get()).text == ["[page 7]", "[aa]"]


def test_too_many_calls_in_one_response() -> None:
    step = Play().step(call("repeat", {"text": "a"}) * 40)
    assert isinstance(step, Step)
    assert (len(step.text), step.text[-1]) == (
        17,
        "[error: more than 16 calls in one response; the rest were not run]",
    )


def test_the_model_is_told_the_tools_as_json_schemas() -> None:
    schema = TOOLS.schemas()[0]["function"]
    assert (schema["name"], schema["description"]) == ("repeat", "The text several times.")
    assert schema["parameters"]["required"] == ["text"]
    assert schema["parameters"]["properties"]["times"]["type"] == "integer"
    assert json.dumps(TOOLS.schemas()[2]) in TOOLS.instructions()


def untyped(a):  # type: ignore[no-untyped-def]
    return a


def starred(*words: str) -> str:
    return ""


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ((repeat, repeat), "two of this name"),
        ((untyped,), "give the argument 'a' a type"),
        ((starred,), "cannot be filled by name"),
    ],
)
def test_functions_that_cannot_be_tools(functions: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Tools(*functions)
