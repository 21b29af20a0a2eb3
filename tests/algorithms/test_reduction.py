from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.reduction import reduction_counts, token_weights

REDUCTIONS = ["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"]


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])


@pytest.mark.parametrize(
    "reduction, expected",
    [
        ("token_mean", 1.0),  # 4 / 4 tokens
        ("sequence_mean", 2.0),  # (4 + 0) / 2 rows
        ("sequence_mean_token_sum", 2.0),
        ("constant", 0.5),  # 4 / (2 rows * 4)
    ],
)
def test_one_long_and_one_short_row(reduction, expected):
    loss = torch.tensor([4.0, 0.0, 0.0, 0.0])
    weights = token_weights(torch.ones(4, dtype=torch.bool), offsets_of([1, 3]), reduction, divisor_tokens=4)
    assert weights.dtype == torch.float32
    assert (weights * loss).sum().item() == expected


def test_three_losses_by_hand():
    # rows [prompt, 1, 2] and [prompt, tool, 6] and one without a sampled token
    loss = torch.tensor([9.0, 1.0, 2.0, 9.0, 9.0, 6.0, 9.0])
    mask = torch.tensor([False, True, True, False, False, True, False])
    offsets = offsets_of([3, 3, 1])
    value = {r: (loss * token_weights(mask, offsets, r, divisor_tokens=10)).sum().item() for r in REDUCTIONS}
    assert value == pytest.approx(
        {"token_mean": 3.0, "sequence_mean": 3.75, "sequence_mean_token_sum": 4.5, "constant": 0.45}
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_masked_in_is_zero_and_not_nan(reduction):
    mask = torch.zeros(5, dtype=torch.bool)
    assert token_weights(mask, offsets_of([2, 3]), reduction, divisor_tokens=4).tolist() == [0.0] * 5
    assert token_weights(mask[:0], offsets_of([]), reduction, divisor_tokens=4).tolist() == []
    # a rank without a sampled token, while others have some
    weights = token_weights(
        mask, offsets_of([2, 3]), reduction, divisor_tokens=4, total_tokens=9, total_rows=2
    )
    assert weights.tolist() == [0.0] * 5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_split_over_ranks_gives_the_same_loss_and_gradient(data):
    rows = data.draw(st.lists(st.lists(st.booleans(), min_size=0, max_size=6), min_size=1, max_size=6))
    reduction = data.draw(st.sampled_from(REDUCTIONS))
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    seeds = torch.Generator().manual_seed(0)
    losses = [torch.randn(len(r), generator=seeds, dtype=torch.float64) for r in rows]

    # the definition, row by row, in float64
    counted = [(x, torch.tensor(r, dtype=torch.bool)) for x, r in zip(losses, rows, strict=True) if any(r)]
    n_tokens = sum(int(m.sum()) for _, m in counted)
    n_rows = len(counted)
    expected = 0.0
    for x, m in counted:
        s = float(x[m].sum())
        expected += {
            "token_mean": s / n_tokens,
            "sequence_mean": s / int(m.sum()) / n_rows,
            "sequence_mean_token_sum": s / n_rows,
            "constant": s / 8 / n_rows,
        }[reduction]

    total = 0.0
    gradients: dict[int, list[float]] = {}
    bounds = [0, *cuts, len(rows)]
    for start, end in itertools.pairwise(bounds):
        part = [order[i] for i in range(start, end)]
        mask = torch.tensor([v for i in part for v in rows[i]], dtype=torch.bool)
        x = torch.cat([losses[i] for i in part] or [torch.zeros(0, dtype=torch.float64)]).requires_grad_()
        offsets = offsets_of([len(rows[i]) for i in part])
        weights = token_weights(
            mask, offsets, reduction, divisor_tokens=8, total_tokens=n_tokens, total_rows=n_rows
        )
        loss = (x * weights).sum()
        loss.backward()
        total += loss.item()
        for j, i in enumerate(part):
            gradients[i] = x.grad[offsets[j] : offsets[j + 1]].tolist()
    assert total == pytest.approx(expected, rel=1e-5, abs=1e-6)

    whole_mask = torch.tensor([v for r in rows for v in r], dtype=torch.bool)
    whole = token_weights(whole_mask, offsets_of([len(r) for r in rows]), reduction, divisor_tokens=8)
    assert [v for i in range(len(rows)) for v in gradients[i]] == whole.double().tolist()


def test_counts():
    mask = torch.tensor([True, False, False, True, True])
    assert reduction_counts(mask, offsets_of([2, 1, 0, 2])) == (3, 2)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"reduction": "constant"}, "divisor_tokens"),
        ({"reduction": "constant", "divisor_tokens": 0}, "divisor_tokens"),
        ({"reduction": "mean"}, "unknown reduction 'mean'"),
        ({"reduction": "token_mean", "total_tokens": 2}, "total_tokens is 2"),
        ({"reduction": "sequence_mean", "total_rows": 1}, "total_rows is 1"),
        ({"reduction": "token_mean", "offsets": torch.tensor([0, 2])}, "offsets"),
        ({"reduction": "token_mean", "mask": torch.ones(3)}, "bool"),
    ],
)
def test_bad_arguments(arguments, words):
    base = {"mask": torch.ones(3, dtype=torch.bool), "offsets": offsets_of([1, 2])}
    with pytest.raises(ValueError, match=words):
        token_weights(**(base | arguments))
