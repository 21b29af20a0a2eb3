"""The calculator against exact fractions, and against what a model might write to do harm."""

from __future__ import annotations

import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.agents.calculator import calculate, calculator, shown
from headrace.agents.tools import ToolError

Tree = tuple[str, Fraction | None]  # an expression and its value; None where something is divided by zero

number = st.one_of(
    st.integers(0, 9999).map(lambda n: (str(n), Fraction(n))),
    st.decimals(0, 99, places=2, allow_nan=False).map(lambda d: (str(d), Fraction(str(d)))),
)
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: None if b == 0 else a / b,
}


def joined(parts: tuple[Tree, str, Tree, str]) -> Tree:
    (left, a), sign, (right, b), space = parts
    value = None if a is None or b is None else OPERATIONS[sign](a, b)
    return f"({left}{space}{sign}{space}{right})", value


def negated(part: Tree) -> Tree:
    return f"-{part[0]}", None if part[1] is None else -part[1]


trees = st.recursive(
    number,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner, st.sampled_from(["", " "])).map(joined),
        inner.map(negated),
    ),
    max_leaves=8,
)


@settings(max_examples=300)
@given(trees)
def test_any_expression_has_its_exact_value(tree: Tree) -> None:
    text, value = tree
    if len(text) > 200:
        return
    if value is None:
        with pytest.raises(ToolError, match="division by zero"):
            calculate(text)
    else:
        assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", 14),
        ("2*3+4", 10),
        ("10-3-2", 5),
        ("12/3/2", 2),
        ("2*-3", -6),
        ("--2", 2),
        ("-2-+3", -5),
        ("(1+2)*(3-4)", -3),
        ("1/3*3", 1),
        (".5+1.", Fraction(3, 2)),
        (" 1 +\n1\t", 2),
    ],
)
def test_precedence_and_signs(text: str, value: Fraction) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(14), "14"),
        (Fraction(-5, 2), "-2.5"),
        (Fraction(1, 8), "0.125"),
        (Fraction(-1, 1000), "-0.001"),
        (Fraction(1, 3), "0.333333333333"),
        (Fraction(-2, 3), "-0.666666666667"),
        (Fraction(10**30), "1" + "0" * 30),
    ],
)
def test_numbers_as_the_model_reads_them(value: Fraction, text: str) -> None:
    assert shown(value) == text


HOSTILE = [
    "9**9**9",
    "9" * 160,
    "*".join(["99999999"] * 22),
    "(" * 100_000,
    "(" * 60 + "1" + ")" * 60,
    "-" * 199 + "1",
    "٣+٤",
    "１+１",
    "²+1",
    "1e9",
    "0x10",
    "1_000",
    "1,000",
    "nan",
    "inf",
    "__import__('os').system('true')",
    "(1).__class__",
    "1 if 1 else 2",
    "1;2",
    "1\x00+1",
    "",
    "   ",
    "()",
    "1+",
    "(1",
    "1)",
    "1 2",
    ".",
    "1..2",
    "+",
    "1/0",
    "1/(2-2)",
]


@pytest.mark.parametrize("text", HOSTILE, ids=[ascii(t[:12]) for t in HOSTILE])
def test_hostile_text_is_an_error_at_once(text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ToolError) as error:
        calculator(text)
    assert time.perf_counter() - started < 0.1
    assert len(str(error.value)) < 200


@settings(max_examples=300)
@given(st.text(alphabet="0123456789+-*/(). e٣", max_size=220))
@example("0" * 200)
def test_any_text_is_a_number_or_a_tool_error(text: str) -> None:
    with contextlib.suppress(ToolError):
        assert calculator(text)
