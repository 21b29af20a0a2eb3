"""The contract between the controller and whatever runs the workers; inprocess.py and ray.py keep it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from headrace.cluster.placement import Placement
from headrace.cluster.watch import Watch
from headrace.cluster.wire import Message
from headrace.errors import ConfigError

_ranks_here: list[int] = []


def become_worker(rank: int) -> None:
    """Says that this process is a worker of a run, for as long as it lives."""
    _ranks_here.append(rank)


def refuse_in_worker() -> None:
    """Raises ConfigError in a worker: a script that is imported there, for a function in it, must not start a run."""
    if _ranks_here:
        raise ConfigError(
            "this process is a worker of a run, which imported the script for a function in it, and the script starts a"
            " run as it is imported; put what starts it under `if __name__ == '__main__':`"
        )


@dataclass
class Traffic:
    """What went through the controller so far, in bytes.

    `data_bytes` are rows that it made or wanted itself (`put`, `fetch`); a call moves none through it.
    """

    calls: int = 0
    order_bytes: int = 0
    reply_bytes: int = 0
    data_bytes: int = 0


class Pending(Protocol):
    """Orders that are being carried out."""

    def result(self, watch: Watch | None = None) -> Mapping[int, bytes]:
        """Waits for all; the reply of each rank. Raises WorkerError for the first that failed, by name.

        `watch` hears how far ranks are, and they are told to break off when it says so: the reply of those that did is
        `{"broken_off": true}`.
        """


class Executor(ABC):
    """Runs one worker for each device of a placement. Use it in a `with` block: leaving that ends all workers."""

    def __init__(self, placement: Placement, timeout_s: float) -> None:
        """`timeout_s`: longest call, and longest wait in a collective."""
        self.placement = placement
        self.timeout_s = timeout_s
        self.traffic = Traffic()
        self._dropped: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def submit(self, orders: Mapping[int, bytes], what: str, timeout_s: float | None = None) -> Pending:
        """Gives each rank its order. `what` names the call in errors; orders of one rank run one after the other."""

    @abstractmethod
    def ask(self, requests: Sequence[tuple[int, str, Message]]) -> list[Message]:
        """Sends (rank, topic, message) to workers and returns their answers (see Worker.serve)."""

    @abstractmethod
    def close(self) -> None:
        """Ends every worker and what was started for them. May be called twice."""

    def move_logs(self, folder: Path) -> None:  # noqa: B027  most have no logs of their own
        """Has the logs of the ranks in `folder` from now on, where they have some and no place of their own."""

    def drop(self, group: str, key: str) -> None:
        """Notes that nobody needs these rows any more; the group's workers hear of it with their next order."""
        with self._lock:
            self._dropped.setdefault(group, []).append(key)

    def take_dropped(self, group: str) -> list[str]:
        with self._lock:
            return self._dropped.pop(group, [])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
