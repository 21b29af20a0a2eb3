"""Decoding on a CPU without the modules' Python code: the forward pass of a step is taped for each number of rows.

A small model's operators take less time than the Python code around them. Tapes belong to an engine and outlive a
rollout; the weights, which an update changes in place, are read where they lie.

Shapes: B sequences that decode, R rows (a rung, B of them used), H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from headrace.models.attention import AttentionContext
from headrace.models.causal_lm import CausalLM
from headrace.rollout.native.graphs import rung
from headrace.rollout.native.recorder import NotRepeatable
from headrace.rollout.native.tape import Arena, Tape

logger = logging.getLogger(__name__)

STEP, ROWS_UNIT = 1.125, 4  # an empty row costs a CPU as much as a used one


def tapes_possible(model: CausalLM) -> bool:
    """On the CPU, whole in this process, without hooks, which a tape would not call, and outside of autocast."""
    mesh = model.shards.mesh
    return (
        model.device.type == "cpu"
        and all(mesh.size(axis) == 1 for axis in ("zero3", "tp", "pp"))
        and not torch.is_autocast_enabled("cpu")
        and not (nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    )


class DecodeTapes:
    """The tapes of one engine. Every step of so many sequences is played, the first one too, so that what a run computes
    does not depend on what its process computed before.
    """

    def __init__(self, model: CausalLM, rows: int) -> None:
        """`rows`: sequences at most."""
        self.model, self.rows = model, rows
        self._tapes: dict[int, Tape] = {}
        self._arena = Arena()
        self._facts: list[Any] = []
        # numpy's view and torch's of the same memory
        self._ids, self._positions = (np.zeros(rows, dtype=np.int64) for _ in range(2))
        self._inputs = torch.from_numpy(self._ids), torch.from_numpy(self._positions)
        self.failed = False

    def refresh(self) -> None:
        """Drops tapes of what the model no longer is. To be called before each rollout."""
        facts = list(_facts_of(self.model))
        if not _same(facts, self._facts):
            self._tapes.clear()
            self._facts = facts

    def hidden_states(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], attention: AttentionContext
    ) -> Tensor | None:
        """ids and positions [B] → [B, H], good until the next call; None where the model cannot be taped."""
        used = len(ids)
        rows = min(rung(used, ROWS_UNIT, STEP), self.rows)
        tape = self._tapes.get(rows)
        if tape is None:
            tape = self._record(rows)
            if tape is None:
                return None
        self._ids[:used], self._positions[:used] = ids, positions
        # a module that looks at all rows at once may at least not see those of an earlier rollout
        self._ids[used:rows], self._positions[used:rows] = 0, 0
        return tape.play(attention, used)[0, :used]

    def _record(self, rows: int) -> Tape | None:
        if self.failed:
            return None
        ids, positions = (x[:rows] for x in self._inputs)
        known, limit = self.model.hf.get_input_embeddings().num_embeddings, self.model.max_positions or rows

        def fill(step: int) -> None:
            torch.remainder(torch.arange(step, rows + step) * step, known, out=ids)
            torch.remainder(torch.arange(rows) * step, limit, out=positions)

        fill(1)
        try:
            tape = Tape(
                lambda attention: self.model.run_layers(ids, positions, attention),
                self._arena,
                lambda: fill(7),
            )
        # RuntimeError: no rule for an operator under a recording; what is wrong with the model its own code raises again
        except (NotRepeatable, RuntimeError) as reason:
            self.failed = True
            logger.info("decode steps are computed by the model's own Python code: %s", reason)
            return None
        self._tapes[rows] = tape
        return tape


PLAIN = (bool, int, float, str)
OF_EVERY_MODULE = {*vars(nn.Module())}  # its training flag too, which is off while a rollout runs


def _facts_of(model: CausalLM) -> Iterator[Any]:
    """What tapes have taken: threads, which modules they are, how they are set, and where their tensors lie."""
    yield torch.get_num_threads()
    yield from _facts(vars(model.text_config))
    for module in model.hf.modules():
        yield module
        for own in (module._parameters, module._buffers, module._modules):
            yield from _facts(own)
        yield from _facts({key: x for key, x in vars(module).items() if key not in OF_EVERY_MODULE})


def _facts(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        yield value.dtype
        yield from (value.data_ptr(), *value.shape, *value.stride())
    elif isinstance(value, dict):
        yield len(value)
        for key, x in value.items():
            yield key
            yield from _facts(x)
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for x in value:
            yield from _facts(x)
    else:
        yield value


def _same(a: list[Any], b: list[Any]) -> bool:
    """Values that are equal; of everything else the very same objects."""
    return len(a) == len(b) and all(
        x is y or (type(x) is type(y) and isinstance(x, PLAIN) and x == y) for x, y in zip(a, b, strict=True)
    )
