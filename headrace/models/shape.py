"""The size of a model, from its config.json and the headers of its weight files: no weights are read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.adapter_folder import weights_source
from headrace.models.find import find_model

_LONGEST_HEADER = 100 << 20  # bytes; what safetensors itself allows
_TWO_MATRICES = {
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "phi",
    "bloom",
    "codegen",
    "falcon",
    "mpt",
    "stablelm",
}


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a decoder-only transformer. `head_parameters` are those of an output head that is not tied.

    `experts_per_token` MLPs of `intermediate` are computed for each token (1 where there are no experts).
    """

    parameters: int
    head_parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    query_key_norm: bool
    experts_per_token: int = 1
    norms_per_layer: int = 2
    counted: str = "headers"  # or "arithmetic"

    @property
    def backbone_parameters(self) -> int:
        """Without the output head where that is a tensor of its own: what a critic or reward model has."""
        return self.parameters - self.head_parameters


def read_shape(path: str, key: str, trust_remote_code: bool = False) -> ModelShape | None:
    """The shape of a folder or hub id, of an adapter folder that of its base; None for a GGUF file and for what has
    no readable configuration.

    Raises ConfigError naming `key` for a path that does not exist.
    """
    found = weights_source(find_model(path, key), key)
    if found.endswith(".gguf"):
        return None
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(found, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError):
        return None
    return shape_of(config, _stored_parameters(found))


def shape_of(config: Any, stored: int | None = None) -> ModelShape | None:
    """The shape by a transformers configuration; `stored` parameters win over arithmetic. None: it lacks numbers."""
    text = config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if any(not isinstance(getattr(text, name, None), int) for name in names):
        return None
    hidden, layers, heads, vocab = (int(getattr(text, name)) for name in names)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(text, "head_dim", None) or hidden // heads)
    experts = int(getattr(text, "num_experts_per_tok", None) or 1)
    width = getattr(text, "moe_intermediate_size", None) if experts > 1 else None
    intermediate = int(
        width or getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
    )
    gated = text.model_type not in _TWO_MATRICES
    tied = bool(getattr(text, "tie_word_embeddings", getattr(config, "tie_word_embeddings", False)))
    head = 0 if tied else vocab * hidden
    matrices = 3 if gated else 2
    layer = 2 * hidden * head_dim * (heads + kv_heads) + matrices * hidden * intermediate + 2 * hidden
    counted = vocab * hidden + head + layers * layer + hidden
    return ModelShape(
        parameters=stored or counted,
        head_parameters=head,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        gated=gated,
        query_key_norm=text.model_type.startswith(("qwen3", "gemma3", "olmo2")),
        experts_per_token=experts,
        norms_per_layer=4 if text.model_type.startswith(("gemma2", "gemma3")) else 2,
        counted="headers" if stored else "arithmetic",
    )


def _stored_parameters(path: str) -> int | None:
    """Parameters in the safetensors files of a folder, or of a hub id in the local cache; None where there are none."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    index = folder / "model.safetensors.index.json"
    try:
        names = (
            set(json.loads(index.read_text())["weight_map"].values())
            if index.is_file()
            else {"model.safetensors"}
        )
        return sum(math.prod(shape) for name in names for shape in tensor_shapes(folder / name).values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """The shape of each tensor of a safetensors file, by its header. Raises OSError, ValueError, KeyError, TypeError."""
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _LONGEST_HEADER:
            raise ValueError(f"{file}: not a safetensors file")
        header = json.loads(opened.read(length))
    return {
        name: [int(extent) for extent in tensor["shape"]]
        for name, tensor in header.items()
        if name != "__metadata__"
    }
