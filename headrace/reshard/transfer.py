"""Executing a reshard plan: held parts copied or viewed where they lie, missing ones from rank to rank in buckets.

Point to point (`torch.distributed.batch_isend_irecv`), not `all_to_all_single`: only ranks with something for each other
take part in a bucket, so a rank without traffic does not wait, uneven counts need no padding, and pairs on one host are
not held up by the others. gloo runs the operations of a batch one by one, NCCL as one group. Both match the messages
of a pair in the order they were posted, which is the plan's on both ends; every rank finishes its buckets in ascending
order, so the rank in the lowest unfinished bucket never waits for a later one. NCCL needs a first call that all ranks
of a group make: the agreement before the first bucket is that call. Only raw tensor bytes are sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.errors import ConfigError, RunError
from headrace.reshard.box import Box
from headrace.reshard.live import local, wire_device
from headrace.reshard.plan import Entry, Plan
from headrace.reshard.schedule import ALIGN, Item, buckets

Tensors = Mapping[str, torch.Tensor]
DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class Report:
    """What one rank did. Bytes; `bytes_moved` and `bytes_minimum` are over all ranks, the others of this one."""

    rank: int
    bytes_moved: int
    bytes_minimum: int
    sent_bytes: int
    received_bytes: int
    copied_bytes: int
    """Held already and copied to their new place on the device."""
    viewed_bytes: int
    """Held already and used where they lie."""
    buckets: int
    """In which this rank sent or received."""
    staging_bytes: int
    """Both staging buffers together."""
    new_bytes: int
    """Memory of the target tensors that is not that of source tensors."""
    ms: float

    @property
    def peak_extra_bytes(self) -> int:
        """Memory beyond the source tensors at the fullest moment."""
        return self.new_bytes + self.staging_bytes


@dataclass
class Segment:
    """One contiguous stretch of a message: boxes of one tensor, one after the other."""

    tensor: torch.Tensor
    outer: Box
    boxes: list[Box]
    dtype: torch.dtype
    nbytes: int


def target_tensors(
    plan: Plan, rank: int, source: Tensors, device: torch.device | str | None = None, nest: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors a rank will hold, by target names: views of source tensors where the plan says so, new ones elsewhere.

    `device` is where the new ones are made, and that of the first source tensor when left out. Nothing is moved yet:
    `run` fills them. With `nest`, a plain contiguous source tensor that is a part of a target tensor is moved into its
    memory and becomes a view of it (`tensor.data` is replaced), so that the extra memory is that of the missing part.
    """
    found: dict[str, torch.Tensor] = {}
    for entry in plan.entries:
        needed = entry.target.box(rank)
        if needed is None:
            continue
        own = _find(source, entry.source_names)
        held = entry.source.box(rank)
        place = torch.device(device) if device is not None else _device(source)
        if own is not None and held is not None and entry.view(rank) and local(own).device == place:
            tensor = local(own)[needed.within(held)]
        else:
            tensor = torch.empty(needed.shape, dtype=entry.target_dtype, device=place)
            if nest and own is not None and held is not None:
                _move_into(own, held, tensor, needed)
        found.update(dict.fromkeys(entry.target_names, tensor))
    return found


def _move_into(own: torch.Tensor, held: Box, tensor: torch.Tensor, needed: Box) -> None:
    plain = type(own) in (torch.Tensor, torch.nn.Parameter) and own.dtype == tensor.dtype
    if plain and held.numel and needed.contains(held) and own.device == tensor.device:
        inside = tensor[held.within(needed)]
        if inside.is_contiguous():
            inside.copy_(own.detach())
            own.data = inside


