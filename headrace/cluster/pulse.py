"""How far a rank is with its call, and where it breaks that off when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from headrace.errors import RunError

HOLD_S = 60.0
"""Longest wait of a rank that was told to hold; the controller answers within a few seconds."""


def nothing_more() -> None:
    pass


class BrokenOff(Exception):
    """A call was broken off because the controller asked for that; nothing came of it."""


class Pulse:
    """`begin`, `point` and `end` are for the thread that carries orders out, the rest for another one.

    A call that can be broken off says `point` after each turn of its work. Ranks whose turns need each other (tensor
    parallelism) must all leave after the same one, and say as many points. So each is told to `hold`, and answers
    after which point it will: it waits there, until `leave_at` names the last of their answers. Those before it go on
    to it, and there all leave. A rank that works alone is told to leave at point 0, which is at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._call = 0
        self._running = False
        self._points = 0
        self._fraction = 0.0
        self._rows = 0
        self._held: int | None = None
        self._leave_at: int | None = None
        self.on_point: Callable[[], None] = nothing_more
        """What else happens at a point, for an executor without threads."""

    def begin(self, call: int, rows: int) -> None:
        """`call`: its number; later calls have larger ones. `rows`: how many are worked on."""
        with self._changed:
            self._call, self._running, self._points = call, True, 0
            self._fraction, self._rows = 0.0, rows

    def end(self) -> None:
        with self._changed:
            self._running = False

    def point(self, fraction: float) -> None:
        """A turn is over, and so is `fraction` (0..1) of the work. Raises BrokenOff where the call ends here."""
        with self._changed:
            self._points += 1
            self._fraction = fraction
        self.on_point()
        with self._changed:
            if self._held != self._call:
                return
            if not self._changed.wait_for(self._told, HOLD_S):
                raise RunError("this rank was told to hold, and then nothing more")
            if self._leave_at is not None and self._points >= self._leave_at:
                raise BrokenOff(f"broken off after turn {self._points}, as it was told to")

    def _told(self) -> bool:
        return self._held is None or self._leave_at is not None

    def read(self, call: int) -> dict[str, Any]:
        """`points`, `fraction` and `rows` of a call, plain; nothing where this rank is not at it."""
        with self._changed:
            if call != self._call or not self._running:
                return {}
            return {"points": self._points, "fraction": self._fraction, "rows": self._rows}

    def hold(self, call: int) -> int:
        """After which of its points the call will wait; 0 where it is over."""
        with self._changed:
            if call < self._call or (call == self._call and not self._running):
                return 0
            self._held, self._leave_at = call, None
            return self._points + 1 if call == self._call else 1

    def leave_at(self, call: int, point: int | None) -> None:
        """The call is to be broken off after this point, or at the next if that is over; None: it is to go on."""
        with self._changed:
            self._held = None if point is None else call
            self._leave_at = point
            self._changed.notify_all()
