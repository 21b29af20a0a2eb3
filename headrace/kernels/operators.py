"""Kernels as operators of torch's, so that a recording of a forward pass notes each as one.

`bound` calls such an operator again at the same addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build import function, library
from headrace.kernels.tensors import are_plain

POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
Binding = Callable[..., Callable[[], None]]
"""(*arguments, output) → a call that computes it. It reads and writes tensors at the addresses that they have now."""

_library = torch.library.Library("headrace", "DEF")
_BINDINGS: dict[Any, tuple[Binding, bool]] = {}


def takes(*tensors: Tensor) -> bool:
    """Whether kernels are there and these are plain float32 tensors on the CPU."""
    return are_plain(*tensors) and library() is not None


def bind(
    name: str, types: tuple[Any, ...], numbers: tuple[int, ...], *rest: Tensor | float | None
) -> Callable[[], None]:
    """A call of a kernel with numbers, the rest and how many threads; it keeps tensors alive whose addresses it has."""
    kernel = function(name, types)
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in rest]
    call = partial(kernel, *numbers, *given, torch.get_num_threads())

    def checked(kept: object = rest) -> None:
        if call():
            raise MemoryError(f"{name}: there is no memory for what it holds")

    return checked


def check(fits: bool, *tensors: Tensor) -> None:
    """A kernel reads as many numbers as it is told that there are."""
    if not fits or any(x.dtype != torch.float32 for x in tensors):
        given = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in tensors)
        raise ValueError(f"a kernel for float32 was given tensors that do not fit: {given}")


def define(
    schema: str, compute: Callable[..., Tensor], binding: Binding, *, side_by_side: bool = True
) -> Any:
    """`torch.ops.headrace.…`, computed by `compute` on a CPU; `bound` asks for contiguous tensors if it needs them."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, compute, "CPU")
    # all of them give as many numbers as their first argument has
    _library.impl(name, lambda x, *_: x.new_empty(x.shape), "Meta")
    operator = getattr(torch.ops.headrace, name).default
    _BINDINGS[operator] = binding, side_by_side
    return operator


def bound(operator: Any, arguments: tuple[Any, ...], output: Tensor) -> Callable[[], None] | None:
    """A call of one of these operators that writes into `output`; None for others, and where tensors lie otherwise."""
    binding, side_by_side = _BINDINGS.get(operator, (None, False))
    tensors = [x for x in (*arguments, output) if isinstance(x, Tensor)]
    if binding is None or (side_by_side and not all(x.is_contiguous() for x in tensors)):
        return None
    return binding(*arguments, output)
