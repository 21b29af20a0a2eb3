"""Which tensors kernels can read by their address, and what autograd has to know of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

PLAIN = (Tensor, torch.nn.Parameter)
OWN_LAYERS = "headrace's own attention, norms and feed-forward layers"  # for errors


def are_plain(*tensors: Tensor) -> bool:
    """Whether they are float32 on the CPU and lie there, with nothing else to them: no subclass, sign or tangent."""
    return all(
        type(x) in PLAIN
        and x.layout is torch.strided
        and not x.is_nested
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not x.is_neg()
        and not x._is_zerotensor()
        and unpack_dual(x).tangent is None
        for x in tensors
    )


def are_traced() -> bool:
    """Whether somebody follows each of torch's operators (a recording, torch.func), and so nothing of our kernels."""
    return is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active()


def plain(x: Tensor) -> Tensor:
    """What the backward pass is given, as kernels can read it.

    A gradient that comes over a network may be a subclass that still waits for its numbers; what was saved for the
    backward pass comes back as `torch.autograd.graph.saved_tensors_hooks` please, rounded or on another device.
    Raises RuntimeError for a tangent, which no kernel knows of.
    """
    if unpack_dual(x).tangent is not None:
        raise RuntimeError(f"{OWN_LAYERS} have no forward derivatives of gradients")
    return x if are_plain(x) else torch.empty(x.shape, dtype=torch.float32, device="cpu").copy_(x)


class _NoSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Tensor, *sources: Tensor) -> Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{OWN_LAYERS} have no second derivatives")


def once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """For an autograd function's backward(ctx, saved tensors, *gradients): its results are not differentiated again.

    Saved tensors are unpacked once, as hooks may expect. torch's once_differentiable takes the results for constants
    where the gradients that come in are constants.
    """

    @wraps(backward)
    def first(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return found
        sources = [x for x in (*saved, *grads) if x is not None]
        return tuple(x if x is None else _NoSecond.apply(x, *sources) for x in found)

    return first
