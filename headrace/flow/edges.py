"""The edges of a flow on a cluster: columns that a stage takes, from where, how they get there, how many bytes at most.

Follows what flow/cluster.py will do, with the same two decisions: `columns_read` and `layout_kept`. Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace.cluster.group import layout_kept
from headrace.cluster.handle import Handle, Kind, RowLayout, Stored, new_number
from headrace.cluster.placement import Parallelism, RolePlacement
from headrace.flow.cluster import GROUP, columns_read, home_of
from headrace.flow.compile import CheckedFlow, ancestors, written_columns
from headrace.flow.graph import Stage

TransferKind = Literal["stays", "shared out again", "to another group"]
DATA = "data"
SETTLED = "the step's rows"
"""What a rollout's rows become: shared out evenly over the home role's ranks, where they stay for the step."""

# bytes of a token's value; every other column has one value a row
TOKEN_BYTES = {
    "input_ids": 8,
    "response_mask": 1,
    "loss_mask": 1,
    "rollout_logprobs": 4,
    "rollout_untruncated_logprobs": 4,
    "logprobs": 4,
    "reference_logprobs": 4,
    "values": 4,
    "returns": 4,
    "advantages": 4,
}
# lists go as text: bytes for each token of the prompt or the response that they tell of
PROMPT_TEXT = {"prompt": 4, "prompt_ids": 7}
RESPONSE_TEXT = {"completion": 4, "completion_ids": 7}
ROW_BYTES = 8
SMALL_ROWS = {"greedy_baseline": 1, "reward_model_score": 4}
NUMBERING = 16  # bytes a row that go with every set of columns: its key and its length


@dataclass(frozen=True)
class RowLimits:
    """The most there is of the rows of a step: how many, and tokens of each prompt, response and whole sequence."""

    prompts: int
    rows: int
    prompt_tokens: int
    response_tokens: int

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    def bytes_of(self, column: str, rows: int) -> int:
        """Of one column of so many rows."""
        if column in TOKEN_BYTES:
            return rows * self.sequence_tokens * TOKEN_BYTES[column]
        if column in PROMPT_TEXT:
            return rows * self.prompt_tokens * PROMPT_TEXT[column]
        if column in RESPONSE_TEXT:
            return rows * self.response_tokens * RESPONSE_TEXT[column]
        return rows * SMALL_ROWS.get(column, ROW_BYTES)


@dataclass(frozen=True)
class Edge:
    """Columns that stage `target` takes of what `source` (a stage, or the data) wrote; `bytes` that move, at most."""

    source: str
    target: str
    columns: tuple[str, ...]
    before: str
    after: str
    kind: TransferKind
    bytes: int


@dataclass
class _Rows:
    """The rows of a step as they will lie: for each column who holds it, who wrote it, whether only owners have it."""

    count: int
    stored: dict[str, Stored] = field(default_factory=dict)
    writer: dict[str, str] = field(default_factory=dict)
    at_owners_only: set[str] = field(default_factory=set)

    def add(self, names: Mapping[str, Kind] | set[str], layout: RowLayout, writer: str) -> None:
        for name in sorted(names):
            kind: Kind = "token" if name in TOKEN_BYTES else "row"
            self.stored[name] = Stored(writer, layout, 0, (), (), {name: kind})
            self.writer[name] = writer
            self.at_owners_only.discard(name)


def edges_of(flow: CheckedFlow, limits: RowLimits) -> list[Edge]:
    """Every edge of one step, in the order of the stages."""
    home = flow.placement.roles[home_of(flow).name]
    source = (
        {"prompt_ids", "prompt_id", "prompt", GROUP}
        if flow.generates
        else {"input_ids", "response_mask", *(("pair_id", "is_chosen") if flow.paired else ())}
    )
    rows = _Rows(limits.prompts if flow.generates else limits.rows)
    rows.add(
        source | set(flow.data_columns), _layout(home, together="pair_id" if flow.paired else None), DATA
    )
    rows.at_owners_only = set(rows.stored)
    above, out = ancestors(flow.stages), []
    for stage in flow.stages:
        place = home if stage.role is None else flow.placement.roles[stage.role.name]
        if stage.spec.makes_rows and "rollout" in flow.placement.roles:
            place = flow.placement.roles["rollout"]
        seen = {n: s for n, s in rows.stored.items() if rows.writer[n] in {DATA, *above[stage.name]}}
        taken = columns_read(stage, Handle(seen))
        layout, edges = _take(rows, taken, place, stage.name, limits, GROUP if GROUP in seen else None)
        out += edges
        wrote = written_columns(stage, flow.config)
        if not stage.spec.makes_rows:
            rows.add(wrote, layout, stage.name)
            continue
        carried = {n for n in rows.stored if n != "prompt_ids"}
        rows = _Rows(limits.rows)
        rows.add(wrote | carried | {GROUP}, _layout(place, balanced=False), stage.name)
        settled, edges = _take(rows, list(rows.stored), home, SETTLED, limits, GROUP)
        out += edges
        rows.add(set(rows.stored), settled, stage.name)
    return out


def _layout(place: RolePlacement, *, balanced: bool = True, together: str | None = None) -> RowLayout:
    kept = frozenset({together} if together else ())
    return RowLayout(new_number(), place.group, place.parallelism, (), balanced, kept)


def _take(
    rows: _Rows,
    taken: list[str],
    place: RolePlacement,
    target: str,
    limits: RowLimits,
    together: str | None,
) -> tuple[RowLayout, list[Edge]]:
    """Where the columns lie for a stage at `place`, and how they get there, by who wrote them."""
    if together is None and "pair_id" in rows.stored:
        together = "pair_id"
    named = sorted({*taken, *((together,) if together else ())})
    layouts = {rows.stored[n].layout.number: rows.stored[n].layout for n in named}
    kept = layout_kept(list(layouts.values()), place.group, place.parallelism, together)
    layout = kept or _layout(place, together=together)
    readers = place.parallelism.copies
    edges = []
    parts: dict[tuple[str, int], list[str]] = {}
    for name in named:
        parts.setdefault((rows.writer[name], rows.stored[name].layout.number), []).append(name)
    for (writer, number), names in parts.items():
        before = layouts[number]
        size = rows.count * NUMBERING + sum(limits.bytes_of(n, rows.count) for n in names)
        kind: TransferKind
        if kept is not None:
            kind, copies = "stays", readers - 1 if set(names) <= rows.at_owners_only else 0
        elif before.group == place.group:
            # with one data-parallel rank on both sides its own rows stay, and its other ranks get them
            alone = before.parallelism.dp == place.parallelism.dp == 1
            kind, copies = "shared out again", readers - 1 if alone else readers
        else:
            kind, copies = "to another group", readers
        if copies == 0:
            kind = "stays"
        edges.append(Edge(writer, target, tuple(names), _text(before), _text(layout), kind, size * copies))
    return layout, edges


def _text(layout: RowLayout) -> str:
    return layout_text(layout.group, layout.parallelism)


def layout_text(group: str, parallelism: Parallelism) -> str:
    return f"{group} {parallelism}"


def direct_source(flow: CheckedFlow, edge: Edge) -> str | None:
    """The stage that edge.target depends on and through which the columns come, for a picture of the graph."""
    stage: Stage | None = next((s for s in flow.stages if s.name == edge.target), None)
    if stage is None or edge.source == DATA:
        return None
    if edge.source in stage.depends_on:
        return edge.source
    above = ancestors(flow.stages)
    return next((name for name in stage.depends_on if edge.source in above[name]), None)
