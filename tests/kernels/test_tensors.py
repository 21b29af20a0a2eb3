"""What kernels must not read by its address, and derivatives that they do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from headrace.kernels import build, operators, pointwise
from headrace.kernels.attention import CompiledAttention, CompiledDecode
from headrace.models import gates, norm
from headrace.models.attention import PackedAttention

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"no kernels: {build.missing()}")


class Wrapped(Tensor):
    """Numbers that lie elsewhere, as those of a collective operation that is still under way."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        found: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return PackedAttention([8], "cpu").attend(0, query, key, value, scale=0.3, window=None)


NORM = nn.RMSNorm(8, eps=1e-6)
norm.use_fast_norms(NORM)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return functional_call(NORM, {"weight": gain}, x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(16, 10, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(10, 16, bias=False), nn.SiLU()
        gates.use_fast_gates(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


FEED_FORWARD = FeedForward()


def fed_forward(x: Tensor, *weights: Tensor) -> Tensor:
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    return functional_call(FEED_FORWARD, dict(zip(names, weights, strict=True)), x)


CASES: list[Any] = [
    pytest.param(attend, [(8, 2, 8)] * 3, id="attention"),
    pytest.param(normed, [(8, 8), (8,)], id="norm"),
    pytest.param(gates.gated, [(8, 8)] * 2, id="gate"),
    pytest.param(fed_forward, [(70, 16), (10, 16), (10, 16), (16, 10)], id="feed-forward"),
]
Case = Callable[..., Tensor]


def leaves(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("function", "shapes"), CASES)
def test_a_gradient_that_lies_elsewhere(function: Case, shapes: list[tuple[int, ...]]) -> None:
    inputs = leaves(shapes)
    out = function(*inputs)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(out, inputs, up, retain_graph=True)
    for got, want in zip(torch.autograd.grad(out, inputs, Wrapped(up)), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("function", "shapes"), CASES)
@pytest.mark.parametrize(
    ("brought_back", "tolerance"),
    [
        (lambda x: x.half(), 0.02),
        (lambda x: x.double(), 0.0),
        (lambda x: x.t().contiguous().t() if x.dim() == 2 else x.transpose(-1, 0).contiguous().transpose(-1, 0), 0.0),
        (lambda x: Wrapped(x), 0.0),
    ],
    ids=["rounded", "wide", "layout", "elsewhere"],
)  # fmt: skip
def test_saved_tensors_come_back_otherwise(
    function: Case, shapes: list[tuple[int, ...]], brought_back: Any, tolerance: float
) -> None:
    inputs = leaves(shapes)
    out = function(*inputs)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(out, inputs, up)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, brought_back):
        changed = function(*inputs)
    for got, want in zip(torch.autograd.grad(changed, inputs, up), wanted, strict=True):
        assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize(("function", "shapes"), CASES)
def test_a_gradient_of_zeros_that_lies_nowhere(function: Case, shapes: list[tuple[int, ...]]) -> None:
    inputs = leaves(shapes)
    out = function(*inputs)
    for got in torch.autograd.grad(out, inputs, torch._efficientzerotensor(out.shape)):
        assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize(("function", "shapes"), CASES)
def test_a_derivative_of_gradients_is_refused(function: Case, shapes: list[tuple[int, ...]]) -> None:
    inputs = leaves(shapes)
    with forward_ad.dual_level():
        out = function(*inputs)
        loss = (out * forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))).sum()
        with pytest.raises(RuntimeError, match="no forward derivatives"):
            torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize(("function", "shapes"), CASES)
def test_saved_tensors_are_unpacked_once(function: Case, shapes: list[tuple[int, ...]]) -> None:
    """As recomputation in the backward pass needs it, also where its graph is kept."""
    inputs = leaves(shapes)
    out = checkpoint(function, *inputs, use_reentrant=False)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    for got, want in zip(grads, torch.autograd.grad(function(*inputs).square().sum(), inputs), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("function", "shapes"), CASES)
def test_functional_transforms(function: Case, shapes: list[tuple[int, ...]]) -> None:
    inputs = leaves(shapes)
    wanted = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    got = grad(lambda *x: function(*x).square().sum(), argnums=tuple(range(len(inputs))))(*inputs)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("function", "shapes"), CASES)
def test_saved_tensors_of_other_shapes_are_not_read(function: Case, shapes: list[tuple[int, ...]]) -> None:
    inputs = leaves(shapes)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x[..., :-1]):
        out = function(*inputs)
    with pytest.raises((ValueError, RuntimeError)):
        torch.autograd.grad(out.sum(), inputs)


