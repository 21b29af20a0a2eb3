"""The compiled attention kernels against plain attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import build
from headrace.kernels.attention import CompiledAttention, CompiledDecode
from headrace.models.attention import PackedAttention

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"no kernels: {build.missing()}")


def plain(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, first: int = 0
) -> Tensor:
    """One sequence, the queries of its tokens from `first` on, with an explicit mask and repeated heads."""
    n, repeats = len(key), query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    distance = torch.arange(first, n)[:, None] - torch.arange(n)[None, :]
    hidden = (distance < 0) | (distance >= (window or n))
    scores = torch.einsum("iad,jad->aij", query, key) * scale
    return torch.einsum("aij,jad->iad", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def plain_pack(
    lengths: list[int],
    expand: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Each sequence by itself; a token that several hold takes the output of the first."""
    out: dict[int, Tensor] = {}
    start = 0
    for n in lengths:
        places = expand[start : start + n]
        rows = plain(query[places], key[places], value[places], scale, window)
        for place, row in zip(places.tolist(), rows, strict=True):
            out.setdefault(place, row)
        start += n
    return torch.stack([out[i] for i in range(len(out))])


def close(got: Tensor, wanted: Tensor, tolerance: float = 5e-6) -> bool:
    return bool(
        (got.double() - wanted).detach().abs().max()
        <= tolerance * max(1.0, float(wanted.detach().abs().max()))
    )


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[int], Tensor | None]:
    """Lengths, and for half of them which tokens are shared: beginnings of groups of sequences."""
    if draw(st.booleans()):
        return draw(st.lists(st.integers(0, 70), min_size=1, max_size=5)), None
    lengths, expand, tokens = [], [], 0
    for _ in range(draw(st.integers(1, 3))):
        shared = list(range(tokens, tokens + draw(st.integers(0, 40))))
        tokens += len(shared)
        for row in range(draw(st.integers(1, 4))):
            own = draw(st.integers(0, 40))
            # a sequence may end within the beginning that it shares, but for the one that computes it
            begins = shared if row == 0 or own else shared[: draw(st.integers(0, len(shared)))]
            lengths.append(len(begins) + own)
            expand += [*begins, *range(tokens, tokens + own)]
            tokens += own
    return lengths, torch.tensor(expand, dtype=torch.int64)


@pytest.mark.usefixtures("kernels")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pack=packs(),
    heads=st.sampled_from([(4, 2), (3, 3), (6, 1), (2, 1)]),
    dim=st.sampled_from([1, 7, 16, 20, 32, 48, 128]),
    window=st.none() | st.integers(1, 80),
    seed=st.integers(0, 1000),
)
def test_packs_equal_plain_attention_in_float64(
    pack: tuple[list[int], Tensor | None], heads: tuple[int, int], dim: int, window: int | None, seed: int
) -> None:
    """Values and all three gradients, with shared beginnings and without, for any lengths and windows."""
    lengths, expand = pack
    if sum(lengths) == 0:
        return
    whole = torch.arange(sum(lengths)) if expand is None else expand
    generator = torch.Generator().manual_seed(seed)
    tokens = int(whole.max()) + 1
    shapes = [(tokens, h, dim) for h in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, up = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = plain_pack(lengths, whole, *exact, 0.4, window)
    single = [x.float().requires_grad_() for x in (q, k, v)]
    got = PackedAttention(lengths, "cpu", expand=expand).attend(0, *single, scale=0.4, window=window)
    assert close(got, wanted)
    with torch.no_grad():
        assert torch.equal(
            PackedAttention(lengths, "cpu", expand=expand).attend(0, *single, scale=0.4, window=window), got
        )
    grads = zip(
        torch.autograd.grad(got, single, up.float()), torch.autograd.grad(wanted, exact, up), strict=True
    )
    for mine, theirs in grads:
        assert close(mine, theirs, 2e-5)


def test_gradients_are_those_of_small_differences() -> None:
    """Against the loss itself, not a formula: float64 differences of the plain attention."""
    generator = torch.Generator().manual_seed(1)
    lengths = [6, 3]
    inputs = [torch.randn(9, h, 5, generator=generator, dtype=torch.float64) for h in (2, 1, 1)]
    up = torch.randn(9, 2, 5, generator=generator, dtype=torch.float64)

    def loss(*x: Tensor) -> float:
        return float((plain_pack(lengths, torch.arange(9), *x, 0.5, 4) * up).sum())

    single = [x.float().requires_grad_() for x in inputs]
    out = CompiledAttention(lengths, None, None).attend(*single, scale=0.5, window=4)
    for x, grad in zip(inputs, torch.autograd.grad(out, single, up.float()), strict=True):
        for at in np.ndindex(*x.shape):
            x[at] += 1e-6
            above = loss(*inputs)
            x[at] -= 2e-6
            below = loss(*inputs)
            x[at] += 1e-6
            assert float(grad[at]) == pytest.approx((above - below) / 2e-6, abs=2e-5)


def test_any_layout_in_memory() -> None:
    """Heads before tokens, pieces of a joint projection, and dimensions that do not lie side by side."""
    generator = torch.Generator().manual_seed(2)
    joint = torch.randn(11, 8 * 16, generator=generator)
    query, key, value = (x.unflatten(1, (-1, 16)) for x in joint.split([4 * 16, 2 * 16, 2 * 16], dim=1))
    attention = CompiledAttention([4, 7], None, None)
    wanted = attention.attend(
        query.contiguous(), key.contiguous(), value.contiguous(), scale=0.3, window=None
    )
    for moved in (
        lambda x: x,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ):
        leaves = [moved(x).detach().requires_grad_() for x in (query, key, value)]
        out = attention.attend(*leaves, scale=0.3, window=None)
        assert torch.equal(out, wanted)
        up = moved(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)))
        grads = torch.autograd.grad(out, leaves, up)
        plain_leaves = [x.contiguous().detach().requires_grad_() for x in (query, key, value)]
        plain_out = attention.attend(*plain_leaves, scale=0.3, window=None)
        for a, b in zip(grads, torch.autograd.grad(plain_out, plain_leaves, up.contiguous()), strict=True):
            assert torch.equal(a, b)


