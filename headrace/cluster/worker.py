"""One worker: the named objects it holds, the rows they left, and what it does when it is told to.

The controller's orders and the replies are JSON; rows come from other workers and go to them (`Peers`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.cluster.placement import Parallelism
from headrace.cluster.pulse import BrokenOff, Pulse
from headrace.cluster.shares import Source, child_keys, rank_keys, share_out, sources
from headrace.cluster.wire import Column, Message, pack_columns, plain_bytes, plain_value, unpack_columns
from headrace.config_import import import_source
from headrace.data.batch import Batch
from headrace.errors import ConfigError, RunError

logger = logging.getLogger(__name__)

MAX_VALUE_BYTES = 64 * 1024
"""Largest plain result of a call: metrics fit, rows do not, so none can slip through the controller."""


@dataclass(frozen=True)
class Site:
    """Where an object of a worker lives; factories get it as their first argument.

    `ranks` are the global ranks of the object's group in mesh order (pp, dp, sp, tp), tp running fastest.
    `process_group` is the group's own torch.distributed group; None in-process.
    """

    rank: int
    world: int
    group: str
    group_rank: int
    ranks: tuple[int, ...]
    host: str
    device: str
    parallelism: Parallelism = field(default_factory=Parallelism)
    process_group: Any = None
    pulse: Pulse = field(default_factory=Pulse, compare=False, repr=False)
    """Where the rank says how far it is, and hears that it is to break off."""

    @property
    def dp_rank(self) -> int:
        return self.parallelism.coordinates(self.group_rank)[0]

    @property
    def tp_rank(self) -> int:
        return self.parallelism.coordinates(self.group_rank)[1]

    @property
    def pp_rank(self) -> int:
        return self.parallelism.coordinates(self.group_rank)[2]

    @property
    def owns_output(self) -> bool:
        """Whether what this rank returns is what its data-parallel index returns."""
        return self.parallelism.owner(self.dp_rank) == self.group_rank


@dataclass(frozen=True)
class Outcome:
    """What a method may return besides columns, a Batch or None.

    `rows`: columns over the rows it was given, or a Batch of new ones. `value`: plain, small, for the controller (such
    as metrics). `parents` [R of `rows`]: for each new row the row it was made from, which fixes its place in the order.
    """

    rows: Batch | Mapping[str, Column] | None = None
    value: Any = None
    parents: Sequence[int] | None = None


class Peers(Protocol):
    """How a worker reaches the others."""

    def ask(self, requests: Sequence[tuple[int, str, Message]]) -> list[Message]:
        """Sends (rank, topic, message) to each and returns their answers in order."""


@dataclass(frozen=True)
class Shard:
    """One worker's part of an output: sort keys [R] that order its rows among all, lengths [R], columns."""

    keys: np.ndarray
    lengths: np.ndarray
    columns: Mapping[str, Column]

    def batch(self, kinds: Mapping[str, str]) -> Batch:
        tokens: dict[str, Tensor] = {}
        rows: dict[str, Column] = {}
        for name, kind in kinds.items():
            column = self.columns[name]
            if kind == "token" and isinstance(column, Tensor):
                tokens[name] = column
            else:
                rows[name] = column
        return Batch(torch.from_numpy(self.lengths), tokens, rows)


