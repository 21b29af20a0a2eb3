from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.gap import logprob_gap

nan = float("nan")


def test_by_hand():
    trainer = torch.tensor([nan, -1.0, -2.0, 7.0])
    rollout = torch.tensor([0.0, -1.5, -1.0, nan])
    gap = logprob_gap(trainer, rollout, torch.tensor([False, True, True, False]))
    # d = 0.5 and -1
    assert gap.means() == pytest.approx(
        {
            "gap/abs_logprob_mean": 0.75,
            "gap/abs_logprob_max": 1.0,
            "gap/kl": (math.exp(0.5) - 1.5 + math.exp(-1)) / 2,
        }
    )


def test_kl_estimates_rollout_to_trainer():
    # tokens in the exact proportions of the rollout policy (1/4, 3/4); the trainer has (1/2, 1/2)
    rollout = torch.tensor([1 / 4] + [3 / 4] * 3, dtype=torch.float64).log()
    trainer = torch.full((4,), 0.5, dtype=torch.float64).log()
    gap = logprob_gap(trainer, rollout, torch.ones(4, dtype=torch.bool)).means()
    assert gap["gap/kl"] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_nothing_masked_in():
    assert logprob_gap(torch.tensor([nan]), torch.tensor([nan]), torch.tensor([False])).means() == {}


def test_a_nan_is_reported():
    gap = logprob_gap(torch.tensor([nan, 0.0]), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    assert all(math.isnan(v) for v in gap.means().values())


def test_far_apart_stays_finite():
    gap = logprob_gap(torch.tensor([0.0]), torch.tensor([-1000.0]), torch.ones(1, dtype=torch.bool)).means()
    assert gap["gap/kl"] == pytest.approx(math.exp(20) - 1 - 1000)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.booleans()), max_size=20), st.integers(0, 20)
)
def test_pooling_equals_one_batch(tokens, cut):
    a = torch.tensor([x for x, _, _ in tokens], dtype=torch.float64)
    b = torch.tensor([y for _, y, _ in tokens], dtype=torch.float64)
    mask = torch.tensor([m for _, _, m in tokens], dtype=torch.bool)
    pooled = logprob_gap(a[:cut], b[:cut], mask[:cut])
    pooled.merge(logprob_gap(a[cut:], b[cut:], mask[cut:]))
    kept = [(x - y) for x, y, m in tokens if m]
    expected = {
        "gap/abs_logprob_mean": sum(map(abs, kept)) / max(len(kept), 1),
        "gap/abs_logprob_max": max(map(abs, kept), default=0.0),
        "gap/kl": sum(math.exp(d) - 1 - d for d in kept) / max(len(kept), 1),
    }
    assert pooled.means() == (pytest.approx(expected, abs=1e-12) if kept else {})
