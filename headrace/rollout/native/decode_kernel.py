"""Whether the kernel of paged_kernel.py can be built here, and decoding with it.

Shapes: R rows, W blocks of a table row, A query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from headrace.rollout.native.kv_cache import PagedKVCache


@cache
def missing() -> str | None:
    """What the kernel lacks on this machine; None where it can be built. torch for CUDA on Linux brings Triton along."""
    if find_spec("triton") is None:
        return "Triton, which comes with torch for CUDA on Linux (pip install triton)"
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
        return "a C compiler, which Triton calls once (apt install gcc)"
    return None


class KernelDecode:
    """Attention of one new token a sequence over the cached ones, by the kernel. Its shapes depend on R alone."""

    def __init__(self, cache: PagedKVCache, inputs: Tensor) -> None:
        """`inputs` [R, 2 + W] (int64): of each sequence the new token, its position, and its blocks."""
        self._cache = cache
        self._positions, self._table = inputs[:, 1].contiguous(), inputs[:, 2:]
        size = cache.block_size
        block = self._table.gather(1, (self._positions // size)[:, None])[:, 0]
        self._own = block * size + self._positions % size

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """query [R, A, D], key and value [R, K, D] → [R, A, D]."""
        from headrace.rollout.native import paged_kernel

        self._cache.write(layer, self._own, key, value)
        keys, values = self._cache.tokens(layer)
        return paged_kernel.attend(
            query,
            keys,
            values,
            self._table,
            self._positions,
            self._cache.block_size,
            scale=scale,
            window=window,
        )
