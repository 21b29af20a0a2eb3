"""Sharing rows out, on numbers: every row once, balance, pieces whole, order restored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cluster.shares import child_keys, rank_keys, share_out, sources
from headrace.cluster.wire import from_buffer, pack_columns, to_buffer, unpack_columns
from headrace.errors import RunError

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@given(LENGTHS, st.integers(1, 9), st.lists(st.integers(0, 6), min_size=40, max_size=40), st.booleans())
def test_every_row_goes_to_one_part_pieces_stay_whole_and_parts_are_balanced(
    lengths: list[int], parts: int, pieces: list[int], grouped: bool
) -> None:
    piece_of = pieces[: len(lengths)] if grouped else None
    shares = share_out(np.asarray(lengths, np.int64), parts, piece_of)
    assert len(shares) == parts
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lengths)))
    assert all((np.diff(s) > 0).all() for s in shares)
    named = piece_of or list(range(len(lengths)))
    assert sum(len({named[r] for r in s}) for s in shares) == len(set(named))
    weights = lengths if any(lengths) else [1] * len(lengths)
    size = {p: sum(w for w, q in zip(weights, named, strict=True) if q == p) for p in named}
    loads = [sum(weights[r] for r in s) for s in shares]
    assert max(loads) <= sum(weights) / parts + max(size.values(), default=0)


def test_tokens_are_balanced_and_not_rows() -> None:
    shares = share_out(np.asarray([90, 10, 10, 10, 30, 30]), 2)
    assert [s.tolist() for s in shares] == [[0], [1, 2, 3, 4, 5]]


def test_rows_without_tokens_are_counted() -> None:
    assert sorted(len(s) for s in share_out(np.zeros(7, np.int64), 3)) == [2, 2, 3]


@given(st.permutations(list(range(12))), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_sources_name_each_row_where_it_is(keys: list[int], part_of: list[int]) -> None:
    held = [np.asarray(keys[:5]) * 7, np.asarray([], np.int64), np.asarray(keys[5:]) * 7]
    places = rank_keys(held)
    for own, place in zip(held, places, strict=True):
        assert (place == own // 7).all()  # dense, in the order of the keys
    parts = [np.flatnonzero(np.asarray(part_of) == p) for p in range(4)]
    for part, found in zip(parts, sources(parts, [10, 11, 12], places), strict=True):
        got = [(k, places[s.worker - 10][r]) for s in found for r, k in zip(s.rows, s.places, strict=True)]
        assert sorted(k for k, _ in got) == part.tolist()
        assert all(k == p for k, p in got)
        assert found  # a part without rows still names an owner, who knows the columns


def test_a_row_held_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="held twice"):
        rank_keys([np.asarray([3, 1]), np.asarray([1])])


def test_children_stand_where_their_parents_stood() -> None:
    keys = child_keys(np.asarray([5, 2]), [0, 0, 1, 1, 0])
    assert np.argsort(keys).tolist() == [2, 3, 0, 1, 4]
    with pytest.raises(ValueError, match="generations"):
        child_keys(child_keys(child_keys(np.asarray([9]), [0]), [0]), [0])


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8],
)
@pytest.mark.parametrize("shape", [(6,), (0,), (2, 3), (0, 4)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    back = from_buffer(to_buffer(tensor), dtype, shape)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(
        back.view(torch.uint8) if shape[0] else back, tensor.view(torch.uint8) if shape[0] else tensor
    )
    assert shape[0] == 0 or back.data_ptr() != tensor.data_ptr()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(PLAIN, max_size=5))
def test_lists_come_back_as_they_were(values: list[object]) -> None:
    assert unpack_columns(pack_columns({"c": values})) == {"c": values}


def test_half_a_surrogate_pair_survives() -> None:
    assert unpack_columns(pack_columns({"c": ["\ud800"]})) == {"c": ["\ud800"]}


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, {1, 2}, b"x", [[{"a": (1,)}]], torch.zeros(2)])
def test_what_would_not_come_back_is_refused_by_name(value: object) -> None:
    with pytest.raises(RunError, match="column 'c'"):
        pack_columns({"c": [value]})
