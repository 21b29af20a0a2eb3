"""Who sends what to whom for parameters that lie alike on both sides. Pure numpy: 1,024 ranks take a second at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm

import numpy as np

from headrace.errors import ConfigError
from headrace.reshard.box import Box
from headrace.reshard.layout import Pieces


@dataclass(frozen=True)
class Phase:
    """The T transfers of a parameter with the senders chosen, and what they add up to on W ranks."""

    sender: np.ndarray
    sent: np.ndarray
    """[W] elements each rank sends."""
    received: np.ndarray
    sends: np.ndarray
    """[W] transfers each rank sends."""
    receives: np.ndarray

    def of(self, rank: int, receiver: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the transfers a rank sends, and of those it receives."""
        return np.flatnonzero(self.sender == rank), np.flatnonzero(receiver == rank)


@dataclass(eq=False)
class Pairing:
    """T transfers between two `Pieces`: transfer t takes box `start[cell[t]]` to `stop[cell[t]]` to rank `receiver[t]`.

    A box that several ranks hold is sent by one of its holders. Transfers with the same holders to choose from form a
    group; the holders take equal shares of its elements, in the order of the receivers' ranks. What cannot be shared
    equally goes round: `phase(turn)` moves on by one holder for each parameter that lies alike.
    """

    world: int
    start: np.ndarray
    stop: np.ndarray
    cell: np.ndarray
    receiver: np.ndarray
    elements: np.ndarray
    """[T] elements of each transfer."""
    holder: np.ndarray
    """The holders of all groups, one group after the other."""
    first: np.ndarray
    """[T] where the transfer's group begins in `holder`."""
    holders: np.ndarray
    """[T] how many holders its group has."""
    share: np.ndarray
    """[T] which of them sends in turn 0."""
    turns: np.ndarray
    """[T] bool: whether the sender moves on with the turn."""
    _phases: dict[int, Phase] = field(default_factory=dict)

    @cached_property
    def period(self) -> int:
        """Turns after which the senders repeat."""
        return lcm(1, *np.unique(self.holders[self.turns]).tolist())

    def phase(self, turn: int) -> Phase:
        turn %= self.period
        if turn not in self._phases:
            sender = self.holder[self.first + (self.share + self.turns * turn) % self.holders]
            self._phases[turn] = Phase(
                sender,
                _count(sender, self.world, self.elements),
                _count(self.receiver, self.world, self.elements),
                _count(sender, self.world),
                _count(self.receiver, self.world),
            )
        return self._phases[turn]

    def box(self, transfer: int) -> Box:
        cell = self.cell[transfer]
        return Box(tuple(self.start[cell].tolist()), tuple(self.stop[cell].tolist()))


def _count(rank: np.ndarray, world: int, weights: np.ndarray | None = None) -> np.ndarray:
    return np.bincount(rank, weights, minlength=world).astype(np.int64)  # float64 counts exactly to 2^53


def pair(name: str, source: Pieces, target: Pieces, hosts: Sequence[int] | None = None) -> Pairing:
    """The transfers that give every rank the part of its target box that it does not hold, each element once.

    hosts: [W] a number for each rank's host; a holder on the receiver's host is preferred. ConfigError naming the
    parameter when the target needs a part that no rank of the source holds.
    """
    world, dims = source.start.shape
    pieces, holds = _disjoint(*_unique(source))
    boxes, wants = _unique(target)
    start = np.maximum(pieces[:, None, 0], boxes[None, :, 0])  # [P, Q, D]
    stop = np.minimum(pieces[:, None, 1], boxes[None, :, 1])
    piece, box = np.nonzero((start < stop).all(axis=2))
    start, stop = start[piece, box], stop[piece, box]
    volume = (stop - start).prod(axis=1)
    needed = (boxes[:, 1] - boxes[:, 0]).prod(axis=1)
    covered = _count(box, len(boxes), volume)
    if len(boxes) and (covered != needed).any():
        q = int(np.flatnonzero(covered != needed)[0])
        raise ConfigError(
            f"parameter {name}: rank {int(np.flatnonzero(wants[q])[0])} of the target needs"
            f" {boxes[q, 0].tolist()} to {boxes[q, 1].tolist()}, and no rank of the source holds"
            f" {int(needed[q] - covered[q])} of its {int(needed[q])} elements"
        )
    cell, receiver = _missing(piece, box, holds, wants)
    return _assign(world, dims, start, stop, volume, cell, receiver, piece, holds, hosts)


