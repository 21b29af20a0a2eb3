from __future__ import annotations

import asyncio
import functools
import sys
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from headrace.errors import RewardError
from headrace.rewards.functions import RewardFunction

ROWS = {
    "prompt": ["p0", "p1", "p2"],
    "completion": ["a", "bb", "ccc"],
    "answer": ["a", "x", "ccc"],
    "num_tokens": [1, 2, 3],
}


def rewards(spec, rows=None, **settings):
    rows = ROWS if rows is None else rows
    return RewardFunction.resolve(spec, **settings).score(rows, len(rows["completion"])).rewards


# --- kinds of callables -------------------------------------------------------------------------------------


def length(completion):
    return len(completion)


def right(text, answer):
    return text == answer


class Grader:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completion, answer):
        return self.factor * (completion == answer)

    def method(self, completion):
        return self.factor * len(completion)

    async def async_method(self, completion):
        return self.factor * len(completion)

    @staticmethod
    def static(completion):
        return len(completion)


class AsyncGrader:
    async def __call__(self, completion, answer):
        await asyncio.sleep(0)
        return float(completion == answer)


def closure(factor):
    def inner(completion):
        return factor * len(completion)

    return inner


async def async_length(completion):
    await asyncio.sleep(0)
    return len(completion)


async def async_batched(completions, answer):
    await asyncio.sleep(0)
    return [c == a for c, a in zip(completions, answer, strict=True)]


def with_reference(reference, completion):
    return f"{reference}{completion}" == "xbb"


@functools.wraps(async_length)
def wrapped(*args, **kwargs):
    return async_length(*args, **kwargs)


@pytest.mark.parametrize(
    "function, expected",
    [
        (length, [1, 2, 3]),
        (lambda c: len(c), [1, 2, 3]),
        (len, [1, 2, 3]),
        (right, [1, 0, 1]),
        (closure(10), [10, 20, 30]),
        (Grader(2), [2, 0, 2]),
        (Grader(2).method, [2, 4, 6]),
        (Grader.static, [1, 2, 3]),
        (functools.partial(right, answer="bb"), [0, 1, 0]),
        (functools.partial(with_reference, "x"), [0, 1, 0]),
        (functools.partial(Grader(3).method), [3, 6, 9]),
        (async_length, [1, 2, 3]),
        (async_batched, [1, 0, 1]),
        (AsyncGrader(), [1, 0, 1]),
        (Grader(2).async_method, [2, 4, 6]),
        (functools.partial(async_length), [1, 2, 3]),
        (wrapped, [1, 2, 3]),
        (lambda c: async_length(c), [1, 2, 3]),
        (lambda *args: len(args[0]), [1, 2, 3]),
        ("exact_match", [1, 0, 1]),
    ],
)
def test_any_callable(function, expected):
    assert rewards(function) == expected


# --- what is passed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["completions", "responses", "texts"])
def test_batched_by_the_name_of_the_first_parameter(name):
    seen = []
    namespace = {"seen": seen}
    exec(
        f"def f({name}, prompt, answers):\n    seen.append(({name}, prompt, answers))\n    return [1, 2, 3]",
        namespace,
    )
    assert rewards(namespace["f"]) == [1, 2, 3]
    assert seen == [(ROWS["completion"], ROWS["prompt"], ROWS["answer"])]


def test_the_completion_is_found_by_name_behind_other_parameters():
    assert rewards(lambda prompt, completion: prompt[1:] == "1" and completion == "bb") == [0, 1, 0]
    assert rewards(lambda prompt, response: response == "bb") == [0, 1, 0]
    assert rewards(
        lambda prompts, completions, **kwargs: [len(p + c) for p, c in zip(prompts, completions, strict=True)]
    ) == [3, 4, 5]


def test_a_first_parameter_of_another_name_is_the_completion():
    assert rewards(lambda answer_text, answer: answer_text == answer) == [1, 0, 1]
    assert rewards(lambda text, response=None: (text, response) == ("bb", None)) == [0, 1, 0]


def test_keyword_only_and_positional_only():
    def keyword_only(*, completion, answer):
        return completion == answer

    def positional_only(completion, answer, /, num_tokens):
        return (completion == answer) * num_tokens

    assert rewards(keyword_only) == [1, 0, 1]
    assert rewards(positional_only) == [1, 0, 3]


