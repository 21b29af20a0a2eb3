"""The parameters of a model and how they are cut over ranks, without weights: what each rank of a layout will hold.

The arithmetic is that of models/sharding.py: `tp` cuts one dimension of a parameter or leaves it whole, `zero3` cuts the
rows of what is left, `pp` gives a rank some of the layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.errors import ConfigError
from headrace.models.adapter_folder import weights_source
from headrace.models.find import find_model
from headrace.models.sharding import decoder_layers
from headrace.models.shards import part_of
from headrace.models.stage import split_layers
from headrace.models.tp_plan import COLUMN, PARTIAL, read_plan

Place = tuple[int, int]
"""(index, size) on an axis."""
WHOLE: Place = (0, 1)


@dataclass(frozen=True)
class Weight:
    """One parameter, by its name in `hf`. `tp_dim`: the dimension that tp cuts (None: whole on every tp rank).

    `layer`: the number of its layer; None for embedding, last norm and head, of which the embedding is in the first
    pipeline stage and the others are in the last (`ends`; tied ones are in both).
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    layer: int | None
    ends: frozenset[str] = frozenset()

    def ranges(self, tp: Place = WHOLE, zero3: Place = WHOLE) -> list[range]:
        """What of each dimension the rank at these indices has, where its stage has the parameter."""
        own = [range(extent) for extent in self.shape]
        if self.tp_dim is not None:
            own[self.tp_dim] = part_of(self.shape[self.tp_dim], tp[1], tp[0])
        if own:
            rows = part_of(len(own[0]), zero3[1], zero3[0])
            own[0] = range(own[0].start + rows.start, own[0].start + rows.stop)
        return own

    def numel(self, tp: Place = WHOLE, zero3: Place = WHOLE) -> int:
        """Elements of these."""
        return math.prod(map(len, self.ranges(tp, zero3)))


@dataclass(frozen=True)
class Inventory:
    """All parameters, tied ones once. `mlp_columns`: what tp has to divide besides heads (0: none).

    `tp_problems` and `zero3_problems` say why tp or zero3 cannot cut this model.
    """

    weights: tuple[Weight, ...]
    layers: int
    mlp_columns: int = 0
    tp_problems: tuple[str, ...] = ()
    zero3_problems: tuple[str, ...] = ()

    def numel(self, tp: Place = WHOLE, zero3: Place = WHOLE, pp: Place = WHOLE) -> int:
        """Parameters that the rank at these indices holds."""
        return sum(w.numel(tp, zero3) for w in self.weights if pp[0] in self.stages(w, pp[1]))

    def missing(self, held: tuple[Place, Place, Place], needed: tuple[Place, Place, Place]) -> int:
        """Elements of the parameters that a rank needs at (tp, zero3, pp) and has not whole at those of `held`."""
        return sum(
            w.numel(*needed[:2])
            for w in self.weights
            if needed[2][0] in self.stages(w, needed[2][1])
            and not (
                held[2][0] in self.stages(w, held[2][1])
                and all(
                    a.start <= b.start and b.stop <= a.stop
                    for a, b in zip(w.ranges(*held[:2]), w.ranges(*needed[:2]), strict=True)
                )
            )
        )

    def stages(self, weight: Weight, pp: int) -> frozenset[int]:
        """The pipeline stages that hold a parameter."""
        if weight.layer is not None:
            return frozenset(
                {next(s for s, own in enumerate(split_layers(self.layers, pp)) if weight.layer in own)}
            )
        return frozenset({0 if end == "first" else pp - 1 for end in weight.ends})

    def gathered(self, tp: Place = WHOLE, pp: Place = WHOLE) -> tuple[int, int]:
        """(elements of the largest layer, of everything outside the layers): what zero3 puts together for a pass."""
        by_layer: dict[int | None, int] = {}
        for w in self.weights:
            if pp[0] in self.stages(w, pp[1]):
                by_layer[w.layer] = by_layer.get(w.layer, 0) + w.numel(tp)
        ends = by_layer.pop(None, 0)
        return max(by_layer.values(), default=0), ends

    def described(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name → (shape, dtype), as reshard/layout.py takes them."""
        return {w.name: (w.shape, dtype) for w in self.weights}


def read_inventory(path: str, key: str, *, scalar: bool, trust_remote_code: bool = False) -> Inventory | None:
    """Of a folder or hub id, with a head of one value (`scalar`) or the vocabulary's; of an adapter folder, its base's.

    None for a GGUF file and for what transformers cannot build from its configuration alone. Raises ConfigError naming
    `key` for a path that does not exist.
    """
    found = weights_source(find_model(path, key), key)
    if found.endswith(".gguf"):
        return None
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(found, trust_remote_code=trust_remote_code)
        if scalar:
            config.num_labels = 1
        with torch.device("meta"):
            hf = kind.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError):
        return None
    return inventory_of(hf)


def inventory_of(hf: Any) -> Inventory:
    """Of a transformers model, whose parameters may have no memory."""
    plan, tp_problems = read_plan(hf)
    try:
        layers, zero3_problems = decoder_layers(hf), []
    except ConfigError as error:
        layers, zero3_problems = [], error.violations
    layer_of = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
    first = {id(p) for p in hf.get_input_embeddings().parameters()}
    head = hf.get_output_embeddings()
    last = set() if head is None else {id(p) for p in head.parameters()}
    weights = []
    for name, parameter in hf.named_parameters():
        own = id(parameter)
        ends = {"first"} if own in first else set()
        if own in last or own not in first:
            ends.add("last")
        vocabulary = own in first or own in last
        dim = 0 if vocabulary else _cut_dim(name, plan)
        layer = layer_of.get(own)
        weights.append(
            Weight(name, tuple(parameter.shape), dim, layer, frozenset(ends if layer is None else ()))
        )
    columns = int(getattr(hf.config.get_text_config(), "intermediate_size", None) or 0)
    return Inventory(tuple(weights), len(layers), columns, tuple(tp_problems), tuple(zero3_problems))


def _cut_dim(name: str, plan: Mapping[str, str]) -> int | None:
    module, _, own = name.rpartition(".")
    style = plan.get(module)
    if style is None or style == PARTIAL:
        return None
    if style == COLUMN:
        return 0
    return 1 if own == "weight" else None  # a row-cut layer's bias is whole
