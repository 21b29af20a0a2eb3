"""Packing rows into micro-batches by token budget."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """Row indices of each micro-batch: first-fit decreasing under the budget.

    A row longer than the budget stands alone. Every row appears exactly once; row order inside a micro-batch
    is ascending. Raises ValueError for a budget below 1.
    """
    return pack_units([(length, [row]) for row, length in enumerate(lengths)], tokens_per_microbatch)


def pack_units(units: Sequence[tuple[int, list[int]]], tokens_per_microbatch: int) -> list[list[int]]:
    """`pack_rows` for units (tokens, rows) that must not be torn apart."""
    if tokens_per_microbatch < 1:
        raise ValueError(f"tokens_per_microbatch must be at least 1, got {tokens_per_microbatch}")
    bins: list[list[int]] = []
    free: list[int] = []
    for tokens, rows in sorted(units, key=lambda unit: -unit[0]):
        for b, room in enumerate(free):
            if tokens <= room:
                bins[b] += rows
                free[b] -= tokens
                break
        else:
            bins.append(list(rows))
            free.append(tokens_per_microbatch - tokens)
    return [sorted(b) for b in bins]


def balance_rows(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row indices of `parts` micro-batches with near-equal token counts (longest row to the lightest part).

    Parts may be empty only when there are fewer rows than parts. Raises ValueError for parts < 1.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    heap: list[tuple[int, int, int]] = [(0, 0, p) for p in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        load, count, part = heapq.heappop(heap)
        out[part].append(row)
        heapq.heappush(heap, (load + lengths[row], count + 1, part))
    return [sorted(p) for p in out]
