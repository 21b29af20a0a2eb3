"""One event loop in a thread of its own, for async reward functions and environments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines for synchronous callers, always on the same loop.

    A thread, because the caller may itself sit inside a running loop (a notebook); the same loop, because clients
    and locks that a reward function keeps between calls belong to the loop they were first used on.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """The coroutine's result or exception. Cancels it when the caller is interrupted, or after `timeout_s`.

        Raises TimeoutError in the latter case.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="reward-functions", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise
