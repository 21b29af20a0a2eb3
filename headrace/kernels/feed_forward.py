"""Gated feed-forward layers in float32 on a CPU, by the kernels of feed_forward.c: y = down(silu(gate(x)) * up(x)).

Shapes: x and y [..., H], H a multiple of 16; the weights as `nn.Linear` has them, gate and up [I, H], down [H, I]. What
is computed for a token does not depend on the others, in any bit.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.kernels import operators
from headrace.kernels.operators import INTEGER, POINTER, check, define
from headrace.kernels.tensors import plain

BLOCK = 64  # tokens: as in feed_forward.c
_TYPES = (*([INTEGER] * 3), *([POINTER] * 6), INTEGER)
_BACKWARD_TYPES = (*([INTEGER] * 3), *([POINTER] * 8), INTEGER)

Weights = tuple[Tensor, Tensor, Tensor]


def takes(x: Tensor, weights: Weights) -> bool:
    """Whether these are float32 tensors on the CPU that fit one another and that the kernels can read as they lie."""
    gate, up, down = weights
    inner, hidden = gate.shape
    return (
        hidden % 16 == 0
        and x.shape[-1] == hidden
        and up.shape == gate.shape
        and down.shape == (hidden, inner)
        and all(w.is_contiguous() for w in weights)
        and operators.takes(x, *weights)
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
    inner, hidden = weights[0].shape
    kept = x.new_empty(-(-(x.numel() // hidden) // BLOCK), 2, inner, BLOCK)
    y = x.new_empty(x.shape)
    _bind(x, *weights, y, kept)()
    return y, kept


def gradients(
    x: Tensor, weights: Weights, kept: Tensor, grad: Tensor, *, of_x: bool, of_weights: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of x and of the three weights, None where they are not wanted. Raises MemoryError."""
    x, grad = x.contiguous(), plain(grad).contiguous()
    inner, hidden = weights[0].shape
    d_x = x.new_empty(x.shape) if of_x else None
    sums = x.new_empty(3, inner, hidden) if of_weights else None
    sizes = (x.numel() // hidden, hidden, inner)
    operators.bind(
        "headrace_feed_forward_backward", _BACKWARD_TYPES, sizes, x, *weights, kept, grad, d_x, sums
    )()
    if sums is None:
        return d_x, None, None, None
    return d_x, sums[0], sums[1], sums[2].t().contiguous()