class Worker:
    """The objects and rows of one rank. `run` is called by one thread; `serve` by others meanwhile."""

    def __init__(self, site: Site, peers: Peers) -> None:
        self.site, self.peers = site, peers
        self.current: str | None = None
        self._objects: dict[str, tuple[Any, Site]] = {}
        self._shards: dict[str, Shard] = {}
        self._plans: dict[int, list[list[list[Source]]]] = {}
        self._taken: dict[int, int] = {}
        self._planned = threading.Condition()
        self._moved_bytes = 0

    # orders of the controller

    def run(self, data: bytes) -> bytes:
        """Carries an order out and returns the reply. Whatever the object raises passes through."""
        order = plain_value(data)
        for key in order.get("drop", ()):
            self._shards.pop(key, None)
        self.current = order["what"]
        try:
            reply = self._create(order) if "factory" in order else self._call(order)
        finally:
            self.current = None
        return plain_bytes(reply, order["what"])

    def _create(self, order: Mapping[str, Any]) -> dict[str, Any]:
        factory = load_factory(order["factory"])
        site = replace(self.site, parallelism=Parallelism(**order["parallelism"]))
        self._objects[order["object"]] = (factory(site, **order["arguments"]), site)
        return {}

    def _call(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if order["object"] not in self._objects:
            raise RunError(f"worker {self.site.rank} holds no object '{order['object']}'")
        thing, site = self._objects[order["object"]]
        method = getattr(thing, order["method"], None)
        if not callable(method):
            raise RunError(f"{type(thing).__name__} has no method '{order['method']}'")
        self._moved_bytes = 0
        taken = self._input(order, site)
        began, started = time.time(), time.perf_counter()
        site.pulse.begin(order["number"], 0 if taken is None else len(taken.lengths))
        try:
            if taken is None:
                returned = method(**order["arguments"])
            else:
                returned = method(taken.batch(order["input"]["kinds"]), **order["arguments"])
        except BrokenOff as error:
            logger.info("%s: %s", order["what"], error)
            return {"broken_off": True}
        finally:
            site.pulse.end()
        seconds = time.perf_counter() - started
        outcome = _outcome(returned, taken is not None)
        reply: dict[str, Any] = {
            "began": began,
            "seconds": seconds,
            "moved_bytes": self._moved_bytes,
            "value": outcome.value,
        }
        if len(plain_bytes(outcome.value, "the value")) > MAX_VALUE_BYTES:
            raise RunError(
                f"'{order['method']}' returned a value of over {MAX_VALUE_BYTES} bytes to the controller;"
                " return columns, which stay in the workers"
            )
        if site.owns_output:
            if taken is not None:
                reply["rows"], reply["tokens"] = len(taken.lengths), int(taken.lengths.sum())
            reply |= self._keep(order["output"], outcome, taken, site)
        return reply

    def _keep(self, key: str, outcome: Outcome, taken: Shard | None, site: Site) -> dict[str, Any]:
        """Stores what the owner's method returned; tells the controller its kinds of columns and numbers of rows."""
        if outcome.rows is None:
            return {"written": None}
        if isinstance(outcome.rows, Batch):
            made = outcome.rows
            lengths = made.lengths.numpy()
            same = taken is not None and outcome.parents is None and made.num_rows == len(taken.keys)
            if taken is not None and same:
                keys = taken.keys
            elif taken is not None and outcome.parents is not None:
                if len(outcome.parents) != made.num_rows:
                    raise RunError(f"{len(outcome.parents)} parents were given for {made.num_rows} rows")
                keys = child_keys(taken.keys, outcome.parents)
            else:
                keys = np.arange(made.num_rows, dtype=np.int64) + (site.dp_rank << 30)
            columns: dict[str, Column] = {**made.tokens, **made.rows}
            kinds = dict.fromkeys(made.tokens, "token") | {
                name: "row" if isinstance(c, Tensor) else "list" for name, c in made.rows.items()
            }
            if made.num_rows == made.num_tokens == 0:  # kinds of no rows are what the other ranks say
                kinds = {n: "either" if k == "token" else k for n, k in kinds.items()}
            new_rows = True
        elif taken is None:
            raise RunError("columns were returned by a call that was given no rows; return a Batch")
        else:
            keys, lengths, new_rows = taken.keys, taken.lengths, False
            columns = dict(outcome.rows)
            kinds = {name: _kind(name, c, lengths) for name, c in columns.items()}
        self._shards[key] = Shard(keys, lengths, columns)
        return {
            "written": kinds,
            "new_rows": new_rows,
            "made_rows": len(lengths),
            "made_tokens": int(lengths.sum()),
        }

    # rows coming in

    def _input(self, order: Mapping[str, Any], site: Site) -> Shard | None:
        given = order.get("input")
        if given is None:
            return None
        if "keep" in given:
            return self._kept(given)
        if "sets" in given:
            self._plan(given)
        return self._regrouped(given, site)

    def _kept(self, given: Mapping[str, Any]) -> Shard:
        """The rows that lie here, or with the owner of this data-parallel index."""
        first: Shard | None = None
        columns: dict[str, Column] = {}
        for key, owner, names in given["keep"]:
            have = self._shards.get(key)
            if have is None or not set(names) <= set(have.columns):
                lacking = [n for n in names if have is None or n not in have.columns]
                request = Message({"key": key, "kinds": {n: given["kinds"][n] for n in lacking}, "all": True})
                (answer,) = self._ask([(owner, "rows", request)])
                got = _shard(answer)
                have = Shard(got.keys, got.lengths, {**(have.columns if have else {}), **got.columns})
                self._shards[key] = have
            first = first or have
            columns |= {name: have.columns[name] for name in names}
        if first is None:
            raise RunError("an order with rows named no columns")
        return Shard(first.keys, first.lengths, columns)

    def _plan(self, given: Mapping[str, Any]) -> None:
        """Decides who gets which rows; the first worker of a group does so for all of it."""
        indices: list[list[dict[str, Column]]] = []
        for key, owners, together in given["sets"]:
            answers = self._ask([(o, "index", Message({"key": key, "together": together})) for o in owners])
            indices.append([unpack_columns(a) for a in answers])
        plan: list[list[list[Source]]] = []
        parts: list[np.ndarray] = []
        piece_column = given["together"]
        for (_, owners, _), index in zip(given["sets"], indices, strict=True):
            places = rank_keys([_array(i["keys"]) for i in index])
            if not parts:
                total = sum(len(p) for p in places)
                lengths = np.empty(total, np.int64)
                for place, i in zip(places, index, strict=True):
                    lengths[place] = _array(i["lengths"])
                pieces: list[Any] | None = None
                if piece_column is not None:
                    pieces = [None] * total
                    for place, i in zip(places, index, strict=True):
                        values = i["piece"]
                        plain = values.tolist() if isinstance(values, Tensor) else values
                        for p, value in zip(place.tolist(), plain, strict=True):
                            pieces[p] = (
                                plain_bytes(value, piece_column) if isinstance(value, list | dict) else value
                            )
                parts = share_out(lengths, given["parts"], pieces)
            plan.append(sources(parts, owners, places))
        with self._planned:
            self._plans[given["plan"]] = plan
            self._planned.notify_all()

    def _regrouped(self, given: Mapping[str, Any], site: Site) -> Shard:
        """The rows that the plan gives to this data-parallel index, fetched from those who have them."""
        request = Message({"plan": given["plan"], "part": site.dp_rank, "readers": given["readers"]})
        (answer,) = self._ask([(given["planner"], "plan", request)])
        arrays = iter(b.view(np.int64) for b in answer.buffers)
        requests: list[tuple[int, str, Message]] = []
        places: list[list[np.ndarray]] = []
        for (key, names), workers in zip(given["columns"], answer.header["workers"], strict=True):
            places.append([])
            for worker in workers:
                rows = next(arrays)
                places[-1].append(next(arrays))
                header = {"key": key, "kinds": {name: given["kinds"][name] for name in names}}
                requests.append((worker, "rows", Message(header, [rows.view(np.uint8)])))
        answers = iter(self._ask(requests))
        columns: dict[str, Column] = {}
        whole: Batch | None = None
        for (_, names), place in zip(given["columns"], places, strict=True):
            kinds = {name: given["kinds"][name] for name in names}
            pieces = [_shard(next(answers)).batch(kinds) for _ in place]
            order = np.argsort(np.concatenate(place), kind="stable")
            part = Batch.concat(pieces).select(torch.from_numpy(order))
            if whole is not None and not torch.equal(whole.lengths, part.lengths):
                raise RunError(f"columns {sorted(names)} have rows of other lengths than those before them")
            whole = part if whole is None else whole
            columns |= {**part.tokens, **part.rows}
        if whole is None:
            raise RunError("an order with rows named no columns")
        keys = np.sort(np.concatenate(places[0]))
        shard = Shard(keys, whole.lengths.numpy(), columns)
        self._shards[given["moved"]] = shard
        return shard

    def _ask(self, requests: Sequence[tuple[int, str, Message]]) -> list[Message]:
        """Answers of other workers, and of this one without going out."""
        out: list[Message | None] = [None] * len(requests)
        far = [i for i, request in enumerate(requests) if request[0] != self.site.rank]
        if far:
            for i, answer in zip(far, self.peers.ask([requests[i] for i in far]), strict=True):
                out[i] = answer
                if requests[i][1] == "rows":
                    self._moved_bytes += answer.nbytes
        return [
            answer if answer is not None else self.serve(topic, message)
            for answer, (_, topic, message) in zip(out, requests, strict=True)
        ]

    # rows going out

    def serve(self, topic: str, message: Message) -> Message:
        """Answers another worker. Topics: rows, index (keys and lengths), plan, put (rows made by the controller)."""
        h = message.header
        if topic == "plan":
            return self._planned_part(h["plan"], h["part"], h["readers"])
        if topic == "put":
            self._shards[h["key"]] = _shard(message)
            return Message({})
        shard = self._shards.get(h["key"])
        if shard is None:
            raise RunError(f"worker {self.site.rank} no longer holds rows '{h['key']}'")
        if topic == "index":
            index: dict[str, Column] = {
                "keys": torch.from_numpy(shard.keys),
                "lengths": torch.from_numpy(shard.lengths),
            }
            if h["together"] is not None:
                index["piece"] = shard.columns[h["together"]]
            return pack_columns(index)
        if h.get("all"):
            return shard_message(shard, list(h["kinds"]))
        rows = message.buffers[0].view(np.int64)
        if len(rows) == len(shard.keys):  # row numbers ascend, so these are all
            return shard_message(shard, list(h["kinds"]))
        part = shard.batch(h["kinds"]).select(torch.from_numpy(rows.copy()))
        return shard_message(
            Shard(shard.keys[rows], part.lengths.numpy(), {**part.tokens, **part.rows}), list(h["kinds"])
        )

    def _planned_part(self, number: int, part: int, readers: int) -> Message:
        with self._planned:
            self._planned.wait_for(lambda: number in self._plans)
            plan = self._plans[number]
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == readers:
                del self._plans[number], self._taken[number]
        buffers = [
            a.view(np.uint8)
            for of_set in plan
            for source in of_set[part]
            for a in (source.rows, source.places)
        ]
        return Message({"workers": [[s.worker for s in of_set[part]] for of_set in plan]}, buffers)


def load_factory(path: str) -> Any:
    """The class or function that `package.module:Name` or `path/to/file.py:Name` means. Raises ConfigError."""
    source, _, name = path.rpartition(":")
    if not source:
        raise ConfigError(f"'{path}' names no factory; write package.module:Name")
    module = import_source(source, "factory", prefix="headrace_worker", spec=path, once=True)
    found: Any = module
    for part in name.split("."):
        with contextlib.suppress(AttributeError):
            found = getattr(found, part)
            continue
        raise ConfigError(f"'{path}': {source} has no '{name}'")
    return found


def shard_message(shard: Shard, names: Sequence[str]) -> Message:
    """A shard, with some of its columns, as a message."""
    columns = {name: shard.columns[name] for name in names}
    return pack_columns(
        {
            "/keys": torch.from_numpy(shard.keys),
            "/lengths": torch.from_numpy(shard.lengths),
            **{f"={name}": column for name, column in columns.items()},
        }
    )


def put_message(key: str, shard: Shard) -> Message:
    message = shard_message(shard, list(shard.columns))
    return Message({**message.header, "key": key}, message.buffers)


def _shard(message: Message) -> Shard:
    columns = unpack_columns(message)
    keys, lengths = _array(columns.pop("/keys")), _array(columns.pop("/lengths"))
    return Shard(keys, lengths, {name[1:]: column for name, column in columns.items()})


read_shard = _shard


def _array(column: Column) -> np.ndarray:
    array: np.ndarray = torch.as_tensor(column, dtype=torch.int64).numpy()
    return array


def _kind(name: str, column: Any, lengths: np.ndarray) -> str:
    """Whether a returned column has a value a token, a value a row, or (where those are as many) either."""
    rows, tokens = len(lengths), int(lengths.sum())
    if isinstance(column, Tensor) and column.dim() > 0:
        fits_tokens = column.dim() == 1 and column.shape[0] == tokens
        fits_rows = column.shape[0] == rows
        if fits_tokens or fits_rows:
            return "either" if fits_tokens and fits_rows else "token" if fits_tokens else "row"
    elif isinstance(column, list) and len(column) == rows:
        return "list"
    size = len(column) if isinstance(column, list) else tuple(getattr(column, "shape", ()))
    raise RunError(
        f"column '{name}' is a {type(column).__name__} of size {size}; expected a tensor or list of {rows} values (rows)"
        f" or a tensor of {tokens} (tokens)"
    )


def _outcome(returned: Any, had_rows: bool) -> Outcome:
    if isinstance(returned, Outcome):
        return returned
    if returned is None or isinstance(returned, Batch):
        return Outcome(rows=returned)
    if not had_rows:
        return Outcome(value=returned)
    if isinstance(returned, Mapping):
        return Outcome(rows=returned)
    raise RunError(
        f"a {type(returned).__name__} was returned for rows; return a dict of columns, a Batch, None or an Outcome"
    )