def test_defaults_give_way_to_a_column_and_bound_arguments_do_not():
    def score(completion, answer="?", bonus=0.5):
        return (completion == answer) + bonus

    assert rewards(score) == [1.5, 0.5, 1.5]
    assert rewards(functools.partial(score, answer="bb")) == [0.5, 1.5, 0.5]


def test_all_other_columns_go_to_kwargs():
    seen = []

    def score(completion, answer, **columns):
        seen.append(columns)
        return 0

    rewards(score)
    assert seen[1] == {"prompt": "p1", "num_tokens": 2}


def test_a_batched_function_cannot_change_the_batch():
    def score(completions, answer):
        answer.clear()
        out = [len(c) for c in completions]
        completions.clear()
        return out

    rows = {name: list(values) for name, values in ROWS.items()}
    assert rewards(score, rows) == [1, 2, 3]
    assert rows == ROWS


@pytest.mark.parametrize("batched", [False, True])
def test_what_a_function_does_to_a_row_does_not_reach_the_other_samples(batched):
    """The samples of a prompt share the row's values, such as a list of test cases."""

    def one(completion, tests):
        tests["cases"].append(tests["cases"].pop(0) + 1)
        return sum(tests["cases"])

    def all_of_them(completions, tests):
        return [one(c, t) for c, t in zip(completions, tests, strict=True)]

    row = {"cases": [1, 2]}
    assert rewards(all_of_them if batched else one, ROWS | {"tests": [row] * 3}) == [4, 4, 4]
    assert row == {"cases": [1, 2]}


def test_required_columns_and_check():
    function = RewardFunction.resolve(lambda completion, answer, finish_reason, extra=1: 0)
    assert function.required_columns == ("answer", "finish_reason")
    assert function.check({"completion", "answer", "finish_reason"}) == []
    (violation,) = function.check({"completion", "answers", "finish_reason"})
    assert "reward.function" in violation
    assert "did you mean 'answers'?" in violation
    batched = RewardFunction.resolve(lambda completions, answers: [])
    assert batched.check({"completion", "answer"}) == []
    assert len(batched.check({"completion", "prompt"})) == 1


# --- what is returned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, expected",
    [
        (True, 1.0),
        (2, 2.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array([0.25]), 0.25),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5], requires_grad=True), 0.5),
        (Fraction(1, 2), 0.5),
        (Decimal("0.5"), 0.5),
        (None, None),
    ],
)
def test_values(value, expected):
    (out,) = rewards(lambda completion: value, {"completion": ["a"]})
    assert out == expected
    assert type(out) is type(expected)
    assert rewards(lambda completions: [value], {"completion": ["a"]}) == [expected]


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([[1], [2], [3]]).squeeze(1),
    ],
)
def test_batched_containers(value):
    assert rewards(lambda completions: value) == [1, 2, 3]


def test_generators():
    def score(completions):
        for c in completions:
            yield len(c)

    assert rewards(score) == [1, 2, 3]


def test_parts():
    def score(completion):
        if completion == "bb":
            return None
        return {"reward": len(completion), "format": completion == "a"} | (
            {"style": 0.5} if completion == "ccc" else {}
        )

    result = RewardFunction.resolve(score).score(ROWS, 3)
    assert result.rewards == [1.0, None, 3.0]
    assert result.parts == {"format": [1.0, None, 0.0], "style": [None, None, 0.5]}


def test_no_rows_means_no_call():
    def score(completions):
        raise AssertionError

    assert rewards(score, {"completion": []}) == []


