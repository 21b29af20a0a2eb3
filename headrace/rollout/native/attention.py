"""Attention over the paged KV cache: fresh sequences (prefill), one new token a sequence (decode), or both.

Everything that depends only on the step (slots, blocks, masks) is computed once, not once a layer.

Shapes: T tokens, B sequences, A query heads, K key/value heads, D head size, S slots a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels.attention import CompiledDecode, takes
from headrace.kernels.attention import is_available as kernels_are_available
from headrace.models.attention import AttentionContext, PackedAttention
from headrace.rollout.native.decode import DecodePart, GatheredDecode, SparseDecode, cut_by_width, index_dtype
from headrace.rollout.native.kv_cache import PagedKVCache

WASTE = {"cpu": 0.15, "cuda": 0.4}  # on CUDA a launch costs more than gathering some empty slots
FREE_ENTRIES = 4096  # empty scores that cost a CPU less than one more part


class PrefillAttention:
    """Packed causal attention over fresh sequences, whose keys and values go to `slots` [T]."""

    def __init__(
        self, cache: PagedKVCache, lengths: Sequence[int], slots: NDArray[np.int64], device: torch.device
    ) -> None:
        self._cache = cache
        self._packed = PackedAttention(lengths, device)
        self._slots = torch.from_numpy(slots).to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        self._cache.write(layer, self._slots, key, value)
        return self._packed.attend(layer, query, key, value, scale=scale, window=window)


class PagedDecodeAttention:
    """Attention of one new token per sequence over all its cached tokens, the new one included.

    `table` [B, W]: the blocks of each sequence in order; `lengths` [B]: tokens including the new one. Right
    for any order of sequences, least work when they come sorted by length.
    """

    def __init__(
        self, cache: PagedKVCache, table: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device
    ) -> None:
        self._cache = cache
        self._table = table
        self._lengths = lengths
        self._longest = max(lengths.tolist(), default=0)
        self._device = device
        self._waste = WASTE.get(device.type, WASTE["cpu"])
        block, inside = np.divmod(lengths - 1, cache.block_size)
        own = table[np.arange(len(table)), block] * cache.block_size + inside
        self._slots = torch.from_numpy(own).to(device)
        self._parts: dict[tuple[int | None, int, int], list[tuple[slice, DecodePart]]] = {}
        self._compiled: CompiledDecode | None = None
        if device.type == "cpu" and kernels_are_available():
            self._compiled = CompiledDecode(table, lengths, cache.block_size)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        if self._compiled is not None and takes(query, key, value):
            pools = self._cache.pools_for(layer, key, value)
            return self._compiled.attend(query, key, value, pools, scale=scale, window=window)
        self._cache.write(layer, self._slots, key, value)
        if window is not None and self._longest <= window:
            window = None  # every token still lies inside: both kinds of layer share their parts
        kind = (window, query.shape[1], key.shape[1])
        if kind not in self._parts:
            # SDPA keeps the scores of half precision in float32, as it should be; sparse products do not
            sparse = query.device.type == "cpu" and query.dtype.itemsize >= 4
            self._parts[kind] = (self._sparse if sparse else self._gathered)(*kind, query.dtype)
        parts = self._parts[kind]
        if len(parts) == 1:
            return parts[0][1].attend(layer, query, scale)
        return torch.cat([part.attend(layer, query[rows], scale) for rows, part in parts])

    def _sparse(
        self, window: int | None, heads: int, kv_heads: int, dtype: torch.dtype
    ) -> list[tuple[slice, DecodePart]]:
        lengths, size = self._lengths, self._cache.block_size
        seen = lengths if window is None else np.minimum(lengths, window)
        kind = index_dtype(self._cache, kv_heads, len(lengths) * heads * self._longest)
        # [B, W * S] of each place the pool's row of its first head
        blocks = np.multiply(self._table, size * kv_heads, dtype=kind, casting="unsafe")
        inside = np.arange(0, size * kv_heads, kv_heads, dtype=kind)
        first = (blocks[:, :, None] + inside).reshape(len(lengths), -1)
        parts: list[tuple[slice, DecodePart]] = []
        for rows in cut_by_width(seen, self._waste, FREE_ENTRIES // heads):
            own = seen[rows]
            each = own.tolist()
            width = max(each)
            places = first[rows]
            if window is not None:
                oldest = (lengths[rows] - own)[:, None]
                at = np.minimum(oldest + np.arange(width), places.shape[1] - 1)
                places = np.take_along_axis(places, at, 1)
            hidden = None if min(each) == width else own
            part = SparseDecode(self._cache, places[:, :width], hidden, (heads, kv_heads), dtype)
            parts.append((rows, part))
        return parts

    def _gathered(
        self, window: int | None, heads: int, kv_heads: int, dtype: torch.dtype
    ) -> list[tuple[slice, DecodePart]]:
        size = self._cache.block_size
        lengths = self._lengths
        oldest = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        first_block = oldest // size
        widths = (lengths - 1) // size + 1 - first_block
        parts: list[tuple[slice, DecodePart]] = []
        for rows in cut_by_width(widths, self._waste):
            width = int(widths[rows].max())
            columns = first_block[rows, None] + np.arange(width)
            held = columns * size < lengths[rows, None]
            # empty places point at the sequence's own first block; the bias hides what is in it
            columns = np.where(held, columns, first_block[rows, None])
            blocks = np.take_along_axis(self._table[rows], columns, 1)
            position = first_block[rows, None] * size + np.arange(width * size)
            visible = (position >= oldest[rows, None]) & (position < lengths[rows, None])
            parts.append((rows, GatheredDecode(self._cache, blocks, visible, dtype, self._device)))
        return parts


class MixedAttention:
    """A forward pass over `num_prefill` tokens of fresh sequences, then one token per running sequence."""

    def __init__(self, prefill: PrefillAttention, num_prefill: int, decode: PagedDecodeAttention) -> None:
        self._parts: tuple[tuple[AttentionContext, slice], ...] = (
            (prefill, slice(0, num_prefill)),
            (decode, slice(num_prefill, None)),
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        return torch.cat(
            [c.attend(layer, query[s], key[s], value[s], scale=scale, window=window) for c, s in self._parts]
        )
