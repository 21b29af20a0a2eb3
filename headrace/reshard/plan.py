"""The reshard plan: which slices each rank sends, receives or already holds, between two layouts of one model.

After HybridFlow (https://arxiv.org/abs/2409.19256), section 5: what the training layout left on a device is used where it
lies, and only what is missing there moves. A plan is pure arithmetic, the same on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from headrace.errors import ConfigError
from headrace.reshard.box import Box
from headrace.reshard.layout import Layout, Pieces
from headrace.reshard.pairing import Pairing, Phase, pair


@dataclass(frozen=True)
class Transfer:
    """One box of one parameter from a rank to another; `nbytes` as sent."""

    name: str
    box: Box
    sender: int
    receiver: int
    nbytes: int


@dataclass(frozen=True)
class Alias:
    """What a rank holds already of a parameter it needs.

    With `view`, the held box has all of the needed one in the same dtype, and no memory is needed either.
    """

    name: str
    box: Box
    view: bool


@dataclass(frozen=True)
class Entry:
    """One storage of the target and where it comes from. `turn` counts the parameters before it."""

    name: str
    source_names: tuple[str, ...]
    target_names: tuple[str, ...]
    shape: tuple[int, ...]
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    source: Pieces
    target: Pieces
    pairing: Pairing
    turn: int

    @property
    def wire_dtype(self) -> torch.dtype:
        """The narrower of the two: a sender rounds float32 to bfloat16, a receiver widens bfloat16 to float32."""
        narrower = self.source_dtype.itemsize < self.target_dtype.itemsize
        return self.source_dtype if narrower else self.target_dtype

    @property
    def phase(self) -> Phase:
        return self.pairing.phase(self.turn)

    def view(self, rank: int) -> bool:
        """Whether the target tensor of a rank is a view of its source tensor."""
        held, needed = self.source.box(rank), self.target.box(rank)
        if held is None or needed is None or needed.numel == 0:
            return False
        return self.source_dtype == self.target_dtype and held.contains(needed)


@dataclass(eq=False)
class Plan:
    """`entries` in the order of the target's parameters. Arrays per rank are [W] int64, in bytes."""

    source: Layout
    target: Layout
    entries: list[Entry] = field(default_factory=list)
    hosts: tuple[int, ...] | None = None

    @cached_property
    def digest(self) -> int:
        """62 bits that are equal for equal plans."""
        text = f"{self.source.fingerprint} {self.target.fingerprint} {self.hosts}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2

    @property
    def world(self) -> int:
        return self.source.world

    @cached_property
    def sent_bytes(self) -> np.ndarray:
        """[W] bytes that each rank sends."""
        return self._sum([e.phase.sent * e.wire_dtype.itemsize for e in self.entries])

    @cached_property
    def received_bytes(self) -> np.ndarray:
        """[W] bytes that each rank receives."""
        return self._sum([e.phase.received * e.wire_dtype.itemsize for e in self.entries])

    @property
    def bytes_moved(self) -> int:
        """Bytes that leave any rank."""
        return int(self.sent_bytes.sum())

    @cached_property
    def bytes_minimum(self) -> int:
        """Bytes that no plan can go below: of every rank and parameter, what it needs less what it holds of that.

        Computed from the boxes, not from the transfers.
        """
        lacking: dict[tuple[int, int], int] = {}
        total = 0
        for e in self.entries:
            key = (id(e.source), id(e.target))
            if key not in lacking:
                lacking[key] = int((e.target.numel - _held(e.source, e.target)).sum())
            total += lacking[key] * e.wire_dtype.itemsize
        return total

    @cached_property
    def new_bytes(self) -> np.ndarray:
        """[W] memory of the target tensors that are not views of source tensors."""
        views = [_held(e.source, e.target) == e.target.numel for e in self.entries]
        same = [e.source_dtype == e.target_dtype for e in self.entries]
        return self._sum(
            [
                np.where(view & alike, 0, e.target.numel) * e.target_dtype.itemsize
                for e, view, alike in zip(self.entries, views, same, strict=True)
            ]
        )

    def transfers(self, rank: int | None = None) -> Iterator[Transfer]:
        """All transfers, or those that a rank sends or receives. For looking at: slow on a thousand ranks."""
        for e in self.entries:
            phase = e.phase
            for t in range(len(phase.sender)):
                sender, receiver = int(phase.sender[t]), int(e.pairing.receiver[t])
                if rank in (None, sender, receiver):
                    nbytes = int(e.pairing.elements[t]) * e.wire_dtype.itemsize
                    yield Transfer(e.name, e.pairing.box(t), sender, receiver, nbytes)

    def aliases(self, rank: int) -> list[Alias]:
        """What the rank holds already."""
        found = []
        for e in self.entries:
            held, needed = e.source.box(rank), e.target.box(rank)
            box = held.intersect(needed) if held is not None and needed is not None else None
            if box is not None:
                found.append(Alias(e.name, box, e.view(rank)))
        return found

    def _sum(self, arrays: list[np.ndarray]) -> np.ndarray:
        return np.sum(arrays, axis=0) if arrays else np.zeros(self.world, dtype=np.int64)


