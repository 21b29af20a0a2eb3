"""Sizes without weights, against the parameters that torch counts in the real model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.models.shape import read_shape, shape_of


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3", "gemma3", "gpt2"])
def test_the_parameters_are_those_of_the_model(tiny: Any, name: str, tmp_path: Path) -> None:
    hf = tiny(name).hf
    hf.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path), "model.path")
    assert shape is not None
    assert (shape.counted, shape.parameters) == ("headers", sum(p.numel() for p in hf.parameters()))
    tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    assert shape.head_parameters == (0 if tied else 97 * 32)
    assert (shape.layers, shape.hidden, shape.heads, shape.vocab) == (
        len(hf.base_model.layers) if name != "gpt2" else 2,
        32,
        4,
        97,
    )
    key = next(p for n, p in hf.named_parameters() if "k_proj.weight" in n or "c_attn.weight" in n)
    width = shape.kv_heads * shape.head_dim
    assert key.shape[0] == width or (name == "gpt2" and key.shape[1] == 3 * width)
    up = next(p for n, p in hf.named_parameters() if "up_proj.weight" in n or "c_fc.weight" in n)
    assert shape.intermediate in up.shape
    assert shape.gated == any("gate_proj" in n for n, _ in hf.named_parameters())
    norms = {
        n.rpartition(".layers.0.")[2] for n, _ in hf.named_parameters() if ".0." in n and "norm.weight" in n
    }
    assert shape.norms_per_layer == (2 if name == "gpt2" else len([n for n in norms if "self_attn" not in n]))
    assert shape.query_key_norm == any("q_norm" in n for n, _ in hf.named_parameters())


def test_without_headers_it_is_counted_from_the_configuration(tiny: Any, tmp_path: Path) -> None:
    hf = tiny("llama").hf
    hf.config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path), "model.path")
    assert shape is not None
    assert (shape.counted, shape.parameters) == ("arithmetic", sum(p.numel() for p in hf.parameters()))


def test_several_files_are_added_up(tmp_path: Path) -> None:
    for name, rows in (("a", 3), ("b", 5)):
        header = json.dumps(
            {"w" + name: {"dtype": "F32", "shape": [rows, 7], "data_offsets": [0, 4]}}
        ).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    index = {"weight_map": {"wa": "a.safetensors", "wb": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path), "model.path")
    assert shape is not None
    assert shape.parameters == 3 * 7 + 5 * 7


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, struct.pack("<Q", 9) + b"[1, 2, 3]"])
def test_a_broken_file_is_not_counted(tmp_path: Path, tiny: Any, content: bytes) -> None:
    tiny("llama").hf.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    shape = read_shape(str(tmp_path), "model.path")
    assert shape is not None
    assert shape.counted == "arithmetic"


def test_what_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert read_shape(str(tmp_path / "x.gguf"), "model.path") is None
    assert read_shape(str(tmp_path), "model.path") is None
    with pytest.raises(ConfigError, match=r"reward\.model"):
        read_shape(str(tmp_path / "no" / "such" / "folder"), "reward.model")


def test_experts_count_for_each_token() -> None:
    from transformers import Qwen3MoeConfig

    shape = shape_of(Qwen3MoeConfig(num_experts_per_tok=8, moe_intermediate_size=768), stored=30_000_000_000)
    assert shape is not None
    assert (shape.parameters, shape.intermediate, shape.experts_per_token) == (30_000_000_000, 768, 8)
