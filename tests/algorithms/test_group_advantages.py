"""GRPO advantages, and the statistics of their groups."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.advantages.grpo import group_stats, grpo

nan = float("nan")


def t(values):
    return torch.tensor(values, dtype=torch.float64)


def test_grpo_by_hand():
    # group 7: 1, 0, 0, 1 → mean 1/2, sample deviation sqrt(1/3); group 3: 2, 4 → mean 3, deviation sqrt 2
    rewards = t([1, 2, 0, 0, 4, 1])
    groups = torch.tensor([7, 3, 7, 7, 3, 7])
    h, s = 0.5 * 3**0.5, 0.5**0.5
    assert grpo(rewards, groups, eps=0.0).tolist() == pytest.approx([h, -s, -h, -h, s, h])
    assert grpo(rewards, groups, normalize_std=False).tolist() == [0.5, -1.0, -0.5, -0.5, 1.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.35, 1 / 3, -7.7, 1e6 + 0.1])
def test_eight_equal_rewards_give_exactly_zero(dtype, value):
    rewards = torch.full((8,), value, dtype=dtype)
    assert grpo(rewards, torch.zeros(8, dtype=torch.int64)).tolist() == [0.0] * 8


def test_a_group_of_one_is_zero():
    out = grpo(t([5.0, 1.0, 3.0]), torch.tensor([0, 1, 1]))
    assert out[0] == 0
    assert out.isfinite().all()
    alone = grpo(t([5.0, 9.0]), torch.tensor([0, 0]), valid=torch.tensor([True, False]))
    assert alone.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("excluded", [nan, float("inf"), 1e30])
def test_invalid_rows_enter_no_baseline(excluded):
    valid = torch.tensor([True, False, True, True])
    group = torch.zeros(4, dtype=torch.int64)
    with_hole = grpo(t([1.0, excluded, 2.0, 6.0]), group, valid=valid)
    without = grpo(t([1.0, 2.0, 6.0]), group[:3])
    assert with_hole[1] == 0
    assert with_hole[valid].tolist() == without.tolist()
    nobody = grpo(t([excluded] * 2), group[:2], valid=torch.zeros(2, dtype=torch.bool))
    assert nobody.tolist() == [0.0, 0.0]


def test_integer_rewards_and_empty_batches():
    out = grpo(torch.tensor([0, 2]), torch.tensor([4, 4]), normalize_std=False)
    assert out.dtype == torch.float32
    assert out.tolist() == [-1.0, 1.0]
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_errors():
    with pytest.raises(ValueError, match="row 1"):
        grpo(t([0.0, nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="alike"):
        grpo(t([0.0, 1.0]), torch.tensor([0]))


reward = st.sampled_from([0.0, 0.1, 0.35, 1.0, -2.0, 1 / 3])
rows_strategy = st.lists(st.tuples(reward, st.integers(-2, 3), st.booleans()), min_size=1, max_size=14)


@settings(max_examples=80, deadline=None)
@given(rows_strategy, st.randoms())
def test_against_the_statistics_module_in_any_order(rows, random):
    random.shuffle(rows)
    rewards = t([r if v else nan for r, _, v in rows])
    groups = torch.tensor([g for _, g, _ in rows])
    valid = torch.tensor([v for _, _, v in rows])
    of_group = {g: [r for r, h, v in rows if h == g and v] for _, g, _ in rows}
    eps = 1e-6
    expected = []
    for r, g, v in rows:
        own = of_group[g]
        if not v or len(own) < 2 or len(set(own)) == 1:
            expected.append(0.0)
        else:
            expected.append((r - statistics.fmean(own)) / (statistics.stdev(own) + eps))
    assert grpo(rewards, groups, valid=valid, eps=eps).tolist() == pytest.approx(expected, abs=1e-9)

    there = [own for own in of_group.values() if own]
    flat = [len(set(own)) == 1 for own in there]
    stats = {"reward/zero_spread_group_fraction": sum(flat) / len(flat)} if flat else {}
    assert group_stats(rewards, groups, valid).means() == stats
