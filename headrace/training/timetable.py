"""Which micro-batch each rank of a pipeline works on, and when: 1F1B, and its interleaved form.

PipeDream-Flush: https://arxiv.org/abs/2006.09503, figure 4; interleaved: https://arxiv.org/abs/2104.04473, section 2.2.
With M micro-batches on P ranks that have V chunks each, a rank idles for (P - 1) / V of the time that M take it, and
holds the activations of at most P (interleaved, about P (1 + 1/V)) micro-batches, however many there are.

Stage s is chunk s // P of rank s % P.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    stage: int
    micro: int


Tick = tuple[Action | None, ...]
"""What each rank does in one unit of time."""


@lru_cache(maxsize=64)
def timetable(ranks: int, chunks: int, micros: int, trains: bool = True) -> tuple[Tick, ...]:
    """Ticks in which every stage does every micro-batch forward and, if it `trains`, backward, each after those that it
    needs. Any number of micro-batches."""
    waiting = [_order(ranks, chunks, micros, rank, trains) for rank in range(ranks)]
    last = ranks * chunks - 1
    done: set[Action] = set()
    ticks: list[Tick] = []
    places = [0] * ranks
    while any(place < len(own) for place, own in zip(places, waiting, strict=True)):
        tick: list[Action | None] = []
        for place, own in zip(places, waiting, strict=True):
            action = own[place] if place < len(own) else None
            ready = action is not None and all(need in done for need in needs(action, last))
            tick.append(action if ready else None)
        for rank, action in enumerate(tick):
            if action is not None:
                done.add(action)
                places[rank] += 1
        ticks.append(tuple(tick))
    return tuple(ticks)


def needs(action: Action, last: int) -> list[Action]:
    """What has to be done before."""
    kind, stage, micro = action.kind, action.stage, action.micro
    if kind == "forward":
        return [Action("forward", stage - 1, micro)] if stage > 0 else []
    own = Action("forward", stage, micro)
    return [own] if stage == last else [own, Action("backward", stage + 1, micro)]


def user(action: Action, last: int) -> Action | None:
    """What takes up what this action makes on another stage."""
    kind, stage, micro = action.kind, action.stage, action.micro
    if kind == "forward":
        return Action("forward", stage + 1, micro) if stage < last else None
    return Action("backward", stage - 1, micro) if stage > 0 else None


def _order(ranks: int, chunks: int, micros: int, rank: int, trains: bool) -> list[Action]:
    """What a rank does, in order: forward passes until the first gradient can be back, then one backward pass after each
    forward pass, then the backward passes that are left. With chunks, micro-batches go in groups of `ranks` through
    one chunk after the other; a last group that is not full goes as if it were."""
    whole = micros if chunks == 1 else -(-micros // ranks) * ranks
    turns = [(m // ranks, c, m % ranks) for m in range(whole) for c in range(chunks)]
    forward = [Action("forward", c * ranks + rank, g * ranks + m) for g, c, m in sorted(turns)]
    backward = [
        Action("backward", (chunks - 1 - c) * ranks + rank, g * ranks + m) for g, c, m in sorted(turns)
    ]
    order = forward
    if trains:
        early = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
        early = min(early, len(forward))
        order = forward[:early]
        for ahead, behind in zip(forward[early:], backward, strict=False):
            order += [ahead, behind]
        order += backward[len(forward) - early :]
    return [action for action in order if action.micro < micros]