@pytest.mark.parametrize(
    "value, words",
    [
        ("good", "'good', a str"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (10**400, "too large"),
        (-1e39, "-1e\\+39, more than float32 holds"),
        (1j, "complex"),
        ([1], "list"),
        (np.array([1, 2]), r"shape \(2,\)"),
        ({"score": 1}, r"without 'reward'.*'score'"),
        ({"reward": 1, "style": "bad"}, "its 'style' is 'bad'"),
    ],
)
def test_unusable_values(value, words):
    with pytest.raises(RewardError, match=words) as caught:
        rewards(lambda completion: value if completion == "bb" else 0)
    message = str(caught.value)
    assert "sample 2" in message
    assert "'p1'" in message
    assert "'bb'" in message


@pytest.mark.parametrize(
    "value, words",
    [
        ([1, 2], "2 values for 3 completions"),
        ([], "0 values for 3"),
        (1.0, "float, not a list of 3"),
        (None, "NoneType"),
        ({1, 2, 3}, "set, not a list of 3"),
        ("abc", "str, not a list"),
        ({"reward": [1, 2, 3]}, "dict, not a list"),
        (torch.tensor(1.0), "Tensor, not a list"),
    ],
)
def test_wrong_number_of_values(value, words):
    with pytest.raises(RewardError, match=words):
        rewards(lambda completions: value)


def test_a_raising_function_shows_the_sample_and_keeps_the_cause():
    def score(completion, answer):
        return {"a": 1}[completion]

    rows = {"prompt": ["what?"] * 2, "completion": ["a", "z" * 5000], "answer": ["", ""]}
    with pytest.raises(RewardError) as caught:
        rewards(score, rows)
    message = str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "score" in message
    assert "KeyError" in message
    assert "test_functions.py, line" in message
    assert "sample 2" in message
    assert "'what?'" in message
    assert "zzz" in message
    assert len(message) < 1000


@pytest.mark.parametrize("kind", ["plain", "batched", "async", "async batched"])
def test_a_function_that_leaves_the_program_is_a_failure(kind):
    """sys.exit(0) would end a half-done run with success, and an event loop without an answer."""

    def plain(completion):
        sys.exit(0)

    def batched(completions):
        sys.exit(0)

    async def each(completion):
        sys.exit(0)

    async def async_all(completions):
        sys.exit(0)

    function = {"plain": plain, "batched": batched, "async": each, "async batched": async_all}[kind]
    with pytest.raises(RewardError, match="SystemExit: 0"):
        rewards(function)


@pytest.mark.parametrize("kind", ["async", "batched", "async batched", "generator", "hidden async"])
def test_every_way_of_raising_is_reported(kind):
    async def each(completion):
        if completion == "bb":
            raise OSError("offline")
        return 0

    async def async_all(completions):
        raise OSError("offline")

    def all_at_once(completions):
        raise OSError("offline")

    def generator(completions):
        yield 1
        raise OSError("offline")

    function = {
        "async": each,
        "hidden async": lambda completion: each(completion),
        "batched": all_at_once,
        "async batched": async_all,
        "generator": generator,
    }[kind]
    with pytest.raises(RewardError, match="OSError: offline") as caught:
        rewards(function)
    assert isinstance(caught.value.__cause__, OSError)
    assert ("sample 2" in str(caught.value)) == (kind in ("async", "hidden async"))


def test_missing_columns_at_run_time():
    with pytest.raises(RewardError, match="asks for 'answer'"):
        rewards(right, {"completion": ["a"]})
    with pytest.raises(RewardError, match="no column 'completion'"):
        RewardFunction.resolve(length).score({"prompt": ["a"]}, 1)
    with pytest.raises(ValueError, match=r"column '[a-z]+' holds 3 values for 2 rows"):
        RewardFunction.resolve(length).score(ROWS, 2)


# --- async --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_concurrency_is_used_and_bounded(limit):
    running, peak = 0, 0

    async def score(completion):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.002 * (12 - int(completion)) / 12)
        running -= 1
        return int(completion)

    rows = {"completion": [str(i) for i in range(12)]}
    assert rewards(score, rows, max_concurrency=limit) == list(range(12))  # in row order, not of completion
    assert peak == min(limit, 12)


def test_calls_of_one_function_share_a_loop():
    loops = set()

    async def score(completion):
        loops.add(asyncio.get_running_loop())
        return 1

    function = RewardFunction.resolve(score)
    for _ in range(2):
        function.score(ROWS, 3)
    assert len(loops) == 1


def test_inside_a_running_loop():
    async def notebook():
        return rewards(async_length)

    assert asyncio.run(notebook()) == [1, 2, 3]


def test_the_first_failure_cancels_the_rest():
    finished = threading.Event()

    async def score(completion):
        if completion == "a":
            raise ValueError("bad")
        try:
            await asyncio.sleep(60)
        finally:
            finished.set()

    with pytest.raises(RewardError, match="bad"):
        rewards(score)
    assert finished.wait(5)
