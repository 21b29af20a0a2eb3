from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.packing import balance_rows, pack_rows

LENGTHS = st.lists(st.integers(0, 12), max_size=9)


@given(LENGTHS, st.integers(1, 20))
def test_packs_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    packs = pack_rows(lengths, budget)
    assert sorted(r for p in packs for r in p) == list(range(len(lengths)))
    for pack in packs:
        assert pack == sorted(pack)
        assert pack
        assert sum(lengths[r] for r in pack) <= budget or len(pack) == 1
    # first fit: no two packs within the budget could have been one
    totals = [sum(lengths[r] for r in p) for p in packs]
    assert all(a + b > budget for a, b in itertools.combinations(totals, 2))


def test_first_fit_decreasing_by_hand() -> None:
    # by length: row 1 (7) opens a pack, row 3 (5) another, row 0 (3) joins the first, rows 2 (2) and 4 (2) the second
    assert pack_rows([3, 7, 2, 5, 2], 10) == [[0, 1], [2, 3, 4]]
    assert pack_rows([15, 1], 10) == [[0], [1]]
    assert pack_rows([], 10) == []
    with pytest.raises(ValueError, match="at least 1"):
        pack_rows([1], 0)


@given(LENGTHS, st.integers(1, 6))
def test_balanced_parts(lengths: list[int], parts: int) -> None:
    found = balance_rows(lengths, parts)
    assert len(found) == parts
    assert sorted(r for p in found for r in p) == list(range(len(lengths)))
    assert all(p == sorted(p) for p in found)
    assert sum(1 for p in found if not p) == max(0, parts - len(lengths))
    # the last row of the heaviest part went to a part no heavier than the mean (Graham 1966, theorem 1)
    loads = [sum(lengths[r] for r in p) for p in found]
    assert max(loads) <= sum(lengths) / parts + max(lengths, default=0) * (1 - 1 / parts) + 1e-9


def test_balance_by_hand() -> None:
    # 7 -> first, 5 -> second, 3 -> second (5 < 7), 2 -> first (7 < 8), 2 -> second (8 < 9)
    assert balance_rows([3, 7, 2, 5, 2], 2) == [[1, 2], [0, 3, 4]]
    assert balance_rows([4], 3) == [[0], [], []]
    with pytest.raises(ValueError, match="at least 1"):
        balance_rows([1], 0)
