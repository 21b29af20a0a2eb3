"""Decoding on a CPU without the modules' Python code: the forward pass of a step is taped for each number of rows.

A small model's operators take less time than the Python code around them. Tapes belong to an engine and outlive a
rollout; the weights, which an update changes in place, are read where they lie.

Shapes: B sequences that decode, R rows (a rung, B of them used), H hidden size.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.models.attention import AttentionContext
from headrace.models.causal_lm import CausalLM
from headrace.rollout.native.graphs import rung
from headrace.rollout.native.tape import Arena, NotRepeatable, Tape

logger = logging.getLogger(__name__)

STEP, ROWS_UNIT = 1.125, 4  # an empty row costs a CPU as much as a used one


def tapes_possible(model: CausalLM) -> bool:
    """On the CPU, whole in this process, and without hooks, which a tape would not call."""
    mesh = model.shards.mesh
    return (
        model.device.type == "cpu"
        and all(mesh.size(axis) == 1 for axis in ("zero3", "tp", "pp"))
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    )


class DecodeTapes:
    """The tapes of one engine. Every step of so many sequences is played, the first one too, so that what a run computes
    does not depend on what its process computed before.
    """

    def __init__(self, model: CausalLM, rows: int) -> None:
        """`rows`: sequences at most."""
        self._model, self._rows = model, rows
        self._tapes: dict[int, Tape] = {}
        self._arena = Arena()
        self._addresses: tuple[int, ...] = ()
        # numpy's view and torch's of the same memory
        self._ids, self._positions = (np.zeros(rows, dtype=np.int64) for _ in range(2))
        self._inputs = torch.from_numpy(self._ids), torch.from_numpy(self._positions)
        self.failed = False

    def refresh(self) -> None:
        """Drops tapes that read weights where they no longer lie. To be called before each rollout."""
        hf = self._model.hf
        addresses = tuple(x.data_ptr() for x in (*hf.parameters(), *hf.buffers()))
        if addresses != self._addresses:
            self._tapes.clear()
            self._addresses = addresses

    def hidden_states(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], attention: AttentionContext
    ) -> Tensor | None:
        """ids and positions [B] → [B, H], good until the next call; None where the model cannot be taped."""
        used = len(ids)
        rows = min(rung(used, ROWS_UNIT, STEP), self._rows)
        tape = self._tapes.get(rows)
        if tape is None:
            tape = self._record(rows)
            if tape is None:
                return None
        self._ids[:used], self._positions[:used] = ids, positions
        return tape.play(attention, used)[0, :used]

    def _record(self, rows: int) -> Tape | None:
        if self.failed:
            return None
        ids, positions = (x[:rows] for x in self._inputs)
        positions.copy_(torch.arange(rows))
        try:
            tape = Tape(lambda attention: self._model.run_layers(ids, positions, attention), self._arena)
        except NotRepeatable as reason:
            self.failed = True
            logger.info("decode steps are computed by the model's own Python code: %s", reason)
            return None
        self._tapes[rows] = tape
        return tape
