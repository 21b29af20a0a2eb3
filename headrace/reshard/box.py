"""A box: the part of a parameter that a rank holds, from `start` to `stop` in every dimension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """Elements `start[d] <= index < stop[d]` of each dimension d of a parameter; of a scalar, the one there is."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def contains(self, other: Box) -> bool:
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """What both hold, or None when that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that holds `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))

    def flat_range(self, begin: int, end: int) -> Iterator[Box]:
        """Boxes that together are elements `begin` to `end` of this box in row-major order, in that order.

        At most 2 D - 1 of them for D dimensions, so a range can be copied from a strided tensor without flattening it.
        """
        if begin >= end:
            return
        if begin == 0 and end == self.numel:
            yield self
            return
        row = self.numel // (self.stop[0] - self.start[0])
        first, last = -(-begin // row), end // row  # whole rows
        if first > last:  # inside one row
            yield from self._row(last, begin - last * row, end - last * row)
            return
        if begin < first * row:
            yield from self._row(first - 1, begin - (first - 1) * row, row)
        if first < last:
            yield Box((self.start[0] + first, *self.start[1:]), (self.start[0] + last, *self.stop[1:]))
        if last * row < end:
            yield from self._row(last, 0, end - last * row)

    def _row(self, index: int, begin: int, end: int) -> Iterator[Box]:
        at = self.start[0] + index
        for inner in Box(self.start[1:], self.stop[1:]).flat_range(begin, end):
            yield Box((at, *inner.start), (at + 1, *inner.stop))