def plan(source: Layout, target: Layout, hosts: Sequence[int | str] | None = None) -> Plan:
    """How the weights get from one layout into another; the same on every rank.

    Every element a rank lacks is received once, from one of its holders: one on the same host where `hosts` ([W], a
    name or number each) says so, and the holders take turns. Parameters the target lacks are left alone; a storage with
    two names moves once. ConfigError lists every parameter that the source lacks, has in another shape, or not tied
    where the target ties it, and those the source does not hold completely.
    """
    if source.world != target.world:
        raise ConfigError(f"the source layout has {source.world} ranks and the target layout {target.world}")
    if hosts is not None and len(hosts) != source.world:
        raise ConfigError(f"hosts: {len(hosts)} for {source.world} ranks")
    if violations := _violations(source, target):
        raise ConfigError(violations)
    numbers = None if hosts is None else tuple(list(hosts).index(host) for host in hosts)
    made: dict[tuple[bytes, bytes], tuple[Pieces, Pieces, Pairing]] = {}
    entries, missing = [], []
    for turn, (name, there) in enumerate(target.parameters.items()):
        storage = source.storage(name)
        here = source.parameters[storage]
        key = (here.pieces.key, there.pieces.key)
        if key not in made:
            try:
                made[key] = here.pieces, there.pieces, pair(name, here.pieces, there.pieces, numbers)
            except ConfigError as error:
                missing += error.violations
                continue
        entries.append(
            Entry(
                name,
                tuple(source.names(storage)),
                tuple(target.names(name)),
                there.shape,
                here.dtype,
                there.dtype,
                *made[key],
                turn,
            )
        )
    if missing:
        raise ConfigError(missing)
    return Plan(source, target, entries, numbers)


def _violations(source: Layout, target: Layout) -> list[str]:
    found = []
    for name, there in target.parameters.items():
        here = source.parameters.get(source.storage(name))
        if here is None:
            found.append(f"parameter {name}: the target layout has it, the source layout does not")
        elif here.shape != there.shape:
            found.append(
                f"parameter {name}: of shape {here.shape} in the source and {there.shape} in the target"
            )
    for alias, name in target.tied.items():
        if source.storage(alias) != source.storage(name):
            found.append(f"parameters {alias} and {name} are one in the target layout and two in the source")
    return found


def _held(source: Pieces, target: Pieces) -> np.ndarray:
    """[W] elements of its target box that each rank holds."""
    size = np.minimum(source.stop, target.stop) - np.maximum(source.start, target.start)
    return np.where(source.held & target.held, np.clip(size, 0, None).prod(axis=1), 0)
