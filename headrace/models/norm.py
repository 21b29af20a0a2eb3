"""Root mean square normalisation in few passes over memory, for modules that compute just that.

A module is known by what it computes, not by its name: on random inputs of several sizes, with random weights, it must
give `x / sqrt(mean(x^2) + eps) * gain` (Zhang & Sennrich 2019, equation 4), the gain being its weight (Llama, Qwen) or
one plus its weight (Gemma). Every other module stays as it is.

Shapes: T tokens (of any number of dimensions), D size normalised over.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from headrace.kernels import pointwise
from headrace.kernels.operators import takes
from headrace.kernels.tensors import PLAIN, are_traced, once

TOLERANCE = 1e-5  # of the largest output; float32 rounding is a tenth of it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1e-4, 1.0, 300.0)  # at the smallest, eps decides


def use_fast_norms(model: nn.Module) -> None:
    """Gives every module of `model` that normalises so a faster forward: in float32, and in half precision on CUDA."""
    known: dict[Any, tuple[str, float] | None] = {}
    for module in model.modules():
        if not _may_be_norm(module):
            continue
        kind = (
            type(module),
            module.weight.shape,
            *((name, v) for name, v in vars(module).items() if isinstance(v, float)),
        )
        if kind not in known:
            known[kind] = _recognise(module)
        found = known[kind]
        if found is not None:
            vars(module)["rms_eps_name"], vars(module)["rms_offset"] = found
            # a deep copy of the module gets its own, and unlike a method it can be pickled
            module.forward = partial(_forward, module)


def _may_be_norm(module: nn.Module) -> bool:
    """One vector of weights, nothing else, and a forward of one tensor that is its class's."""
    if "forward" in vars(module):
        return False  # somebody else's, or this file's
    own = dict(module.named_parameters())
    if (
        own.keys() != {"weight"}
        or any(True for _ in module.children())
        or any(True for _ in module.buffers())
    ):
        return False
    weight = own["weight"]
    plain = type(weight) is nn.Parameter and weight.dim() == 1 and weight.dtype in DTYPES
    return plain and len(inspect.signature(type(module).forward).parameters) == 2


@torch.no_grad()
def _recognise(module: nn.Module) -> tuple[str, float] | None:
    """(the name of eps, what is added to the weight to get the gain), or None for a module of something else."""
    own = module.get_parameter("weight")
    size, device = (
        len(own),
        torch.device("cpu") if own.is_meta else own.device,
    )  # without weights as with them
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator, device="cpu")
    inputs = [scale * torch.randn(2, 3, size, generator=generator, device="cpu") for scale in SIZES]
    try:
        shown = [
            functional_call(module, {"weight": weight.to(device)}, (x.to(device),), strict=True)
            for x in inputs
        ]
    except RuntimeError:
        return None  # it takes no such input, so it is no normalisation of vectors
    for name, eps in vars(module).items():
        if not isinstance(eps, float):
            continue
        for offset in (0.0, 1.0):
            wanted = [F.rms_norm(x, (size,), weight + offset, eps) for x in inputs]
            if all(
                isinstance(a, Tensor) and a.shape == b.shape and _close(a.cpu(), b)
                for a, b in zip(shown, wanted, strict=True)
            ):
                return name, offset
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def _forward(self: Any, *inputs: Any, **named: Any) -> Tensor:
    weight, eps = self.weight, getattr(self, self.rms_eps_name)
    hidden: Any = inputs[0] if len(inputs) == 1 and not named else None
    plain = type(hidden) is Tensor and type(weight) in PLAIN and type(eps) is float
    plain = plain and hidden.dtype == weight.dtype and hidden.shape[-1:] == weight.shape
    if plain and hidden.is_cuda and hidden.dtype != torch.float32 and not self.rms_offset:
        # torch's kernel; it rounds once, at the end, where a module may round before its gain too
        return F.rms_norm(hidden, weight.shape, weight, eps)
    trained = plain and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not plain or hidden.dtype != torch.float32 or (trained and are_traced()):
        out: Tensor = type(self).forward(self, *inputs, **named)
        return out
    gain = weight + self.rms_offset if self.rms_offset else weight
    if trained:
        normed: Tensor = _RMSNorm.apply(hidden, gain, eps)
        return normed
    if takes(hidden, gain):
        one: Tensor = pointwise.rms_norm(hidden.contiguous(), gain, eps)
        return one
    return F.rms_norm(hidden, gain.shape, gain, eps)


class _RMSNorm(torch.autograd.Function):
    """y = x * r * gain with r = 1 / sqrt(mean(x^2) + eps), over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        if takes(x, gain):
            y, r = pointwise.normed(x, gain, eps)
            ctx.save_for_backward(x, gain, r)
            return y
        size = x.shape[-1]
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        # in the kernel's shape: what is saved must not depend on how it is computed
        ctx.save_for_backward(x, gain, r.squeeze(-1))
        return (x * r).mul_(gain)

    @staticmethod
    @once
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """d/dx = r * gain * g - x * r^3 / D * sum(gain * g * x);  d/dgain = sum over tokens of g * x * r."""
        # saved-tensor hooks may have brought them back rounded, or on another device
        x, gain, r = (one.to(grad.device, grad.dtype) for one in saved)
        size = x.shape[-1]
        if takes(x, gain) and ctx.needs_input_grad[0] and not are_traced():
            return *pointwise.norm_gradients(x, gain, r, grad, of_gain=ctx.needs_input_grad[1]), None
        r = r.unsqueeze(-1)
        product = (x * grad).reshape(-1, size)  # in x's layout: a head's gradient comes transposed
        grad_gain = (r.reshape(1, -1) @ product)[0] if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_gain, None
        along = (product @ gain).view(r.shape).mul_(r.pow(3)).div_(-size)
        return (grad * gain).mul_(r).addcmul_(x, along), grad_gain, None
