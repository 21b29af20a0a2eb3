"""What a flow will do on a cluster: where each stage runs, beside which others, what moves, and the memory it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.cluster.mesh import model_ranks
from headrace.cluster.placement import Placement, RolePlacement
from headrace.flow.cluster import home_of
from headrace.flow.compile import CheckedFlow, ancestors
from headrace.flow.edges import Edge, RowLimits, edges_of, layout_text
from headrace.flow.graph import Stage
from headrace.flow.memory_ranks import ClusterMemory, LoadOf, estimate_cluster, shares_weights
from headrace.flow.memory_terms import tokens_at_once
from headrace.models.hf import resolve_dtype
from headrace.models.inventory import Inventory, read_inventory
from headrace.reshard.layout import Layout
from headrace.reshard.model_layout import ModelOutline
from headrace.reshard.plan import plan as reshard_plan


@dataclass(frozen=True)
class RolePlan:
    """A role of the run, or the rollout: the ranks it is on and how its model is cut over them."""

    name: str
    place: RolePlacement
    devices: tuple[str, ...]
    """host:index of each rank."""


@dataclass(frozen=True)
class StagePlan:
    """`column`: the stages before it in a row, at most. `microbatches` of a rank in a pass or update; None: no model.

    `memory_bytes`: what the largest rank of the group holds meanwhile, at most.
    """

    name: str
    place: RolePlacement
    column: int
    microbatches: int | None
    beside: tuple[str, ...]
    """Stages that may run at the same time: on other devices, and without a path between them."""
    after: tuple[str, ...]
    trains: bool
    memory_bytes: int


@dataclass(frozen=True)
class WeightSync:
    """From the actor that trains to the one that generates. `bytes` is None where the model's size is not known."""

    before: str
    after: str
    bytes: int | None

    @property
    def same_storage(self) -> bool:
        return self.bytes == 0 and self.before == self.after


@dataclass
class ClusterPlan:
    placement: Placement
    roles: list[RolePlan]
    stages: list[StagePlan]
    edges: list[Edge]
    together: list[tuple[str, ...]]
    """Largest sets of stages that may run at the same time."""
    beside_next_rollout: tuple[str, ...]
    """The stages beside which the rollout of the next step is made (rollout.staleness)."""
    weights: WeightSync | None
    memory: ClusterMemory


def plan_cluster(flow: CheckedFlow, load_of: LoadOf, limits: RowLimits) -> ClusterPlan:
    """Raises ConfigError for a model that is not there."""
    memory = estimate_cluster(flow, load_of)
    stages = _stages(flow, load_of, memory)
    return ClusterPlan(
        flow.placement,
        _roles(flow),
        stages,
        edges_of(flow, limits),
        _cliques({s.name: set(s.beside) for s in stages}),
        _beside_next_rollout(flow, stages),
        _weights(flow),
        memory,
    )


def devices_of(placement: Placement, group: str) -> tuple[str, ...]:
    """host:index of each rank of a group."""
    return tuple(
        f"{placement.hosts[seat.host].name}:{seat.local_index}"
        for seat in placement.seats
        if seat.group == group
    )


def _roles(flow: CheckedFlow) -> list[RolePlan]:
    names = list(dict.fromkeys(role.name for role in flow.roles))
    if flow.generates and "rollout" in flow.placement.roles:
        names.append("rollout")
    places = {name: flow.placement.roles[name] for name in names}
    return [RolePlan(n, place, devices_of(flow.placement, place.group)) for n, place in places.items()]


def place_of(flow: CheckedFlow, stage: Stage) -> RolePlacement:
    """Where a stage runs: functions of the flow beside the home role."""
    roles = flow.placement.roles
    if stage.spec.makes_rows and "rollout" in roles:
        return roles["rollout"]
    return roles[(home_of(flow) if stage.role is None else stage.role).name]


def phase_of(stage: Stage) -> str | None:
    """The phase of the memory estimate that a stage is; None: it takes nothing besides what is always there."""
    if stage.spec.makes_rows:
        return "rollout"
    if stage.role is None:
        return None
    return f"{stage.role.name} {'update' if stage.spec.trains else 'pass'}"


