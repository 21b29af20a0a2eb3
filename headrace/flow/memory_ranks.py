"""The memory estimate of a cluster: what each rank of each group holds, roles that share a group added up.

Parameters are cut as models/sharding.py cuts them (models/inventory.py), heads, columns and layers are a rank's own,
rows those of its data-parallel share, and tokens in a pass those of its slice. docs/report.md has the formula.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from headrace.cluster.placement import Group, Parallelism, RolePlacement
from headrace.flow.compile import CheckedFlow
from headrace.flow.memory_terms import (
    LIBRARIES,
    LIBRARY_BYTES,
    WITHOUT,
    Cut,
    Estimate,
    Load,
    Part,
    Sizes,
    add_training,
    add_weights,
    gathered_part,
    named_parts,
    rollout_parts,
    sizes_of,
    tokens_at_once,
    weights_in_turn,
)
from headrace.models.hf import resolve_dtype
from headrace.models.inventory import Inventory, Place, read_inventory
from headrace.models.sequence_parallel import kv_copies
from headrace.models.stage import split_layers
from headrace.observe.machine import host_memory
from headrace.observe.report_facts import format_bytes
from headrace.roles.role import LanguageModelRole, Role

LoadOf = Callable[[int], Load]
"""Data-parallel ranks → the load of one of them."""
LEAST = Load(longest=1, rows_per_update=1, rows_at_once=0, prompts_at_once=1)
"""A load of nothing, for what no batch size makes smaller."""


@dataclass
class GroupMemory:
    """The ranks of one group: what the largest of them takes, and the peak of each."""

    group: str
    largest: Estimate
    peaks: list[int]
    least: list[int]
    """Bytes of weights, gradients and optimizer of each rank."""


@dataclass
class ClusterMemory:
    """All groups, against what a device has: of `kind` cuda each rank has one, of cpu all share this machine.

    `total` and `free` are None where the devices are not those of this machine.
    """

    kind: str
    total: int | None
    free: int | None
    groups: list[GroupMemory] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def during(self, group: str, phase: str | None) -> int:
        """Bytes that the largest rank of a group holds in a phase (None, or one that is not there: outside of all)."""
        largest = next(g.largest for g in self.groups if g.group == group)
        return sum(part.bytes for part in [*largest.always, *largest.phases.get(phase or "", [])])

    @property
    def capacity(self) -> str:
        """What there is, for people."""
        if self.total is None:
            return "unknown: the devices are not in this machine"
        each = "each GPU" if self.kind == "cuda" else "this machine, for all processes together"
        free = "" if self.free is None else f", {format_bytes(self.free)} free now"
        return f"{format_bytes(self.total)} in {each}{free}"

    def refusals(self) -> list[str]:
        """An error for each group, or for the machine, that cannot hold even what no setting makes smaller."""
        if self.total is None:
            return []
        what = "weights, gradients and optimizer alone take"
        if self.kind == "cuda":
            return [
                f"memory: on each GPU of group '{g.group}' {what} {format_bytes(max(g.least))}, and it has"
                f" {format_bytes(self.total)}: {named_parts(g.largest.least_largest())}"
                for g in self.groups
                if max(g.least) > self.total
            ]
        taken = sum(sum(g.least) for g in self.groups)
        if taken <= self.total:
            return []
        largest = max(self.groups, key=lambda g: sum(g.least))
        return [
            f"memory: {what} {format_bytes(taken)} in the processes together, and this machine has"
            f" {format_bytes(self.total)}; most of it in group '{largest.group}', each process:"
            f" {named_parts(largest.largest.least_largest())}"
        ]

    def warning(self) -> str | None:
        if self.free is None:
            return None
        if self.kind == "cuda":
            for g in self.groups:
                if max(g.peaks) > self.free:
                    return (
                        f"memory: a rank of group '{g.group}' may take up to {format_bytes(max(g.peaks))} and its GPU has"
                        f" {format_bytes(self.free)} free: {named_parts(g.largest.largest())}"
                    )
            return None
        taken = sum(sum(g.peaks) for g in self.groups)
        if taken <= self.free:
            return None
        largest = max(self.groups, key=lambda g: sum(g.peaks)).largest
        return (
            f"memory: the processes may take up to {format_bytes(taken)} together and this machine has"
            f" {format_bytes(self.free)} free: {named_parts(largest.largest())}"
        )


def estimate_cluster(flow: CheckedFlow, load_of: LoadOf) -> ClusterMemory:
    """The largest memory of every rank of a flow's placement. Raises ConfigError for a model that is not there."""
    placement = flow.placement
    memory = ClusterMemory(placement.device, *_capacity(placement.device))
    models: dict[Role, _Model] = {}
    for role in flow.roles:
        model = _read(flow, role)
        if model is None:
            memory.unknown.append(f"{role.name} ({role.model_config.path})")
        else:
            models[role] = model
    for group in placement.groups.values():
        memory.groups.append(_group(flow, group, models, load_of, memory))
    return memory


