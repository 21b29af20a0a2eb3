import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.rollout.native.attention import (
    MixedAttention,
    PagedDecodeAttention,
    PrefillAttention,
)
from headrace.rollout.native.decode import cut_by_width
from headrace.rollout.native.kv_cache import PagedKVCache

CPU = torch.device("cpu")
BLOCK = 4


def by_hand(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, window: int | None
) -> np.ndarray:
    """One query [A, D] at the end of keys and values [L, K, D], in float64; head a uses key head a * K // A."""
    heads, kv_heads = q.shape[0], keys.shape[1]
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    out = np.zeros(q.shape)
    for a in range(heads):
        k = a * kv_heads // heads
        scores = keys[:, k].astype(np.float64) @ q[a].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out[a] = weights / weights.sum() @ values[:, k].astype(np.float64)
    return out


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "dtype,atol", [(torch.float32, 2e-6), (torch.float64, 1e-12), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("window", [None, 1, 5, 8])
@pytest.mark.parametrize("heads,kv_heads", [(4, 2), (6, 2), (3, 3), (4, 1)])
def test_prefill_then_mixed_then_decode(
    heads: int, kv_heads: int, window: int | None, dtype: torch.dtype, atol: float
) -> None:
    generator = torch.Generator().manual_seed(heads)
    lengths, head_dim = [9, 1, 4, 21, 8], 8
    final = [n + 2 for n in lengths]
    draw = lambda n, h: torch.randn(n, h, head_dim, generator=generator).to(dtype)  # noqa: E731
    q, k, v = ([draw(n, h) for n in final] for h in (heads, kv_heads, kv_heads))
    cache = PagedKVCache(1, 40, BLOCK)
    table = np.random.default_rng(0).permutation(40)[: 5 * 6].reshape(5, 6).astype(np.int64)
    scale = 0.3

    def check(out: torch.Tensor, row: int, position: int) -> None:
        kk, vv = k[row][: position + 1].double().numpy(), v[row][: position + 1].double().numpy()
        want = by_hand(q[row][position].double().numpy(), kk, vv, scale, window)
        np.testing.assert_allclose(out.double().numpy(), want, atol=atol)

    def slots(row: int, n: int) -> np.ndarray:
        at = np.arange(n)
        return table[row, at // BLOCK] * BLOCK + at % BLOCK

    # rows 0-2 are prefilled; then they decode a token while 3 and 4 are prefilled; then all decode
    def prefill(rows: list[int]) -> PrefillAttention:
        return PrefillAttention(
            cache, [lengths[r] for r in rows], np.concatenate([slots(r, lengths[r]) for r in rows]), CPU
        )

    def decode(rows: list[int], position: list[int]) -> PagedDecodeAttention:
        return PagedDecodeAttention(cache, table[rows], np.array(position) + 1, CPU)

    def run(context: object, picks: list[tuple[int, slice]]) -> torch.Tensor:
        take = [torch.cat([x[r][s] for r, s in picks]) for x in (q, k, v)]
        return context.attend(0, *take, scale=scale, window=window)  # type: ignore[attr-defined]

    first = [0, 1, 2]
    out = run(prefill(first), [(r, slice(0, lengths[r])) for r in first])
    for r, last in zip(first, np.cumsum([lengths[r] for r in first]) - 1, strict=True):
        check(out[last], r, lengths[r] - 1)
    at = [lengths[r] for r in first]
    mixed = MixedAttention(prefill([3, 4]), 29, decode(first, at))
    out = run(
        mixed, [(3, slice(0, 21)), (4, slice(0, 8)), *((r, slice(lengths[r], lengths[r] + 1)) for r in first)]
    )
    check(out[20], 3, 20)
    check(out[28], 4, 7)
    for i, r in enumerate(first):
        check(out[29 + i], r, at[i])
    everyone = [3, 0, 2, 4, 1]
    at = [lengths[r] + (r < 3) for r in everyone]
    out = run(decode(everyone, at), [(r, slice(p, p + 1)) for r, p in zip(everyone, at, strict=True)])
    for i, r in enumerate(everyone):
        check(out[i], r, at[i])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype,atol", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_layers_may_differ_in_heads_and_windows_and_repeat(dtype: torch.dtype, atol: float) -> None:
    """One context for a whole step: what it keeps for one layer must not reach another."""
    generator = torch.Generator().manual_seed(0)
    lengths = np.array([12, 11, 3])
    table = np.random.default_rng(1).permutation(12).reshape(3, 4).astype(np.int64)
    cache = PagedKVCache(4, 12, BLOCK)
    context = PagedDecodeAttention(cache, table, lengths, CPU)
    at = np.arange(12)
    for layer, (heads, kv_heads, dim, window) in enumerate(
        [(4, 2, 8, None), (4, 2, 8, 5), (6, 1, 16, None), (4, 2, 8, None)]
    ):
        k, v = (torch.randn(3, 12, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
        q = torch.randn(3, heads, dim, generator=generator).to(dtype)
        for row, n in enumerate(lengths):
            slots = torch.from_numpy(table[row, at[: n - 1] // BLOCK] * BLOCK + at[: n - 1] % BLOCK)
            cache.write(layer, slots, k[row, : n - 1], v[row, : n - 1])
        newest = (torch.stack([x[row, n - 1] for row, n in enumerate(lengths)]) for x in (k, v))
        out = context.attend(layer, q, *newest, scale=0.4, window=window)
        for row, n in enumerate(lengths):
            keys, values = (x[row, :n].double().numpy() for x in (k, v))
            want = by_hand(q[row].double().numpy(), keys, values, 0.4, window)
            np.testing.assert_allclose(out[row].double().numpy(), want, atol=atol)


def test_cut_by_width() -> None:
    def cut(widths: list[int], waste: float, free: int = 0) -> list[tuple[int, int]]:
        return [(part.start, part.stop) for part in cut_by_width(np.array(widths), waste, free)]

    assert cut([4, 4, 4], 0.0) == [(0, 3)]
    assert cut([8, 4, 4, 1], 0.0) == [(0, 1), (1, 3), (3, 4)]
    # 8 + 7 fill 15 of 16 places; 3 would leave 6 of 24 empty
    assert cut([8, 7, 3], 0.15) == [(0, 2), (2, 3)]
    assert cut([8, 7, 3], 0.25) == [(0, 3)]
    assert cut([8, 7, 3, 3], 0.0, free=6) == [(0, 3), (3, 4)]
    # not sorted: the longest decides
    assert cut([3, 7, 8], 0.15) == [(0, 1), (1, 3)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.15, 0.4]),
    st.integers(0, 30),
)
def test_parts_hold_every_sequence_once_and_waste_little(widths: list[int], waste: float, free: int) -> None:
    parts = cut_by_width(np.array(widths), waste, free)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(widths)))
    for part in parts:
        own = widths[part]
        places = len(own) * max(own)
        assert places - sum(own) <= max(free, waste * places)


@pytest.mark.usefixtures("kernels")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from([None, 1, 3, 6]))
def test_sequences_of_unlike_lengths_in_any_order(data: st.DataObject, window: int | None) -> None:
    """Three layers of one step over any table, whose spare entries are blocks of others, and any finite rubbish."""
    lengths = np.array(data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=9)))
    rng = np.random.default_rng(int(lengths.sum()))
    table = rng.permutation(9 * 8)[: len(lengths) * 8].reshape(-1, 8).astype(np.int64)
    cache = PagedKVCache(3, 72, BLOCK)
    context = PagedDecodeAttention(cache, table[:, : int(lengths.max() - 1) // BLOCK + 1], lengths, CPU)
    every = torch.arange(72 * BLOCK)
    for layer in range(3):
        keys, values = (
            torch.from_numpy(rng.normal(0, 1, (72 * BLOCK, 2, 8)).astype(np.float32)) for _ in "kv"
        )
        cache.write(layer, every, keys, values)
        query = torch.from_numpy(rng.normal(0, 1, (4, len(lengths), 8)).astype(np.float32)).transpose(0, 1)
        last = torch.from_numpy(
            table[np.arange(len(lengths)), (lengths - 1) // BLOCK] * BLOCK + (lengths - 1) % BLOCK
        )
        out = context.attend(layer, query, keys[last] * 2, values[last] * 2, scale=0.4, window=window)
        keys[last], values[last] = keys[last] * 2, values[last] * 2
        for row, n in enumerate(lengths.tolist()):
            at = np.arange(n)
            slots = torch.from_numpy(table[row, at // BLOCK] * BLOCK + at % BLOCK)
            want = by_hand(
                query[row].double().numpy(), keys[slots].numpy(), values[slots].numpy(), 0.4, window
            )
            np.testing.assert_allclose(out[row].double().numpy(), want, atol=3e-6)
