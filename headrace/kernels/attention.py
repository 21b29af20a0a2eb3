"""Attention in float32 on a CPU by the kernels of attention.c: of packs, with gradients, and of decode steps.

Shapes: T tokens, S places (the tokens of all sequences end to end), R sequences, A query heads, K key/value heads,
D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels.build import function, library
from headrace.kernels.tensors import are_plain, are_traced, once, plain


class _Tensor(ctypes.Structure):
    """[tokens, heads, D], D side by side."""

    _fields_ = [("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class _Pack(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_void_p) for name in ("starts", "first", "token", "order")),
        *((name, ctypes.c_int64) for name in ("longest", "threads")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "heads", "kv_heads", "dim", "block_size", "table_stride")
        ),
        *((name, ctypes.c_void_p) for name in ("table", "lengths")),
        *((name, ctypes.c_int64) for name in ("longest", "threads")),
    ]


_QUERY_KEY_VALUE = [_Tensor] * 3
_SCALE_AND_WINDOW = [ctypes.c_double, ctypes.c_int64]
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "headrace_attend": (
        ctypes.POINTER(_Pack), *_QUERY_KEY_VALUE, *_SCALE_AND_WINDOW, _Tensor, ctypes.c_void_p
    ),
    "headrace_attend_backward": (
        ctypes.POINTER(_Pack), *_QUERY_KEY_VALUE, *_SCALE_AND_WINDOW, _Tensor, ctypes.c_void_p, *([_Tensor] * 4)
    ),
    "headrace_sum_places": (
        *([ctypes.c_int64] * 2), *([ctypes.c_void_p] * 4), ctypes.c_int64
    ),
    "headrace_decode": (
        ctypes.POINTER(_Step), *_QUERY_KEY_VALUE, *([ctypes.c_void_p] * 2), *_SCALE_AND_WINDOW, _Tensor
    ),
}  # fmt: skip


@cache
def _kernel(name: str) -> Any:
    return function(name, _ARGUMENTS[name])


def _call(name: str, *arguments: Any) -> None:
    if _kernel(name)(*arguments):
        raise MemoryError(f"{name}: no memory for a thread's scores")


def is_available() -> bool:
    return library() is not None


def takes(*tensors: Tensor) -> bool:
    """Whether they are plain float32 tensors [T, heads, D] on the CPU, all with the same D, and nobody traces them."""
    return (
        are_plain(*tensors) and all(x.shape[-1] == tensors[0].shape[-1] for x in tensors) and not are_traced()
    )


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tensor(x: Tensor) -> _Tensor:
    return _Tensor(x.data_ptr(), x.stride(0), x.stride(1))


def _address(x: NDArray[np.int64] | None) -> int | None:
    return None if x is None else x.ctypes.data


def _check_shapes(tokens: int, query: Tensor, key: Tensor, value: Tensor) -> None:
    """A kernel reads as many numbers as it is told that there are."""
    fitting = key.shape == value.shape == (tokens, *key.shape[1:])
    if not fitting or query.shape != (tokens, query.shape[1], key.shape[2]):
        given = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"attention over {tokens} tokens was given query, key and value of {given}")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads")


class CompiledAttention:
    """Causal attention inside each of R sequences. See `PackedAttention`, which uses it."""

    def __init__(self, lengths: Sequence[int], expand: Tensor | None, first: Tensor | None) -> None:
        """`expand` [S] and `first` [T]: where sequences share tokens, a place's token and a token's first place."""
        self._starts = np.cumsum([0, *lengths], dtype=np.int64)
        self._longest = max(lengths, default=0)
        self._order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
        self._first = np.zeros(len(lengths), dtype=np.int64)
        self.tokens = self._places = int(self._starts[-1])
        self._token: NDArray[np.int64] | None = None
        if expand is not None and first is not None:
            self._token = np.ascontiguousarray(expand.numpy(), dtype=np.int64)
            self.tokens = len(first)
            # a token's output is computed where it lies first
            computed = first.numpy()[self._token] == np.arange(self._places)
            before = np.append(0, computed.cumsum())  # how many of the places before each are
            self._first = np.diff(self._starts) - np.diff(before[self._starts])
            ends = np.flatnonzero(computed[:-1] & ~computed[1:]) + 1
            if not np.isin(ends, self._starts).all():
                raise ValueError("sequences can share their beginnings alone")
            self._by_token = np.argsort(self._token, kind="stable")  # the places of token 0, of token 1, ...
            self._runs = np.append(0, np.bincount(self._token, minlength=self.tokens).cumsum())

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """query [T, A, D], key and value [T, K, D] → [T, A, D]. Raises MemoryError."""
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            out: Tensor = _Attend.apply(query, key, value, self, scale, window)
            return out
        return self.forward((query, key, value), scale, window)[0]

    def forward(
        self, inputs: tuple[Tensor, Tensor, Tensor], scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """The output, and the logarithm of each softmax's denominator [T, A]."""
        query, key, value = map(_side_by_side, inputs)
        out, logs = query.new_empty(query.shape), query.new_empty(query.shape[:2])
        _call(
            "headrace_attend", *self._given((query, key, value), scale, window), _tensor(out), logs.data_ptr()
        )
        return out, logs

    def backward(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        outputs: tuple[Tensor, Tensor],
        grad: Tensor,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value; `outputs` are those of `forward`."""
        query, key, value, grad = (_side_by_side(plain(x)) for x in (*inputs, grad))
        out, logs = (plain(x).contiguous() for x in outputs)
        if not out.shape == grad.shape == query.shape or logs.shape != query.shape[:2]:
            raise ValueError("what attention saved for its backward pass came back in other shapes")
        d_query = query.new_empty(query.shape)
        d_key, d_value = (x.new_empty(self._places, *x.shape[1:]) for x in (key, value))
        _call(
            "headrace_attend_backward",
            *self._given((query, key, value), scale, window),
            _tensor(out),
            logs.data_ptr(),
            *map(_tensor, (grad, d_query, d_key, d_value)),
        )
        return d_query, self._of_tokens(d_key), self._of_tokens(d_value)

    def _given(
        self, inputs: tuple[Tensor, Tensor, Tensor], scale: float, window: int | None
    ) -> tuple[Any, ...]:
        """The first arguments of both kernels. Arrays that it points to belong to this object."""
        query, key, value = inputs
        _check_shapes(self.tokens, query, key, value)
        pack = _Pack(
            len(self._order),
            query.shape[1],
            key.shape[1],
            query.shape[2],
            *map(_address, (self._starts, self._first, self._token, self._order)),
            self._longest,
            torch.get_num_threads(),
        )
        return pack, *map(_tensor, inputs), scale, window or 0

    def _of_tokens(self, x: Tensor) -> Tensor:
        """[S, K, D] → [T, K, D], the sums over each token's places."""
        if self._token is None:
            return x
        out = x.new_empty(self.tokens, *x.shape[1:])
        _call(
            "headrace_sum_places",
            self.tokens,
            x[0].numel(),
            *map(_address, (self._runs, self._by_token)),
            x.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pack: CompiledAttention,
        scale: float,
        window: int | None,
    ) -> Tensor:
        outputs = pack.forward((query, key, value), scale, window)
        ctx.save_for_backward(query, key, value, *outputs)
        ctx.pack, ctx.scale, ctx.window = pack, scale, window
        return outputs[0]

    @staticmethod
    @once
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *outputs = saved
        grads = ctx.pack.backward((query, key, value), tuple(outputs), grad, ctx.scale, ctx.window)
        return (*grads, None, None, None)


class CompiledDecode:
    """Attention of one new token a sequence over all of its tokens; writes its key and value into the paged cache."""

    def __init__(self, table: NDArray[np.int64], lengths: NDArray[np.int64], block_size: int) -> None:
        """`table` [R, W]: the blocks of each sequence in order; `lengths` [R]: tokens, the new one included."""
        self._table = np.ascontiguousarray(table, dtype=np.int64)
        self._lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        self._longest = int(self._lengths.max(initial=0))
        self._block_size = block_size
        last = table.shape[1] * block_size
        if len(table) != len(lengths) or self._lengths.min(initial=1) < 1 or self._longest > last:
            raise ValueError(
                f"{len(table)} rows of blocks with {last} slots hold no sequences of {lengths.tolist()} tokens"
            )
        if self._table.min(initial=0) < 0:
            raise ValueError("there is no block before block 0")
        self._slots = (int(self._table.max(initial=-1)) + 1) * block_size
        self._last: _Step | None = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pools: tuple[Tensor, Tensor],
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """query [R, A, D], key and value [R, K, D], pools [slots, K, D] of keys and of values → [R, A, D].

        Raises MemoryError.
        """
        _check_shapes(len(self._lengths), query, key, value)
        query, key, value = map(_side_by_side, (query, key, value))
        out = query.new_empty(query.shape)
        keys, values = pools
        for pool in pools:
            if len(pool) < self._slots or pool.shape[1:] != key.shape[1:] or not pool.is_contiguous():
                raise ValueError(
                    f"no pool of {self._slots} tokens {tuple(key.shape[1:])}: {tuple(pool.shape)}"
                )
            if pool.dtype != torch.float32:
                raise ValueError(f"keys and values in float32 cannot be written into a cache in {pool.dtype}")
        _call(
            "headrace_decode",
            self._step(query.shape[1], key.shape[1], query.shape[2]),
            *map(_tensor, (query, key, value)),
            keys.data_ptr(),
            values.data_ptr(),
            scale,
            window or 0,
            _tensor(out),
        )
        return out

    def _step(self, heads: int, kv_heads: int, dim: int) -> _Step:
        """Arrays that it points to belong to this object. Layers of one shape share it."""
        if self._last is None or (self._last.heads, self._last.kv_heads, self._last.dim) != (
            heads,
            kv_heads,
            dim,
        ):
            table, lengths = self._table, self._lengths
            self._last = _Step(
                *(len(lengths), heads, kv_heads, dim, self._block_size, table.shape[1]),
                *map(_address, (table, lengths)),
                *(self._longest, torch.get_num_threads()),
            )
        return self._last
