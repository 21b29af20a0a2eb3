"""Export of .gguf files, whole and as the base of an adapter, against the weights that were put into the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from headrace.checkpoint.export import save_hf_folder
from headrace.config import LoraConfig
from headrace.models.hf import load_causal_lm
from headrace.roles.role import adapt
from headrace.trainers.export import export

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A Qwen2 of random weights as a .gguf file with a byte-level tokenizer, and the weights."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, tie_word_embeddings=False)
    weights = Qwen2ForCausalLM(config).state_dict()
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(300)
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"]
    pieces += [f"<extra{i}>" for i in range(300 - len(pieces) - 1)] + ["<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(pieces)
    writer.add_token_types([1] * 299 + [3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(299)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    for name, value in weights.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


def test_a_gguf_file_becomes_a_folder(written: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, weights = written
    out = export(str(path), tmp_path / "out")
    saved = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert saved.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in saved.items())
    assert AutoTokenizer.from_pretrained(out)("abcab").input_ids == [257, 256]
    assert "quantization_config" not in (out / "config.json").read_text()


def test_an_adapter_on_a_gguf_file(written: Any, tmp_path: Path) -> None:
    path, weights = written
    model = load_causal_lm(str(path))
    adapt(model, LoraConfig(rank=2, alpha=4, targets=["q_proj"]), str(path))
    for parameter in model.trained_parameters().values():
        torch.nn.init.normal_(parameter)
    adapter = save_hf_folder(model, tmp_path / "adapter")
    state = model.trainable_state()
    merged = load_file(export(str(adapter), tmp_path / "out", merged=True) / "model.safetensors")
    for name, value in weights.items():
        key = name.removesuffix(".weight") + ".lora_{}.default.weight"
        if key.format("A") in state:
            delta = 2 * state[key.format("B")].double() @ state[key.format("A")].double()
            torch.testing.assert_close(merged[name].double(), value.double() + delta, atol=1e-6, rtol=2e-7)
        else:
            assert torch.equal(merged[name], value)
