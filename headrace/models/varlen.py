"""Packed causal attention in one kernel, for half precision on CUDA.

The kernel takes the sequences' boundaries as they are: no buckets, no masks, and no work on empty slots.

Shapes: T tokens, A query heads, K key/value heads, D head size, R sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@cache
def is_available() -> bool:
    """Whether this torch has variable-length attention with windows (2.11 and newer have)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


class VarlenAttention:
    """Causal attention inside each of R sequences lying end to end."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        boundaries = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        boundaries[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        self._boundaries = boundaries.to(device)  # [R + 1]
        self._longest = max(lengths, default=0)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """query [T, A, D], key and value [T, K, D] → [T, A, D]."""
        from torch.nn.attention.varlen import varlen_attn

        if query.shape[1] != key.shape[1]:
            # the versions of torch differ in how they are told of grouped heads; none objects to equal ones
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        left = -1 if window is None else window - 1
        out = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            self._boundaries,
            self._boundaries,
            self._longest,
            self._longest,
            scale=scale,
            window_size=(left, 0),
        )
        return out if isinstance(out, Tensor) else out[0]