def _unique(pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """([P, 2, D] the different boxes that hold something, [P, W] who holds them). A scalar counts as one dimension."""
    world, dims = pieces.start.shape
    rows = np.stack([pieces.start, pieces.stop], axis=1)
    if dims == 0:
        rows = np.tile(np.array([[0], [1]], dtype=np.int64), (world, 1, 1))
    ranks = np.flatnonzero(pieces.numel)
    flat, which = np.unique(rows[ranks].reshape(len(ranks), 2 * max(dims, 1)), axis=0, return_inverse=True)
    holds = np.zeros((len(flat), world), dtype=bool)
    holds[which.reshape(-1), ranks] = True
    return flat.reshape(-1, 2, max(dims, 1)), holds


def _disjoint(boxes: np.ndarray, holds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same boxes, cut along each other's edges when they overlap, with the holders of each part."""
    overlap = np.maximum(boxes[:, None, 0], boxes[None, :, 0]) < np.minimum(
        boxes[:, None, 1], boxes[None, :, 1]
    )
    if np.count_nonzero(overlap.all(axis=2)) == len(boxes):
        return boxes, holds
    cuts = [np.unique(boxes[:, :, d]) for d in range(boxes.shape[2])]
    start = np.stack(np.meshgrid(*(c[:-1] for c in cuts), indexing="ij"), axis=-1).reshape(-1, len(cuts))
    stop = np.stack(np.meshgrid(*(c[1:] for c in cuts), indexing="ij"), axis=-1).reshape(-1, len(cuts))
    inside = (boxes[None, :, 0] <= start[:, None]) & (stop[:, None] <= boxes[None, :, 1])
    who = inside.all(axis=2).astype(np.int64) @ holds.astype(np.int64) > 0
    some = who.any(axis=1)
    return np.stack([start, stop], axis=1)[some], who[some]


def _missing(
    piece: np.ndarray, box: np.ndarray, holds: np.ndarray, wants: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[T] cells and [T] receivers that need and lack them."""
    order, who = np.nonzero(wants)  # sorted by target box
    first = np.searchsorted(order, np.arange(len(wants)))
    many = wants.sum(axis=1)[box]
    cell = np.repeat(np.arange(len(box)), many)
    step = np.arange(len(cell)) - np.repeat(np.cumsum(many) - many, many)
    receiver = who[first[box][cell] + step]
    lacks = ~holds[piece[cell], receiver]
    return cell[lacks], receiver[lacks]


def _assign(
    world: int,
    dims: int,
    start: np.ndarray,
    stop: np.ndarray,
    volume: np.ndarray,
    cell: np.ndarray,
    receiver: np.ndarray,
    piece: np.ndarray,
    holds: np.ndarray,
    hosts: Sequence[int] | None,
) -> Pairing:
    host = np.unique(np.zeros(world) if hosts is None else np.asarray(hosts), return_inverse=True)[1].reshape(
        -1
    )
    here = np.eye(host.max(initial=0) + 1, dtype=bool)[host]  # [W, H]
    near = (holds.astype(np.int64) @ here.astype(np.int64) > 0)[piece[cell], host[receiver]]
    group = piece[cell] * (here.shape[1] + 1) + np.where(near, host[receiver] + 1, 0)
    order = np.lexsort((cell, receiver, group))
    cell, receiver, group = cell[order], receiver[order], group[order]
    keys, begin, which = np.unique(group, return_index=True, return_inverse=True)
    which = which.reshape(-1)
    chosen = [
        _holders(holds[key // (here.shape[1] + 1)], here, key % (here.shape[1] + 1)) for key in keys.tolist()
    ]
    sizes = np.array([len(c) for c in chosen], dtype=np.int64)
    offset = np.cumsum(sizes) - sizes
    elements = volume[cell]
    total = np.add.reduceat(elements, begin) if len(keys) else elements
    before = np.cumsum(elements) - elements
    middle = before - before[begin][which] + elements / 2
    share = np.minimum((middle / total[which] * sizes[which]).astype(np.int64), sizes[which] - 1)
    holder = np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)
    load = np.bincount(offset[which] + share, elements, minlength=len(holder))
    uneven = np.zeros(0, dtype=bool)
    if len(keys):
        uneven = np.maximum.reduceat(load, offset) > np.minimum.reduceat(load, offset)
    return Pairing(
        world, start[:, :dims], stop[:, :dims], cell, receiver, elements,
        holder, offset[which], sizes[which], share, uneven[which],
    )  # fmt: skip


def _holders(holds: np.ndarray, here: np.ndarray, host: int) -> np.ndarray:
    """Ranks that hold a piece; of one host, unless `host` is 0."""
    return np.flatnonzero(holds if host == 0 else holds & here[:, host - 1])