def _capacity(kind: str) -> tuple[int | None, int | None]:
    """(total, free) bytes of a device, where they can be known here."""
    if os.environ.get("RAY_ADDRESS"):
        return None, None
    if kind == "cpu":
        found = host_memory()
        return found.total, found.free
    if not torch.cuda.is_available():
        return None, None
    # the smallest of the machine's, since a rank may be on any
    each = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]
    return min(total for _, total in each), min(free for free, _ in each)


@dataclass(frozen=True)
class _Model:
    """A role's model as a whole, as each worker loads it by itself (flow/remote.py)."""

    sizes: Sizes
    inventory: Inventory
    trains: bool


def _read(flow: CheckedFlow, role: Role) -> _Model | None:
    c = role.model_config
    trains = flow.trains(role)
    # workers load each role from its own path, so none shares the weights of another
    sizes = sizes_of(role, flow.config, {}, trains=trains)
    if sizes is None:
        return None
    scalar = not isinstance(role, LanguageModelRole)
    inventory = read_inventory(str(c.path), role.key, scalar=scalar, trust_remote_code=c.trust_remote_code)
    return None if inventory is None else _Model(sizes, inventory, trains)


def _group(
    flow: CheckedFlow, group: Group, models: dict[Role, _Model], load_of: LoadOf, memory: ClusterMemory
) -> GroupMemory:
    """Ranks with the same parts of every model are worked out once."""
    here = {role: place for role in models if (place := flow.placement.roles[role.name]).group == group.name}
    rollout = flow.placement.roles.get("rollout")
    if rollout is not None and rollout.group != group.name:
        rollout = None
    known: dict[tuple[object, ...], Estimate] = {}
    ranks: list[Estimate] = []
    for rank in range(group.size):
        places = [place.parallelism for place in (*here.values(), *([rollout] if rollout else []))]
        key = tuple(coordinates(p, rank) for p in places)
        if key not in known:
            known[key] = _rank(flow, rank, here, rollout, models, load_of, memory)
        ranks.append(known[key])
    peaks, least = [e.peak for e in ranks], [e.least_bytes for e in ranks]
    return GroupMemory(group.name, max(ranks, key=lambda e: e.peak), peaks, least)


def coordinates(p: Parallelism, rank: int) -> tuple[Place, Place, Place]:
    """Of a rank of a group: its (index, size) on tp, zero3 and pp, which decide what weights it has."""
    dp, tp, pp, _ = p.coordinates(rank)
    return (tp, p.tp), (dp % p.zero3, p.zero3), (pp, p.pp)


