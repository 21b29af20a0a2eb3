import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.observe.summary import (
    ascii_curve,
    before_after_table,
    format_duration,
    format_metric,
    format_number,
    sparkline,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.512, "0.512"), (-0.0213, "-0.0213"), (0.00123, "0.0012"), (-0.00012, "-1.2e-4"),
        (1.0, "1.00"), (87.25, "87.2"), (512.4, "512"), (999.6, "1.00k"), (1234, "1.23k"), (12_345, "12.3k"),
        (999_700, "1.00M"), (2.5e9, "2.50G"), (1e13, "1.0e+13"), (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_numbers(value, text):
    assert format_number(value) == text


@given(st.floats(-1e99, 1e99).filter(lambda v: v == 0 or abs(v) > 1e-9))
def test_numbers_are_short_and_near(value):
    text = format_number(value)
    assert len(text) <= (8 if abs(value) >= 999.5e9 else 7)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1)
    assert float(text.rstrip("kMG")) * scale == pytest.approx(value, rel=0.051)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (0.44, "0.4s"), (9.96, "10s"), (59.6, "1m00s"), (192, "3m12s"), (3599.7, "1h00m"),
     (7500, "2h05m"), (86_399, "23h59m"), (273_600, "3d04h"), (-1, "0.0s")],
)  # fmt: skip
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_metrics_are_shown_in_their_unit():
    assert format_metric("eval/accuracy", 0.4525) == "45.2%"
    assert format_metric("time/rollout_s", 192) == "3m12s"
    assert format_metric("rollout/tokens_per_s", 1234) == "1.23k"
    assert format_metric("time/rollout_s", math.nan) == "nan"


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, math.nan, 0]) == "█▁"
    assert sparkline([]) == ""
    assert set(sparkline([3.0, 3.0])) == {"▄"}
    # averages of equal values differ in the last bit; that is not a course
    assert set(sparkline([0.35] * 100, width=7)) == {"▄"}
    # six values in three buckets: means 1, 2, 3
    assert sparkline([0, 2, 1, 3, 2, 4], width=3) == "▁▅█"


def test_ascii_curve_draws_a_connected_line():
    assert ascii_curve([0, 0, 2, 1], width=4, height=3).splitlines() == [
        "2.00 ┤  ╭╮",
        "     ┤  │╰",
        "   0 ┤──╯",
        "     └────",
        "      1  4",
    ]
    assert "0.500" in ascii_curve([0.5] * 3, width=10, height=4)
    assert ascii_curve([math.nan]) == "(no values)"
    with pytest.raises(ValueError, match="height"):
        ascii_curve([1, 2], height=1)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=300),
    st.integers(4, 70),
    st.integers(2, 12),
)
def test_curves_keep_to_their_size(values, width, height):
    lines = ascii_curve(values, width, height).splitlines()
    assert len(lines) == height + 2
    margin = lines[-2].index("└")
    assert max(len(line) for line in lines) <= margin + 1 + width
    assert len(sparkline(values, width)) == min(len(values), width)


def test_before_after_table():
    table = before_after_table(
        {"eval/accuracy": 0.031, "eval/response_tokens_mean": 12.0, "time/eval_s": 3.2},
        {
            "eval/accuracy": 0.953,
            "eval/response_tokens_mean": 9.5,
            "eval/reward_mean": 1.0,
            "time/eval_s": 2.0,
        },
        labels={
            "eval/accuracy": "accuracy",
            "eval/response_tokens_mean": "tokens",
            "eval/reward_mean": "reward",
            "time/eval_s": "time",
        },
    )
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(table)
    rows = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert rows[0] == ["before", "after", "change"]
    assert rows[2:] == [
        ["accuracy", "3.1%", "95.3%", "+92.2", "points"],
        ["tokens", "12.0", "9.50", "-2.50"],
        ["reward", "-", "1.00"],
        ["time", "3.2s", "2.0s", "-1.2s"],
    ]
