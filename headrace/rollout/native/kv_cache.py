"""The paged key/value cache: fixed-size blocks of token slots, handed out by a reference-counting allocator.

Shapes: N blocks, S slots a block, K key/value heads, D head size. Slot `block * S + i` holds one token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from headrace.errors import RunError

BLOCK_TOKENS = 16
ALIGNMENT = 64  # bytes, a cache line
FREE_MEMORY_SHARE = 0.25  # of the memory free when `generate` starts; the trainer's activations need the rest


class BlockAllocator:
    """Hands out block numbers 0 … N - 1 and counts who holds each. Holds no tensors."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(
            range(num_blocks - 1, -1, -1)
        )  # last in, first out: few distinct blocks get touched
        self._holders = [0] * num_blocks
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each. Raises RunError when there are fewer free ones."""
        if count > len(self._free):
            raise RunError(f"the KV cache was asked for {count} blocks and has {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block."""
        for block in blocks:
            self._check_held(block)
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each block; a block nobody holds is free again."""
        for block in blocks:
            self._check_held(block)
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def _check_held(self, block: int) -> None:
        if self._holders[block] < 1:
            raise RunError(f"KV cache block {block} is used after it was freed")


class PagedKVCache:
    """Keys and values of every layer, [N, S, K, D] each, in dtype and device of the first key written.

    A token's heads lie side by side, so that it is written in one piece. A layer's pool appears with its first
    `write`, so layers may differ in heads and head size. Pools start as zeros: a masked slot must hold a finite
    number, since 0 * NaN is NaN.
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, *, spare: bool = False) -> None:
        """`spare`: one block more, which the allocator does not know."""
        self.num_blocks, self._spare = num_blocks, int(spare)
        self.block_size = block_size
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        # views of a layer's keys and values as `tokens` and `rows` give them: made once, not at every step
        self._tokens: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._rows: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        # flat, for keys and for values: fresh memory at each gather costs page faults
        self._gathered: list[Tensor | None] = [None, None]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key and value [T, K, D] in `slots` [T] (int64)."""
        keys, values = self.pools_for(layer, key, value)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)

    def pools_for(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`tokens`, made if the layer was never written; key and value [T, K, D] are like those that will be."""
        tokens = self._tokens[layer]
        return self._add(layer, self._pool(key), self._pool(value)) if tokens is None else tokens

    @property
    def spare_block(self) -> int:
        """A block behind those of the allocator, for what nobody reads. Only with `spare`."""
        return self.num_blocks

    def tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values [N * S, K, D], not copied. Raises RunError for a layer never written."""
        tokens = self._tokens[layer]
        return self._unwritten(layer) if tokens is None else tokens

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values [N * S * K, D], not copied: slot s of head k is row s * K + k.

        Raises RunError for a layer never written.
        """
        rows = self._rows[layer]
        return self._unwritten(layer) if rows is None else rows

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B * S, K, D] of `blocks` [B] (int64), good until the next `gather`.

        Raises RunError for a layer never written.
        """
        found = []
        for side, pool in enumerate(self._written(layer)):
            _, size, heads, dim = pool.shape
            needed = len(blocks) * size * heads * dim
            buffer = self._gathered[side]
            if buffer is None or buffer.numel() < needed:
                buffer = self._gathered[side] = pool.new_empty(needed + needed // 4)
            out = buffer[:needed].view(len(blocks), size * heads * dim)
            torch.index_select(pool.flatten(1), 0, blocks, out=out)
            found.append(out.view(len(blocks) * size, heads, dim))
        return found[0], found[1]

    def _add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._keys[layer], self._values[layer] = keys, values
        self._rows[layer] = keys.flatten(0, 2), values.flatten(0, 2)
        tokens = self._tokens[layer] = keys.flatten(0, 1), values.flatten(0, 1)
        return tokens

    def _written(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        return self._unwritten(layer) if keys is None or values is None else (keys, values)

    def _unwritten(self, layer: int) -> NoReturn:
        raise RunError(f"KV cache layer {layer} is read before it was written")

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (from, to) in every layer; all are read before any is written."""
        if not pairs:
            return
        for pool in (*self._keys, *self._values):
            if pool is not None:
                index = torch.tensor(pairs, dtype=torch.int64).to(pool.device)
                pool.index_copy_(0, index[:, 1], pool.index_select(0, index[:, 0]))

    def release(self) -> None:
        """Gives the memory back; the next `write` starts from zeros."""
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)
        self._tokens = [None] * len(self._tokens)
        self._rows = [None] * len(self._rows)
        self._gathered = [None, None]

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in (*self._keys, *self._values) if p is not None)

    def _pool(self, like: Tensor) -> Tensor:
        shape = (self.num_blocks + self._spare, self.block_size, like.shape[1], like.shape[2])
        return zeros(shape, like.dtype, like.device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU numpy's, which are memory that the system gives when it is first touched.

    torch writes its zeros, and so takes the whole of a pool of which a rollout may use a part.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    needed = math.prod(shape) * dtype.itemsize
    memory = np.zeros(needed + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + needed]).view(dtype).view(shape)


def block_bytes(num_layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * num_layers * block_size * kv_heads * head_dim * dtype.itemsize


def free_memory_bytes(device: torch.device) -> int:
    """Memory of `device` nobody uses (CUDA: what torch's allocator keeps idle included; CPU: free RAM)."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    name = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
