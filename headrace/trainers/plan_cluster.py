"""What `headrace plan` says of a cluster: roles, stages, edges, weights and the memory of each group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from headrace.flow.cluster_plan import ClusterPlan, StagePlan
from headrace.flow.edges import Edge, layout_text
from headrace.flow.memory_ranks import GroupMemory
from headrace.flow.memory_terms import Estimate
from headrace.observe.report_facts import format_bytes

Row = tuple[str, ...]
Section = tuple[str, list[Row]]


def cluster_title(cluster: ClusterPlan) -> str:
    p = cluster.placement
    kind = "GPU" if p.device == "cuda" else "CPU"
    return f"{p.world} {kind} processes in {len(p.groups)} group{'s' * (len(p.groups) > 1)}, {p.backend}"


def cluster_sections(cluster: ClusterPlan) -> Iterator[Section]:
    """Titles and rows, each row of columns that are aligned under each other."""
    yield (
        "roles",
        [(r.name, r.place.group, str(r.place.parallelism), shortened(r.devices)) for r in cluster.roles],
    )
    yield (
        "where stages run",
        [
            (
                s.name,
                layout_text(s.place.group, s.place.parallelism),
                f"{format_bytes(s.memory_bytes)} a rank",
                micro_text(s),
                beside_text(s),
            )
            for s in cluster.stages
        ],
    )
    yield (
        "columns between stages, bytes at most",
        [
            (
                f"{e.source} → {e.target}",
                f"{e.before} → {e.after}",
                kind_text(e),
                size_of(e),
                ", ".join(e.columns),
            )
            for e in cluster.edges
        ],
    )
    together: list[Row] = [(" ∥ ".join(names),) for names in cluster.together]
    if cluster.beside_next_rollout:
        together.append(
            (f"rollout of the next step ∥ {', '.join(cluster.beside_next_rollout)}, one after another",)
        )
    yield "at the same time", together or [("no two stages: they share devices or wait for each other",)]
    if cluster.weights is not None:
        yield "weights, actor → rollout", [(weights_text(cluster),)]


def micro_text(stage: StagePlan) -> str:
    if stage.microbatches is None:
        return ""
    of = "an update" if stage.trains else "a pass"
    return f"{stage.microbatches} micro-batch{'es' * (stage.microbatches != 1)} in {of}"


def beside_text(stage: StagePlan) -> str:
    return f"∥ {', '.join(stage.beside)}" if stage.beside else ""


def kind_text(edge: Edge) -> str:
    return f"{edge.kind}, other ranks copy" if edge.kind == "stays" and edge.bytes else edge.kind


def size_of(edge: Edge) -> str:
    return format_bytes(edge.bytes) if edge.bytes else ""


def weights_text(cluster: ClusterPlan) -> str:
    w = cluster.weights
    if w is None:
        return ""
    if w.same_storage:
        return f"{w.before}: same storage, nothing moves"
    moved = (
        "of unknown size" if w.bytes is None else f"{format_bytes(w.bytes)} move after each step's updates"
    )
    return f"{w.before} → {w.after}: {moved}"


def memory_sections(cluster: ClusterPlan) -> Iterator[Section]:
    """For each group, what its largest rank holds; and what there is."""
    memory = cluster.memory
    for group in memory.groups:
        rows: list[Row] = [(part.what, f"{format_bytes(part.bytes):>10}") for part in group.largest.always]
        rows += list(phase_rows(group.largest))
        rows.append(("at most", f"{format_bytes(group.largest.peak):>10}", smallest(group)))
        count = len(group.peaks)
        yield f"memory of a rank of group '{group.group}' ({count} rank{'s' * (count > 1)})", rows
    rows = [(name, "unknown: no config.json and weights to count") for name in memory.unknown]
    if memory.kind == "cpu" and memory.total is not None:
        rows.append(("all ranks at most", format_bytes(sum(sum(g.peaks) for g in memory.groups))))
    yield "memory there is", [*rows, ("capacity", memory.capacity)]


def phase_rows(e: Estimate) -> Iterator[Row]:
    for name, parts in e.phases.items():
        total = format_bytes(sum(p.bytes for p in parts))
        largest = "the largest phase" if name == e.phase and len(e.phases) > 1 else ""
        yield (f"during {name}", f"{total:>10}", largest)
        for part in parts:
            yield (f"  {part.what}", f"{format_bytes(part.bytes):>10}")


def smallest(group: GroupMemory) -> str:
    least, most = format_bytes(min(group.peaks)), format_bytes(max(group.peaks))
    return "" if least == most else f"the smallest rank {least}"


def shortened(devices: Iterable[str]) -> str:
    """host:0, host:1, host:2 → host:0-2."""
    out = []
    for host, own in itertools.groupby((d.rpartition(":") for d in devices), key=lambda d: d[0]):
        numbers = [int(number) for _, _, number in own]
        runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
        for _, run in runs:
            kept = [number for _, number in run]
            out.append(f"{host}:{kept[0]}" + (f"-{kept[-1]}" if len(kept) > 1 else ""))
    return ", ".join(out[:6]) + (f" and {len(out) - 6} more" if len(out) > 6 else "")


def aligned(rows: list[Row]) -> list[str]:
    """Columns under each other; the last of a row is as long as it is."""
    width = [0] * max(map(len, rows), default=0)
    for row in rows:
        for i, text in enumerate(row[:-1]):
            width[i] = max(width[i], len(text))
    return [
        "  ".join([*(t.ljust(width[i]) for i, t in enumerate(row[:-1])), row[-1]]).rstrip() for row in rows
    ]


def cluster_json(cluster: ClusterPlan) -> dict[str, Any]:
    """The same for machines."""
    p, memory = cluster.placement, cluster.memory
    return {
        "device": p.device,
        "backend": p.backend,
        "world": p.world,
        "hosts": [{"name": h.name, "devices": h.devices} for h in p.hosts],
        "roles": [
            {"name": r.name, "group": r.place.group, "parallelism": degrees(r), "devices": list(r.devices)}
            for r in cluster.roles
        ],
        "stages": [
            {
                "name": s.name,
                "group": s.place.group,
                "parallelism": degrees(s),
                "microbatches_per_rank": s.microbatches,
                "memory_bytes_per_rank": s.memory_bytes,
                "beside": list(s.beside),
            }
            for s in cluster.stages
        ],
        "edges": [
            {
                "from": e.source,
                "to": e.target,
                "columns": list(e.columns),
                "from_layout": e.before,
                "to_layout": e.after,
                "transfer": e.kind,
                "bytes": e.bytes,
            }
            for e in cluster.edges
        ],
        "at_the_same_time": [list(names) for names in cluster.together],
        "beside_the_next_rollout": list(cluster.beside_next_rollout),
        "weights": None
        if cluster.weights is None
        else {
            "from_layout": cluster.weights.before,
            "to_layout": cluster.weights.after,
            "same_storage": cluster.weights.same_storage,
            "bytes": cluster.weights.bytes,
        },
        "memory": {
            "total_bytes": memory.total,
            "free_bytes": memory.free,
            "unknown": memory.unknown,
            "groups": [_group_json(g) for g in memory.groups],
        },
    }


def degrees(part: Any) -> dict[str, int]:
    return asdict(part.place.parallelism)


def _group_json(g: GroupMemory) -> dict[str, Any]:
    return {
        "group": g.group,
        "peak_bytes_of_ranks": g.peaks,
        "least_bytes_of_ranks": g.least,
        "largest_rank": {
            "always": {part.what: part.bytes for part in g.largest.always},
            "phases": {
                name: {part.what: part.bytes for part in parts} for name, parts in g.largest.phases.items()
            },
        },
    }