def _stages(flow: CheckedFlow, load_of: LoadOf, memory: ClusterMemory) -> list[StagePlan]:
    above = ancestors(flow.stages)
    columns: dict[str, int] = {}
    for stage in flow.stages:
        columns[stage.name] = max((columns[d] + 1 for d in stage.depends_on), default=0)
    places = {stage.name: place_of(flow, stage) for stage in flow.stages}
    out = []
    for stage in flow.stages:
        name, place = stage.name, places[stage.name]
        beside = tuple(
            other.name
            for other in flow.stages
            if places[other.name].group != place.group
            and other.name not in above[name]
            and name not in above[other.name]
        )
        held = memory.during(place.group, phase_of(stage))
        micros = _microbatches(flow, stage, place, load_of)
        out.append(
            StagePlan(name, place, columns[name], micros, beside, stage.depends_on, stage.spec.trains, held)
        )
    return out


def _microbatches(flow: CheckedFlow, stage: Stage, place: RolePlacement, load_of: LoadOf) -> int | None:
    """Of one update, or of a pass over all rows of the step: at their longest, so at most."""
    if stage.role is None or stage.spec.makes_rows:
        return None
    config, load = flow.config, load_of(place.parallelism.dp)
    if stage.spec.trains and config.train.microbatches_per_update is not None:
        return config.train.microbatches_per_update
    rows = load.rows_per_update
    if flow.generates and not stage.spec.trains:
        rows = load.prompts_at_once * config.rollout.samples_per_prompt
    tokens = tokens_at_once(config, replace(load, rows_per_update=rows), flow.placement.device)
    return max(1, -(-rows * load.longest // tokens))


def _beside_next_rollout(flow: CheckedFlow, stages: list[StagePlan]) -> tuple[str, ...]:
    if not flow.config.rollout.staleness:
        return ()
    group = next(place_of(flow, s).group for s in flow.stages if s.spec.makes_rows)
    return tuple(s.name for s in stages if s.place.group != group)


def _cliques(beside: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """The largest sets of at least two stages that are all beside each other (Bron and Kerbosch 1973)."""
    found: list[tuple[str, ...]] = []
    order = list(beside)

    def grow(chosen: set[str], more: set[str], seen: set[str]) -> None:
        if not more and not seen and len(chosen) > 1:
            found.append(tuple(sorted(chosen, key=order.index)))
        for name in sorted(more, key=order.index):
            grow(chosen | {name}, more & beside[name], seen & beside[name])
            more, seen = more - {name}, seen | {name}

    grow(set(), set(beside), set())
    return found


def _weights(flow: CheckedFlow) -> WeightSync | None:
    """What goes from the actor to the rollout after its updates; None where nothing is generated."""
    roles = flow.placement.roles
    actor = next((role for role in flow.roles if role.name == "actor"), None)
    if actor is None or not flow.generates or not any(flow.trains(r) for r in [actor]):
        return None
    source, target = roles["actor"], roles.get("rollout", roles["actor"])
    texts = [layout_text(place.group, place.parallelism) for place in (source, target)]
    if shares_weights(flow):
        return WeightSync(texts[0], texts[1], 0)
    c = actor.model_config
    inventory = read_inventory(str(c.path), actor.key, scalar=False, trust_remote_code=c.trust_remote_code)
    if inventory is None:
        return WeightSync(texts[0], texts[1], None)
    dtype = resolve_dtype(flow.config.model.dtype, torch.device(flow.placement.device))
    kept = torch.float32 if source.parallelism.zero3 > 1 else dtype
    trained = weight_layout(inventory, flow.placement, source, kept)
    needed = weight_layout(inventory, flow.placement, target, dtype)
    hosts = [str(seat.host) for seat in flow.placement.seats]
    return WeightSync(texts[0], texts[1], reshard_plan(trained, needed, hosts).bytes_moved)


def weight_layout(
    inventory: Inventory, placement: Placement, place: RolePlacement, dtype: torch.dtype
) -> Layout:
    """Which part of every parameter each rank of the cluster holds, as models/sharding.py lays them out."""
    p = place.parallelism
    outline = ModelOutline(
        inventory.described(dtype),
        {w.name: w.tp_dim for w in inventory.weights if w.tp_dim is not None},
        {w.name: tuple(sorted(inventory.stages(w, p.pp))) for w in inventory.weights},
    )
    return outline.layout(model_ranks(placement.ranks(place.group), p), placement.world)
