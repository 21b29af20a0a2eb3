"""A role's workers as one thing to call: rows are shared out over data-parallel ranks, outputs stay where they are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from headrace.cluster.handle import Handle, Kind, RowLayout, Stored, new_number
from headrace.cluster.placement import Parallelism
from headrace.cluster.pulse import BrokenOff
from headrace.cluster.shares import share_out
from headrace.cluster.watch import Report, Watch
from headrace.cluster.wire import Message, plain_bytes, plain_value
from headrace.cluster.worker import Shard, put_message, read_shard
from headrace.cluster.workers import Executor, Pending
from headrace.data.batch import Batch
from headrace.errors import RunError


@dataclass(frozen=True)
class Result:
    """What a call came to.

    `handle`: the rows it was given with the columns it wrote (`written`), or the rows it made; None where neither.
    `values`: the plain value of each data-parallel index; `every_value` of each rank of the group.
    `seconds`: of the method on each data-parallel index, and when it `began` (seconds since 1970). `moved_bytes`: of rows
    that went from worker to worker.
    `controller_s`, `controller_bytes`: this process's own work for the call, and its orders and replies.
    """

    handle: Handle | None
    written: tuple[str, ...]
    values: tuple[Any, ...]
    every_value: tuple[Any, ...]
    seconds: tuple[float, ...]
    began: tuple[float, ...]
    moved_bytes: int
    controller_s: float
    controller_bytes: int
    new_rows: bool
    """Whether `handle` is of other rows than those given."""


class WorkerGroup:
    """The workers of one role. Roles on the same group of devices are objects of the same workers."""

    def __init__(self, executor: Executor, role: str, name: str | None = None) -> None:
        """`name` of the object in the workers, where a role has several (default: that of the role).

        Raises RunError for a role that the executor's placement does not have.
        """
        if role not in executor.placement.roles:
            raise RunError(f"the cluster has no role '{role}'; it has {', '.join(executor.placement.roles)}")
        self.executor, self.role, self.name = executor, role, name or role
        place = executor.placement.roles[role]
        self.group, self.parallelism = place.group, place.parallelism
        self.ranks = executor.placement.ranks(place.group)
        self.owners = tuple(self.ranks[self.parallelism.owner(d)] for d in range(self.parallelism.dp))

    def create(self, factory: str, *, timeout_s: float | None = None, **arguments: Any) -> None:
        """Makes the role's object in every worker: `factory(site, **arguments)`.

        `factory` is `package.module:Name` or `path/to/file.py:Name`, `arguments` are plain values.
        Raises WorkerError (in-process, what the factory raises).
        """
        order = {
            "what": f"{self.name}.create",
            "object": self.name,
            "factory": factory,
            "arguments": arguments,
            "parallelism": asdict(self.parallelism),
        }
        data = plain_bytes(order, f"{self.name}: arguments of {factory}")
        self.executor.submit(dict.fromkeys(self.ranks, data), f"{self.name}.create", timeout_s).result()

    def call(self, method: str, handle: Handle | None = None, **options: Any) -> Result:
        """`start` and `result` in one: calls a method on every worker of the group and waits."""
        return self.start(method, handle, **options).result()

    def start(
        self,
        method: str,
        handle: Handle | None = None,
        *,
        reads: Iterable[str] | None = None,
        together: str | None = None,
        balance: bool = True,
        timeout_s: float | None = None,
        arguments: Mapping[str, Any] | None = None,
        label: str | None = None,
    ) -> Call:
        """Begins a call; groups on other devices can work meanwhile.

        With `handle`, each data-parallel index gets a part of the rows, with columns `reads` (default: all), as the
        method's first argument, a Batch that may be empty; its sp, tp and pp ranks get the same one. Parts are near-equal
        in tokens, and rows with equal `together` (default: `pair_id`, where there is one) stay on one index. Rows
        that lie so already do not move; with `balance` false, neither do rows that lie in this group in any other
        way. `arguments` are plain values, the same for all. `label` replaces `<name>.<method>` in errors.
        Raises RunError for a column that is not there or an argument that is not plain.
        """
        began = time.perf_counter()
        number = new_number()
        what = label or f"{self.name}.{method}"
        order: dict[str, Any] = {
            "what": what,
            "object": self.name,
            "method": method,
            "arguments": dict(arguments or {}),
            "number": number,
            "output": f"{self.name}.{method}/{number}",
            "drop": self.executor.take_dropped(self.group),
        }
        layout: RowLayout | None = None
        taken: Handle | None = None
        if handle is None:
            orders = dict.fromkeys(self.ranks, plain_bytes(order, what))
        else:
            if not handle.stored:
                raise RunError(f"{what}: was given rows without columns")
            if together is None and "pair_id" in handle.stored:
                together = "pair_id"
            names = set(handle.stored if reads is None else reads)
            taken = handle.select(sorted(names | ({together} if together else set())))
            layout = self._fits(taken, together, balance)
            if layout is not None:
                orders = self._keep_orders(order, taken)
            else:
                layout = RowLayout(
                    new_number(),
                    self.group,
                    self.parallelism,
                    self.owners,
                    True,
                    frozenset({together} if together else ()),
                )
                orders = self._regroup_orders(order, taken, layout, together)
        traffic = self.executor.traffic
        sent = sum(map(len, orders.values()))
        traffic.calls += 1
        traffic.order_bytes += sent
        pending = self.executor.submit(orders, what, timeout_s)
        return Call(
            self, number, order["output"], handle, taken, layout, pending, sent, time.perf_counter() - began
        )

    def _fits(self, taken: Handle, together: str | None, balance: bool) -> RowLayout | None:
        """The layout that all columns have, if the rows can stay as they are."""
        layouts = {s.layout.number: s.layout for s in taken.stored.values()}
        return layout_kept(list(layouts.values()), self.group, self.parallelism, together, balance)

    def _keep_orders(self, order: dict[str, Any], taken: Handle) -> dict[int, bytes]:
        by_index: list[bytes] = []
        for owner in self.owners:
            keep = [[stored.key, owner, names] for stored, names in taken.sets()]
            order["input"] = {"kinds": taken.columns, "keep": keep}
            by_index.append(plain_bytes(order, order["what"]))
        return {r: by_index[self.parallelism.coordinates(i)[0]] for i, r in enumerate(self.ranks)}

    def _regroup_orders(
        self, order: dict[str, Any], taken: Handle, layout: RowLayout, together: str | None
    ) -> dict[int, bytes]:
        sets = taken.sets()
        # the set with the column that keeps rows together comes first: its rows are the ones shared out
        sets.sort(key=lambda s: together is not None and together not in s[1])
        given: dict[str, Any] = {
            "kinds": taken.columns,
            "plan": layout.number,
            "planner": self.ranks[0],
            "readers": len(self.ranks),
            "columns": [[stored.key, names] for stored, names in sets],
            "moved": f"rows/{layout.number}",
        }
        order["input"] = given
        data = plain_bytes(order, order["what"])
        given["sets"] = [
            [stored.key, stored.layout.owners, together if i == 0 else None]
            for i, (stored, _) in enumerate(sets)
        ]
        given["together"], given["parts"] = together, self.parallelism.dp
        return {**dict.fromkeys(self.ranks, data), self.ranks[0]: plain_bytes(order, order["what"])}

    def put(self, batch: Batch, together: str | None = None) -> Handle:
        """Sends rows that the controller has itself (prompts from a file) to the workers, shared out as in `start`."""
        pieces = together or ("pair_id" if "pair_id" in batch.rows else None)
        values = None if pieces is None else batch[pieces]
        plain = values.tolist() if isinstance(values, torch.Tensor) else values
        parts = share_out(batch.lengths.numpy(), self.parallelism.dp, plain)
        kept = frozenset({pieces} if pieces else ())
        layout = RowLayout(new_number(), self.group, self.parallelism, self.owners, True, kept)
        key = f"rows/{layout.number}"
        requests: list[tuple[int, str, Message]] = []
        tokens: list[int] = []
        for owner, rows in zip(self.owners, parts, strict=True):
            part = batch.select(torch.from_numpy(rows))
            tokens.append(part.num_tokens)
            shard = Shard(rows, part.lengths.numpy(), {**part.tokens, **part.rows})
            requests.append((owner, "put", put_message(key, shard)))
        self.executor.traffic.data_bytes += sum(m.nbytes for _, _, m in requests)
        self.executor.ask(requests)
        kinds: dict[str, Kind] = dict.fromkeys(batch.tokens, "token")
        kinds |= {n: "row" if isinstance(c, torch.Tensor) else "list" for n, c in batch.rows.items()}
        rows_each = tuple(len(p) for p in parts)
        stored = self._stored(key, layout, new_number(), rows_each, tuple(tokens), kinds)
        return Handle(dict.fromkeys(kinds, stored))

    def fetch(self, handle: Handle, columns: Iterable[str] | None = None) -> Batch:
        return fetch(self.executor, handle, columns)

    def _stored(
        self,
        key: str,
        layout: RowLayout,
        row_set: int,
        rows: tuple[int, ...],
        tokens: tuple[int, ...],
        kinds: Mapping[str, Kind],
    ) -> Stored:
        return Stored(key, layout, row_set, rows, tokens, kinds).on_release(self.executor.drop)


@dataclass
class Call:
    """A call that is under way. Holds on to its rows, so that no worker drops them too early."""

    group: WorkerGroup
    number: int
    output: str
    handle: Handle | None
    taken: Handle | None
    layout: RowLayout | None
    pending: Pending
    sent_bytes: int
    controller_s: float

    def result(self, report: Report | None = None) -> Result:
        """Waits. `report` hears about once a second how much is over, and says whether to break off.

        Raises WorkerError naming the rank, host, method and cause (in-process: what was raised), and BrokenOff where
        `report` had that done before all ranks were through.
        """
        raw = self.pending.result(None if report is None else self._watch(report))
        began = time.perf_counter()
        received = sum(map(len, raw.values()))
        self.group.executor.traffic.reply_bytes += received
        replies = {rank: plain_value(data) for rank, data in raw.items()}
        if any("broken_off" in reply for reply in replies.values()):
            self.group.executor.drop(self.group.group, self.output)
            raise BrokenOff
        own = [replies[rank] for rank in self.group.owners]
        handle = self._moved(own)
        written: tuple[str, ...] = ()
        kinds = self._kinds(own)
        if kinds is not None:
            written = tuple(kinds)
            handle = self._with_written(handle, own, kinds)
        return Result(
            handle,
            written,
            tuple(r["value"] for r in own),
            tuple(replies[rank]["value"] for rank in self.group.ranks),
            tuple(r["seconds"] for r in own),
            tuple(r["began"] for r in own),
            sum(r["moved_bytes"] for r in replies.values()),
            self.controller_s + time.perf_counter() - began,
            self.sent_bytes + received,
            kinds is not None and bool(own[0]["new_rows"]),
        )

    def _watch(self, report: Report) -> Watch:
        """Ranks with the same rows take turns together."""
        group = self.group
        turns: list[list[int]] = [[] for _ in range(group.parallelism.dp)]
        for i, rank in enumerate(group.ranks):
            turns[group.parallelism.coordinates(i)[0]].append(rank)
        return Watch(self.number, turns, group.owners, report)

    def _moved(self, own: Sequence[Mapping[str, Any]]) -> Handle | None:
        """The rows as they were given, those columns that moved at their new place."""
        if self.handle is None or self.taken is None or self.layout is None:
            return self.handle
        if all(s.layout.number == self.layout.number for s in self.taken.stored.values()):
            return self.handle
        row_set = next(iter(self.taken.stored.values())).row_set
        stored = self.group._stored(
            f"rows/{self.layout.number}",
            self.layout,
            row_set,
            tuple(r["rows"] for r in own),
            tuple(r["tokens"] for r in own),
            self.taken.columns,
        )
        return Handle({**self.handle.stored, **dict.fromkeys(self.taken.stored, stored)})

    def _kinds(self, own: Sequence[Mapping[str, Any]]) -> dict[str, Kind] | None:
        """The columns that all owners wrote, and what they agree each to be."""
        what = self.output.partition("/")[0]
        seen = [r["written"] for r in own]
        if all(kinds is None for kinds in seen):
            return None
        out: dict[str, Kind] = {}
        for rank, kinds in zip(self.group.owners, seen, strict=True):
            if kinds is None or kinds.keys() != seen[0].keys() if seen[0] is not None else kinds is not None:
                raise RunError(
                    f"{what}: worker {rank} wrote {sorted(kinds or ())} and worker {self.group.owners[0]}"
                    f" {sorted(seen[0] or ())}; all must write the same columns, also for no rows"
                )
        for name in seen[0]:
            said = {kinds[name] for kinds in seen} - {"either"} or {"token"}
            if len(said) > 1:
                raise RunError(
                    f"{what}: column '{name}' is one of {' and '.join(sorted(said))} on different workers"
                )
            out[name] = said.pop()
        return out

    def _with_written(
        self, handle: Handle | None, own: Sequence[Mapping[str, Any]], kinds: dict[str, Kind]
    ) -> Handle:
        group, layout = self.group, self.layout
        if own[0]["new_rows"] or layout is None or handle is None:
            fresh = RowLayout(new_number(), group.group, group.parallelism, group.owners, balanced=False)
            handle, layout, row_set = Handle(), fresh, new_number()
        else:
            row_set = next(iter(handle.stored.values())).row_set
        rows, tokens = tuple(r["made_rows"] for r in own), tuple(r["made_tokens"] for r in own)
        stored = group._stored(self.output, layout, row_set, rows, tokens, kinds)
        return handle.merged(Handle(dict.fromkeys(kinds, stored)))


def layout_kept(
    layouts: Sequence[RowLayout], group: str, q: Parallelism, together: str | None, balance: bool = True
) -> RowLayout | None:
    """The layout of all columns, if their rows can stay as they are for a call of a group with parallelism `q`."""
    if len(layouts) != 1:
        return None
    (layout,) = layouts
    p = layout.parallelism
    if layout.group != group or (p.dp, p.sp, p.tp, p.pp) != (q.dp, q.sp, q.tp, q.pp):
        return None
    kept = q.dp == 1 or ((layout.balanced or not balance) and (not together or together in layout.together))
    return layout if kept else None


def fetch(executor: Executor, handle: Handle, columns: Iterable[str] | None = None) -> Batch:
    """Brings columns to the controller, rows in their order; for what is logged, not for what is computed on."""
    taken = handle if columns is None else handle.select(columns)
    kinds = taken.columns
    whole: Batch | None = None
    for stored, names in taken.sets():
        message = Message({"key": stored.key, "kinds": {n: kinds[n] for n in names}, "all": True})
        answers = executor.ask([(owner, "rows", message) for owner in stored.layout.owners])
        executor.traffic.data_bytes += sum(a.nbytes for a in answers)
        shards = [read_shard(a) for a in answers]
        order = np.argsort(np.concatenate([s.keys for s in shards]), kind="stable")
        batch = Batch.concat([s.batch({n: kinds[n] for n in names}) for s in shards])
        part = batch.select(torch.from_numpy(order))
        whole = (
            part
            if whole is None
            else Batch(whole.lengths, {**whole.tokens, **part.tokens}, {**whole.rows, **part.rows})
        )
    if whole is None:
        raise RunError("there are no columns to fetch")
    return whole


def fetch_row(executor: Executor, handle: Handle, row: int) -> Batch:
    """One row, numbered as its workers hold them: those of the first owner, then those of the next.

    Raises RunError where the columns lie in several layouts, which may differ in that.
    """
    layouts = {stored.layout.number: stored.layout for stored in handle.stored.values()}
    if len(layouts) != 1:
        raise RunError(f"columns {sorted(handle.stored)} are shared out in {len(layouts)} ways")
    (layout,) = layouts.values()
    kinds, place, owner = handle.columns, row, 0
    counts = next(iter(handle.stored.values())).rows
    while place >= counts[owner]:
        place, owner = place - counts[owner], owner + 1
    tokens: dict[str, torch.Tensor] = {}
    rows: dict[str, Any] = {}
    lengths = torch.zeros(1, dtype=torch.int64)
    for stored, names in handle.sets():
        chosen = np.asarray([place], np.int64).view(np.uint8)
        message = Message({"key": stored.key, "kinds": {n: kinds[n] for n in names}}, [chosen])
        (answer,) = executor.ask([(layout.owners[owner], "rows", message)])
        executor.traffic.data_bytes += answer.nbytes
        part = read_shard(answer).batch({n: kinds[n] for n in names})
        tokens, rows, lengths = {**tokens, **part.tokens}, {**rows, **part.rows}, part.lengths
    return Batch(lengths, tokens, rows)
