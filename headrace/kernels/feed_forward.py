"""Gated feed-forward layers in float32 on a CPU, by the kernels of feed_forward.c: y = down(silu(gate(x)) * up(x)).

Shapes: x and y [..., H], H a multiple of 16; the weights as `nn.Linear` has them, gate and up [I, H], down [H, I]. What
is computed for a token does not depend on the others, in any bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.kernels import operators
from headrace.kernels.operators import INTEGER, POINTER, check, define
from headrace.kernels.tensors import plain

BLOCK = 64  # tokens: as in feed_forward.c
_TYPES = (*([INTEGER] * 3), *([POINTER] * 6), INTEGER)
_BACKWARD_TYPES = (*([INTEGER] * 3), *([POINTER] * 10), INTEGER)

Weights = tuple[Tensor, Tensor, Tensor]


def takes(x: Tensor, weights: Weights) -> bool:
    """Whether these are float32 tensors on the CPU that fit one another and that the kernels can read as they lie."""
    if not operators.takes(x, *weights) or weights[0].dim() != 2:
        return False
    gate, up, down = weights
    inner, hidden = gate.shape
    return (
        hidden > 0
        and hidden % 16 == 0
        and x.shape[-1:] == (hidden,)
        and up.shape == gate.shape
        and down.shape == (hidden, inner)
        and all(w.is_contiguous() for w in weights)
    )


def _bind(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, y: Tensor, kept: Tensor | None = None
) -> Callable[[], None]:
    inner, hidden = gate.shape
    check(x.shape == y.shape and takes(x, (gate, up, down)), x, gate, up, down, y)
    sizes = (x.numel() // hidden, hidden, inner)
    return operators.bind("headrace_feed_forward", _TYPES, sizes, x, gate, up, down, kept, y)


def _new(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    _bind(x.contiguous(), gate, up, down, y)()
    return y


feed_forward = define(
    "feed_forward(Tensor x, Tensor gate, Tensor up, Tensor down) -> Tensor", _new, _bind
)  # without gradients


def forward(x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """y, and what `gradients` needs. Raises MemoryError."""
    x = x.contiguous()
    kept = x.new_empty(_kept_shape(x.numel(), weights[0]))
    y = x.new_empty(x.shape)
    _bind(x, *weights, y, kept)()
    return y, kept


def _kept_shape(numbers: int, gate: Tensor) -> tuple[int, ...]:
    inner, hidden = gate.shape
    return -(-(numbers // hidden) // BLOCK), 2, inner, BLOCK


def gradients(
    x: Tensor | None, weights: Weights, kept: Tensor, grad: Tensor, *, of_x: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of x, None where it is not wanted, and of the three weights, None where no x is given.

    Raises MemoryError, and ValueError for tensors that do not fit.
    """
    grad, kept = plain(grad).contiguous(), plain(kept).contiguous()
    weights = tuple(plain(w).contiguous() for w in weights)  # type: ignore[assignment]
    x = None if x is None else plain(x).contiguous()
    fits = takes(grad, weights) and kept.shape == _kept_shape(grad.numel(), weights[0])
    check(fits and (x is None or x.shape == grad.shape), grad, kept, *weights)
    inner, hidden = weights[0].shape
    d_x = torch.empty_like(grad) if of_x else None
    # each with memory of its own, so that one is freed without the others
    d_gate, d_up, d_down = (None if x is None else x.new_empty(inner, hidden) for _ in range(3))
    sizes = (grad.numel() // hidden, hidden, inner)
    given = (x, *weights, kept, grad, d_x, d_gate, d_up, d_down)
    operators.bind("headrace_feed_forward_backward", _BACKWARD_TYPES, sizes, *given)()
    return d_x, d_gate, d_up, None if d_down is None else d_down.t().contiguous()
