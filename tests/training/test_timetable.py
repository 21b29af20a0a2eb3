"""Every pass is there once and after what it needs, ranks idle and hold what the papers say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.training.timetable import Action, timetable, user


def text(ticks: tuple) -> list[str]:
    """A line a rank: F and B with stage and micro-batch."""
    cells = [["." if a is None else f"{a.kind[0].upper()}{a.stage}{a.micro}" for a in tick] for tick in ticks]
    return [" ".join(c.ljust(3) for c in rank).rstrip() for rank in zip(*cells, strict=True)]


def test_one_forward_one_backward_by_hand() -> None:
    assert text(timetable(2, 1, 3)) == [
        "F00 F01 .   B00 F02 B01 .   B02",
        ".   F10 B10 F11 B11 F12 B12 .",
    ]


def test_interleaved_by_hand() -> None:
    assert text(timetable(2, 2, 2)) == [
        "F00 F01 F20 F21 .   B20 .   B21 B00 B01",
        ".   F10 F11 F30 B30 F31 B31 B10 B11 .",
    ]


def test_one_process_alternates() -> None:
    assert text(timetable(1, 1, 2)) == ["F00 B00 F01 B01"]
    assert text(timetable(1, 1, 2, trains=False)) == ["F00 F01"]


def test_without_gradients_each_rank_goes_straight_on() -> None:
    assert text(timetable(2, 2, 3, trains=False)) == [
        "F00 F01 F20 F21 F02 .   F22 .",
        ".   F10 F11 F30 F31 F12 .   F32",
    ]


@pytest.mark.parametrize(
    "ranks, chunks, micros", [(2, 1, 5), (4, 1, 9), (8, 1, 3), (4, 2, 8), (3, 4, 6), (8, 2, 16)]
)
def test_the_idle_time_is_that_of_the_papers(ranks: int, chunks: int, micros: int) -> None:
    """2 (P - 1) of a chunk's passes: (P - 1) / V of the time of a micro-batch."""
    ticks = timetable(ranks, chunks, micros)
    assert len(ticks) == 2 * micros * chunks + 2 * (ranks - 1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 13), st.booleans())
def test_each_pass_once_and_after_what_it_needs(ranks: int, chunks: int, micros: int, trains: bool) -> None:
    last = ranks * chunks - 1
    ticks = timetable(ranks, chunks, micros, trains)
    when = {action: t for t, tick in enumerate(ticks) for action in tick if action is not None}
    kinds = ("forward", "backward") if trains else ("forward",)
    expected = {Action(k, s, m) for k in kinds for s in range(last + 1) for m in range(micros)}
    assert when.keys() == expected
    assert sum(a is not None for tick in ticks for a in tick) == len(expected)
    for tick in ticks:
        assert all(a is None or a.stage % ranks == rank for rank, a in enumerate(tick))
        assert any(a is not None for a in tick)
    for action, t in when.items():
        if action.stage > 0 and action.kind == "forward":
            assert when[Action("forward", action.stage - 1, action.micro)] < t
        if action.kind == "backward":
            before = "backward" if action.stage < last else "forward"
            assert when[Action(before, min(action.stage + 1, last), action.micro)] < t
            assert when[Action("forward", action.stage, action.micro)] < t
        taker = user(action, last)
        if taker in when:
            assert when[taker] > t


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 30))
def test_activations_held_do_not_grow_with_the_micro_batches(ranks: int, chunks: int, micros: int) -> None:
    ticks = timetable(ranks, chunks, micros)
    for rank in range(ranks):
        held = most = 0
        for tick in ticks:
            action = tick[rank]
            held += 0 if action is None else 1 if action.kind == "forward" else -1
            most = max(most, held)
        assert held == 0
        bound = ranks - rank if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
        assert most <= bound
