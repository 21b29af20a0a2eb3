"""Executing a reshard plan: held parts copied or viewed where they lie, missing ones from rank to rank in buckets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.errors import ConfigError, RunError
from headrace.reshard.among import Among
from headrace.reshard.box import Box
from headrace.reshard.exchange import Exchange, Tensors, find, required
from headrace.reshard.live import local
from headrace.reshard.plan import Entry, Plan
from headrace.reshard.schedule import Item, buckets

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
        own = find(source, entry.source_names)
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
    ranks: Sequence[int] | None = None,
) -> Report:
    """Fill the target tensors of this rank; to be called by all `ranks`, each with its own tensors.

    `ranks` (default: all of the group) must be those that hold a part in one of the layouts.

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
    _agree(plan, bucket_bytes, bad, group, ranks)
    with torch.no_grad():
        copied, viewed = _keep(plan, rank, source, target)
        exchange = Exchange(plan, rank, source, target, _device(target or source), group)
        for number, items in enumerate(schedule):
            exchange.bucket(number, items)
    _synchronize(target)
    found = [local(t) for e in plan.entries if (t := find(target, e.target_names)) is not None]
    return Report(
        rank=rank,
        bytes_moved=plan.bytes_moved,
        bytes_minimum=plan.bytes_minimum,
        sent_bytes=exchange.sent_bytes,
        received_bytes=exchange.received_bytes,
        copied_bytes=copied,
        viewed_bytes=viewed,
        buckets=exchange.buckets,
        staging_bytes=sum(b.nbytes for b in exchange.staging.values()),
        new_bytes=sum(t.nbytes for t in found) - viewed,
        ms=(time.perf_counter() - started) * 1e3,
    )


def _keep(plan: Plan, rank: int, source: Tensors, target: Tensors) -> tuple[int, int]:
    """Copy what is held to its place, unless it lies there; (bytes copied, bytes that lay there)."""
    copied = viewed = 0
    for entry in plan.entries:
        held, needed, shared = _held(entry, rank)
        if held is None or needed is None or shared is None:
            continue
        here = local(required(source, entry.source_names))[shared.within(held)]
        there = local(required(target, entry.target_names))[shared.within(needed)]
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
    """Tensors of this rank that are missing, of the wrong shape or dtype, untied, or that lie across each other."""
    found: list[str] = []
    if dist.is_initialized() and (rank, plan.world) != (dist.get_rank(), dist.get_world_size()):
        ranks = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        found.append(f"run was called for rank {rank} of a plan for {plan.world} ranks by {ranks}")
        return found
    for entry in plan.entries:
        held, needed, _ = _held(entry, rank)
        wrong = [
            *_unfit("source", source, entry.source_names, held, entry.source_dtype),
            *_unfit("target", target, entry.target_names, needed, entry.target_dtype),
        ] or _across(entry, rank, source, target)
        found += [f"rank {rank}: {sentence}" for sentence in wrong]
    return found


def _unfit(
    side: str, tensors: Tensors, names: tuple[str, ...], box: Box | None, dtype: torch.dtype
) -> list[str]:
    """What is wrong with a rank's tensor of one storage, where it is to hold `box`."""
    there = {name: local(tensors[name]) for name in names if name in tensors}
    if box is None or (box.numel == 0 and not there):
        return []
    if not there:
        return [f"{side} tensor {names[0]} is missing"]
    first, *others = there.values()
    if any(other.data_ptr() != first.data_ptr() for other in others):
        return [f"{side} tensors {' and '.join(there)} are tied in the layout, and two tensors here"]
    if tuple(first.shape) != box.shape or first.dtype != dtype:
        name = next(iter(there))
        return [
            f"{side} tensor {name} is {first.dtype} of shape {tuple(first.shape)},"
            f" the plan says {dtype} of shape {box.shape}"
        ]
    return []


def _across(entry: Entry, rank: int, source: Tensors, target: Tensors) -> list[str]:
    """Whether the target tensor shares memory with its source without holding the same elements there."""
    held, needed, shared = _held(entry, rank)
    if held is None or needed is None or not held.numel or not needed.numel:
        return []
    sentence = f"target tensor {entry.name} lies across its source's memory"
    here, there = local(required(source, entry.source_names)), local(required(target, entry.target_names))
    if here.untyped_storage().data_ptr() != there.untyped_storage().data_ptr():
        return []
    if shared is not None and (held.contains(needed) or needed.contains(held)):
        alike = _same_memory(here[shared.within(held)], there[shared.within(needed)])
        return [] if alike else [sentence]
    return [sentence]


def _agree(
    plan: Plan,
    bucket_bytes: int,
    bad: list[str],
    group: dist.ProcessGroup | None,
    ranks: Sequence[int] | None,
) -> None:
    """All ranks have the same plan and good tensors, or all of them raise."""
    if not dist.is_initialized() and plan.world > 1:
        bad = [*bad, f"a plan of {plan.world} ranks needs torch.distributed: init_process_group first"]
        raise ConfigError(bad)
    digest = plan.digest ^ bucket_bytes
    try:
        highest, lowest, worst = Among(ranks, group).largest([digest, -digest, len(bad)])
    except RunError as error:
        raise RunError(f"resharding did not start: not all ranks came: {error}") from error
    if bad:
        raise ConfigError(bad)
    if highest != -lowest:
        raise ConfigError("the ranks were given different reshard plans or bucket_bytes")
    if worst:
        raise ConfigError(
            "another rank was given tensors that do not fit the reshard plan; its message says which"
        )


def _device(tensors: Tensors) -> torch.device:
    return next((t.device for t in tensors.values()), torch.device("cpu"))


def _synchronize(target: Tensors) -> None:
    """Milliseconds count until the last byte is there."""
    if _device(target).type == "cuda":
        torch.cuda.synchronize(_device(target))
