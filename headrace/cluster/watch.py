"""What the controller does while it waits for a call: it shows how far that is, and hears whether to break it off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

Report = Callable[[float | None], bool]
"""Told how much of a call is over (0..1; None where that is not known). Returns whether it is to be broken off."""


class Watch:
    """Of one call: how far its ranks are together, and which of them have to leave it together."""

    def __init__(
        self, call: int, turns: Sequence[Sequence[int]], owners: Collection[int], report: Report
    ) -> None:
        """`turns`: ranks that take each turn of the work together. `owners`: those whose rows are counted."""
        self.call, self.turns, self._report = call, turns, report
        self._owners = dict.fromkeys(owners, (0.0, 0.0))
        self._heard: set[int] = set()
        self._over: set[int] = set()

    def heard(self, rank: int, pulse: Mapping[str, Any]) -> None:
        """Notes what a rank said of itself (Pulse.read)."""
        if rank in self._owners and pulse.get("points"):
            self._owners[rank] = pulse["fraction"] * pulse["rows"], pulse["rows"]
            self._heard.add(rank)

    def over(self, rank: int) -> None:
        """Notes that a rank is done."""
        if rank in self._owners:
            rows = self._owners[rank][1]
            self._owners[rank] = rows, rows
            self._over.add(rank)

    @property
    def fraction(self) -> float | None:
        """How much is over, of the rows of all ranks. One that has not begun is taken to have as many as the others."""
        if not self._heard:
            return None
        done, rows = (sum(each) for each in zip(*self._owners.values(), strict=True))
        silent = len(self._owners.keys() - self._heard - self._over)
        rows += silent * rows / len(self._heard)
        return done / rows if rows else None

    def stop(self) -> bool:
        """Tells how far the call is. Returns whether it is to be broken off."""
        return self._report(self.fraction)
