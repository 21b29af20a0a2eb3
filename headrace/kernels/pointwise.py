"""Root mean square normalisation and gated units in float32 on a CPU, by the kernels of pointwise.c.

Each is an operator of torch's too, so that a recording of a forward pass notes it as one; `bound` calls it again at the
same addresses. Shapes: any, with D the size normalised over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build import function, library
from headrace.kernels.tensors import are_plain, plain

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "headrace_rms_norm": (*([_INTEGER] * 2), *([_POINTER] * 2), ctypes.c_double, *([_POINTER] * 2), _INTEGER),
    "headrace_rms_norm_backward": (*([_INTEGER] * 2), *([_POINTER] * 6), _INTEGER),
    "headrace_gated": (_INTEGER, *([_POINTER] * 3), _INTEGER),
    "headrace_gated_backward": (_INTEGER, *([_POINTER] * 5), _INTEGER),
    "headrace_rotate": (*([_INTEGER] * 9), *([_POINTER] * 4), _INTEGER),
}


def _bind(name: str, numbers: tuple[int, ...], *rest: Tensor | float | None) -> Callable[[], None]:
    """A call of a kernel. It keeps the tensors alive, whose addresses it has."""
    kernel = function(name, _ARGUMENTS[name])
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in rest]
    call = partial(kernel, *numbers, *given, torch.get_num_threads())

    def checked(kept: object = rest) -> None:
        if call():
            raise MemoryError(f"{name}: no memory for sums")

    return checked


def takes(*tensors: Tensor) -> bool:
    """Whether kernels are there and these are plain float32 tensors on the CPU."""
    return are_plain(*tensors) and library() is not None


def _check(fits: bool, *tensors: Tensor) -> None:
    """A kernel reads as many numbers as it is told that there are."""
    if not fits or any(x.dtype != torch.float32 for x in tensors):
        given = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in tensors)
        raise ValueError(f"a kernel for float32 was given tensors that do not fit: {given}")


def _normed(
    x: Tensor, gain: Tensor, eps: float, y: Tensor, factors: Tensor | None = None
) -> Callable[[], None]:
    size = gain.numel()
    _check(x.shape[-1:] == gain.shape, x, gain, y)
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
    x, gain, factors, grad = (t.contiguous() for t in (x, gain, factors, plain(grad)))
    size, d_x, d_gain = gain.numel(), x.new_empty(x.shape), gain.new_empty(gain.shape) if of_gain else None
    rows = x.numel() // max(size, 1)
    _bind("headrace_rms_norm_backward", (rows, size), x, gain, factors, grad, d_x, d_gain)()
    return d_x, d_gain


def _gated(gate: Tensor, up: Tensor, out: Tensor) -> Callable[[], None]:
    _check(gate.shape == up.shape, gate, up, out)
    return _bind("headrace_gated", (gate.numel(),), gate, up, out)


def gate_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of silu(gate) * up."""
    gate, up, grad = gate.contiguous(), up.contiguous(), plain(grad).contiguous()
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


_operators = torch.library.Library("headrace", "DEF")
_operators.define("rms_norm(Tensor x, Tensor gain, float eps) -> Tensor")
_operators.impl("rms_norm", _new_normed, "CPU")
_operators.define("gated(Tensor gate, Tensor up) -> Tensor")
_operators.impl("gated", _new_gated, "CPU")
# x [1, heads, rows, D], cos and sin [1, 1, rows, D]; the numbers of a row and head lie side by side
_operators.define("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor")
_operators.impl("rotate", _new_rotated, "CPU")

rms_norm = torch.ops.headrace.rms_norm.default  # without gradients
gated = torch.ops.headrace.gated.default
rotate = torch.ops.headrace.rotate.default
_BOUND: dict[Any, Callable[..., Callable[[], None]]] = {rms_norm: _normed, gated: _gated, rotate: _rotated}


def bound(operator: Any, arguments: tuple[Any, ...], output: Tensor) -> Callable[[], None] | None:
    """A call of one of this file's operators that writes into `output`; None for others and what is not contiguous."""
    bind = _BOUND.get(operator)
    flat = operator is rotate or all(x.is_contiguous() for x in (*arguments, output) if isinstance(x, Tensor))
    return bind(*arguments, output) if bind is not None and flat else None
