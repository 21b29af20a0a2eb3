"""Deadlines: what never returns does not hang the run."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from headrace.agents import calls
from headrace.agents.calls import Caller
from headrace.errors import AgentError


def test_values_and_errors_in_order_one_after_the_other_in_one_thread() -> None:
    threads: list[str] = []

    def one(n: int) -> int:
        threads.append(threading.current_thread().name)
        return 10 // n

    def leave() -> None:
        raise SystemExit("usage")

    finished: list[int] = []
    outcomes = Caller(5, 4).run([lambda: one(2), lambda: one(0), leave, lambda: one(5)], finished.append)
    assert [o.value for o in outcomes] == [5, None, None, 2]
    assert [type(o.error) for o in outcomes] == [type(None), ZeroDivisionError, SystemExit, type(None)]
    assert set(threads) == {"environment"}
    assert finished == [1, 2, 3, 4]


def test_a_call_that_never_returns_costs_its_deadline_only() -> None:
    caller, release = Caller(0.2, 4), threading.Event()
    started = time.perf_counter()
    outcomes = caller.run([lambda: 1, release.wait, lambda: 3])
    assert time.perf_counter() - started < 2
    assert [(o.value, o.timed_out) for o in outcomes] == [(1, False), (None, True), (3, False)]
    release.set()


def test_coroutines_run_together_and_are_cancelled_at_the_deadline() -> None:
    together = asyncio.Semaphore(0)
    cancelled: list[bool] = []

    async def waits_for_the_other() -> str:
        await together.acquire()
        return "met"

    async def meets() -> str:
        together.release()
        return "gave"

    async def never() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)

    async def own_timeout() -> None:
        raise TimeoutError("the server did not answer")

    outcomes = Caller(0.5, 8).run([waits_for_the_other, meets, never, own_timeout])
    assert [o.value for o in outcomes] == ["met", "gave", None, None]
    assert [o.timed_out for o in outcomes] == [False, False, True, False]
    assert isinstance(outcomes[3].error, TimeoutError)
    assert cancelled == [True]


def test_a_coroutine_that_blocks_the_loop_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.1)
    caller, release = Caller(0.2, 8), threading.Event()

    async def blocks() -> None:
        release.wait()

    async def fine() -> int:
        return 1

    assert caller.run([blocks])[0].timed_out
    assert caller.run([fine])[0].value == 1  # on a loop of its own
    release.set()


def test_too_many_stuck_calls_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_STUCK", 3)
    caller, release = Caller(0.05, 8), threading.Event()
    with pytest.raises(AgentError, match="3 calls of the environment are still going on"):
        caller.run([release.wait] * 5)
    release.set()


def test_calls_that_come_back_late_are_not_counted_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_STUCK", 2)
    caller = Caller(0.1, 8)
    for _ in range(3):
        assert caller.run([lambda: time.sleep(0.15)])[0].timed_out
        time.sleep(0.2)
