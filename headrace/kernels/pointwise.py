"""Root mean square normalisation and gated units in float32 on a CPU, by the kernels of pointwise.c.

Shapes: any, with D the size normalised over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.operators import INTEGER, POINTER, bind, check, define
from headrace.kernels.tensors import plain

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "headrace_rms_norm": (*([INTEGER] * 2), *([POINTER] * 2), ctypes.c_double, *([POINTER] * 2), INTEGER),
    "headrace_rms_norm_backward": (*([INTEGER] * 2), *([POINTER] * 6), INTEGER),
    "headrace_gated": (INTEGER, *([POINTER] * 3), INTEGER),
    "headrace_gated_backward": (INTEGER, *([POINTER] * 5), INTEGER),
    "headrace_rotate": (*([INTEGER] * 9), *([POINTER] * 4), INTEGER),
}


def _bind(name: str, numbers: tuple[int, ...], *rest: Tensor | float | None) -> Callable[[], None]:
    return bind(name, _ARGUMENTS[name], numbers, *rest)


def _normed(
    x: Tensor, gain: Tensor, eps: float, y: Tensor, factors: Tensor | None = None
) -> Callable[[], None]:
    size = gain.numel()
    check(x.shape[-1:] == gain.shape, x, gain, y)
    return _bind("headrace_rms_norm", (x.numel() // max(size, 1), size), x, gain, eps, y, factors)


def normed(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., D] / sqrt(mean(x^2) + eps) * gain [D], and the factor that each row of x was multiplied with [...]."""
    x, gain = x.contiguous(), gain.contiguous()
    y, factors = x.new_empty(x.shape), x.new_empty(x.shape[:-1])
    _normed(x, gain, eps, y, factors)()
    return y, factors


def norm_gradients(
    x: Tensor, gain: Tensor, factors: Tensor, grad: Tensor, *, of_gain: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x, and of the gain where it is wanted, from that of `normed`'s first output."""
    x, gain, factors, grad = (plain(t).contiguous() for t in (x, gain, factors, grad))
    fits = x.shape == grad.shape and x.shape == (*factors.shape, *gain.shape)
    check(fits, x, gain, factors, grad)
    size, d_x, d_gain = gain.numel(), x.new_empty(x.shape), gain.new_empty(gain.shape) if of_gain else None
    rows = x.numel() // max(size, 1)
    _bind("headrace_rms_norm_backward", (rows, size), x, gain, factors, grad, d_x, d_gain)()
    return d_x, d_gain


def _gated(gate: Tensor, up: Tensor, out: Tensor) -> Callable[[], None]:
    check(gate.shape == up.shape, gate, up, out)
    return _bind("headrace_gated", (gate.numel(),), gate, up, out)


def gate_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of silu(gate) * up."""
    gate, up, grad = (plain(t).contiguous() for t in (gate, up, grad))
    check(gate.shape == up.shape == grad.shape, gate, up, grad)
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _bind("headrace_gated_backward", (gate.numel(),), gate, up, grad, d_gate, d_up)()
    return d_gate, d_up


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Callable[[], None]:
    _, heads, rows, dim = x.shape
    strides = (x.stride(2), x.stride(1), cos.stride(2), sin.stride(2), out.stride(2), out.stride(1))
    return _bind("headrace_rotate", (rows, heads, dim, *strides), x, cos, sin, out)


def _new_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _rotated(x, cos, sin, out)()
    return out


def _new_normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    y = x.new_empty(x.shape)
    _normed(x.contiguous(), gain.contiguous(), eps, y)()
    return y


def _new_gated(gate: Tensor, up: Tensor) -> Tensor:
    out = gate.new_empty(gate.shape)
    _gated(gate.contiguous(), up.contiguous(), out)()
    return out


# without gradients
rms_norm = define("rms_norm(Tensor x, Tensor gain, float eps) -> Tensor", _new_normed, _normed)
gated = define("gated(Tensor gate, Tensor up) -> Tensor", _new_gated, _gated)
# x [1, heads, rows, D], cos and sin [1, 1, rows, D]; the numbers of a row and head lie side by side
rotate = define(
    "rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", _new_rotated, _rotated, side_by_side=False
)
