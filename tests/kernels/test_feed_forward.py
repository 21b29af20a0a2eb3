"""The compiled feed-forward layers against float64, and that a token's output is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import build, feed_forward, operators

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"no kernels: {build.missing()}")

Weights = tuple[Tensor, Tensor, Tensor]


def layer(hidden: int, inner: int, seed: int = 0, scale: float = 1.0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    gate, up, down = (
        torch.randn(shape, generator=generator)
        for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    return gate * scale / hidden**0.5, up / hidden**0.5, down / inner**0.5


def exactly(x: Tensor, weights: Weights) -> Tensor:
    gate, up, down = weights
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def magnitudes(x: Tensor, weights: Weights, grad: Tensor) -> tuple[Tensor, ...]:
    """Of y and of the gradients of x and the weights: what the terms add up to without signs, as rounding sees it."""
    x, gate, up, down, grad = (t.double().abs() for t in (x, *weights, grad))
    g, u, inner = F.linear(x, gate), F.linear(x, up), F.linear(grad, down.t())
    # silu' and silu'' are below 1.1 and 0.6
    of_gate, of_up = inner * u * (1.1 + g), inner * 1.1 * g
    of_x = F.linear(of_gate, gate.t()) + F.linear(of_up, up.t())
    products = ((of_gate, x), (of_up, x), (grad, 1.1 * g * u))
    return (F.linear(1.1 * g * u, down), of_x, *(a[0].t() @ b[0] for a, b in products))


def close(got: Tensor | None, wanted: Tensor, magnitude: Tensor, tolerance: float = 1e-6) -> bool:
    if got is None or got.shape != wanted.shape:
        return False
    return bool(((got.double() - wanted).abs() <= tolerance * magnitude).all())


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.one_of(st.integers(0, 40), st.integers(120, 700)),
    hidden=st.sampled_from([16, 32, 48, 80, 128]),
    inner=st.one_of(st.integers(1, 30), st.integers(90, 140)),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 999),
)
def test_values_and_gradients_are_those_of_float64(
    tokens: int, hidden: int, inner: int, scale: float, seed: int
) -> None:
    weights = layer(hidden, inner, seed, scale)
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(1, tokens, hidden, generator=generator) for _ in range(2))
    inputs = [t.double().requires_grad_() for t in (x, *weights)]
    wanted = exactly(inputs[0], (inputs[1], inputs[2], inputs[3]))
    got, kept = feed_forward.forward(x, weights)
    of_y, *of_gradients = magnitudes(x, weights, grad)
    assert close(got, wanted.detach(), of_y)
    assert torch.equal(feed_forward.feed_forward(x, *weights), got)
    gradients = torch.autograd.grad(wanted, inputs, grad.double())
    found = feed_forward.gradients(x, weights, kept, grad, of_x=True)
    for mine, theirs, size in zip(found, gradients, of_gradients, strict=True):
        assert close(mine, theirs, size)
    (of_x, *none) = feed_forward.gradients(None, weights, kept, grad, of_x=True)
    assert of_x is not None
    assert found[0] is not None
    assert torch.equal(of_x, found[0])
    assert none == [None, None, None]
    (nothing, *of_weights) = feed_forward.gradients(x, weights, kept, grad, of_x=False)
    assert nothing is None
    for mine, theirs, size in zip(of_weights, gradients[1:], of_gradients[1:], strict=True):
        assert close(mine, theirs, size)
    # a gradient that is gone frees its memory though the others live
    assert all(g is None or g.untyped_storage().nbytes() == 4 * g.numel() for g in found)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 700),
    chosen=st.lists(st.integers(0, 699), min_size=1),
    threads=st.sampled_from([1, 2, 3]),
)
def test_a_token_does_not_depend_on_others(tokens: int, chosen: list[int], threads: int) -> None:
    weights = layer(48, 31)
    x = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([at % tokens for at in chosen])
    alone = feed_forward.feed_forward(x[rows], *weights)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together, _ = feed_forward.forward(x, weights)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together[rows], alone)
    x[0] = torch.nan
    broken = feed_forward.feed_forward(x, *weights)
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], together[1:])


def test_nor_where_the_compiler_avoids_fused_instructions() -> None:
    """As gcc 13 does for sums, tuned for Sapphire Rapids; not in the same way for one and two registers of tokens."""
    code = """
from headrace.kernels import build
build.FLAGS = (*build.FLAGS, "--param", "avoid-fma-max-bits=512")
import torch
from headrace.kernels import feed_forward
x, gate, up, down = torch.randn(70, 48), torch.randn(31, 48), torch.randn(31, 48), torch.randn(48, 31)
together = feed_forward.feed_forward(x, gate, up, down)
alone = torch.cat([feed_forward.feed_forward(row[None], gate, up, down) for row in x])
print("missing:", build.missing(), "the same:", torch.equal(together, alone))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if "unrecognized" in done.stdout or "unknown" in done.stdout:
        pytest.skip("the compiler is not gcc 9 or newer")
    assert "missing: None the same: True" in done.stdout


def test_a_token_past_the_end_adds_nothing_to_gradients() -> None:
    """Registers are filled up with tokens that are none, and an infinite weight times 0 is NaN."""
    gate, up, down = layer(16, 8)
    down[0, 0] = torch.inf
    x, grad = torch.randn(5, 16), torch.randn(5, 16)
    grad[:, 0] = 0.0
    _, kept = feed_forward.forward(x, (gate, up, down))
    found = feed_forward.gradients(x, (gate, up, down), kept, grad, of_x=True)
    of_down = found[3]
    assert of_down is not None
    assert of_down.isfinite().all()


def test_a_bound_call_reads_and_writes_where_its_tensors_lie() -> None:
    weights, x, y = layer(32, 20), torch.randn(9, 32), torch.zeros(9, 32)
    call = operators.bound(feed_forward.feed_forward, (x, *weights), y)
    assert call is not None
    for _ in range(2):
        x.normal_()
        weights[1].normal_()
        call()
        torch.testing.assert_close(y, exactly(x, weights), atol=1e-5, rtol=1e-4)
    assert operators.bound(feed_forward.feed_forward, (x[:, ::2], *layer(16, 4)), y) is None


def test_what_does_not_fit_is_not_read() -> None:
    gate, up, down = layer(32, 20)
    x = torch.randn(3, 32)
    assert feed_forward.takes(x, (gate, up, down))
    for others in (
        (gate, up, down.t()), (gate, up[:10], down), (gate[:, :16], up, down), (gate.double(), up, down),
        (gate, up, down[:, ::2]),
    ):  # fmt: skip
        assert not feed_forward.takes(x, others)
        with pytest.raises(ValueError, match="do not fit"):
            feed_forward.feed_forward(x, *others)
    _, kept = feed_forward.forward(x, (gate, up, down))
    for a, b, grad in ((x[:2], kept, x), (x, kept[:, :1], x), (x, kept, x[:, :16]), (x, kept[..., :32], x)):
        with pytest.raises(ValueError, match="do not fit"):
            feed_forward.gradients(a, (gate, up, down), b, grad, of_x=True)
    odd = layer(24, 20)
    assert not feed_forward.takes(torch.randn(3, 24), odd)
    with pytest.raises(ValueError, match="do not fit"):
        feed_forward.feed_forward(torch.randn(3, 24), *odd)


def test_inputs_of_any_layout() -> None:
    weights, x = layer(32, 20), torch.randn(32, 7).t()
    assert torch.equal(
        feed_forward.feed_forward(x, *weights), feed_forward.feed_forward(x.contiguous(), *weights)
    )
