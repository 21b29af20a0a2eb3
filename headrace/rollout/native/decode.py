"""How new tokens attend to what the paged cache holds of their sequences: sparse products on the CPU, else gathered keys.

Both take consecutive sequences of like length, a *part* of a step, and both are built once a step, not once a layer.

Shapes: R sequences of a part, L places of the longest, A query heads, K key/value heads, D head size, S slots a block,
P rows of a pool (one for each slot and key/value head).
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace.rollout.native.kv_cache import PagedKVCache


class DecodePart(Protocol):
    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """query [R, A, D] → [R, A, D]."""
        ...


class SparseDecode:
    """Queries times the keys they may see, read where they lie: nothing is gathered or repeated for heads.

    The scores are the values of a sparse matrix [R * A, P] in CSR form, whose entries are all a query may see
    (`torch.sparse.sampled_addmm`), and the output is the weighted sum of the same rows of the values
    (`torch.nn.functional.embedding_bag`). Samples of a prompt read its blocks from the same memory.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        first: NDArray[np.signedinteger],
        seen: NDArray[np.int64] | None,
        heads: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """`first` [R, L]: the pool's row of each place's first head; `heads`: (A, K). See `index_dtype`.

        Of a sequence's places the first `seen` [R] are seen (None: all are); the others may be any rows of the pool.
        """
        self._cache = cache
        rows, length = first.shape
        num_heads, kv_heads = heads
        pool_rows, entries = cache.num_blocks * cache.block_size * kv_heads, rows * num_heads * length
        columns = np.empty((rows, kv_heads, num_heads // kv_heads, length), dtype=first.dtype)
        np.add(first[:, None, None], np.arange(kv_heads, dtype=first.dtype)[:, None, None], out=columns)
        self._columns = torch.from_numpy(columns.reshape(entries))
        self._starts = torch.arange(0, entries + 1, length, dtype=self._columns.dtype)
        _hear_the_warning()
        products = torch.zeros(entries, dtype=dtype)
        self._products = torch.sparse_csr_tensor(
            self._starts,
            self._columns,
            products,
            size=(rows * num_heads, pool_rows),
            check_invariants=False,  # blocks come in any order, so columns are not sorted
        )
        # the same memory, a query's scores side by side
        self._scores = products.view(rows, num_heads, length)
        self._bias: Tensor | None = None
        if seen is not None:
            self._bias = hidden_bias(np.arange(length) < seen[:, None], dtype)[:, None]

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        keys, values = self._cache.rows(layer)
        # written in place: with another output the indices would be copied at every layer
        torch.sparse.sampled_addmm(
            self._products, query.flatten(0, 1), keys.t(), beta=0.0, alpha=scale, out=self._products
        )
        # not in place: the next product adds zero times what is there, which may not be infinite
        scores = self._scores if self._bias is None else self._scores + self._bias
        # what torch.nn.functional.embedding_bag calls, without its checks, which take as long as a few sequences
        out = torch.embedding_bag(
            values,
            self._columns,
            self._starts,
            mode=0,  # the sum
            per_sample_weights=scores.softmax(-1).view(-1),
            include_last_offset=True,
        )[0]
        return out.view(query.shape)


def index_dtype(cache: PagedKVCache, kv_heads: int, entries: int) -> type[np.signedinteger]:
    """Of the indices of a sparse product with so many entries: half the memory to read where they are small enough."""
    pool_rows = cache.num_blocks * cache.block_size * kv_heads
    return np.int32 if max(pool_rows, entries) < 1 << 31 else np.int64


@cache
def _hear_the_warning() -> None:
    """torch says once a process that CSR tensors are in beta and unchecked; this is where nobody has to read it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
        index = torch.tensor([0, 1])
        torch.sparse_csr_tensor(index, index[:1], torch.zeros(1), size=(1, 1), check_invariants=False)


class GatheredDecode:
    """Whole blocks gathered side by side, and one call of scaled dot-product attention."""

    def __init__(
        self,
        cache: PagedKVCache,
        blocks: NDArray[np.int64],
        visible: NDArray[np.bool_],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`blocks` [R, W], in order; `visible` [R, W * S]."""
        self._cache = cache
        self._rows = len(blocks)
        self._blocks = torch.from_numpy(blocks.reshape(-1)).to(device)
        self._bias: Tensor | None = None
        if not visible.all():
            self._bias = hidden_bias(visible, dtype)[:, None, None].to(device)

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        # [R, K, L, D]
        keys, values = (
            x.unflatten(0, (self._rows, -1)).transpose(1, 2) for x in self._cache.gather(layer, self._blocks)
        )
        # the query heads of one key/value head become its "positions": no key is repeated
        q = query.unflatten(1, (keys.shape[1], -1))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self._bias, scale=scale).flatten(
            1, 2
        )


def hidden_bias(visible: NDArray[np.bool_], dtype: torch.dtype) -> Tensor:
    """[R, L] what to add to scores: 0 or -inf."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), -torch.inf)


def cut_by_width(widths: NDArray[np.int64], waste: float, free: int = 0) -> list[slice]:
    """Cuts consecutive sequences into parts, each with at most `free` empty places or at most the share `waste`."""
    each = widths.tolist()
    whole = len(each) * max(each, default=0)
    if whole and whole - sum(each) <= max(free, waste * whole):
        return [slice(0, len(each))]
    parts: list[slice] = []
    start = 0
    while start < len(widths):
        rest = widths[start:]
        places = np.maximum.accumulate(rest) * np.arange(1, len(rest) + 1)
        bad = (places - rest.cumsum() > np.maximum(free, waste * places)).nonzero()[0]
        stop = start + int(bad[0]) if len(bad) else len(widths)
        parts.append(slice(start, stop))
        start = stop
    return parts
