"""Sharing rows out: which rows go to which data-parallel rank, and from which workers they come.

Pure functions of small arrays. Shapes: R rows, D data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.data.packing import balance_rows

SAMPLES_BITS = 20
"""Rows made from one row are told apart by so many low bits of their sort keys."""


def share_out(lengths: np.ndarray, parts: int, piece_of: Sequence[Any] | None = None) -> list[np.ndarray]:
    """Row numbers of each of `parts`, ascending, near-equal in tokens; some are empty where pieces are too few.

    `lengths` [R] tokens of each row; where there are none at all, rows are counted instead. Rows with the same value
    of `piece_of` [R] stay together. The fullest part holds at most the mean plus the largest piece.
    """
    rows = len(lengths)
    weights = lengths if lengths.any() else np.ones(rows, np.int64)
    if piece_of is None:
        return [np.asarray(part, np.int64) for part in balance_rows(weights.tolist(), parts)]
    number: dict[Any, int] = {}
    piece = np.asarray([number.setdefault(value, len(number)) for value in piece_of], np.int64)
    totals = np.bincount(piece, weights=weights, minlength=len(number)).astype(np.int64)
    part_of = np.zeros(len(number), np.int64)
    for part, pieces in enumerate(balance_rows(totals.tolist(), parts)):
        part_of[pieces] = part
    row_part = part_of[piece] if rows else np.zeros(0, np.int64)
    return [np.flatnonzero(row_part == part) for part in range(parts)]


@dataclass(frozen=True)
class Source:
    """Rows that one worker gives: its row numbers, and where each stands among all rows."""

    worker: int
    rows: np.ndarray
    places: np.ndarray


def rank_keys(keys: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For the sort keys of each holder's rows: the place 0 … R-1 of every row among all.

    Raises ValueError when a key comes twice.
    """
    every = np.concatenate([np.empty(0, np.int64), *keys])
    order = np.argsort(every, kind="stable")
    ordered = every[order]
    if len(ordered) > 1 and (ordered[1:] == ordered[:-1]).any():
        raise ValueError("a row is held twice")
    place = np.empty(len(every), np.int64)
    place[order] = np.arange(len(every))
    cuts = np.cumsum([len(k) for k in keys])[:-1]
    return np.split(place, cuts)


def sources(
    parts: Sequence[np.ndarray], owners: Sequence[int], places: Sequence[np.ndarray]
) -> list[list[Source]]:
    """For each part (places of its rows): the workers it gets them from. `places[i]` are those of the rows of owner i.

    Every row is taken once; owners without rows for a part are left out, except that a part without any rows
    still names the first owner, who knows the columns.
    """
    total = sum(len(p) for p in places)
    holder, local = np.empty(total, np.int64), np.empty(total, np.int64)
    for i, own in enumerate(places):
        holder[own] = i
        local[own] = np.arange(len(own))
    out: list[list[Source]] = []
    for part in parts:
        held = holder[part]
        out.append([Source(owners[i], local[part[held == i]], part[held == i]) for i in np.unique(held)])
        if not out[-1]:
            nothing = np.empty(0, np.int64)
            out[-1] = [Source(owners[0], nothing, nothing)]
    return out


def child_keys(keys: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """Sort keys of rows made from rows: those of one parent stay in order, where the parent stood.

    Raises ValueError when the keys do not fit in 63 bits.
    """
    parent = np.asarray(parents, np.int64)
    count: dict[int, int] = {}
    nth = np.empty(len(parent), np.int64)
    for i, p in enumerate(parent.tolist()):
        nth[i] = count[p] = count.get(p, -1) + 1
    top = int(keys.max(initial=0))
    if top >= 1 << (62 - SAMPLES_BITS) or int(nth.max(initial=0)) >= 1 << SAMPLES_BITS:
        raise ValueError("too many generations of rows without a split by tokens between them")
    made: np.ndarray = (keys[parent] << SAMPLES_BITS) | nth
    return made
