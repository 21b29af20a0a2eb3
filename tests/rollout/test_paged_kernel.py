"""The attention kernel of decode steps against attention written out in float64, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.rollout.native.decode_kernel import num_spans

pytestmark = pytest.mark.gpu


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    positions: Tensor,
    size: int,
    scale: float,
    window: int | None,
) -> Tensor:
    out = torch.empty_like(q, dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        seen = torch.arange(
            0 if window is None else max(0, position + 1 - window), position + 1, device=q.device
        )
        slots = table[row, seen // size] * size + seen % size
        each = q.shape[1] // k.shape[1]
        keys, values = (x[slots].double().repeat_interleave(each, 1) for x in (k, v))
        weights = (torch.einsum("ad,tad->at", q[row].double(), keys) * scale).softmax(-1)
        out[row] = torch.einsum("at,tad->ad", weights, values)
    return out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(16, 8, 128), (14, 2, 64), (4, 1, 256), (6, 2, 80), (3, 3, 16)]
)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_every_sequence_sees_its_own_tokens(
    heads: int, kv_heads: int, dim: int, window: int | None, rows: int
) -> None:
    """Few sequences in spans and many in one piece; blocks in any order; slots that nobody sees hold NaN."""
    from headrace.rollout.native.paged_kernel import attend

    torch.manual_seed(rows)
    size, width = 16, 21
    lengths = torch.tensor([1, 2, 15, 16, 17, 64, 65, 200, 330]).repeat(rows // 9 + 1)[:rows]
    table = torch.randperm(rows * width).view(rows, width)
    keys, values = (torch.full((rows * width * size, kv_heads, dim), float("nan")) for _ in range(2))
    for row, length in enumerate(lengths.tolist()):
        where = torch.arange(0 if window is None else max(0, length - window), length)
        slots = table[row, where // size] * size + where % size
        keys[slots], values[slots] = torch.randn(2, len(slots), kv_heads, dim)
    device = torch.device("cuda")
    inputs = torch.cat([torch.zeros(rows, 1), lengths[:, None] - 1, table], 1).long().to(device)
    query = torch.randn(rows, dim, heads, device=device).transpose(
        1, 2
    )  # as a model may give it: not contiguous
    assert (num_spans(rows, kv_heads) > 1) == (rows < 256)
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 0.003)):
        q, k, v = (x.to(device, dtype) for x in (query, keys, values))
        got = attend(q, k, v, inputs[:, 2:], inputs[:, 1].contiguous(), size, scale=dim**-0.5, window=window)
        want = attention(q, k, v, inputs[:, 2:], inputs[:, 1], size, dim**-0.5, window)
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() < tolerance
