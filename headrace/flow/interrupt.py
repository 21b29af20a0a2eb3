"""Ctrl-C, or a lost terminal, at a safe point: the first signal ends the run cleanly, the second one at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """The user asked the run to stop; raised only where nothing is half done."""


class InterruptGuard:
    """While active, SIGINT, SIGTERM and SIGHUP only leave a request, which `check()` turns into `Interrupted`.

    A lost terminal (SIGHUP) stops a run as Ctrl-C does, unless it was told to outlive it (nohup). A second signal raises
    KeyboardInterrupt where it lands, but for SIGHUP, which shells and the system both send. Outside the main thread it
    does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> InterruptGuard:
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._drop_terminal()
            if self.requested:
                return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping at the next safe point; press Ctrl-C again to stop at once")

    def _drop_terminal(self) -> None:
        """Whatever is still shown goes nowhere: writing to a terminal that is gone is an error."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self._terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)

    def check(self) -> None:
        if self.requested:
            raise Interrupted
