from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.advantages.whiten import whiten


def test_by_hand():
    # masked 1, 3, 5: mean 3, sample deviation 2
    x = torch.tensor([float("nan"), 1.0, 3.0, 99.0, 5.0])
    mask = torch.tensor([False, True, True, False, True])
    assert whiten(x, mask).tolist() == [0.0, -1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("values", [[], [2.5], [0.35] * 7, [0.1 + 0.2, 0.3], [0.0] * 4])
def test_nothing_to_scale_gives_zeros(values):
    x = torch.tensor(values, dtype=torch.float64)
    assert whiten(x, torch.ones(len(values), dtype=torch.bool)).tolist() == [0.0] * len(values)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=20).filter(lambda v: len(set(v)) > 1))
def test_mean_zero_and_deviation_one(values):
    x = torch.tensor(values, dtype=torch.float64) / 8
    out = whiten(x, torch.ones(len(values), dtype=torch.bool))
    assert float(out.mean()) == pytest.approx(0, abs=1e-9)
    assert float(out.std()) == pytest.approx(1)
    assert out.argsort(stable=True).tolist() == x.argsort(stable=True).tolist()


def test_large_offset_is_computed_in_float64():
    x = torch.tensor([1e6, 1e6 + 1, 1e6 + 2], dtype=torch.float32)
    assert whiten(x, torch.ones(3, dtype=torch.bool)).tolist() == [-1.0, 0.0, 1.0]
