"""How far ranks are, and that those that take turns together leave their work together whenever they are told to."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch

from headrace.cluster.group import WorkerGroup
from headrace.cluster.inprocess import InProcess
from headrace.cluster.layouts import resolve
from headrace.cluster.pulse import BrokenOff, Pulse
from headrace.cluster.watch import Watch
from headrace.data.batch import Batch

TOY = f"{Path(__file__).parent / 'toys.py'}:Toy"


def watch(owners: list[int]) -> Watch:
    return Watch(7, [[rank] for rank in owners], owners, lambda fraction: False)


def said(fraction: float, rows: int) -> dict[str, float]:
    return {"points": 1, "fraction": fraction, "rows": rows}


def test_rows_of_all_ranks_count_alike() -> None:
    w = watch([0, 1, 2])
    assert w.fraction is None
    w.heard(0, said(0.5, 8))  # 4 of 8, and of 16 of ranks that have not begun
    assert w.fraction == pytest.approx(4 / 24)
    w.heard(1, said(0.25, 4))  # 5 of 12, and of 6
    assert w.fraction == pytest.approx(5 / 18)
    w.heard(2, said(1.0, 2))
    assert w.fraction == pytest.approx(7 / 14)
    w.over(1)
    assert w.fraction == pytest.approx(10 / 14)
    w.heard(0, {})  # it is at another call again: what it said before stays
    w.heard(5, said(1.0, 100))  # not an owner
    assert w.fraction == pytest.approx(10 / 14)


def test_a_rank_that_was_through_at_once_is_not_taken_to_be_slow() -> None:
    w = watch([0, 1])
    w.over(1)
    w.heard(0, said(0.5, 8))
    assert w.fraction == 0.5


def test_no_rows() -> None:
    w = watch([0])
    w.heard(0, said(1.0, 0))
    assert w.fraction is None


def test_a_rank_alone_leaves_at_its_next_point_and_only_that_call() -> None:
    pulse = Pulse()
    pulse.begin(3, rows=4)
    pulse.point(0.25)
    assert pulse.read(3) == {"points": 1, "fraction": 0.25, "rows": 4}
    assert pulse.read(4) == {}
    pulse.leave_at(3, 0)
    with pytest.raises(BrokenOff, match="after turn 2"):
        pulse.point(0.5)
    pulse.end()
    assert pulse.read(3) == {}
    assert pulse.hold(3) == 0
    pulse.begin(5, rows=4)
    for _ in range(3):
        pulse.point(1.0)
    assert pulse.hold(4) == 0
    assert pulse.hold(6) == 1  # not begun: it will wait after its first turn
    pulse.point(1.0)  # call 5 goes on
    pulse.leave_at(6, None)
    pulse.begin(6, rows=4)
    pulse.point(1.0)


def rank(
    pulse: Pulse, turns: int, barrier: threading.Barrier, sleeps: random.Random, left: list[int]
) -> None:
    """Takes turns that need all ranks; notes after how many it left. A rank alone in a turn breaks the barrier."""
    time.sleep(sleeps.random() * 0.02)
    pulse.begin(1, rows=2)
    done = 0
    try:
        for turn in range(turns):
            time.sleep(sleeps.random() * 0.003)
            barrier.wait(timeout=10)
            done += 1
            pulse.point((turn + 1) / turns)
    except BrokenOff:
        pass
    finally:
        pulse.end()
    left.append(done)


@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_need_each_other_leave_after_the_same_turn(seed: int) -> None:
    """Told to at any time: before they begin, at work, as they end; some hear of it later than others."""
    chance, size, turns = random.Random(seed), 4, 25
    pulses, left = [Pulse() for _ in range(size)], []
    barrier = threading.Barrier(size)
    threads = [
        threading.Thread(target=rank, args=(p, turns, barrier, random.Random(seed * size + i), left))
        for i, p in enumerate(pulses)
    ]
    for thread in threads:
        thread.start()
    time.sleep(chance.random() * 0.1)
    points = []
    for pulse in pulses:
        points.append(pulse.hold(1))
        time.sleep(chance.random() * 0.01)
    for pulse in pulses:
        pulse.leave_at(1, max(points))
        time.sleep(chance.random() * 0.01)
    for thread in threads:
        thread.join(timeout=20)
    assert left == [min(max(points), turns) if max(points) else turns] * size


def test_held_ranks_go_on_where_the_decision_is_taken_back() -> None:
    pulses, left, barrier = [Pulse() for _ in range(2)], [], threading.Barrier(2)
    threads = [
        threading.Thread(target=rank, args=(p, 20, barrier, random.Random(i), left))
        for i, p in enumerate(pulses)
    ]
    for thread in threads:
        thread.start()
    for pulse in pulses:
        pulse.hold(1)
    time.sleep(0.1)
    assert left == []
    for pulse in pulses:
        pulse.leave_at(1, None)
    for thread in threads:
        thread.join(timeout=20)
    assert left == [20, 20]


def test_simulated_ranks_are_watched_and_broken_off() -> None:
    executor = InProcess(resolve("cpu_2", roles=["actor"]))
    group = WorkerGroup(executor, "actor")
    group.create(TOY)
    handle = group.put(Batch([1] * 4, rows={"row": torch.arange(4)}))
    arguments = {"each": 2, "seconds": 0.0, "apart": True}
    heard: list[float | None] = []

    def report(fraction: float | None) -> bool:
        heard.append(fraction)
        return False

    assert group.start("turns", handle, arguments=arguments).result(report).values == (4, 4)
    # two ranks of two rows one after the other; until the second begins, it is taken to have as many
    assert heard == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0])
    with pytest.raises(BrokenOff):
        group.start("turns", handle, arguments=arguments).result(lambda fraction: fraction == 0.625)
    assert group.start("turns", handle, arguments=arguments).result(report).values == (4, 4)
