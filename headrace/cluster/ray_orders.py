"""Orders at ranks that are Ray actors, and who is to blame when they do not all come back."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from headrace.cluster.faults import Failure, root_cause
from headrace.cluster.watch import Watch
from headrace.cluster.wire import plain_value
from headrace.errors import WorkerError

GRACE_S = 3.0
"""After a first failure: how long the others have to say that they were the cause."""
HEARTBEATS_PER_S = 64
"""So many ranks are asked in a second, each at most once a second and, however many there are, once in BEAT_S."""
BEAT_S = 5.0
HOLD_S = 5.0
"""Longest wait for ranks to say where they will hold."""
NODE_LOST_S = 25.0
"""Longest wait for Ray to say that a node is gone whose ranks cannot be reached."""
FROZEN_S = 30.0
"""A rank that does not answer for so long, though it only has to say where it is, counts as hung."""


class RayOrders:
    """Orders given to ranks. Finds the one that is to blame when they do not all come back."""

    def __init__(
        self,
        actors: Mapping[int, Any],
        refs: Mapping[Any, int],
        timeout_s: float,
        blame: Callable[[Failure], WorkerError],
    ) -> None:
        """`actors`: all ranks. `refs`: what these orders return → rank. `blame` makes the error of the rank at fault."""
        self._actors, self.timeout_s, self._blame = actors, timeout_s, blame
        self._waiting = dict(refs)
        self._replies: dict[int, bytes] = {}
        self._failures: dict[int, Failure] = {}
        self._unreachable: set[int] = set()
        self._deadline = time.monotonic() + timeout_s
        self._pings: dict[int, Any] = {}
        self._answered: dict[int, float] = {}
        self._breaks_off = False

    def result(self, watch: Watch | None = None) -> Mapping[int, bytes]:
        import ray

        first_failure: float | None = None
        every_s = min(BEAT_S, max(1.0, len(self._waiting) / HEARTBEATS_PER_S))
        next_beat = time.monotonic() + every_s
        while self._waiting:
            now = time.monotonic()
            # Python hears of Ctrl-C only between two waits
            step = 0.2 if first_failure is not None else 0.5
            pending = list(self._waiting)
            done, _ = ray.wait(pending, num_returns=len(pending), timeout=step, fetch_local=False)
            for ref in done:
                rank = self._waiting.pop(ref)
                self._collect(ref, rank)
                if watch is not None:
                    watch.over(rank)
            if self._failures:
                first_failure = first_failure or now
                if not all(f.secondary for f in self._failures.values()) or now - first_failure > GRACE_S:
                    break
            elif now > self._deadline:
                self._find_hung(f"did not finish within {self.timeout_s:g} s")
                break
            else:
                if now > next_beat:
                    next_beat = now + every_s
                    self._beat(now, watch)
                if watch is not None and self._waiting and watch.stop() and not self._breaks_off:
                    self._breaks_off = self._break_off(watch)
        if self._failures:
            self._find_dead()
            if all(f.secondary for f in self._failures.values()) and self._waiting:
                self._find_hung("did not take part while the others waited for it")
            raise self._blame(root_cause(self._failures))
        return self._replies

    def _collect(self, ref: Any, rank: int) -> None:
        import ray

        try:
            reply = ray.get(ref)
        except ray.exceptions.ActorUnavailableError as error:
            self._failures[rank] = Failure(rank, f"it cannot be reached ({one_sentence(error)})", 0.5)
            self._unreachable.add(rank)
            return
        except ray.exceptions.RayError as error:
            self._failures[rank] = Failure(rank, f"its process died ({one_sentence(error)})", 0.0)
            return
        if reply.startswith(b'{"error"'):
            e = plain_value(reply)["error"]
            self._failures[rank] = Failure(rank, e["cause"], e["time"], e["secondary"], e.get("exit_code", 1))
        else:
            self._replies[rank] = reply

    def _beat(self, now: float, watch: Watch | None) -> None:
        """Asks the ranks at work how far they are; one that is frozen cannot say so."""
        import ray

        asked = list(self._pings.values())
        ready = set(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) if asked else set()
        for rank in self._waiting.values():
            ping = self._pings.get(rank)
            if ping is not None and ping not in ready:
                if now - self._answered[rank] > FROZEN_S:
                    self._failures[rank] = Failure(rank, f"it has not answered for {FROZEN_S:g} s", 0.0)
                continue
            if ping is not None and watch is not None:
                with contextlib.suppress(
                    ray.exceptions.RayError
                ):  # of a rank that is gone: its order says so too
                    watch.heard(rank, plain_value(ray.get(ping)))
            self._answered[rank] = now
            self._pings[rank] = self._control(rank, "pulse", 0 if watch is None else watch.call)

    def _control(self, rank: int, method: str, *arguments: Any) -> Any:
        return getattr(self._actors[rank], method).options(concurrency_group="control").remote(*arguments)

    def _break_off(self, watch: Watch) -> bool:
        """Has the ranks at work leave the call, those that take turns together after the same one (see Pulse).

        Returns whether all were told: a rank that does not say where it is leaves the others of its turns at work.
        """
        import ray

        at_work = set(self._waiting.values())
        together = [ranks for ranks in watch.turns if len(ranks) > 1]
        held = {
            self._control(rank, "hold", watch.call): rank
            for ranks in together
            for rank in ranks
            if rank in at_work
        }
        answered = ray.wait(list(held), num_returns=len(held), timeout=HOLD_S)[0] if held else []
        points: dict[int, int] = {}
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                points[held[ref]] = ray.get(ref)
        for ranks in watch.turns:
            here = [rank for rank in ranks if rank in at_work]
            last: int | None = 0
            if len(ranks) > 1:
                last = max((points[rank] for rank in here), default=0) if points.keys() >= set(here) else None
            for rank in here:
                self._control(rank, "leave_at", watch.call, last)
        return len(points) == len(held)

    def _find_hung(self, why: str) -> None:
        """Blames the ranks that neither finished nor wait for another one."""
        import ray

        ranks = list(self._waiting.values())
        asked = {
            self._actors[rank].where.options(concurrency_group="control").remote(): rank for rank in ranks
        }
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=5.0)
        waiting: dict[int, str] = {}
        for ref in silent:
            self._failures[asked[ref]] = Failure(asked[ref], f"it {why} and does not answer", 0.0)
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                place = plain_value(ray.get(ref))
                cause = f"it {why}; it is at {place['line']}"
                if place["waiting"]:
                    waiting[asked[ref]] = cause
                else:
                    self._failures[asked[ref]] = Failure(asked[ref], cause, 1.0)
        if all(f.secondary for f in self._failures.values()):
            for rank, cause in waiting.items():
                self._failures[rank] = Failure(rank, cause, 2.0)

    def _find_dead(self) -> None:
        """Blames a rank that is gone, of these orders or not: others failed when they asked it for rows.

        That it cannot be reached is known at once, why only when Ray has found its node gone.
        """
        import ray

        deadline = time.monotonic() + NODE_LOST_S
        if {rank for rank, failure in self._failures.items() if not failure.secondary} - self._unreachable:
            return
        asked = list(self._unreachable or self._actors)
        while asked:
            refs = {
                self._actors[rank].where.options(concurrency_group="control").remote(): rank for rank in asked
            }
            answered, silent = ray.wait(list(refs), num_returns=len(refs), timeout=5.0)
            # one of these orders that is silent hangs, which is found out next
            silent = [ref for ref in silent if refs[ref] not in self._waiting.values()]
            asked = [refs[ref] for ref in silent]
            for ref in answered:
                rank = refs[ref]
                try:
                    ray.get(ref)
                except ray.exceptions.ActorUnavailableError as error:
                    self._failures[rank] = Failure(rank, f"it cannot be reached ({one_sentence(error)})", 0.5)
                    asked.append(rank)
                except ray.exceptions.RayError as error:
                    self._failures[rank] = Failure(rank, f"its process died ({one_sentence(error)})", 0.0)
                    return
            if time.monotonic() > deadline:
                for ref in silent:
                    self._failures[refs[ref]] = Failure(refs[ref], "it does not answer", 0.5)
                return
            time.sleep(0.5)


def one_sentence(error: BaseException) -> str:
    """The sentence of a Ray error that says what happened."""
    whole = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    if "Traceback" in whole or "ray::" in whole:
        whole = whole.splitlines()[-1]  # what was raised; before it are Ray's own frames
    text = " ".join(whole.split())
    for mark in ("Worker exit type:", "The actor is dead because", "The actor died because"):
        if mark in text:
            text = text[text.index(mark) :]
    return text.partition("Some common causes")[0].strip()[:300]
