from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rewards.verifiers import VERIFIERS, exact_match, extract_last_number, numeric_match


@pytest.mark.parametrize(
    "text, number",
    [
        ("The answer is 42.", "42"),
        ("so it costs $1,234.50!", "1234.5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        (r"exactly \$7", "7"),
        ("minus −3", "-3"),
        ("x = -3.25", "-3.25"),
        ("+7", "7"),
        (".5", "1/2"),
        ("5.", "5"),
        ("50% of them", "50"),
        ("3/4", "3/4"),
        ("-3/4 of it", "-3/4"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        ("1.5e-3", "0.0015"),
        ("2E5", "200000"),
        ("1,000,000", "1000000"),
        ("first 1, then 2", "2"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("10-5", "5"),
        ("f(2)-3", "3"),
        ("- 5 apples", "5"),
        ("on 12/05/2023", "2023"),
        ("7 and x2", "7"),
        ("2^-3", "-3"),
        ("**12**", "12"),
        ("答案是42", "42"),
        ("007", "7"),
        ("3 / 4", "4"),
        ("12kg", "12"),
        ("a/3", "3"),
    ],
)
def test_last_number(text, number):
    assert extract_last_number(text) == Fraction(number)


@pytest.mark.parametrize(
    "text", ["", "none", "x2", "3/0", "1e999999999999", "1e401", "9" * 401, "-", "$", "."]
)
def test_no_number(text):
    assert extract_last_number(text) is None


def test_an_unreadable_last_number_does_not_fall_back_to_an_earlier_one():
    assert extract_last_number("5, no: 1/0") is None


@pytest.mark.parametrize(
    "completion, answer, score",
    [
        ("so 6 * 7 = 42.", "She has 6 * 7 = <<6*7=42>>42\n#### 42", 1.0),
        ("#### 42 (that is 6 times 7)", "#### 42", 1.0),
        ("####42", "42", 1.0),
        ("#### **$1,200**\nDone in 3 steps.", "1200", 1.0),
        ("#### Step 3\nthe answer is 5", "5", 1.0),
        ("#### 41\nor rather 42", "42", 0.0),
        ("0.50", "1/2", 1.0),
        ("0.333", "1/3", 0.0),
        ("0.1", 0.1, 1.0),
        ("the answer is 3", 3, 1.0),
        ("the answer is 3.0", 3, 1.0),
        ("5e1 percent", "50%", 1.0),
        ("-4", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("1/0", "4", 0.0),
        ("__import__('os').getpid()", "1", 0.0),
    ],
)
def test_numeric_match(completion, answer, score):
    assert numeric_match(completion, answer) == score


def test_an_answer_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="'Paris' holds no number"):
        numeric_match("5", "Paris")


def test_exact_match():
    assert exact_match(" Paris\n", "Paris") == 1.0
    assert exact_match("paris", "Paris") == 0.0
    assert exact_match("It is Paris", "Paris") == 0.0
    assert exact_match("3", 3) == 1.0
    assert {"exact_match", "numeric_match"} == set(VERIFIERS)


@given(
    st.decimals(min_value=-(10**12), max_value=10**12, places=4),
    st.sampled_from(["{}", "{:,}", "{:e}", "{:+}", "{}.", "{} %", "({})", "= {}\n", "{} dollars"]),
    st.text(alphabet="ab c:=\n$(", max_size=10),
)
def test_every_way_of_writing_a_decimal(number: Decimal, form: str, before: str):
    text = f"9 {before} {form.format(number)}"
    assert extract_last_number(text) == Fraction(number)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_every_fraction(numerator: int, denominator: int):
    assert extract_last_number(f"is {numerator}/{denominator}.") == Fraction(numerator, denominator)
    assert numeric_match(f"{numerator}/{denominator}", f"#### {Fraction(numerator, denominator)}") == 1.0


@given(st.text(alphabet="0123456789,./-+eE$ #%\\fracd{}x", max_size=60))
def test_any_text_gives_a_number_or_none(text: str):
    value = extract_last_number(text)
    assert value is None or isinstance(value, Fraction)
    assert numeric_match(text, "1") in (0.0, 1.0)
