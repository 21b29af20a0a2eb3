"""Importance weights between rollout and trainer, by hand and against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.importance import importance_weights

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def weights(mode, trainer, rollout, rows, cap=2.0):
    t = torch.tensor
    used, before, above = importance_weights(
        t(trainer, dtype=torch.float64), t(rollout, dtype=torch.float64), t(rows), max(rows) + 1, mode, cap
    )
    return used.tolist(), before.tolist(), above.tolist()


def test_by_hand():
    """Row 0: ratios 2 and 1/4, product 1/2. Row 1: ratios 3 and 1, product 3. Cap 2 (reached is not above)."""
    log = math.log
    trainer = [log(0.5), log(0.1), log(0.9), log(0.2)]
    rollout = [log(0.25), log(0.4), log(0.3), log(0.2)]
    rows = [0, 0, 1, 1]
    near = pytest.approx
    cap = 2.0 + 1e-9
    assert weights("token_truncate", trainer, rollout, rows, cap)[0] == near([2, 0.25, 2, 1])
    assert weights("token_mask", trainer, rollout, rows, cap)[0] == near([2, 0.25, 0, 1])
    assert weights("sequence_truncate", trainer, rollout, rows, cap)[0] == near([0.5, 0.5, 2, 2])
    used, before, above = weights("sequence_mask", trainer, rollout, rows, cap)
    assert used == near([0.5, 0.5, 0, 0])
    assert before == near([0.5, 0.5, 3, 3])
    assert above == [False, False, True, True]


@pytest.mark.parametrize("mode", MODES)
def test_equal_distributions_weigh_one(mode):
    assert weights(mode, [-1.0, -700.0, -0.1], [-1.0, -700.0, -0.1], [0, 1, 1]) == (
        [1.0] * 3,
        [1.0] * 3,
        [False] * 3,
    )


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.integers(0, 3)), min_size=1, max_size=8),
    mode=st.sampled_from(MODES),
    cap=st.sampled_from([1.0, 1.5, 5.0]),
)
def test_against_plain_loops(tokens, mode, cap):
    wanted = []
    for t, r, row in tokens:
        d = t - r
        if mode.startswith("sequence"):
            d = sum(a - b for a, b, other in tokens if other == row)
        w = math.exp(min(max(d, -20), 20))
        wanted.append(min(w, cap) if mode.endswith("truncate") else w if w <= cap else 0.0)
    got = weights(mode, *map(list, zip(*tokens, strict=True)), cap=cap)[0]
    assert got == pytest.approx(wanted, rel=1e-9)


def test_detached_and_finite():
    trainer = torch.tensor([0.0, -800.0], requires_grad=True)
    used, before, _ = importance_weights(
        trainer, torch.tensor([-900.0, 0.0]), torch.tensor([0, 1]), 2, "sequence_truncate", 3.0
    )
    assert not used.requires_grad
    assert used.dtype == torch.float32
    assert used.tolist() == pytest.approx([3.0, math.exp(-20)])
    assert torch.isfinite(before).all()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="unknown importance weights 'row_truncate'"):
        weights("row_truncate", [0.0], [0.0], [0])
