"""Which transfers go together: buckets that fit into a staging buffer on every rank, the same list on all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.errors import ConfigError
from headrace.reshard.plan import Plan

ALIGN = 16
"""Every message begins at a multiple of this in the staging buffer, so that any dtype can be viewed there."""

OPEN_BUCKETS = 32
"""How many of the last buckets are tried for room; more would cost time and gain little."""


@dataclass(frozen=True)
class Item:
    """Part `part` of `parts` of every transfer of an entry: elements [n part / parts, n (part + 1) / parts) of each."""

    entry: int
    part: int = 0
    parts: int = 1

    def span(self, elements: int) -> tuple[int, int]:
        return elements * self.part // self.parts, elements * (self.part + 1) // self.parts


def buckets(plan: Plan, bucket_bytes: int) -> list[list[Item]]:
    """Buckets in which no rank stages more than `bucket_bytes`: half of it to send and half to receive.

    Parameters go into the first bucket with room for them on all ranks, so that pipeline stages, which load different
    ranks, share buckets; one that fits into none is cut. ConfigError names the least `bucket_bytes` that would do.
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes={bucket_bytes} must be positive")
    limit = bucket_bytes // 2
    found: list[list[Item]] = []
    used: list[np.ndarray] = []
    for index, entry in enumerate(plan.entries):
        phase, size = entry.phase, entry.wire_dtype.itemsize
        elements = np.concatenate([phase.sent, phase.received])
        count = np.concatenate([phase.sends, phase.receives])
        if not elements.any():
            continue
        # a part has a gap before each message and, in each slice, up to an element more than its share
        overhead = count * (ALIGN + size)
        parts = 1
        if (elements * size + count * ALIGN).max() > limit:
            if overhead.max() >= limit:
                raise ConfigError(
                    f"bucket_bytes={bucket_bytes} is too small for {int(count.max())} slices of {entry.name} on one rank:"
                    f" at least {4 * int(overhead.max())}"
                )
            parts = int(np.max(-(-elements * size // (limit - overhead))))
        load = elements * size // parts + (count * ALIGN if parts == 1 else overhead)
        for part in range(parts):
            recent = range(max(0, len(used) - OPEN_BUCKETS), len(used))
            at = next((b for b in recent if (used[b] + load <= limit).all()), None)
            if at is None:
                at = len(found)
                found.append([])
                used.append(np.zeros_like(load))
            found[at].append(Item(index, part, parts))
            used[at] = used[at] + load
    return found


def peak_extra_bytes(plan: Plan, bucket_bytes: int) -> np.ndarray:
    """[W] the most memory beyond the source tensors: new target tensors and both staging buffers."""
    most = np.zeros((2, plan.world), dtype=np.int64)
    for items in buckets(plan, bucket_bytes):
        load = np.zeros_like(most)
        for item in items:
            entry = plan.entries[item.entry]
            phase, size = entry.phase, entry.wire_dtype.itemsize
            count = np.stack([phase.sends, phase.receives])
            elements = np.stack([phase.sent, phase.received])
            load += elements * size // item.parts + count * (ALIGN + size * (item.parts > 1))
        most = np.maximum(most, load)
    return plan.new_bytes + most.sum(axis=0)
