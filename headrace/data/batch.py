"""The ragged batch: rows of token ids with lengths, and columns over the same rows.

Shapes: R rows, N tokens of all rows together. Row r owns tokens `offsets[r]:offsets[r + 1]`.
There is no padding: masks come from lengths, never from token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.data.packing import balance_rows, pack_rows

RowColumn = Tensor | list[Any]


class Batch:
    """Columns over the same R rows.

    A *token column* is a tensor of N values (`[N]`), one per token of the row's full sequence (prompt and
    response); the value at position t belongs to token t (a log-probability at t is that of token t given
    the tokens before it; position 0 is undefined and never masked in). A *row column* holds one value per
    row: a tensor `[R]` or a Python list of length R.

    A batch is a value: operations return new batches and never change their input.
    """

    __slots__ = ("offsets", "rows", "tokens")

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        tokens: Mapping[str, Tensor] | None = None,
        rows: Mapping[str, RowColumn] | None = None,
    ) -> None:
        """`lengths` [R]: tokens of each row (zeros where there are no token columns).

        Raises ValueError naming the column whose length does not fit.
        """
        lengths_t = torch.as_tensor(lengths, dtype=torch.int64).cpu()
        self.offsets: Tensor = torch.zeros(len(lengths_t) + 1, dtype=torch.int64)
        torch.cumsum(lengths_t, 0, out=self.offsets[1:])
        self.tokens: dict[str, Tensor] = dict(tokens or {})
        self.rows: dict[str, RowColumn] = dict(rows or {})
        for name, column in self.tokens.items():
            if column.dim() != 1 or column.shape[0] != self.num_tokens:
                raise ValueError(
                    f"token column '{name}' has shape {tuple(column.shape)}; the batch has {self.num_tokens} tokens"
                )
        for name, row_column in self.rows.items():
            if len(row_column) != self.num_rows:
                raise ValueError(
                    f"row column '{name}' has {len(row_column)} values; the batch has {self.num_rows} rows"
                )
        both = self.tokens.keys() & self.rows.keys()
        if both:
            raise ValueError(f"columns {sorted(both)} are given both as token and as row columns")

    @classmethod
    def from_rows(
        cls,
        token_rows: Mapping[str, Sequence[Sequence[Any]]],
        rows: Mapping[str, RowColumn] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> Batch:
        """Builds a batch from one list of values per row for each token column."""
        dtypes = dtypes or {}
        lengths: list[int] | None = None
        tokens: dict[str, Tensor] = {}
        for name, values in token_rows.items():
            own = [len(v) for v in values]
            if lengths is not None and own != lengths:
                raise ValueError(f"token column '{name}' has row lengths unlike the columns before it")
            lengths = own
            flat = [x for v in values for x in v]
            tokens[name] = (
                torch.tensor(flat, dtype=dtypes.get(name)) if flat else torch.zeros(0, dtype=dtypes.get(name))
            )
        if lengths is None:
            lengths = [0] * (len(next(iter(rows.values()))) if rows else 0)
        return cls(lengths, tokens, rows)

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Tensor:
        """[R] int64, on the CPU."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def columns(self) -> set[str]:
        return set(self.tokens) | set(self.rows)

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.rows

    def __getitem__(self, name: str) -> Any:
        """The column `name`; KeyError names the columns there are."""
        if name in self.tokens:
            return self.tokens[name]
        if name in self.rows:
            return self.rows[name]
        raise KeyError(f"no column '{name}'; the batch has {sorted(self.columns)}")

    def __repr__(self) -> str:
        return f"Batch({self.num_rows} rows, {self.num_tokens} tokens, columns {sorted(self.columns)})"

    def row_values(self, name: str, row: int) -> Tensor:
        """The values of token column `name` in one row."""
        return self.tokens[name][int(self.offsets[row]) : int(self.offsets[row + 1])]

    def position_ids(self) -> Tensor:
        """[N] int64: 0, 1, 2, … restarting at every row."""
        return torch.arange(self.num_tokens) - torch.repeat_interleave(self.offsets[:-1], self.lengths)

    def row_ids(self) -> Tensor:
        """[N] int64: the row each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_rows), self.lengths)

    def with_columns(self, columns: Mapping[str, Any]) -> Batch:
        """A batch with `columns` added or replaced; a tensor of N values is a token column, of R a row column.

        Where N == R (every row one token) the kind of a replaced column is kept, and a new one is a token column.
        Raises ValueError when a column fits neither.
        """
        tokens, rows = dict(self.tokens), dict(self.rows)
        for name, column in columns.items():
            is_tensor = isinstance(column, Tensor) and column.dim() == 1
            fits_tokens = is_tensor and column.shape[0] == self.num_tokens and bool(self.tokens)
            fits_rows = len(column) == self.num_rows
            if name in self.rows and fits_rows:
                rows[name] = column
            elif fits_tokens:
                rows.pop(name, None)
                tokens[name] = column
            elif fits_rows:
                tokens.pop(name, None)
                rows[name] = column
            else:
                raise ValueError(
                    f"column '{name}' has {len(column)} values; expected {self.num_rows} (rows)"
                    f" or {self.num_tokens} (tokens)"
                )
        return Batch(self.lengths, tokens, rows)

    def without_columns(self, names: Iterable[str]) -> Batch:
        drop = set(names)
        return Batch(
            self.lengths,
            {k: v for k, v in self.tokens.items() if k not in drop},
            {k: v for k, v in self.rows.items() if k not in drop},
        )

    def select(self, rows: Sequence[int] | Tensor) -> Batch:
        """The given rows, in the given order (repeats allowed); a boolean mask [R] selects too.

        Raises ValueError for a mask of another length.
        """
        index = torch.as_tensor(rows)
        if index.dtype == torch.bool and len(index) != self.num_rows:
            raise ValueError(f"a mask of {len(index)} values cannot select from {self.num_rows} rows")
        index = index.nonzero().flatten() if index.dtype == torch.bool else index.to(torch.int64)
        lengths = self.lengths[index]
        starts = self.offsets[:-1][index]
        total = int(lengths.sum()) if len(lengths) else 0
        out_starts = torch.cumsum(lengths, 0) - lengths
        gather = torch.arange(total) + torch.repeat_interleave(starts - out_starts, lengths)
        tokens = {k: v[gather.to(v.device)] for k, v in self.tokens.items()}
        picked = index.tolist()
        out_rows: dict[str, RowColumn] = {
            k: v[index.to(v.device)] if isinstance(v, Tensor) else [v[i] for i in picked]
            for k, v in self.rows.items()
        }
        return Batch(lengths, tokens, out_rows)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Rows of all batches, in order. Raises ValueError unless all have the same columns."""
        if not batches:
            raise ValueError("concat needs at least one batch")
        first = batches[0]
        for other in batches[1:]:
            if other.tokens.keys() != first.tokens.keys() or other.rows.keys() != first.rows.keys():
                raise ValueError(f"columns differ: {sorted(first.columns)} and {sorted(other.columns)}")
        tokens = {k: torch.cat([b.tokens[k] for b in batches]) for k in first.tokens}
        rows: dict[str, RowColumn] = {}
        for k, v in first.rows.items():
            if isinstance(v, Tensor):
                rows[k] = torch.cat([torch.as_tensor(b.rows[k]) for b in batches])
            else:
                rows[k] = [x for b in batches for x in b.rows[k]]
        return Batch(torch.cat([b.lengths for b in batches]), tokens, rows)

    def split(self, n: int) -> list[Batch]:
        """`n` contiguous parts whose row counts differ by at most one. Raises ValueError when n > R or n < 1."""
        if not 1 <= n <= self.num_rows:
            raise ValueError(f"cannot split {self.num_rows} rows into {n} parts")
        bounds = [self.num_rows * i // n for i in range(n + 1)]
        return [self.select(range(bounds[i], bounds[i + 1])) for i in range(n)]

    def regroup(self, key: str | Callable[[Batch], Sequence[Any]]) -> Iterator[tuple[Any, Batch]]:
        """(value, rows with that value of row column `key`), in order of first appearance."""
        values = self.rows[key] if isinstance(key, str) else key(self)
        plain = values.tolist() if isinstance(values, Tensor) else list(values)
        groups: dict[Any, list[int]] = {}
        for row, value in enumerate(plain):
            groups.setdefault(value, []).append(row)
        for value, members in groups.items():
            yield value, self.select(members)

    def pack(self, tokens_per_microbatch: int) -> list[Batch]:
        """Micro-batches of at most `tokens_per_microbatch` tokens (a longer row stands alone). See data/packing.py.

        Rows with the same value of row column `pair_id` count as one row here: no cut can part a pair.
        """
        return self._cut(lambda lengths: pack_rows(lengths, tokens_per_microbatch))

    def balance(self, parts: int) -> list[Batch]:
        """At most `parts` micro-batches with near-equal token counts, none empty; pairs stay whole as in `pack`."""
        return self._cut(lambda lengths: balance_rows(lengths, parts))

    def pieces(self) -> list[list[int]]:
        """Rows that no cut may part: those with the same value of row column `pair_id`, or each row by itself."""
        column = self.rows.get("pair_id", range(self.num_rows))
        pieces: dict[Any, list[int]] = {}
        for row, pair in enumerate(column.tolist() if isinstance(column, Tensor) else column):
            pieces.setdefault(pair, []).append(row)
        return list(pieces.values())

    def _cut(self, cut: Callable[[list[int]], list[list[int]]]) -> list[Batch]:
        """The batch as `cut` divides it, given the tokens of each piece that must stay whole."""
        whole = self.pieces()
        lengths = self.lengths.tolist()
        divided = cut([sum(lengths[row] for row in piece) for piece in whole])
        return [self.select(sorted(row for p in part for row in whole[p])) for part in divided if part]

    def to(self, device: torch.device | str) -> Batch:
        """Tensor columns on `device`; offsets stay on the CPU."""
        tokens = {k: v.to(device) for k, v in self.tokens.items()}
        rows: dict[str, RowColumn] = {
            k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.rows.items()
        }
        return Batch(self.lengths, tokens, rows)
