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
        slots: NDArray[np.int64],
        visible: NDArray[np.bool_],
        heads: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """`slots` and `visible` [R, L]: where each place is, and whether it is seen; `heads`: (A, K).

        What is hidden may be any slot of the cache.
        """
        self._cache = cache
        rows, length = slots.shape
        num_heads, kv_heads = heads
        pool_rows, entries = cache.num_blocks * cache.block_size * kv_heads, rows * num_heads * length
        kind = torch.int32 if max(pool_rows, entries) < 1 << 31 else torch.int64
        first = torch.from_numpy(slots).to(kind).mul_(kv_heads)[:, None, None, :]
        own = first + torch.arange(kv_heads, dtype=kind)[:, None, None]
        self._columns = own.expand(rows, kv_heads, num_heads // kv_heads, length).flatten()
        self._starts = torch.arange(0, entries + 1, length, dtype=kind)
        _hear_the_warning()
        self._scores = torch.sparse_csr_tensor(
            self._starts,
            self._columns,
            torch.zeros(entries, dtype=dtype),
            size=(rows * num_heads, pool_rows),
            check_invariants=False,  # blocks come in any order, so columns are not sorted
        )
        self._shape = (rows, num_heads, length)
        self._bias = hidden_bias(visible, dtype)

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        keys, values = self._cache.rows(layer)
        # written in place: with another output the indices would be copied at every layer
        torch.sparse.sampled_addmm(
            self._scores, query.flatten(0, 1), keys.t(), beta=0.0, alpha=scale, out=self._scores
        )
        scores = self._scores.values().view(self._shape)
        if self._bias is not None:
            scores = scores + self._bias[:, None]
        out = F.embedding_bag(
            self._columns,
            values,
            self._starts,
            mode="sum",
            per_sample_weights=scores.softmax(-1).flatten(),
            include_last_offset=True,
        )
        return out.view(query.shape)


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
        bias = hidden_bias(visible, dtype)
        self._bias = None if bias is None else bias[:, None, None].to(device)

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


def hidden_bias(visible: NDArray[np.bool_], dtype: torch.dtype) -> Tensor | None:
    """[R, L] what to add to scores: 0 or -inf; None where everything is seen."""
    if visible.all():
        return None
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), -torch.inf)


def cut_by_width(widths: NDArray[np.int64], waste: float, free: int = 0) -> list[slice]:
    """Cuts consecutive sequences into parts, each with at most `free` empty places or at most the share `waste`."""
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