@pytest.mark.parametrize(("function", "shapes"), CASES)
def test_who_traces_sees_every_operator(function: Case, shapes: list[tuple[int, ...]]) -> None:
    """The graph computes of other numbers what the function does of them, and its gradients."""

    def with_gradients(*inputs: Tensor) -> list[Tensor]:
        out = function(*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    inputs = leaves(shapes)
    graph = make_fx(with_gradients)(*[torch.zeros_like(x).requires_grad_() for x in inputs])
    for got, want in zip(graph(*inputs), with_gradients(*inputs), strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("function", "shapes"), CASES)
@pytest.mark.parametrize("constant", [True, False])
def test_a_second_derivative_is_refused(
    function: Case, shapes: list[tuple[int, ...]], constant: bool
) -> None:
    """Where what comes in is a constant, too: a penalty on gradients must not be taken for a constant."""
    inputs = leaves(shapes)
    out = function(*inputs)
    grads = torch.autograd.grad((out if constant else out**2).sum(), inputs, create_graph=True)
    loss = out.sum() + sum(g.square().sum() for g in grads)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        loss.backward()


def test_forward_derivatives_are_not_lost() -> None:
    """silu(x) u along x: s (1 + x (1 - s)) u with s = sigmoid(x)."""
    gate, up = torch.randn(8), torch.randn(8)
    s = torch.sigmoid(gate)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(gate, torch.ones(8))
        tangent = forward_ad.unpack_dual(gates.gated(dual, up)).tangent
        assert not operators.takes(dual)
    torch.testing.assert_close(tangent, s * (1 + gate * (1 - s)) * up)


@pytest.mark.parametrize(("function", "shapes"), CASES)
def test_a_sign_that_was_not_written_yet(function: Case, shapes: list[tuple[int, ...]]) -> None:
    inputs = [x.detach() for x in leaves(shapes)]
    torch.testing.assert_close(
        function(torch._neg_view(inputs[0]), *inputs[1:]),
        function(-inputs[0], *inputs[1:]),
        atol=1e-4,
        rtol=1e-4,
    )


def test_the_default_dtype_is_not_that_of_the_numbers() -> None:
    x, gain = torch.randn(9, 512), torch.randn(512)
    wanted = pointwise.normed(x, gain, 1e-6)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        y, factors = pointwise.normed(x, gain, 1e-6)
        made = [
            y,
            factors,
            pointwise.rms_norm(x, gain, 1e-6),
            pointwise.gated(x, x),
            *pointwise.norm_gradients(x, gain, factors, x, of_gain=True),
            *pointwise.gate_gradients(x, x, x),
        ]
    finally:
        torch.set_default_dtype(before)
    assert all(m is not None and m.dtype == torch.float32 for m in made)
    assert torch.equal(y, wanted[0])


def test_operators_refuse_what_does_not_fit() -> None:
    x = torch.randn(4, 6)
    for call in (
        lambda: pointwise.gated(x.bfloat16(), x.bfloat16()),
        lambda: pointwise.gated(x, x[:, :1]),
        lambda: pointwise.rms_norm(x, torch.ones(3), 1e-6),
        lambda: pointwise.normed(x, torch.ones(12), 1e-6),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            call()


def test_a_gate_that_is_broadcast() -> None:
    gate, up = torch.randn(5, 6), torch.randn(5, 1)
    torch.testing.assert_close(gates.gated(gate, up), F.silu(gate) * up)


def test_attention_refuses_heads_of_other_sizes() -> None:
    attention = CompiledAttention([3], None, None)
    with pytest.raises(ValueError, match="3 tokens"):
        attention.attend(
            torch.randn(3, 2, 8), torch.randn(3, 2, 4), torch.randn(3, 2, 4), scale=1.0, window=None
        )


@pytest.mark.parametrize(
    "pool",
    [
        torch.zeros(32, 2, 8, dtype=torch.bfloat16),
        torch.zeros(32, 2, 4),
        torch.zeros(20, 2, 8),
        torch.zeros(2, 32, 8).transpose(0, 1),
    ],
    ids=["dtype", "size", "slots", "layout"],
)
def test_decoding_refuses_a_cache_that_does_not_fit(pool: Tensor) -> None:
    x = torch.randn(2, 2, 8)
    decode = CompiledDecode(np.array([[5], [7]]), np.array([1, 2]), 4)
    with pytest.raises(ValueError, match=r"pool|cache"):
        decode.attend(x, x, x, (pool, pool), scale=1.0, window=None)


@pytest.mark.parametrize(("table", "lengths"), [([[5], [7]], [0, 2]), ([[5]], [5]), ([[-1]], [1])])
def test_decoding_refuses_sequences_outside_of_their_blocks(
    table: list[list[int]], lengths: list[int]
) -> None:
    with pytest.raises(ValueError, match="block"):
        CompiledDecode(np.array(table), np.array(lengths), 4)