def test_the_number_of_threads_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(4)
    lengths = [90, 5, 33, 61]
    inputs = [torch.randn(189, h, 32, generator=generator).requires_grad_() for h in (4, 2, 2)]
    up = torch.randn(189, 4, 32, generator=generator)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = CompiledAttention(lengths, None, None).attend(*inputs, scale=0.2, window=None)
            results.append([out, *torch.autograd.grad(out, inputs, up)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_in_its_own_sequence(bad: float) -> None:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(40, 2, 16, generator=generator) for _ in range(3))
    key[3, 1, 2] = bad
    out = CompiledAttention([8, 32], None, None).attend(query, key, value, scale=0.3, window=None)
    wanted = plain(query[:8].double(), key[:8].double(), value[:8].double(), 0.3, None)
    assert torch.equal(out[:8].isfinite(), wanted.isfinite())
    assert not out[3:8, 1].isfinite().all()
    assert out[8:].isfinite().all()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 60.0])
def test_scores_of_any_size(scale: float) -> None:
    """From flat weights to those where one key takes all; far below the largest a weight is 0."""
    generator = torch.Generator().manual_seed(6)
    query, key, value = (torch.randn(50, 1, 32, generator=generator) for _ in range(3))
    out = CompiledAttention([50], None, None).attend(query, key, value, scale=scale, window=None)
    assert close(out, plain(query.double(), key.double(), value.double(), scale, None), 3e-5)


def test_sequences_share_beginnings_alone() -> None:
    with pytest.raises(ValueError, match="beginnings alone"):
        PackedAttention([3, 3], "cpu", expand=torch.tensor([0, 1, 2, 3, 4, 1]))


def test_what_does_not_fit_is_refused() -> None:
    attention = CompiledAttention([3, 2], None, None)
    x = torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match=r"5 tokens .* \(4, 2, 8\)"):
        attention.attend(x, x, x, scale=1.0, window=None)
    x = torch.randn(5, 3, 8)
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        attention.attend(x, x[:, :2], x[:, :2], scale=1.0, window=None)
    decode = CompiledDecode(np.zeros((2, 1), dtype=np.int64), np.ones(2, dtype=np.int64), 4)
    with pytest.raises(ValueError, match="2 tokens"):
        decode.attend(x, x, x, (x, x), scale=1.0, window=None)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    dim=st.sampled_from([1, 7, 16, 20, 32, 48, 64, 128, 256]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 100),
    seed=st.integers(0, 1000),
)
def test_decoding_equals_plain_attention_in_float64(
    lengths: list[int], heads: tuple[int, int], dim: int, block_size: int, window: int | None, seed: int
) -> None:
    """Sequences of any length, their blocks anywhere; nothing but the new tokens' slots is written."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), -(-max(lengths) // block_size)
    table = np.random.default_rng(seed).permutation(rows * width).reshape(rows, width)
    pools = tuple(
        torch.randn(rows * width * block_size, heads[1], dim, generator=generator) for _ in range(2)
    )
    query, key, value = (torch.randn(rows, h, dim, generator=generator) for h in (heads[0], *heads[1:] * 2))
    before = [pool.clone() for pool in pools]
    out = CompiledDecode(table, np.array(lengths), block_size).attend(
        query, key, value, pools, scale=0.4, window=window
    )
    for row, n in enumerate(lengths):
        at = np.arange(n)
        slots = table[row, at // block_size] * block_size + at % block_size
        for pool, new in zip(before, (key, value), strict=True):
            pool[slots[-1]] = new[row]
        keys, values = (pool[slots].double() for pool in before)
        wanted = plain(query[row : row + 1].double(), keys, values, 0.4, window, first=n - 1)
        assert close(out[row : row + 1], wanted)
    assert all(torch.equal(a, b) for a, b in zip(pools, before, strict=True))
