"""Shared prompts: which tokens are computed, once each, and where every row finds them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.batch import Batch
from headrace.data.prefixes import pack_shared, prefix_groups, prefix_lengths, share_prefixes


def batch_of(rows: list[tuple[list[int], list[int]]]) -> Batch:
    return Batch.from_rows(
        {
            "input_ids": [prompt + response for prompt, response in rows],
            "response_mask": [[False] * len(p) + [True] * len(r) for p, r in rows],
        },
        dtypes={"input_ids": torch.int64, "response_mask": torch.bool},
    )


def needed_of(batch: Batch) -> torch.Tensor:
    """The tokens that predict a sampled one."""
    needed = torch.zeros(batch.num_tokens, dtype=torch.bool)
    needed[batch["response_mask"].nonzero().flatten() - 1] = True
    return needed


def test_by_hand() -> None:
    batch = batch_of([([1, 2], [3, 4]), ([1, 2], [5]), ([1, 9], [3]), ([1, 2], [6, 7, 8])])
    assert prefix_lengths(batch["response_mask"], batch.offsets).tolist() == [2, 2, 2, 2]
    assert prefix_groups(batch, prefix_lengths(batch["response_mask"], batch.offsets)) == [0, 0, 1, 0]
    shared = share_prefixes(batch, needed_of(batch))
    # the last token of a row predicts nothing; the prompt [1, 2] is computed in row 0 alone
    assert shared.lengths == [3, 2, 2, 4]
    assert batch["input_ids"][shared.computed].tolist() == [1, 2, 3, 1, 9, 6, 7]
    assert shared.expand is not None
    assert shared.expand.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 5, 6]
    assert shared.place.tolist() == [0, 1, 2, -1, 0, 1, -1, 3, 4, -1, 0, 1, 5, 6, -1]


def test_a_row_without_a_needed_token_costs_nothing() -> None:
    batch = batch_of([([1, 2], []), ([1, 2], [5])])
    shared = share_prefixes(batch, needed_of(batch))
    assert shared.lengths == [0, 2]
    assert shared.expand is None
    assert batch["input_ids"][shared.computed].tolist() == [1, 2]


def test_packing_keeps_a_prompts_rows_together_and_counts_its_tokens_once() -> None:
    prompt = [1] * 10
    batch = batch_of([(prompt, [2, 3]), ([7], [8]), (prompt, [4]), (prompt, [5, 6])])
    parts = pack_shared(batch, 15)
    assert [p["input_ids"].tolist() for p in parts] == [
        [*prompt, 2, 3, *prompt, 4, *prompt, 5, 6],
        [7, 8],
    ]
    # too small for all of them: torn between rows, each part with the prompt
    torn = pack_shared(batch, 13)
    assert sorted(p.num_rows for p in torn) == [1, 1, 2]
    assert sum(p.num_rows for p in pack_shared(batch, 1)) == 4
    with pytest.raises(ValueError, match="at least 1"):
        pack_shared(batch, 0)


rows_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.lists(st.integers(0, 3), max_size=4)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(rows=rows_strategy, budget=st.integers(1, 40))
def test_every_row_is_whole_and_nothing_is_computed_twice(rows, budget: int) -> None:
    batch = batch_of(rows)
    numbered = batch.with_columns({"number": list(range(batch.num_rows))})
    parts = pack_shared(numbered, budget)
    assert sorted(n for p in parts for n in p["number"]) == list(range(batch.num_rows))
    for part in parts:
        shared = share_prefixes(part, needed_of(part))
        ids, expand = part["input_ids"], shared.expand
        computed = ids[shared.computed]
        if part.num_rows > 1:
            assert len(computed) <= budget
        spanned = computed if expand is None else computed[expand]
        taken = 0
        for r, n in enumerate(shared.lengths):
            whole = part.row_values("input_ids", r)
            has_response = bool(part.row_values("response_mask", r).any())
            assert n == (len(whole) - 1 if has_response else 0)
            assert spanned[taken : taken + n].tolist() == whole[:n].tolist()
            place = shared.place[int(part.offsets[r]) : int(part.offsets[r + 1])]
            assert computed[place[:n]].tolist() == whole[:n].tolist()
            assert place[n:].eq(-1).all()
            taken += n
        prompts = {tuple(part.row_values("input_ids", r).tolist()[: len(rows[i][0])])
                   for r, i in enumerate(part["number"]) if rows[i][1]}  # fmt: skip
        own = sum(max(len(rows[i][1]) - 1, 0) for i in part["number"])
        assert len(computed) == sum(map(len, prompts)) + own
