"""Every advantage by hand-worked numbers and against plain-Python loops; what must hold of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scored import NAN, Row, per_row, scored, some_rows

from headrace.algorithms.find import ADVANTAGES, find_advantage
from headrace.config import AlgorithmConfig
from headrace.config_presets import GROUPED_ADVANTAGES, PRESETS

PLAIN = AlgorithmConfig()
BUILT_IN = sorted({PRESETS[p].get("advantage", "grpo") for p in PRESETS})


def advantage(name: str, rows: list[Row], config: AlgorithmConfig = PLAIN) -> list[list[float]]:
    result = ADVANTAGES[name].function(scored(rows), config)
    return per_row(result[0] if isinstance(result, tuple) else result, rows)


def flat(name: str, rows: list[Row], config: AlgorithmConfig = PLAIN) -> list[float]:
    return [v for row in advantage(name, rows, config) for v in row]


# ---- by hand


def test_leave_one_out_by_hand() -> None:
    """Seven of 0.35 and a 0: the last is compared with 0.35, each other one with 2.1 / 7 = 0.3."""
    rows = [Row(0.35, 0) for _ in range(7)] + [Row(0.0, 0)]
    assert flat("rloo", rows) == pytest.approx([0.05] * 7 + [-0.35])


def test_leave_one_out_of_two_groups_and_an_excluded_row() -> None:
    # group 4: 1, 3, (left out) → 1 - 3, 3 - 1; group 9: 2, 2, 5 → 2 - 3.5, 2 - 3.5, 5 - 2
    rows = [Row(1, 4), Row(2, 9), Row(3, 4), Row(2, 9), Row(7, 4, valid=False), Row(5, 9)]
    assert flat("rloo", rows) == pytest.approx([-2.0, -1.5, 2.0, -1.5, 0.0, 3.0])


def test_remax_by_hand() -> None:
    rows = [Row(1, 0, greedy=0.25), Row(0, 0, greedy=0.25), Row(0, 1, greedy=1.0), Row(5, 1, valid=False)]
    assert flat("remax", rows) == [0.75, -0.25, -1.0, 0.0]


def test_batch_mean_by_hand() -> None:
    rows = [Row(1, 0), Row(2, 1), Row(6, 2), Row(100, 3, valid=False)]
    assert flat("batch_mean", rows) == [-2.0, -1.0, 3.0, 0.0]


def test_reinforce_plus_plus_by_hand() -> None:
    """Returns from each token on: 1 - 0.2, 1 - 0.1 and 0; over the three tokens mean 0.5667, sample deviation 0.4933."""
    rows = [Row(1.0, 0, length=2, penalty=0.1), Row(0.0, 1, length=1)]
    plain = AlgorithmConfig(whiten_advantages=False)
    assert advantage("reinforce_plus_plus", rows, plain) == [pytest.approx([0.8, 0.9]), [0.0]]
    mean = 1.7 / 3
    deviation = math.sqrt(((0.8 - mean) ** 2 + (0.9 - mean) ** 2 + mean**2) / 2)
    wanted = [(x - mean) / deviation for x in (0.8, 0.9, 0.0)]
    assert flat("reinforce_plus_plus", rows) == pytest.approx(wanted, abs=1e-6)


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    """Centred 0.5, -0.5 (one prompt) and 2, -2 (another), by token: 0.5 twice; mean 0.1, squares 8.75 - 5 x 0.01."""
    rows = [Row(1, 0, length=2), Row(0, 0), Row(4, 1), Row(0, 1)]
    deviation = math.sqrt((2 * 0.25 + 0.25 + 4 + 4 - 5 * 0.01) / 4)
    wanted = [0.4 / deviation, 0.4 / deviation, -0.6 / deviation, 1.9 / deviation, -2.1 / deviation]
    assert flat("reinforce_plus_plus_baseline", rows) == pytest.approx(wanted, abs=1e-6)


def test_dr_grpo_is_the_difference_to_the_mean() -> None:
    rows = [Row(1, 0), Row(0, 0), Row(0, 0), Row(0, 0)]
    assert flat("grpo", rows, AlgorithmConfig(name="dr_grpo")) == [0.75, -0.25, -0.25, -0.25]


def test_gae_gives_returns_too() -> None:
    """lambda 1: the return is the reward whatever the values; the advantage what is missing to it."""
    rows = [Row(1, 0, length=2, value=0.25), Row(-1, 1, length=1, value=0.5)]
    config = AlgorithmConfig(name="ppo", gae_lambda=1.0, whiten_advantages=False)
    advantages, returns = ADVANTAGES["gae"].function(scored(rows), config)
    assert per_row(advantages, rows) == [[0.75, 0.75], [-1.5]]
    assert per_row(returns, rows) == [[1.0, 1.0], [-1.0]]


# ---- against plain loops


def loops_mean(values: list[float]) -> float:
    total = 0.0
    for v in values:
        total += v
    return total / len(values)


def whitened(values: list[list[float]], rows: list[Row]) -> list[list[float]]:
    kept = [v for own, r in zip(values, rows, strict=True) if r.valid for v in own]
    spread = max(kept, default=0.0) - min(kept, default=0.0)
    if len(kept) < 2 or spread <= 1e-6 * max(abs(v) for v in kept):
        return [[0.0] * r.length for r in rows]
    mean = loops_mean(kept)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in kept) / (len(kept) - 1))
    return [
        [(v - mean) / deviation for v in own] if r.valid else [0.0] * r.length
        for own, r in zip(values, rows, strict=True)
    ]


def slow_rloo(rows: list[Row]) -> list[list[float]]:
    out = []
    for i, r in enumerate(rows):
        others = [s.total for j, s in enumerate(rows) if j != i and s.group == r.group and s.valid]
        out.append([r.total - loops_mean(others) if r.valid and others else 0.0] * r.length)
    return out


def slow_remax(rows: list[Row]) -> list[list[float]]:
    return [[(r.total - r.greedy) if r.valid else 0.0] * r.length for r in rows]


def slow_batch_mean(rows: list[Row]) -> list[list[float]]:
    kept = [r.total for r in rows if r.valid]
    return [[(r.total - loops_mean(kept)) if r.valid else 0.0] * r.length for r in rows]


def slow_returns(rows: list[Row]) -> list[list[float]]:
    out = []
    for r in rows:
        out.append([sum(r.token_rewards[t:]) if r.valid else 0.0 for t in range(r.length)])
    return whitened(out, rows)


def slow_centred(rows: list[Row]) -> list[list[float]]:
    out = []
    for r in rows:
        own = [s.total for s in rows if s.group == r.group and s.valid]
        varies = r.valid and max(own) > min(own)
        out.append([r.total - loops_mean(own) if varies else 0.0] * r.length)
    return whitened(out, rows)


SLOW: dict[str, Callable[[list[Row]], list[list[float]]]] = {
    "rloo": slow_rloo,
    "remax": slow_remax,
    "batch_mean": slow_batch_mean,
    "reinforce_plus_plus": slow_returns,
    "reinforce_plus_plus_baseline": slow_centred,
}


@pytest.mark.parametrize("name", SLOW)
@settings(max_examples=60, deadline=None)
@given(rows=some_rows)
def test_against_plain_loops(name: str, rows: list[Row]) -> None:
    got, wanted = advantage(name, rows), SLOW[name](rows)
    for r, mine, theirs in zip(rows, got, wanted, strict=True):
        if r.valid:
            assert mine == pytest.approx(theirs, abs=2e-5), r


# ---- of all of them


def test_every_advantage_is_tested_against_loops() -> None:
    elsewhere = {"grpo", "gae"}  # test_group_advantages.py, test_gae.py
    assert set(BUILT_IN) == SLOW.keys() | elsewhere
    assert {n for n in BUILT_IN if find_advantage(n).grouped} == GROUPED_ADVANTAGES


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=30, deadline=None)
@given(rows=some_rows, random=st.randoms())
def test_the_order_of_rows_and_the_numbers_of_groups_do_not_matter(
    name: str, rows: list[Row], random
) -> None:
    before = advantage(name, rows)
    order = list(range(len(rows)))
    random.shuffle(order)
    renamed = {-1: 17, 0: 3, 1: -40, 2: 8}
    moved = [Row(**{**vars(rows[i]), "group": renamed[rows[i].group]}) for i in order]
    after = advantage(name, moved)
    for i, own in zip(order, after, strict=True):
        if rows[i].valid:
            assert own == pytest.approx(before[i], abs=1e-5)


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=30, deadline=None)
@given(rows=some_rows, noise=st.sampled_from([NAN, math.inf, 1e30]))
def test_rows_that_do_not_count_change_nothing(name: str, rows: list[Row], noise: float) -> None:
    kept = [r for r in rows if r.valid]
    if not kept:
        return
    everything = scored(rows)
    everything.rewards[~everything.valid] = noise
    result = ADVANTAGES[name].function(everything, PLAIN)
    got = per_row(result[0] if isinstance(result, tuple) else result, rows)
    assert [v for v, r in zip(got, rows, strict=True) if r.valid] == [
        pytest.approx(v, abs=1e-6) for v in advantage(name, kept)
    ]


@pytest.mark.parametrize("name", [n for n in BUILT_IN if n != "remax"])
@pytest.mark.parametrize("value", [0.1, 0.35, 1 / 3, -7.7])
def test_eight_equal_rewards_teach_nothing(name: str, value: float) -> None:
    rows = [Row(value, 0) for _ in range(8)]
    assert flat(name, rows) == [0.0] * 8


@pytest.mark.parametrize("name", sorted(GROUPED_ADVANTAGES))
def test_a_group_of_one_is_zero(name: str) -> None:
    rows = [Row(5.0, 0), Row(1.0, 1), Row(3.0, 1), Row(2.0, 2), Row(2.0, 2, valid=False)]
    found = flat(name, rows)
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert found[3] == pytest.approx(0.0, abs=1e-6)
    assert all(math.isfinite(v) for v in found)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_step_without_a_valid_row(name: str) -> None:
    rows = [Row(1.0, 0, valid=False), Row(2.0, 0, valid=False, length=3)]
    assert flat(name, rows) == [0.0] * 4


@pytest.mark.parametrize(("name", "part"), [("remax", "greedy"), ("gae", "values")])
def test_what_is_missing_is_named(name: str, part: str) -> None:
    whole = scored([Row(1.0, 0)])
    lacking = type(whole)(**{**vars(whole), "greedy_rewards": None, "values": None})
    with pytest.raises(ValueError, match=part):
        ADVANTAGES[name].function(lacking, PLAIN)


def test_no_gradient_is_kept() -> None:
    whole = scored([Row(1.0, 0), Row(0.0, 0)])
    for name in BUILT_IN:
        result = ADVANTAGES[name].function(whole, PLAIN)
        assert not (result[0] if isinstance(result, tuple) else result).requires_grad
    assert torch.is_grad_enabled()
