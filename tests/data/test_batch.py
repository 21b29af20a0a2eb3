"""The ragged batch against plain Python lists of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.batch import Batch

RowList = list[tuple[list[int], str, int]]


@st.composite
def plain_rows(draw: st.DrawFn, min_rows: int = 0) -> RowList:
    lengths = draw(st.lists(st.integers(0, 5), min_size=min_rows, max_size=7))
    counter = iter(range(1000))
    return [
        ([next(counter) for _ in range(n)], f"row {i}", draw(st.integers(0, 2)))
        for i, n in enumerate(lengths)
    ]


def to_batch(rows: RowList) -> Batch:
    return Batch.from_rows(
        {"ids": [r[0] for r in rows]},
        {"name": [r[1] for r in rows], "group": torch.tensor([r[2] for r in rows], dtype=torch.int64)},
        {"ids": torch.int64},
    )


def to_rows(batch: Batch) -> RowList:
    return [
        (batch.row_values("ids", r).tolist(), batch["name"][r], int(batch["group"][r]))
        for r in range(batch.num_rows)
    ]


@given(plain_rows())
def test_round_trip_and_shape(rows: RowList) -> None:
    batch = to_batch(rows)
    assert to_rows(batch) == rows
    assert batch.num_rows == len(rows)
    assert batch.num_tokens == sum(len(r[0]) for r in rows)
    assert batch.lengths.tolist() == [len(r[0]) for r in rows]
    assert batch.position_ids().tolist() == [t for r in rows for t in range(len(r[0]))]
    assert batch.row_ids().tolist() == [i for i, r in enumerate(rows) for _ in r[0]]


@given(plain_rows(min_rows=1), st.data())
def test_select(rows: RowList, data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    assert to_rows(to_batch(rows).select(picked)) == [rows[i] for i in picked]
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    assert to_rows(to_batch(rows).select(torch.tensor(mask))) == [
        r for r, m in zip(rows, mask, strict=True) if m
    ]


@given(st.lists(plain_rows(), min_size=1, max_size=4))
def test_concat(parts: list[RowList]) -> None:
    assert to_rows(Batch.concat([to_batch(p) for p in parts])) == [r for p in parts for r in p]


@given(plain_rows(min_rows=1), st.data())
def test_split(rows: RowList, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(rows)))
    parts = to_batch(rows).split(n)
    sizes = [p.num_rows for p in parts]
    assert len(parts) == n
    assert max(sizes) - min(sizes) <= 1
    assert [r for p in parts for r in to_rows(p)] == rows


@given(plain_rows())
def test_regroup(rows: RowList) -> None:
    groups = list(to_batch(rows).regroup("group"))
    assert [value for value, _ in groups] == list(dict.fromkeys(r[2] for r in rows))
    for value, part in groups:
        assert to_rows(part) == [r for r in rows if r[2] == value]
    by_length = dict(to_batch(rows).regroup(lambda b: b.lengths.tolist()))
    assert {k: to_rows(b) for k, b in by_length.items()} == {
        n: [r for r in rows if len(r[0]) == n] for n in {len(r[0]) for r in rows}
    }


@given(plain_rows(), st.integers(1, 12))
def test_pack(rows: RowList, budget: int) -> None:
    parts = to_batch(rows).pack(budget)
    assert sorted(r for p in parts for r in to_rows(p)) == sorted(rows)
    for part in parts:
        assert part.num_tokens <= budget or part.num_rows == 1
        assert to_rows(part) == sorted(to_rows(part), key=lambda r: int(r[1].split()[1]))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 9),
)
def test_pairs_are_never_parted(lengths: list[int], budget: int, parts: int, seed: int) -> None:
    """By budget or by number: every row once, both rows of a pair in one part, and no budget is passed needlessly."""
    pairs = [i // 2 for i in range(2 * len(lengths))]
    batch = Batch(
        [n for n in lengths for _ in range(2)],
        {"x": torch.arange(2 * sum(lengths))},
        {"pair_id": torch.tensor(pairs), "row": torch.arange(len(pairs))},
    ).select(torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)))
    for cut in (batch.pack(budget), batch.balance(parts)):
        assert sorted(r for part in cut for r in part["row"].tolist()) == list(range(len(pairs)))
        for part in cut:
            assert part.num_rows > 0
            assert all(part["pair_id"].tolist().count(p) == 2 for p in part["pair_id"].tolist())
    assert all(part.num_tokens <= budget or part.num_rows == 2 for part in batch.pack(budget))
    assert len(batch.balance(parts)) == min(parts, len(lengths))


@given(plain_rows(min_rows=1))
def test_with_columns(rows: RowList) -> None:
    batch = to_batch(rows)
    names = [r[1].upper() for r in rows]
    doubled = batch.with_columns({"double": batch["ids"] * 2, "upper": names, "name": names})
    assert doubled["double"].tolist() == [2 * t for r in rows for t in r[0]]
    assert "double" in doubled.tokens
    assert (doubled.rows["upper"], doubled.rows["name"]) == (names, names)
    assert to_rows(batch) == rows
    assert doubled.without_columns(["double", "upper"]).columns == batch.columns


def test_one_token_a_row_keeps_the_kind_of_a_column() -> None:
    batch = Batch([1, 1], {"ids": torch.tensor([4, 5])}, {"reward": torch.tensor([0.0, 1.0])})
    new = batch.with_columns({"reward": torch.tensor([2.0, 3.0]), "fresh": torch.tensor([6.0, 7.0])})
    assert "reward" in new.rows
    assert "fresh" in new.tokens


def test_hand_worked_batch() -> None:
    batch = Batch([2, 0, 3], {"ids": torch.tensor([5, 6, 7, 8, 9])}, {"n": ["a", "b", "c"]})
    assert batch.offsets.tolist() == [0, 2, 2, 5]
    assert batch.position_ids().tolist() == [0, 1, 0, 1, 2]
    assert batch.row_ids().tolist() == [0, 0, 2, 2, 2]
    turned = batch.select([2, 2, 0])
    assert turned["ids"].tolist() == [7, 8, 9, 7, 8, 9, 5, 6]
    assert turned["n"] == ["c", "c", "a"]
    assert [p["ids"].tolist() for p in batch.pack(3)] == [[7, 8, 9], [5, 6]]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Batch([2], {"ids": torch.zeros(3)}), "token column 'ids'"),
        (lambda: Batch([2], {"ids": torch.zeros(2, 1)}), "token column 'ids'"),
        (lambda: Batch([2], rows={"n": [1, 2]}), "row column 'n'"),
        (lambda: Batch([1], {"x": torch.zeros(1)}, {"x": [1]}), "'x'"),
        (lambda: Batch.from_rows({"a": [[1]], "b": [[1, 2]]}), "token column 'b'"),
        (lambda: Batch.concat([]), "at least one"),
        (lambda: Batch.concat([Batch([1], rows={"a": [1]}), Batch([1], rows={"b": [1]})]), "columns differ"),
        (lambda: Batch([1, 1]).split(3), "2 rows into 3"),
        (lambda: Batch([2, 2]).with_columns({"x": [1, 2, 3]}), "column 'x' has 3"),
        (lambda: Batch([1]).pack(0), "at least 1"),
        (lambda: Batch([1, 1]).select(torch.tensor([True])), "mask"),
    ],
)
def test_what_does_not_fit_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_unknown_column_lists_those_there_are() -> None:
    with pytest.raises(KeyError, match=r"no column 'y'.*\['x'\]"):
        Batch([0], rows={"x": [1]})["y"]
