"""A micro-batch on its way through a model's layers, from token ids to the hidden states that a head needs.

Shapes: N tokens of a micro-batch, C of them computed, W wanted, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.data.batch import Batch
from headrace.data.prefixes import share_prefixes
from headrace.models.attention import PackedAttention
from headrace.models.causal_lm import Backbone


class Pass:
    """What one micro-batch (on the CPU) needs of a model: hidden states of its flat tokens `wanted` [W].

    Nothing beyond them is computed, and a beginning that rows have in common once. Every stage of a pipeline makes the
    same pass of the same rows, so that all know its size.
    """

    def __init__(self, model: Backbone, batch: Batch, wanted: Tensor) -> None:
        self.model, self.batch = model, batch
        self._expand: Tensor | None = None
        if len(wanted) == 0:
            # where other processes wait for this pass, it is made of one token and must not add anything
            mesh = model.shards.mesh
            self.tokens = 1 if mesh.size("zero3") * mesh.size("pp") > 1 else 0
            self._ids = self._positions = torch.zeros(self.tokens, dtype=torch.int64)
            self._lengths, self._place = [self.tokens], wanted
            return
        needed = torch.zeros(batch.num_tokens, dtype=torch.bool)
        needed[wanted] = True
        shared = share_prefixes(batch, needed)
        self.tokens = len(shared.computed)
        self._ids = batch["input_ids"][shared.computed]
        self._positions = batch.position_ids()[shared.computed]
        self._lengths, self._expand = shared.lengths, shared.expand
        self._place = shared.place[wanted]

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the hidden states between stages: [1, C, H]."""
        return 1, self.tokens, int(self.model.text_config.hidden_size)

    def run(self, chunk: int, incoming: Tensor | None) -> Tensor:
        """A chunk's hidden states [1, C, H], of those of the layers before it (None: of the embedding)."""
        model, device = self.model, self.model.device
        if self.tokens == 0:
            return torch.zeros(self.shape, dtype=model.dtype, device=device)
        attention = PackedAttention(self._lengths, device, expand=self._expand)
        ids, positions = self._ids.to(device), self._positions.to(device)
        return model.run_layers(ids, positions, attention, chunk, incoming)

    def wanted(self, hidden: Tensor) -> Tensor:
        """[W, H] of the last chunk's hidden states."""
        return hidden[0][self._place.to(hidden.device)]
