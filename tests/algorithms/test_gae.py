from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.advantages.gae import gae

nan = float("nan")


def row_gae(rewards, values, mask, gamma, lam):
    """The definition as a double sum: A_k = sum_l (gamma lam)^l delta_(k+l), over masked tokens."""
    picked = [t for t, m in enumerate(mask) if m]
    r = [rewards[t] for t in picked]
    v = [values[t] for t in picked] + [0.0]
    delta = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(r))]
    out = [0.0] * len(mask)
    for k, t in enumerate(picked):
        out[t] = sum((gamma * lam) ** j * delta[k + j] for j in range(len(r) - k))
    return out


def test_by_hand_with_a_tool_answer_between():
    # masked tokens 1, 3, 4; gamma = lam = 0.5
    # delta: 0 + 0.5 * 4 - 2 = 0;  1 + 0.5 * 6 - 4 = 0;  10 - 6 = 4
    # advantage: 4;  0 + 0.25 * 4 = 1;  0 + 0.25 * 1 = 0.25
    rewards = torch.tensor([nan, 0.0, nan, 1.0, 10.0])
    values = torch.tensor([nan, 2.0, nan, 4.0, 6.0])
    mask = torch.tensor([False, True, False, True, True])
    advantages, returns = gae(rewards, values, mask, torch.tensor([0, 5]), 0.5, 0.5)
    assert advantages.tolist() == [0.0, 0.25, 0.0, 1.0, 4.0]
    assert returns.tolist() == [0.0, 2.25, 0.0, 5.0, 10.0]


def test_gamma_and_lambda_one_is_the_reward_to_go():
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0])
    values = torch.tensor([0.5, 0.25, -1.0, 3.0])
    mask = torch.ones(4, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, torch.tensor([0, 3, 4]), 1.0, 1.0)
    assert returns.tolist() == [3.0, 3.0, 2.0, 5.0]
    assert advantages.tolist() == [2.5, 2.75, 3.0, 2.0]


def test_empty_batches_and_rows():
    nothing = torch.zeros(0)
    advantages, returns = gae(nothing, nothing, nothing.bool(), torch.tensor([0]), 1.0, 0.95)
    assert advantages.shape == returns.shape == (0,)
    unmasked = torch.full((2,), nan)
    advantages, returns = gae(
        unmasked, unmasked, torch.zeros(2, dtype=torch.bool), torch.tensor([0, 0, 2]), 1.0, 0.95
    )
    assert advantages.tolist() == returns.tolist() == [0.0, 0.0]


def test_no_gradient_flows_and_dtype_is_kept():
    values = torch.ones(2, requires_grad=True)
    advantages, returns = gae(
        torch.ones(2), values, torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]), 1.0, 1.0
    )
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert advantages.dtype == torch.float32


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="one length"):
        gae(torch.ones(3), torch.ones(2), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]), 1.0, 1.0)


number = st.floats(-3, 3, width=32)
row_strategy = st.lists(st.tuples(number, number, st.booleans()), max_size=7)


@settings(max_examples=100, deadline=None)
@given(st.lists(row_strategy, min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1), st.randoms())
def test_every_row_equals_the_definition_whatever_else_is_in_the_batch(rows, gamma, lam, random):
    random.shuffle(rows)
    flat = [x for row in rows for x in row]
    mask = torch.tensor([m for _, _, m in flat], dtype=torch.bool)
    rewards = torch.tensor([r if m else nan for r, _, m in flat], dtype=torch.float64)
    values = torch.tensor([v if m else nan for _, v, m in flat], dtype=torch.float64)
    offsets = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()])
    advantages, returns = gae(rewards, values, mask, offsets, gamma, lam)
    for i, row in enumerate(rows):
        own = slice(int(offsets[i]), int(offsets[i + 1]))
        r, v, m = ([x[j] for x in row] for j in range(3))
        expected = row_gae(r, v, m, gamma, lam)
        assert advantages[own].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns[own].tolist() == pytest.approx(
            [a + b if on else 0.0 for a, b, on in zip(expected, v, m, strict=True)], abs=1e-9
        )
