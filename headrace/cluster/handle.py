"""What the controller knows of rows that lie in the workers: who holds how many, and which columns. Never the rows."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace.cluster.placement import Parallelism
from headrace.errors import RunError

Kind = Literal["token", "row", "list"]
"""One value a token, one value a row, or a Python list with one value a row."""

_numbers = itertools.count(1)


def new_number() -> int:
    """A number that no other layout, set of rows or output of this controller has."""
    return next(_numbers)


@dataclass(frozen=True)
class RowLayout:
    """One way that rows are shared out over the data-parallel ranks of a group. Equal numbers mean equal shares."""

    number: int
    group: str
    parallelism: Parallelism
    owners: tuple[int, ...]
    """Global rank of the worker that answers for each data-parallel index."""
    balanced: bool
    together: frozenset[str] = frozenset()
    """Columns whose equal values were kept on one rank."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Columns that one call left in the workers, over rows shared out by `layout`."""

    key: str
    layout: RowLayout
    row_set: int
    """Number of the rows: equal for columns over the same rows, however these are shared out."""
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    columns: Mapping[str, Kind]

    def on_release(self, release: Callable[[str, str], None]) -> Stored:
        """Has `release(group, key)` called when nothing refers to this any more."""
        weakref.finalize(self, release, self.layout.group, self.key).atexit = False
        return self


@dataclass(frozen=True)
class Handle:
    """A batch that lies in workers: for each column, who holds it. A value, like Batch."""

    stored: Mapping[str, Stored] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len({s.row_set for s in self.stored.values()}) > 1:
            raise RunError(f"columns {sorted(self.stored)} are over different rows")

    @property
    def columns(self) -> dict[str, Kind]:
        return {name: s.columns[name] for name, s in self.stored.items()}

    @property
    def num_rows(self) -> int:
        return sum(self._first.rows) if self.stored else 0

    @property
    def num_tokens(self) -> int:
        return sum(self._first.tokens) if self.stored else 0

    @property
    def _first(self) -> Stored:
        return next(iter(self.stored.values()))

    def select(self, names: Iterable[str]) -> Handle:
        """Only some columns. Raises RunError naming one that is not there."""
        wanted = list(names)
        for name in wanted:
            if name not in self.stored:
                raise RunError(f"no column '{name}'; the rows have {', '.join(sorted(self.stored))}")
        return Handle({name: self.stored[name] for name in wanted})

    def merged(self, other: Handle, names: Iterable[str] | None = None) -> Handle:
        """With columns of `other`, which are over the same rows. Raises RunError when they are not."""
        more = other if names is None else other.select(names)
        return Handle({**self.stored, **more.stored})

    def sets(self) -> list[tuple[Stored, list[str]]]:
        """The outputs that make up the columns, and the columns taken from each."""
        found: dict[str, tuple[Stored, list[str]]] = {}
        for name, stored in self.stored.items():
            found.setdefault(stored.key, (stored, []))[1].append(name)
        return list(found.values())
