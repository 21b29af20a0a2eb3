"""The compiled norms and gates against float64, and as operators of a recording."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import build, operators, pointwise

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"no kernels: {build.missing()}")

SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 300), st.integers(1, 70))


def close(got: Tensor, wanted: Tensor, tolerance: float, part: Tensor | None = None) -> bool:
    """Relative to the largest number, or to that of a `part` of which wanted is a sum."""
    largest = max(
        (float(x.detach().abs().max()) for x in (wanted, part) if x is not None and x.numel()), default=0.0
    )
    return not got.numel() or bool((got.double() - wanted).detach().abs().max() <= tolerance * largest)


@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES,
    eps=st.sampled_from([1e-6, 1e-2]),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 999),
)
def test_norms_are_those_of_float64(shape: tuple[int, int, int], eps: float, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, up = (torch.randn(shape, generator=generator) * size for size in (scale, 1.0))
    gain = torch.randn(shape[-1], generator=generator)
    exact, exact_gain = x.double().requires_grad_(), gain.double().requires_grad_()
    factors = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    wanted = exact * factors * exact_gain
    wanted_x, wanted_gain = torch.autograd.grad(wanted, (exact, exact_gain), up.double())
    got, got_factors = pointwise.normed(x, gain, eps)
    assert close(got, wanted, 1e-6)
    assert close(got_factors, factors[..., 0], 1e-6)
    assert torch.equal(pointwise.rms_norm(x, gain, eps), got)
    of_x, of_gain = pointwise.norm_gradients(x, gain, got_factors, up, of_gain=True)
    assert close(of_x, wanted_x, 5e-6, up * exact_gain * factors)
    assert of_gain is not None
    assert close(of_gain, wanted_gain, 5e-6, (up * exact * factors).abs().flatten(0, 1).sum(0))
    alone, none = pointwise.norm_gradients(x, gain, got_factors, up, of_gain=False)
    assert none is None
    assert torch.equal(alone, of_x)


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, scale=st.sampled_from([1e-3, 3.0, 40.0]), seed=st.integers(0, 999))
def test_gates_are_those_of_float64(shape: tuple[int, int, int], scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate, up, grad = (torch.randn(shape, generator=generator) * s for s in (scale, 1.0, 1.0))
    exact = gate.double().requires_grad_(), up.double().requires_grad_()
    wanted = F.silu(exact[0]) * exact[1]
    assert close(pointwise.gated(gate, up), wanted, 1e-6)
    # near silu's least, at -1.28, its derivative is a difference of nearly equal numbers
    terms = (exact[1] * grad * (1.0 + exact[0].abs()), F.silu(exact[0].abs()) * grad)
    for mine, theirs, term in zip(
        pointwise.gate_gradients(gate, up, grad),
        torch.autograd.grad(wanted, exact, grad.double()),
        terms,
        strict=True,
    ):
        assert close(mine, theirs, 2e-6, term)


def test_gates_of_extreme_numbers() -> None:
    gate = torch.tensor([torch.nan, -1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.inf])
    got = pointwise.gated(gate, torch.ones(9))
    torch.testing.assert_close(got, F.silu(gate), equal_nan=True, atol=1e-30, rtol=1e-6)
    for grad in pointwise.gate_gradients(gate[1:-1], torch.ones(7), torch.ones(7)):
        assert grad.isfinite().all()


def test_the_number_of_threads_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    x, up = (torch.randn(1000, 48, generator=generator) for _ in range(2))
    gain = torch.randn(48, generator=generator)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, factors = pointwise.normed(x, gain, 1e-6)
            grads = pointwise.norm_gradients(x, gain, factors, up, of_gain=True)
            results.append([y, *grads, pointwise.gated(x, up), *pointwise.gate_gradients(x, up, y)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_bound_call_reads_and_writes_where_its_tensors_lie() -> None:
    x, gain, out = torch.randn(6, 8), torch.randn(8), torch.zeros(6, 8)
    call = operators.bound(pointwise.rms_norm, (x, gain, 1e-5), out)
    assert call is not None
    for _ in range(2):
        x.normal_()
        call()
        torch.testing.assert_close(out, F.rms_norm(x, (8,), gain, 1e-5))
    assert operators.bound(torch.ops.aten.mul.Tensor, (x, x), out) is None
    assert operators.bound(pointwise.gated, (x.t(), x.t()), out.t()) is None  # not side by side


def test_inputs_of_any_layout() -> None:
    x, gain = torch.randn(8, 6).t(), torch.randn(16)[::2]
    torch.testing.assert_close(pointwise.rms_norm(x, gain, 1e-5), F.rms_norm(x, (8,), gain, 1e-5))
    torch.testing.assert_close(pointwise.gated(x, x), F.silu(x) * x)


def test_only_plain_float32_on_a_cpu_is_taken() -> None:
    assert operators.takes(torch.ones(2), torch.nn.Parameter(torch.ones(2)))
    assert not operators.takes(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not operators.takes(torch.ones(2, device="meta"))
    assert not operators.takes(torch.ones(2).as_subclass(type("Own", (Tensor,), {})))
    assert not operators.takes(torch.eye(2).to_sparse())
    assert not operators.takes(torch.nested.nested_tensor([torch.ones(2)]))
