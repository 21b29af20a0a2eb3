"""Packing rows into micro-batches by token budget."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """Row indices of each micro-batch: first-fit decreasing under the budget.

    A row longer than the budget stands alone. Every row appears exactly once; row order inside a micro-batch
    is ascending. Raises ValueError for a budget below 1.
    """
    if tokens_per_microbatch < 1:
        raise ValueError(f"tokens_per_microbatch must be at least 1, got {tokens_per_microbatch}")
    order = sorted(range(len(lengths)), key=lambda r: -lengths[r])
    bins: list[list[int]] = []
    free: list[int] = []
    for row in order:
        for b, room in enumerate(free):
            if lengths[row] <= room:
                bins[b].append(row)
                free[b] -= lengths[row]
                break
        else:
            bins.append([row])
            free.append(tokens_per_microbatch - lengths[row])
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
