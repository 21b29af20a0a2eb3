"""Attention of one new token a sequence over the paged KV cache, as a Triton kernel: nothing is gathered or repeated.

Import it only where decode_kernel.py finds nothing `missing`. A program takes one sequence and one key/value head, whose
query heads it computes together, and with few sequences one of several spans of their tokens; the spans are joined by a
second kernel. Softmax over blocks of tokens with a running maximum: Milakov & Gimelshein 2018, algorithm 3; in spans:
Dao et al., "Flash-Decoding for long-context inference", 2023.

Shapes: R sequences, A query heads, K key/value heads, D head size, S slots a block, W blocks of a table row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.rollout.native.decode_kernel import MAX_SPANS, num_spans

BLOCK = 64  # tokens at a time
SMALLEST_TILE = 16  # of the tensor cores
NO_WINDOW = (1 << 31) - 1


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, table, positions, out, spans, scale, window, table_stride,
    SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    GROUP_TILE: tl.constexpr, DIM_TILE: tl.constexpr, TOKENS: tl.constexpr, IN_SPANS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    span = tl.program_id(2)
    num_spans = tl.num_programs(2)
    total = tl.load(positions + row) + 1
    first = tl.maximum(total - window, 0)
    each = tl.cdiv(tl.cdiv(total - first, num_spans), TOKENS) * TOKENS
    begin = first + span * each
    end = tl.minimum(begin + each, total)
    g = tl.arange(0, GROUP_TILE)
    d = tl.arange(0, DIM_TILE)
    n = tl.arange(0, TOKENS)
    query_rows = (row * KV_HEADS + head) * GROUP + g
    inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + query_rows[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    peak = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    norm = tl.zeros([GROUP_TILE], tl.float32)
    sums = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    for start in range(begin, end, TOKENS):
        place = start + n
        seen = place < end
        block = tl.load(table + row * table_stride + place // SIZE, mask=seen, other=0)
        at = ((block * SIZE + place % SIZE) * KV_HEADS + head) * DIM
        there = seen[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + at[:, None] + d[None, :], mask=there, other=0.0)
        scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        shrink = tl.exp(peak - new_peak)
        v = tl.load(values + at[:, None] + d[None, :], mask=there, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        norm = norm * shrink + tl.sum(weights, 1)
        peak = new_peak
    if IN_SPANS:
        to = (query_rows * num_spans + span) * (DIM + 2)
        tl.store(spans + to, peak, mask=g < GROUP)
        tl.store(spans + to + 1, norm, mask=g < GROUP)
        tl.store(spans + to[:, None] + 2 + d[None, :], sums, mask=inside)
    else:
        result = (sums / norm[:, None]).to(out.dtype.element_ty)
        tl.store(out + query_rows[:, None] * DIM + d[None, :], result, mask=inside)


@triton.jit
def _join(spans, out, num_spans, DIM: tl.constexpr, DIM_TILE: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, MOST)
    d = tl.arange(0, DIM_TILE)
    at = (row * num_spans + s) * (DIM + 2)
    there = s < num_spans
    peak = tl.load(spans + at, mask=there, other=float("-inf"))  # -inf too for a span without tokens
    norm = tl.load(spans + at + 1, mask=there, other=0.0)
    weight = tl.exp(peak - tl.max(peak, 0))
    inside = there[:, None] & (d < DIM)[None, :]
    sums = tl.load(spans + at[:, None] + 2 + d[None, :], mask=inside, other=0.0)
    result = tl.sum(sums * weight[:, None], 0) / tl.sum(norm * weight, 0)
    tl.store(out + row * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    block_size: int,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """query [R, A, D] → [R, A, D], in its dtype (half precision); sums and softmax are float32.

    keys and values [slots, K, D], contiguous, of the same dtype; table [R, W] and positions [R] (int64): a sequence's
    blocks, and the position of its new token, whose key is in the cache already. It sees `window` tokens (None: all).
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    query, out = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    count = num_spans(rows, kv_heads)
    spans = out
    if count > 1:
        spans = torch.empty(rows * heads * count * (dim + 2), dtype=torch.float32, device=query.device)
    tile = max(SMALLEST_TILE, triton.next_power_of_2(dim))
    kernel: Any = _attend
    kernel[(rows, kv_heads, count)](
        query, keys, values, table, positions, out, spans, scale, NO_WINDOW if window is None else window,
        table.stride(0), SIZE=block_size, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim,
        GROUP_TILE=max(SMALLEST_TILE, triton.next_power_of_2(heads // kv_heads)), DIM_TILE=tile, TOKENS=BLOCK,
        IN_SPANS=count > 1, num_warps=2, num_stages=2,
    )  # fmt: skip
    if count > 1:
        join: Any = _join
        join[(rows * heads,)](spans, out, count, DIM=dim, DIM_TILE=tile, MOST=MAX_SPANS)
    return out