def _rank(
    flow: CheckedFlow,
    rank: int,
    here: dict[Role, RolePlacement],
    rollout: RolePlacement | None,
    models: dict[Role, _Model],
    load_of: LoadOf,
    memory: ClusterMemory,
) -> Estimate:
    config, device = flow.config, torch.device(memory.kind)
    width = resolve_dtype(config.model.dtype, device).itemsize
    name = "each GPU" if memory.kind == "cuda" else "this machine"
    estimate = Estimate(name, memory.total or 0, memory.free or 0, memory.kind)
    held: dict[Role, Sizes] = {}
    for role, place in here.items():
        model, p = models[role], place.parallelism
        load = load_of(p.dp)
        budget = tokens_at_once(config, load, memory.kind)
        micros = max(1, -(-load.rows_per_update * load.longest // budget))
        sizes = rank_sizes(model.sizes, model.inventory, p, rank, width, micros)
        held[role] = sizes
        add_weights(estimate, role, sizes, width)
        if model.trains:
            add_training(estimate, config, role, sizes, width, load)
        elif sizes.cut is not None and sizes.cut.gathered:
            estimate.phases[f"{role.name} pass"] = [gathered_part(sizes.cut, width)]
    turns = weights_in_turn(estimate, config, held)
    if rollout is not None:
        _add_rollout(flow, rank, estimate, rollout, models, load_of, width, turns.get("actor", []))
    estimate.always.append(Part(LIBRARIES, LIBRARY_BYTES[memory.kind]))
    return estimate


def _add_rollout(
    flow: CheckedFlow,
    rank: int,
    estimate: Estimate,
    rollout: RolePlacement,
    models: dict[Role, _Model],
    load_of: LoadOf,
    width: int,
    in_turn: list[Part],
) -> None:
    """The KV cache and one pass; the actor's weights `in_turn`; and weights, where these do not lie as generation needs
    them.

    Beside the actor that trains they are there only while it generates, and what of them it has in one piece is used
    where it lies (training/weight_sync.py).
    """
    model = next((m for role, m in models.items() if role.name == "actor"), None)
    load = load_of(rollout.parallelism.dp)
    if model is None or not load.rows_at_once:
        return
    p = rollout.parallelism
    sizes = rank_sizes(model.sizes, model.inventory, replace(p, zero3=1), rank, width, 1)
    actor = flow.placement.roles["actor"]
    own = list(in_turn)
    if actor.group != rollout.group:
        estimate.always.append(Part("rollout weights", sizes.base * width, WITHOUT["actor"]))
    elif not shares_weights(flow):
        missing = sizes.base
        if (
            actor.parallelism.zero3 == 1 or width == 4
        ):  # zero3 keeps float32 shards, which are no views of others
            missing = model.inventory.missing(
                coordinates(actor.parallelism, rank), coordinates(rollout.parallelism, rank)
            )
        own.append(Part("rollout weights", missing * width, WITHOUT["actor"]))
    weights = sum(part.bytes for part in [*estimate.always, *in_turn])
    room = max(0, estimate.free - weights) if estimate.total else 1 << 60
    # a draw is made from whole logits on every tp rank
    shape = replace(sizes.shape, vocab=model.sizes.shape.vocab)
    estimate.phases["rollout"] = own + rollout_parts(flow.config, shape, width, load, room)


def shares_weights(flow: CheckedFlow) -> bool:
    """Whether the actor generates with the weights that it trains, as they lie: no second copy and nothing to move."""
    roles = flow.placement.roles
    if "rollout" not in roles or "actor" not in roles:
        return True
    return roles["rollout"] == roles["actor"] and roles["actor"].parallelism.zero3 == 1


def rank_sizes(
    whole: Sizes, inventory: Inventory, p: Parallelism, rank: int, width: int, micros: int
) -> Sizes:
    """What a rank of a group with parallelism `p` has of a model, `width` bytes an element that is computed with."""
    tp, zero3, pp = coordinates(p, rank)
    shape = whole.shape
    kv_heads = -(-shape.kv_heads // p.tp)
    own = replace(
        shape,
        heads=-(-shape.heads // p.tp),
        kv_heads=kv_heads * kv_copies(kv_heads, p.sp),
        intermediate=-(-shape.intermediate // p.tp),
        vocab=-(-shape.vocab // p.tp),
        layers=max(1, len(split_layers(shape.layers, p.pp)[pp[0]])),
    )
    layer, ends = inventory.gathered(tp, pp)
    cut = Cut(
        inventory.numel(tp, zero3, pp),
        4 if p.zero3 > 1 else width,  # zero3 keeps float32 shards (models/sharding.py)
        gathered=2 * layer + ends if p.zero3 > 1 else 0,
        summed=max(layer, ends) if p.zero3 > 1 else 0,
        passes=min(p.pp - pp[0], micros),
        slices=p.sp,
        has_head=pp[0] == p.pp - 1,
    )
    return replace(whole, shape=own, start=None, cut=cut)
