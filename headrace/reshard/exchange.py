"""The messages of one rank: packed into a staging buffer, sent and received bucket by bucket, unpacked.

Point to point (`torch.distributed.batch_isend_irecv`), not `all_to_all_single`: only ranks with something for each other
take part in a bucket, so a rank without traffic does not wait, uneven counts need no padding, and pairs on one host are
not held up by the others. gloo runs the operations of a batch one by one, NCCL as one group. Both match the messages
of a pair in the order they were posted, which is the plan's on both ends; every rank finishes its buckets in ascending
order, so the rank in the lowest unfinished bucket never waits for a later one. Only raw tensor bytes are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.errors import ConfigError, RunError
from headrace.reshard.box import Box
from headrace.reshard.live import local
from headrace.reshard.plan import Entry, Plan
from headrace.reshard.schedule import ALIGN, Item

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A box of a tensor: where it lies in the memory of this rank, and its shape."""

    where: tuple[slice, ...]
    shape: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Slice:
    """One transfer of this rank, worked out once for all parameters that lie alike."""

    peer: int
    box: Box
    outer: Box
    """What the rank holds of the parameter."""
    whole: Part

    def parts(self, item: Item) -> list[Part]:
        """The boxes that make up an item's part of the transfer."""
        if item.parts == 1:
            return [self.whole]
        return [
            Part(box.within(self.outer), box.shape, box.numel)
            for box in self.box.flat_range(*item.span(self.whole.numel))
        ]


@dataclass(frozen=True)
class Segment:
    """One contiguous stretch of a message: parts of one tensor, one after the other."""

    tensor: torch.Tensor
    parts: list[Part]
    dtype: torch.dtype
    nbytes: int

    def pack(self, wire: torch.Tensor) -> None:
        """Copies the parts into [nbytes] uint8, rounded to the dtype of the wire."""
        for flat, part in self._pieces(wire):
            flat.copy_(self.tensor[part.where])

    def unpack(self, wire: torch.Tensor) -> None:
        """Copies [nbytes] uint8 to where the parts belong."""
        for flat, part in self._pieces(wire):
            self.tensor[part.where].copy_(flat)

    def _pieces(self, wire: torch.Tensor) -> list[tuple[torch.Tensor, Part]]:
        pieces = wire.view(self.dtype).split([part.numel for part in self.parts])
        return [(piece.view(part.shape), part) for piece, part in zip(pieces, self.parts, strict=True)]


Messages = dict[int, list[Segment]]
"""Peer → what goes there, or comes from there, in one bucket."""


