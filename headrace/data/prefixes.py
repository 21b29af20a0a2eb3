"""Rows that begin alike: a prompt shared by several rows is computed once in a forward pass.

Under causal attention the hidden states of a common beginning are the same in every row, so the linear layers need them
once; attention still sees every row whole. Exact up to the rounding of float sums, gradients included.

Shapes: R rows, N tokens of a batch, C tokens computed, S tokens the rows span.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.batch import Batch
from headrace.data.packing import pack_units


@dataclass(frozen=True)
class SharedPrefixes:
    """What a forward pass over a batch computes. All on the CPU, int64."""

    lengths: list[int]  # [R] tokens of each row up to its last needed one
    computed: Tensor  # [C] flat tokens of the batch, each once
    expand: Tensor | None  # [S] where each spanned token is among the computed; None when nothing is shared
    place: Tensor  # [N] where each token is among the computed; -1 beyond a row's last needed one


def prefix_lengths(response_mask: Tensor, offsets: Tensor) -> NDArray[np.int64]:
    """[R] tokens before each row's first sampled one (the whole row where none is)."""
    starts, ends = offsets[:-1].numpy(), offsets[1:].numpy()
    sampled = response_mask.cpu().numpy().nonzero()[0]
    first = np.append(sampled, len(response_mask))[np.searchsorted(sampled, starts)]
    return np.asarray(np.minimum(first, ends) - starts)


def prefix_groups(batch: Batch, prefixes: NDArray[np.int64]) -> list[int]:
    """[R] a number for each row, equal for rows whose first `prefixes` tokens are equal."""
    ids, starts = batch["input_ids"].cpu().numpy(), batch.offsets.tolist()
    seen: dict[bytes, int] = {}
    return [
        seen.setdefault(ids[start : start + n].tobytes(), len(seen))
        for start, n in zip(starts, prefixes.tolist(), strict=False)
    ]


def share_prefixes(batch: Batch, needed: Tensor) -> SharedPrefixes:
    """`needed` [N] bool: tokens whose hidden states are wanted. Reads `input_ids` and `response_mask`."""
    starts = batch.offsets[:-1].numpy()
    wanted = needed.cpu().numpy().nonzero()[0]
    before = np.append(-1, wanted)[np.searchsorted(wanted, batch.offsets[1:].numpy())]
    spans = np.maximum(before - starts + 1, 0)
    prefixes = np.minimum(prefix_lengths(batch["response_mask"], batch.offsets), spans)
    owner: dict[int, int] = {}  # the row that computes a group's beginning
    ranges: list[NDArray[np.int64]] = []
    place = np.full(batch.num_tokens, -1, dtype=np.int64)
    count = 0
    for row, group in enumerate(prefix_groups(batch, prefixes)):
        start, n, p = int(starts[row]), int(spans[row]), int(prefixes[row])
        first = owner.setdefault(group, row)
        shared = p if first != row else 0
        if shared:
            place[start : start + p] = place[starts[first] : starts[first] + p]
        fresh = np.arange(start + shared, start + n)
        place[fresh] = np.arange(count, count + len(fresh))
        ranges.append(fresh)
        count += len(fresh)
    lengths = spans.tolist()
    expand = None
    if count < int(spans.sum()):
        expand = torch.from_numpy(place[place >= 0])
    computed = np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.int64)
    return SharedPrefixes(lengths, torch.from_numpy(computed), expand, torch.from_numpy(place))


def pack_shared(batch: Batch, tokens_per_microbatch: int) -> list[Batch]:
    """Micro-batches of at most so many computed tokens; rows that begin alike stay together where they fit.

    What `Batch.pieces` holds together (a row, or a pair) is never parted; one over the budget stands alone. Every row
    appears exactly once; row order inside a micro-batch is ascending. Raises ValueError for a budget below 1.
    """
    prefixes = prefix_lengths(batch["response_mask"], batch.offsets)
    own = batch.lengths.numpy() - prefixes
    groups = prefix_groups(batch, prefixes)
    pieces_of: dict[tuple[int, ...], list[list[int]]] = {}
    for piece in batch.pieces():
        pieces_of.setdefault(tuple(dict.fromkeys(groups[row] for row in piece)), []).append(piece)
    units: list[tuple[int, list[int]]] = []
    for pieces in pieces_of.values():
        prefix = sum({groups[row]: int(prefixes[row]) for row in pieces[0]}.values())
        members: list[int] = []
        size = prefix
        for piece in pieces:
            tokens = int(own[piece].sum())
            if members and size + tokens > tokens_per_microbatch:
                units.append((size, members))
                size, members = prefix, []
            members += piece
            size += tokens
        units.append((size, members))
    return [batch.select(rows) for rows in pack_units(units, tokens_per_microbatch)]
