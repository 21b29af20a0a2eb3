"""Calling a user's code with a deadline: what never returns must not hang the run."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import AgentError
from headrace.rewards.event_loop import EventLoopThread
from headrace.rewards.functions import FAILURES

MAX_STUCK = 16  # calls that may go on past their deadline before the run stops
GRACE_S = 1.0  # what cancelling may take on top of the deadlines

Call = Callable[[], Any]


@dataclass
class Outcome:
    """What a call came to: a value, an error, or neither before its deadline."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False


class Caller:
    """Runs calls, each with a deadline of `timeout_s` seconds.

    Plain functions run one after the other in one worker thread; what they return, where it can be awaited, then runs
    on one event loop, `max_concurrency` at a time. A coroutine past its deadline is cancelled. A thread cannot be:
    it is left alone (as a daemon, so that it holds up no exit), and the next call gets a new one. Code that never
    lets go of the interpreter (a regular expression that backtracks, a power with millions of digits) stops
    everything all the same; only a process of its own can be killed.
    """

    def __init__(self, timeout_s: float, max_concurrency: int) -> None:
        self.timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self._worker: _Worker | None = None
        self._loop = EventLoopThread()
        self._stuck: list[threading.Event] = []

    def run(
        self, calls: Sequence[Call], on_each: Callable[[int], None] = lambda finished: None
    ) -> list[Outcome]:
        """One outcome a call, in order. `on_each(finished)` is called after each plain call.

        Raises AgentError when too many calls are stuck.
        """
        outcomes: list[Outcome] = []
        for call in calls:
            outcomes.append(self._in_worker(call))
            on_each(len(outcomes))
        waiting = {i: o.value for i, o in enumerate(outcomes) if inspect.isawaitable(o.value)}
        if waiting:
            for i, outcome in self._on_loop(waiting).items():
                outcomes[i] = outcome
        return outcomes

    def _in_worker(self, call: Call) -> Outcome:
        if self._worker is None:
            self._worker = _Worker()
        outcome, done = self._worker.start(call)
        if done.wait(self.timeout_s):
            return outcome
        self._worker.leave()
        self._worker = None
        self._remember_stuck(done)
        return Outcome(timed_out=True)

    def _on_loop(self, waiting: dict[int, Awaitable[Any]]) -> dict[int, Outcome]:
        outcomes = {i: Outcome(timed_out=True) for i in waiting}
        done = threading.Event()

        async def run_all() -> None:
            free = asyncio.Semaphore(self.max_concurrency)

            async def one(i: int, awaitable: Awaitable[Any]) -> None:
                async with free:
                    try:
                        async with asyncio.timeout(self.timeout_s) as deadline:
                            outcomes[i] = Outcome(await awaitable)
                    except FAILURES as error:
                        # a TimeoutError of the user's own code is an error like any other
                        outcomes[i] = Outcome(timed_out=True) if deadline.expired() else Outcome(error=error)

            await asyncio.gather(*(one(i, awaitable) for i, awaitable in waiting.items()))
            done.set()

        rounds = -(-len(waiting) // self.max_concurrency)
        try:
            self._loop.run(run_all(), rounds * self.timeout_s + GRACE_S)
        except TimeoutError:
            # something blocks the loop itself, or will not be cancelled
            self._loop = EventLoopThread()
            self._remember_stuck(done)
        return dict(outcomes)

    def _remember_stuck(self, done: threading.Event) -> None:
        self._stuck = [event for event in [*self._stuck, done] if not event.is_set()]
        if len(self._stuck) >= MAX_STUCK:
            raise AgentError(
                f"{len(self._stuck)} calls of the environment are still going on after agent.timeout_s"
                f" ({self.timeout_s:g} s) and cannot be ended from outside; let it run what may not return in a process"
                " of its own and kill that"
            )


class _Worker:
    """One daemon thread that runs what it is given, in order."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Call, Outcome, threading.Event] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def start(self, call: Call) -> tuple[Outcome, threading.Event]:
        job = (call, Outcome(), threading.Event())
        self._jobs.put(job)
        return job[1], job[2]

    def leave(self) -> None:
        """The thread ends after what it is doing now."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, outcome, done = job
            try:
                outcome.value = call()
            except FAILURES as error:
                outcome.error = error
            done.set()