def run(
    plan: Plan,
    rank: int,
    source: Tensors,
    target: Tensors,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> Report:
    """Fill the target tensors of this rank; to be called by all ranks of the plan, each with its own tensors.

    source, target: parameter name (any of a tied storage's) → tensor or DTensor of exactly the rank's box and dtype. A
    target may share memory with its source only where both hold the same elements. `bucket_bytes` bounds the staging
    memory, both directions together; it must be the same on all ranks. Every rank raises ConfigError when one of them
    has a wrong tensor or another plan. RunError names the peers of a bucket that failed: the group's timeout passed or
    a process ended; the target tensors are then incomplete.
    """
    started = time.perf_counter()
    bad = _violations(plan, rank, source, target)
    schedule: list[list[Item]] = []
    try:
        schedule = buckets(plan, bucket_bytes)
    except ConfigError as error:
        bad += error.violations
    _agree(plan, bucket_bytes, bad, group)
    with torch.no_grad():
        copied, viewed = _keep(plan, rank, source, target)
        exchange = Exchange(plan, rank, source, target, group)
        for number, items in enumerate(schedule):
            exchange.bucket(number, items)
    _synchronize(target)
    found = [local(t) for e in plan.entries if (t := _find(target, e.target_names)) is not None]
    return Report(
        rank=rank,
        bytes_moved=plan.bytes_moved,
        bytes_minimum=plan.bytes_minimum,
        sent_bytes=exchange.sent,
        received_bytes=exchange.received,
        copied_bytes=copied,
        viewed_bytes=viewed,
        buckets=exchange.count,
        staging_bytes=sum(b.nbytes for b in exchange.staging.values()),
        new_bytes=sum(t.nbytes for t in found) - viewed,
        ms=(time.perf_counter() - started) * 1e3,
    )


class Exchange:
    """The buckets of one rank, through one staging buffer a direction that grows to the largest bucket."""

    def __init__(
        self, plan: Plan, rank: int, source: Tensors, target: Tensors, group: dist.ProcessGroup | None
    ) -> None:
        self.plan, self.rank, self.source, self.target, self.group = plan, rank, source, target, group
        self.device = _device(target) if target else _device(source)
        self.staging: dict[str, torch.Tensor] = {}
        self.sent = self.received = self.count = 0
        self._own: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def bucket(self, number: int, items: list[Item]) -> None:
        """Send and receive what this rank has in a bucket; returns when the staging buffers are free again."""
        outgoing, incoming = self._messages(items)
        if not outgoing and not incoming:
            return
        self.count += 1
        arrivals = self._lay_out("receive", incoming)
        departures = self._lay_out("send", outgoing)
        for peer, segments in outgoing.items():
            for segment, flat in zip(segments, _cut(departures[peer], segments), strict=True):
                _pack(segment, flat)
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
            for segment, flat in zip(segments, _cut(arrivals[peer], segments), strict=True):
                _unpack(segment, flat)
        self.sent += sum(wire.numel() for wire in departures.values())
        self.received += sum(wire.numel() for wire in arrivals.values())

    def _messages(self, items: list[Item]) -> tuple[dict[int, list[Segment]], dict[int, list[Segment]]]:
        """Peer → what goes to it, peer → what comes from it, both by falling element size so that all stay aligned."""
        outgoing: dict[int, list[Segment]] = {}
        incoming: dict[int, list[Segment]] = {}
        for item in items:
            entry = self.plan.entries[item.entry]
            sends, receives = self._transfers(entry)
            if sends:
                tensor = local(_required(self.source, entry.source_names))
                for t in sends:
                    peer = int(entry.pairing.receiver[t])
                    _add(outgoing, peer, tensor, entry.source.box(self.rank), entry, t, item)
            if receives:
                tensor = local(_required(self.target, entry.target_names))
                for t in receives:
                    peer = int(entry.phase.sender[t])
                    _add(incoming, peer, tensor, entry.target.box(self.rank), entry, t, item)
        for messages in (outgoing, incoming):
            for segments in messages.values():
                segments.sort(key=lambda segment: -segment.dtype.itemsize)
        return outgoing, incoming

    def _transfers(self, entry: Entry) -> tuple[list[int], list[int]]:
        key = (id(entry.pairing), entry.turn % entry.pairing.period)
        if key not in self._own:
            sends, receives = entry.phase.of(self.rank, entry.pairing.receiver)
            self._own[key] = sends.tolist(), receives.tolist()
        return self._own[key]

    def _lay_out(self, direction: str, messages: dict[int, list[Segment]]) -> dict[int, torch.Tensor]:
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


def _add(
    messages: dict[int, list[Segment]],
    peer: int,
    tensor: torch.Tensor,
    outer: Box | None,
    entry: Entry,
    transfer: int,
    item: Item,
) -> None:
    box = entry.pairing.box(transfer)
    begin, end = item.span(box.numel)
    if outer is not None and begin < end:
        boxes = list(box.flat_range(begin, end))
        nbytes = (end - begin) * entry.wire_dtype.itemsize
        messages.setdefault(peer, []).append(Segment(tensor, outer, boxes, entry.wire_dtype, nbytes))


def _cut(wire: torch.Tensor, segments: list[Segment]) -> list[torch.Tensor]:
    return list(wire.split([segment.nbytes for segment in segments]))


def _pack(segment: Segment, flat: torch.Tensor) -> None:
    for box, part in zip(segment.boxes, _parts(segment, flat), strict=True):
        part.copy_(segment.tensor[box.within(segment.outer)])  # rounds to the dtype on the wire


def _unpack(segment: Segment, flat: torch.Tensor) -> None:
    for box, part in zip(segment.boxes, _parts(segment, flat), strict=True):
        segment.tensor[box.within(segment.outer)].copy_(part)


def _parts(segment: Segment, flat: torch.Tensor) -> list[torch.Tensor]:
    values = flat.view(segment.dtype)
    pieces = values.split([box.numel for box in segment.boxes])
    return [piece.view(box.shape) for piece, box in zip(pieces, segment.boxes, strict=True)]


def _keep(plan: Plan, rank: int, source: Tensors, target: Tensors) -> tuple[int, int]:
    """Copy what is held to its place, unless it lies there; (bytes copied, bytes that lay there)."""
    copied = viewed = 0
    for entry in plan.entries:
        held, needed, shared = _held(entry, rank)
        if held is None or needed is None or shared is None:
            continue
        here = local(_required(source, entry.source_names))[shared.within(held)]
        there = local(_required(target, entry.target_names))[shared.within(needed)]
        if _same_memory(here, there):
            viewed += there.nbytes
        else:
            there.copy_(here)
            copied += there.nbytes
    return copied, viewed


def _held(entry: Entry, rank: int) -> tuple[Box | None, Box | None, Box | None]:
    held, needed = entry.source.box(rank), entry.target.box(rank)
    shared = held.intersect(needed) if held is not None and needed is not None else None
    return held, needed, shared


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    steps = [[n for n, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (a, b)]
    return (a.data_ptr(), a.dtype, a.device, steps[0]) == (b.data_ptr(), b.dtype, b.device, steps[1])


def _violations(plan: Plan, rank: int, source: Tensors, target: Tensors) -> list[str]:
    """Tensors of this rank that are missing, of the wrong shape or dtype, or that lie across each other."""
    found: list[str] = []
    if dist.is_initialized() and rank != dist.get_rank():
        found.append(f"run was called for rank {rank} by rank {dist.get_rank()}")
    for entry in plan.entries:
        held, needed, shared = _held(entry, rank)
        sides = (
            ("source", source, entry.source_names, held, entry.source_dtype),
            ("target", target, entry.target_names, needed, entry.target_dtype),
        )
        wrong = len(found)
        for side, tensors, names, box, dtype in sides:
            tensor = _find(tensors, names)
            if box is None or (box.numel == 0 and tensor is None):
                continue
            if tensor is None:
                found.append(f"rank {rank}: {side} tensor {entry.name} is missing")
            elif tuple(local(tensor).shape) != box.shape or tensor.dtype != dtype:
                found.append(
                    f"rank {rank}: {side} tensor {entry.name} is {tensor.dtype} of shape"
                    f" {tuple(local(tensor).shape)}, the plan says {dtype} of shape {box.shape}"
                )
        if len(found) == wrong and held is not None and needed is not None and held.numel and needed.numel:
            here = local(_required(source, entry.source_names))
            there = local(_required(target, entry.target_names))
            if here.untyped_storage().data_ptr() != there.untyped_storage().data_ptr():
                continue
            if shared is None or not (held.contains(needed) or needed.contains(held)):
                alike = False
            else:
                alike = _same_memory(here[shared.within(held)], there[shared.within(needed)])
            if not alike:
                found.append(f"rank {rank}: target tensor {entry.name} lies across its source's memory")
    return found


def _agree(plan: Plan, bucket_bytes: int, bad: list[str], group: dist.ProcessGroup | None) -> None:
    """All ranks have the same plan and good tensors, or all of them raise. The first call that NCCL wants of all."""
    if not dist.is_initialized():
        if plan.world > 1:
            bad = [*bad, f"a plan of {plan.world} ranks needs torch.distributed: init_process_group first"]
        if bad:
            raise ConfigError(bad)
        return
    digest = plan.digest ^ bucket_bytes
    state = torch.tensor([digest, -digest, len(bad)], dtype=torch.int64, device=wire_device(group))
    try:
        dist.all_reduce(state, dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise RunError(
            f"resharding did not start: not all ranks came: {str(error).splitlines()[0]}"
        ) from error
    highest, lowest, worst = state.tolist()
    if bad:
        raise ConfigError(bad)
    if highest != -lowest:
        raise ConfigError("the ranks were given different reshard plans or bucket_bytes")
    if worst:
        raise ConfigError(
            "another rank was given tensors that do not fit the reshard plan; its message says which"
        )


def _find(tensors: Tensors, names: tuple[str, ...]) -> torch.Tensor | None:
    return next((tensors[name] for name in names if name in tensors), None)


def _required(tensors: Tensors, names: tuple[str, ...]) -> torch.Tensor:
    tensor = _find(tensors, names)
    if tensor is None:
        raise ConfigError(f"tensor {names[0]} is missing")
    return tensor


def _device(tensors: Tensors) -> torch.device:
    return next((t.device for t in tensors.values()), torch.device("cpu"))


def _synchronize(target: Tensors) -> None:
    """Milliseconds count until the last byte is there."""
    if _device(target).type == "cuda":
        torch.cuda.synchronize(_device(target))