class Exchange:
    """The buckets of one rank, through one staging buffer a direction that grows to the largest bucket."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source: Tensors,
        target: Tensors,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.plan, self.rank, self.source, self.target, self.group = plan, rank, source, target, group
        self.device = device
        self.staging: dict[str, torch.Tensor] = {}
        self.sent_bytes = self.received_bytes = self.buckets = 0
        self._own: dict[tuple[int, int], tuple[list[Slice], list[Slice]]] = {}

    def bucket(self, number: int, items: list[Item]) -> None:
        """Send and receive what this rank has in a bucket; returns when the staging buffers are free again.

        RunError when a peer is gone or did not come within the group's timeout.
        """
        outgoing, incoming = self.messages(items)
        if not outgoing and not incoming:
            return
        arrivals = self._lay_out("receive", incoming)
        departures = self._lay_out("send", outgoing)
        for peer, segments in outgoing.items():
            for segment, wire in zip(segments, _cut(departures[peer], segments), strict=True):
                segment.pack(wire)
        operations = [dist.P2POp(dist.irecv, wire, peer, self.group) for peer, wire in arrivals.items()]
        operations += [dist.P2POp(dist.isend, wire, peer, self.group) for peer, wire in departures.items()]
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        except RuntimeError as error:
            peers = f"it sends to {sorted(outgoing)} and receives from {sorted(incoming)}"
            raise RunError(
                f"resharding stopped on rank {self.rank} in bucket {number}: {peers}. A rank ended, failed or did not"
                f" come within the group's timeout: {str(error).splitlines()[0]}"
            ) from error
        for peer, segments in incoming.items():
            for segment, wire in zip(segments, _cut(arrivals[peer], segments), strict=True):
                segment.unpack(wire)
        self.buckets += 1
        self.sent_bytes += sum(wire.numel() for wire in departures.values())
        self.received_bytes += sum(wire.numel() for wire in arrivals.values())

    def messages(self, items: list[Item]) -> tuple[Messages, Messages]:
        """(What this rank sends, what it receives), each message by falling element size so that all stay aligned."""
        outgoing: Messages = {}
        incoming: Messages = {}
        for item in items:
            entry = self.plan.entries[item.entry]
            sends, receives = self._slices(entry)
            if sends:
                _add(outgoing, sends, local(required(self.source, entry.source_names)), entry, item)
            if receives:
                _add(incoming, receives, local(required(self.target, entry.target_names)), entry, item)
        for messages in (outgoing, incoming):
            for segments in messages.values():
                segments.sort(key=lambda segment: -segment.dtype.itemsize)
        return outgoing, incoming

    def _slices(self, entry: Entry) -> tuple[list[Slice], list[Slice]]:
        key = (id(entry.pairing), entry.turn % entry.pairing.period)
        if key not in self._own:
            pairing, phase = entry.pairing, entry.phase
            sends, receives = phase.of(self.rank, pairing.receiver)
            held, needed = entry.source.box(self.rank), entry.target.box(self.rank)
            self._own[key] = (
                [_slice(int(pairing.receiver[t]), pairing.box(t), held) for t in sends.tolist() if held],
                [_slice(int(phase.sender[t]), pairing.box(t), needed) for t in receives.tolist() if needed],
            )
        return self._own[key]

    def _lay_out(self, direction: str, messages: Messages) -> dict[int, torch.Tensor]:
        """Peer → its bytes in the staging buffer."""
        spans: dict[int, tuple[int, int]] = {}
        end = 0
        for peer, segments in messages.items():
            begin = -(-end // ALIGN) * ALIGN
            end = begin + sum(segment.nbytes for segment in segments)
            spans[peer] = (begin, end)
        buffer = self.staging.get(direction)
        if buffer is None or buffer.numel() < end:
            self.staging.pop(direction, None)
            del buffer  # before the larger one is made
            buffer = self.staging[direction] = torch.empty(end, dtype=torch.uint8, device=self.device)
        return {peer: buffer[begin:end] for peer, (begin, end) in spans.items()}


def find(tensors: Tensors, names: tuple[str, ...]) -> torch.Tensor | None:
    """The tensor of a storage, under whichever of its names it is there."""
    return next((tensors[name] for name in names if name in tensors), None)


def required(tensors: Tensors, names: tuple[str, ...]) -> torch.Tensor:
    """As `find`; ConfigError when it is missing."""
    tensor = find(tensors, names)
    if tensor is None:
        raise ConfigError(f"tensor {names[0]} is missing")
    return tensor


def _slice(peer: int, box: Box, outer: Box) -> Slice:
    return Slice(peer, box, outer, Part(box.within(outer), box.shape, box.numel))


def _add(messages: Messages, slices: list[Slice], tensor: torch.Tensor, entry: Entry, item: Item) -> None:
    for own in slices:
        begin, end = item.span(own.whole.numel)
        if begin < end:
            nbytes = (end - begin) * entry.wire_dtype.itemsize
            segment = Segment(tensor, own.parts(item), entry.wire_dtype, nbytes)
            messages.setdefault(own.peer, []).append(segment)


def _cut(wire: torch.Tensor, segments: list[Segment]) -> tuple[torch.Tensor, ...]:
    return wire.split([segment.nbytes for segment in segments])
