"""Decoding on CUDA without Python between kernels: the forward pass of a step is recorded as a CUDA graph and replayed.

A small kernel takes less time than Python takes to launch it, and a step of decoding is some thousand small kernels.
A graph replays them in one launch, but always with the same shapes and addresses: the number of sequences is padded up to
a rung of a ladder, and everything that changes from step to step is read from one tensor that stays where it is.

Shapes: B sequences that decode, R rows (a rung, B of them used), W blocks of a table row, H hidden size,
A query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.models.causal_lm import CausalLM
from headrace.models.varlen import KERNEL_DTYPES
from headrace.rollout.native.decode_kernel import build_errors, missing, num_spans
from headrace.rollout.native.kv_cache import PagedKVCache

logger = logging.getLogger(__name__)

STEP = 1.25  # from rung to rung: at most a fifth of the places are empty
ROWS_UNIT = 8
MOVING_ROPES = (
    "dynamic",
    "longrope",
)  # their tables depend on the longest position, which they ask the device for


def graphs_possible(model: CausalLM) -> bool:
    """Half precision on CUDA, whole on this device, with nothing in its forward pass that asks the device."""
    mesh = model.shards.mesh
    rope = getattr(model.text_config, "rope_parameters", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    if model.device.type != "cuda" or model.dtype not in KERNEL_DTYPES:
        return False
    return (
        _kernel_is_there()
        and all(mesh.size(axis) == 1 for axis in ("zero3", "tp", "pp"))
        and not any(kind.get("rope_type") in MOVING_ROPES for kind in kinds)
    )


@cache
def _kernel_is_there() -> bool:
    lacking = missing()
    if lacking is not None:
        logger.warning("decoding on CUDA is several times as fast with %s", lacking)
    return lacking is None


def rung(number: int, unit: int, step: float = STEP) -> int:
    """The least rung at or above `number`: multiples of `unit`, each `step` times the one before, or `unit` above it."""
    size = unit
    while size < number:
        size = max(size + unit, int(size * step) // unit * unit)
    return size


class KernelDecode:
    """Attention of one new token a sequence over the cached ones, by the kernel. Its shapes depend on R alone."""

    def __init__(self, cache: PagedKVCache, inputs: Tensor) -> None:
        """`inputs` [R, 2 + W] (int64): of each sequence the new token, its position, and its blocks."""
        self._cache = cache
        self._positions, self._table = inputs[:, 1].contiguous(), inputs[:, 2:]
        size = cache.block_size
        block = self._table.gather(1, (self._positions // size)[:, None])[:, 0]
        self._own = block * size + self._positions % size

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """query [R, A, D], key and value [R, K, D] → [R, A, D]."""
        from headrace.rollout.native import paged_kernel

        self._cache.write(layer, self._own, key, value)
        keys, values = self._cache.tokens(layer)
        return paged_kernel.attend(
            query,
            keys,
            values,
            self._table,
            self._positions,
            self._cache.block_size,
            scale=scale,
            window=window,
        )


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
        self._recorded: dict[int, _Recorded | None] = {}
        self._known: set[bool] = set()  # kernels that were built before a recording
        self._pool: Any = None
        self.failed = False

    def hidden_states(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], table: NDArray[np.int64]
    ) -> Tensor | None:
        """ids and positions [B], table [B, up to W] → [B, H], good until the next call; None: not this time."""
        used = len(ids)
        rows = min(rung(used, ROWS_UNIT), self._rows)
        if self.failed or rows not in self._recorded:
            self._recorded[rows] = None
            return None
        packed = np.zeros((rows, self._inputs.shape[1]), dtype=np.int64)
        packed[:used, 0], packed[:used, 1] = ids, positions
        packed[:used, 2 : 2 + table.shape[1]] = table
        packed[used:, 2:] = self._cache.spare_block
        self._inputs[:rows].copy_(torch.from_numpy(packed))
        found = self._recorded[rows]
        if found is None:
            found = self._record(rows)
            if found is None:
                return None
            self._recorded[rows] = found
        found.graph.replay()
        return found.hidden[:used]

    def _forward(self, rows: int) -> Tensor:
        inputs = self._inputs[:rows]
        attention = KernelDecode(self._cache, inputs)
        return self._model.hidden_states(inputs[:, 0].contiguous(), inputs[:, 1].contiguous(), attention)

    def _record(self, rows: int) -> _Recorded | None:
        """Records a step; its inputs are in place, and what it writes before it is replayed is what a replay writes."""
        try:
            stream = _recording_stream(self._model.device)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            in_spans = num_spans(rows, self._model.num_kv_heads) > 1
            if in_spans not in self._known:
                self._known.add(in_spans)
                # libraries set themselves up, and kernels are built, at the first call on a stream: not to be recorded
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._forward(rows)
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    hidden = self._forward(rows)
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
        except build_errors() as error:
            self.failed = True
            logger.warning(
                "decoding goes on without CUDA graphs, which could not be recorded: %s",
                str(error).strip().partition("\n")[0],
            )
            return None
        return _Recorded(graph, hidden)

    def release(self) -> None:
        self._recorded.clear()
