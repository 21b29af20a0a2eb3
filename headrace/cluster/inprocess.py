"""The executor without services: the worker lives in this process, and its rows never leave it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import partial

from headrace.cluster.placement import Placement
from headrace.cluster.pulse import Pulse, nothing_more
from headrace.cluster.watch import Watch
from headrace.cluster.wire import Message
from headrace.cluster.worker import Site, Worker
from headrace.cluster.workers import Executor, Pending


class InProcess(Executor):
    """One worker on one device. What its object raises passes through unchanged, with a note.

    A placement with several devices gives simulated ranks that take turns, without torch.distributed: the same orders
    and the same movement of rows, for tests and for measuring the controller.
    """

    def __init__(self, placement: Placement, device: str | None = None, timeout_s: float = 1800.0) -> None:
        super().__init__(placement, timeout_s)
        host = socket.gethostname()
        default = "cpu" if placement.device == "cpu" else "cuda:0"
        self.workers: list[Worker] = []
        for seat in placement.seats:
            site = Site(
                seat.rank,
                placement.world,
                seat.group,
                seat.group_rank,
                placement.ranks(seat.group),
                host,
                device or default,
            )
            self.workers.append(Worker(site, self))
        self._queue: list[_Turn] = []

    def submit(self, orders: Mapping[int, bytes], what: str, timeout_s: float | None = None) -> Pending:
        turn = _Turn(self, orders, what)
        self._queue.append(turn)
        return turn

    def run_until(self, turn: _Turn, watch: Watch | None) -> None:
        """Carries out the orders given so far, up to and with those of `turn`."""
        while turn.replies is None:
            now = self._queue.pop(0)
            now.run(watch if now is turn else None)

    def ask(self, requests: Sequence[tuple[int, str, Message]]) -> list[Message]:
        return [self.workers[rank].serve(topic, message) for rank, topic, message in requests]

    def close(self) -> None:
        self.workers.clear()
        self._queue.clear()


class _Turn:
    def __init__(self, executor: InProcess, orders: Mapping[int, bytes], what: str) -> None:
        self.executor, self.orders, self.what = executor, orders, what
        self.replies: dict[int, bytes] | None = None

    def run(self, watch: Watch | None) -> None:
        replies: dict[int, bytes] = {}
        # each group's first worker plans for the others, so its turn comes first
        for rank, order in sorted(self.orders.items()):
            worker = self.executor.workers[rank]
            if watch is not None:
                worker.site.pulse.on_point = partial(_tell, watch, rank, worker.site.pulse)
            try:
                replies[rank] = worker.run(order)
                if watch is not None:
                    watch.over(rank)
            except Exception as error:
                error.add_note(f"in {self.what} of worker {rank}")
                raise
            finally:
                worker.site.pulse.on_point = nothing_more
        self.replies = replies

    def result(self, watch: Watch | None = None) -> Mapping[int, bytes]:
        self.executor.run_until(self, watch)
        return self.replies or {}


def _tell(watch: Watch, rank: int, pulse: Pulse) -> None:
    """At a point of a rank, which is alone as long as it has its turn."""
    watch.heard(rank, pulse.read(watch.call))
    if watch.stop():
        pulse.leave_at(watch.call, 0)
