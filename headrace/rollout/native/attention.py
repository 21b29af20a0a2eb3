"""Attention over the paged KV cache: fresh sequences (prefill), one new token a sequence (decode), or both.

Everything that depends only on the step (slots, blocks, masks) is computed once, not once a layer.

Shapes: T tokens, B sequences, A query heads, K key/value heads, D head size, S slots a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace.models.attention import AttentionContext, PackedAttention
from headrace.rollout.native.kv_cache import PagedKVCache

WASTE = {"cpu": 0.15, "cuda": 0.4}  # on CUDA a launch costs more than gathering some empty slots


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


@dataclass(slots=True)
class _Bucket:
    """Consecutive sequences of like length: their blocks [rows * width] and what to add to the scores."""

    start: int
    stop: int
    width: int  # blocks a sequence
    blocks: Tensor
    bias: Tensor | None  # [rows, 1, 1, width * S], 0 or -inf; None when every slot holds a visible token


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
        self._longest = int(lengths.max(initial=0))
        self._device = device
        self._waste = WASTE.get(device.type, WASTE["cpu"])
        last = lengths - 1
        size = cache.block_size
        own = np.take_along_axis(table, (last // size)[:, None], 1)[:, 0]
        self._slots = torch.from_numpy(own * size + last % size).to(device)
        self._buckets: dict[int | None, list[_Bucket]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        self._cache.write(layer, self._slots, key, value)
        if window is not None and self._longest <= window:
            window = None  # every token still lies inside: both kinds of layer share their buckets
        if window not in self._buckets:
            self._buckets[window] = self._make_buckets(window, query.dtype)
        kv_heads = key.shape[1]
        outputs = []
        for bucket in self._buckets[window]:
            keys, values = self._cache.gather(layer, bucket.blocks)
            rows = bucket.stop - bucket.start
            # the query heads of one key/value head become its "positions": no key is repeated
            q = query[bucket.start : bucket.stop].unflatten(1, (kv_heads, -1)).transpose(0, 1)
            k, v = (x.unflatten(1, (rows, -1)) for x in (keys, values))
            out = attend_few(q, k, v, bucket.bias, scale)
            outputs.append(out.transpose(0, 1).flatten(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _make_buckets(self, window: int | None, dtype: torch.dtype) -> list[_Bucket]:
        size = self._cache.block_size
        lengths = self._lengths
        oldest = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        first_block = oldest // size
        widths = (lengths - 1) // size + 1 - first_block
        buckets = []
        for start, stop in cut_by_width(widths.tolist(), self._waste):
            width = int(widths[start:stop].max())
            columns = first_block[start:stop, None] + np.arange(width)
            held = columns * size < lengths[start:stop, None]
            # empty places point at the sequence's own first block; the bias hides what is in it
            columns = np.where(held, columns, first_block[start:stop, None])
            blocks = np.take_along_axis(self._table[start:stop], columns, 1)
            position = first_block[start:stop, None] * size + np.arange(width * size)
            visible = (position >= oldest[start:stop, None]) & (position < lengths[start:stop, None])
            bias = None
            if not visible.all():
                seen = torch.from_numpy(visible[:, None, None, :]).to(self._device)
                bias = torch.zeros(seen.shape, dtype=dtype, device=self._device).masked_fill_(
                    ~seen, -torch.inf
                )
            index = torch.from_numpy(blocks.reshape(-1)).to(self._device)
            buckets.append(_Bucket(start, stop, width, index, bias))
        return buckets


def attend_few(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of few queries to many keys: q [K, B, G, D], k and v [K, B, L, D], bias [B, 1, 1, L] → [K, B, G, D]."""
    if (
        q.device.type != "cpu" or q.dtype.itemsize < 4
    ):  # half precision wants scores in float32, as SDPA keeps them
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=bias, scale=scale
        )
        return out.transpose(0, 1)
    # SDPA's CPU kernel makes blocks for many queries; with one or a few, two batched products are faster
    scores = torch.matmul(q * scale, k.transpose(-1, -2))
    if bias is not None:
        scores += bias[:, 0]
    return torch.matmul(scores.softmax(-1), v)


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


def cut_by_width(widths: Sequence[int], waste: float) -> list[tuple[int, int]]:
    """Cuts consecutive sequences into [start, stop) so that at most `waste` of a part's blocks are empty."""
    parts: list[tuple[int, int]] = []
    start, widest, used = 0, 0, 0
    for i, width in enumerate(widths):
        if i > start and used + width < (1 - waste) * max(widest, width) * (i - start + 1):
            parts.append((start, i))
            start, widest, used = i, 0, 0
        widest = max(widest, width)
        used += width
    parts.append((start, len(widths)))
    return parts
