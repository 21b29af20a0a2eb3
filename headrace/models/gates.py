"""Gated feed-forward layers, `down(silu(gate(x)) * up(x))` (Shazeer 2020, SwiGLU), in fewer passes over memory on a CPU.

A module is known by what its class computes: its forward, given small layers of the same names and nothing else, must
return just that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from headrace.kernels import feed_forward, pointwise
from headrace.kernels.operators import takes
from headrace.kernels.tensors import are_traced, once

LAYERS = ("gate_proj", "up_proj", "down_proj")
LARGEST_TRAINED = 1 << 19  # numbers in a weight: gradients of larger ones do not stay in a core's cache
HOOKS = ("forward", "forward_pre", "backward", "backward_pre")
SIZES = (0.3, 3.0, 300.0)  # of inputs: what cuts off large numbers is something else


def use_fast_gates(model: nn.Module) -> None:
    """Gives every module of `model` that computes so a faster forward: in float32 on a CPU."""
    known: dict[Any, bool] = {}
    for module in model.modules():
        own = dict(module.named_children())
        # a forward of the module's own is somebody else's, or this file's
        if {*LAYERS, "act_fn"} != own.keys() or "forward" in vars(module):
            continue
        activation = own["act_fn"]
        if any(True for _ in (*activation.parameters(), *activation.buffers(), *activation.children())):
            continue
        settings = {key: value for key, value in vars(activation).items() if not key.startswith("_")}
        kind = (type(module), type(activation), str(settings))
        if kind not in known:
            known[kind] = _recognise(type(module), activation)
        if known[kind]:
            # in the dictionary, where it is no second child; a deep copy gets its own of both
            vars(module)["known_activation"] = own["act_fn"]
            module.forward = partial(_forward, module)  # unlike a method it can be pickled


class _Watched:
    """A module of these layers alone, and whether it was asked for anything else."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self.__dict__.update(layers)

    def __getattr__(self, name: str) -> Any:
        self.__dict__["asked"] = True
        raise AttributeError(name)


@torch.no_grad()
def _recognise(kind: type[nn.Module], activation: nn.Module) -> bool:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        for name, shape in zip(LAYERS, ((6, 4), (6, 4), (4, 6)), strict=True)
    }
    layers = {name: lambda x, w=w: F.linear(x, w) for name, w in weights.items()}
    module: Any = _Watched({**layers, "act_fn": activation})
    gate, up, down = (weights[name] for name in LAYERS)
    for size in SIZES:
        x = size * torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, device="cpu")
        try:
            shown = kind.forward(module, x)
        except (AttributeError, TypeError, RuntimeError):
            return False  # it needs more than these layers
        wanted = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        if (
            not isinstance(shown, Tensor)
            or shown.shape != wanted.shape
            or not torch.allclose(shown, wanted, rtol=1e-9)
        ):
            return False
    return "asked" not in vars(module)


def _forward(self: Any, *inputs: Tensor, **named: Any) -> Tensor:
    layers = [getattr(self, name) for name in LAYERS]
    other = named or len(inputs) != 1 or self.act_fn is not self.known_activation
    if other or _is_watched(self.act_fn):
        own: Tensor = type(self).forward(self, *inputs, **named)
        return own
    (hidden,) = inputs
    out: Tensor
    if all(map(_is_product, layers)) and not torch.is_autocast_enabled("cpu"):
        weights = (layers[0].weight, layers[1].weight, layers[2].weight)
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, *weights))
        if feed_forward.takes(hidden, weights):
            if not trained:
                out = feed_forward.feed_forward(hidden.contiguous(), *weights)
                return out
            if weights[0].numel() <= LARGEST_TRAINED and not are_traced():
                out = _FeedForward.apply(hidden, *weights)
                return out
    gate, up, down = layers
    out = down(gated(gate(hidden), up(hidden)))
    return out


def _is_watched(module: nn.Module) -> bool:
    """Whether its class's forward is not all that calling it does."""
    return (
        "forward" in vars(module)
        or any(vars(module)[f"_{kind}_hooks"] for kind in HOOKS)
        or any(getattr(nn_module, f"_global_{kind}_hooks") for kind in HOOKS)
    )


def _is_product(layer: nn.Module) -> bool:
    """Whether it is a plain product with its weight and nothing else."""
    return type(layer) is nn.Linear and layer.bias is None and not _is_watched(layer)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        out, kept = feed_forward.forward(hidden, (gate, up, down))
        # only the gradients of weights need it
        ctx.save_for_backward(hidden if any(ctx.needs_input_grad[1:]) else None, gate, up, down, kept)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, down, kept = saved
        found = feed_forward.gradients(hidden, (gate, up, down), kept, grad, of_x=ctx.needs_input_grad[0])
        return tuple(x if wanted else None for x, wanted in zip(found, ctx.needs_input_grad, strict=True))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of equal shapes."""
    if gate.shape != up.shape or not takes(gate, up):
        return F.silu(gate) * up
    out: Tensor
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out = F.silu(gate) * up if are_traced() else _Gated.apply(gate, up)
    else:
        out = pointwise.gated(gate.contiguous(), up.contiguous())
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out: Tensor = pointwise.gated(gate.contiguous(), up.contiguous())
        return out

    @staticmethod
    @once
    def backward(ctx: Any, saved: tuple[Tensor, Tensor], grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = saved
        return pointwise.gate_gradients(gate, up, grad)
