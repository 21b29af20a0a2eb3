"""Ctrl-C at a safe point: the first one ends the run cleanly, the second one at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """The user asked the run to stop; raised only where nothing is half done."""


class InterruptGuard:
    """While active, SIGINT and SIGTERM only leave a request, which `check()` turns into `Interrupted`.

    A second signal raises KeyboardInterrupt where it lands. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping at the next safe point; press Ctrl-C again to stop at once")

    def check(self) -> None:
        if self.requested:
            raise Interrupted
