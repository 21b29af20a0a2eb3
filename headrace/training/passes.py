"""A micro-batch on its way through a model's layers, from token ids to the hidden states that a head needs.

Shapes: N tokens of a micro-batch, C of them computed, P of these by this rank, W wanted, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.data.batch import Batch
from headrace.data.prefixes import share_prefixes
from headrace.models.causal_lm import Backbone
from headrace.models.sequence_parallel import PackSlice


class Pass:
    """What one micro-batch (on the CPU) needs of a model: hidden states of its flat tokens `wanted` [W].

    Nothing beyond them is computed, and a beginning that rows have in common once. Every stage of a pipeline makes the
    same pass of the same rows, so that all know its size. Along `sp` each rank computes a slice of the pass's tokens.
    """

    own: Tensor  # which of `wanted` this rank has: all but along sp

    def __init__(self, model: Backbone, batch: Batch, wanted: Tensor) -> None:
        self.model, self.batch = model, batch
        self._expand: Tensor | None = None
        mesh, place = model.shards.mesh, wanted
        if len(wanted) == 0:
            # where other processes wait for this pass, it is made of one token and must not add anything
            tokens = 1 if mesh.size("zero3") * mesh.size("pp") > 1 else 0
            self._ids = self._positions = torch.zeros(tokens, dtype=torch.int64)
            self._lengths = [tokens]
        else:
            needed = torch.zeros(batch.num_tokens, dtype=torch.bool)
            needed[wanted] = True
            shared = share_prefixes(batch, needed)
            self._ids = batch["input_ids"][shared.computed]
            self._positions = batch.position_ids()[shared.computed]
            self._lengths, self._expand = shared.lengths, shared.expand
            place = shared.place[wanted]
        self._slice = PackSlice(len(self._ids), mesh)
        self.own, self._place = self._slice.find(place)

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the hidden states between stages: [1, P, H]."""
        return 1, self._slice.count, int(self.model.text_config.hidden_size)

    def run(self, chunk: int, incoming: Tensor | None) -> Tensor:
        """A chunk's hidden states [1, P, H], of those of the layers before it (None: of the embedding)."""
        model, device, part = self.model, self.model.device, self._slice
        if part.count == 0:
            return torch.zeros(self.shape, dtype=model.dtype, device=device)
        attention = part.attention(self._lengths, device, self._expand)
        ids, positions = part.of(self._ids).to(device), part.of(self._positions).to(device)
        return model.run_layers(ids, positions, attention, chunk, incoming)

    def wanted(self, hidden: Tensor) -> Tensor:
        """Of the last chunk's hidden states those of `own` of the wanted tokens, [own, H]."""
        return hidden[0][self._place.to(hidden.device)]
