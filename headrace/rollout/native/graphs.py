"""Decoding on CUDA without Python between kernels: the forward pass of a step is recorded as a CUDA graph and replayed.

A small kernel takes less time than Python takes to launch it, and a step of decoding is some thousand small kernels.
A graph replays them in one launch, but always with the same shapes and addresses: sequences and keys are padded up to
rungs of a ladder, and everything that changes from step to step is read from one tensor that stays where it is.

Shapes: B sequences that decode, R rows (a rung, B of them used), W blocks of a table row, S slots a block, T places for
keys (a rung), A query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.models import varlen
from headrace.models.causal_lm import CausalLM
from headrace.rollout.native.kv_cache import PagedKVCache

logger = logging.getLogger(__name__)

STEP = 1.25  # from rung to rung: at most a fifth of the places are empty
ROWS_UNIT, PLACES_UNIT = 8, 512
MOVING_ROPES = (
    "dynamic",
    "longrope",
)  # their tables depend on the longest position, which they ask the device for


def graphs_possible(model: CausalLM) -> bool:
    """Half precision on CUDA, whole on this device, with nothing in its forward pass that asks the device."""
    mesh = model.shards.mesh
    rope = getattr(model.text_config, "rope_parameters", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    return (
        model.device.type == "cuda"
        and model.dtype in varlen.KERNEL_DTYPES
        and varlen.is_available()
        and all(mesh.size(axis) == 1 for axis in ("zero3", "tp", "pp"))
        and not any(kind.get("rope_type") in MOVING_ROPES for kind in kinds)
    )


def rung(number: int, unit: int, step: float = STEP) -> int:
    """The least rung at or above `number`: multiples of `unit`, each `step` times the one before, or `unit` above it."""
    size = unit
    while size < number:
        size = max(size + unit, int(size * step) // unit * unit)
    return size


class FlatDecode:
    """Attention of one new token a sequence over the cached ones, which are gathered end to end.

    All of it is computed on the device from `inputs`, so that shapes depend on R and T alone.
    """

    def __init__(self, cache: PagedKVCache, inputs: Tensor, places: int) -> None:
        """`inputs` [R, 2 + W] (int64): of each sequence the new token, its position, and its blocks.

        `places`: T, at least the number of tokens that are seen.
        """
        self._cache, self._places = cache, places
        self._positions, self._table = inputs[:, 1].contiguous(), inputs[:, 2:]
        size = cache.block_size
        self._longest = self._table.shape[1] * size
        block = self._table.gather(1, (self._positions // size)[:, None])[:, 0]
        self._own = block * size + self._positions % size
        self._seen: dict[int | None, tuple[Tensor, Tensor]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """query [R, A, D], key and value [R, K, D] → [R, A, D]."""
        self._cache.write(layer, self._own, key, value)
        if window not in self._seen:
            self._seen[window] = self.seen(window)
        slots, boundaries = self._seen[window]
        keys, values = (tokens.index_select(0, slots) for tokens in self._cache.tokens(layer))
        rows, heads, dim = query.shape
        kv_heads = key.shape[1]
        # the query heads of one key/value head become its "positions", of which each sees all keys
        each = heads // kv_heads
        q = query.view(rows, kv_heads, each, dim).transpose(1, 2).reshape(rows * each, kv_heads, dim)
        starts = torch.arange(0, rows * each + 1, each, dtype=torch.int32, device=q.device)
        out = varlen.attend_all(q, keys, values, starts, boundaries, each, self._longest, scale)
        return out.view(rows, each, kv_heads, dim).transpose(1, 2).reshape(rows, heads, dim)

    def seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Slots [T] of the tokens that each sequence's new one sees, end to end, and their boundaries [R + 1] (int32).

        Places behind the last sequence's are any slots of the cache.
        """
        size, total = self._cache.block_size, self._positions + 1
        count = total if window is None else total.clamp_max(window)
        ends = count.cumsum(0)
        place = torch.arange(self._places, device=ends.device)
        row = torch.searchsorted(ends, place, right=True).clamp_max(len(ends) - 1)
        position = (place - (ends - count)[row] + (total - count)[row]).clamp_max(self._longest - 1)
        slots = self._table[row, position // size] * size + position % size
        return slots, torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all rollouts: cuBLAS keeps a workspace (32 MiB on an H200) for every stream that it has seen."""
    return torch.cuda.Stream(device)


class _Recorded:
    """One graph and what it computes, [R, H], which the next replay writes over."""

    def __init__(self, graph: torch.cuda.CUDAGraph, hidden: Tensor) -> None:
        self.graph, self.hidden = graph, hidden


class DecodeGraphs:
    """The graphs of one rollout. A shape is recorded when it comes for the second time, since recording costs two steps.

    The cache's pools have to stay where they are, so graphs live no longer than they do.
    """

    def __init__(self, model: CausalLM, cache: PagedKVCache, rows: int, width: int) -> None:
        """`rows`: sequences at most; `width`: W. The cache's block `cache.spare_block` takes what empty rows write."""
        self._model, self._cache, self._rows = model, cache, rows
        self._inputs = torch.zeros(rows, 2 + width, dtype=torch.int64, device=model.device)
        self._recorded: dict[tuple[int, int], _Recorded | None] = {}
        self._pool: Any = None
        self.failed = False

    def hidden_states(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], table: NDArray[np.int64]
    ) -> Tensor | None:
        """ids and positions [B], table [B, up to W] → [B, H], good until the next call; None: not this time."""
        used = len(ids)
        rows = min(rung(used, ROWS_UNIT), self._rows)
        places = rung(int(positions.sum()) + rows, PLACES_UNIT)
        if self.failed or (rows, places) not in self._recorded:
            self._recorded[rows, places] = None
            return None
        packed = np.zeros((rows, self._inputs.shape[1]), dtype=np.int64)
        packed[:used, 0], packed[:used, 1] = ids, positions
        packed[:used, 2 : 2 + table.shape[1]] = table
        packed[used:, 2:] = self._cache.spare_block
        self._inputs[:rows].copy_(torch.from_numpy(packed))
        found = self._recorded[rows, places]
        if found is None:
            found = self._record(rows, places)
            if found is None:
                return None
            self._recorded[rows, places] = found
        found.graph.replay()
        return found.hidden[:used]

    def _forward(self, rows: int, places: int) -> Tensor:
        inputs = self._inputs[:rows]
        attention = FlatDecode(self._cache, inputs, places)
        return self._model.hidden_states(inputs[:, 0].contiguous(), inputs[:, 1].contiguous(), attention)

    def _record(self, rows: int, places: int) -> _Recorded | None:
        """Records a step; its inputs are in place, and what it writes before it is replayed is what a replay writes."""
        try:
            stream = _recording_stream(self._model.device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                # libraries set themselves up at their first call on a stream, which cannot be recorded
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._forward(rows, places)
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    hidden = self._forward(rows, places)
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
        except RuntimeError as error:
            self.failed = True
            logger.warning(
                "decoding goes on without CUDA graphs, which could not be recorded: %s",
                str(error).strip().partition("\n")[0],
            )
            return None
        return _Recorded(graph, hidden)

    def release(self) -> None:
        self._recorded.clear()
