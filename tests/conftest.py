"""Tiny models of each architecture, made on the spot with weights wide enough for peaked distributions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.models.causal_lm import CausalLM
from headrace.models.hf import wrap

torch.set_num_threads(
    1
)  # these models are too small to share, and threads that wait cost more than they help

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _hf_model(name: str) -> Any:
    import transformers as t

    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**SHAPE))
    if name == "qwen2-tied":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**SHAPE, tie_word_embeddings=True))
    if name == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**SHAPE, head_dim=16))
    if name == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = t.Gemma3TextConfig(
            **SHAPE, head_dim=16, sliding_window=7, layer_types=kinds, query_pre_attn_scalar=16
        )
        return t.Gemma3ForCausalLM(config)
    if name == "gpt2":
        config = t.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            bos_token_id=None,
            eos_token_id=None,
        )
        return t.GPT2LMHeadModel(config)
    raise ValueError(name)


ARCHITECTURES = ["llama", "qwen2-tied", "qwen3", "gemma3", "gpt2"]


def build(name: str, tokenizer: Any = None) -> CausalLM:
    torch.manual_seed(ARCHITECTURES.index(name))
    hf = _hf_model(name)
    with torch.no_grad():
        for key, parameter in hf.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif "norm" not in key and "ln_" not in key:
                parameter.normal_(0, 0.1)
    return wrap(hf, tokenizer)


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], CausalLM]:
    """The tiny model of an architecture, one object per session: tests that change weights call `build_model`."""
    return lru_cache(maxsize=None)(build)


@pytest.fixture(scope="session")
def build_model() -> Callable[..., CausalLM]:
    return build


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Ragged: shorter and longer than a block of 4 or 16, and than Gemma's window of 7."""
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, VOCAB, n).tolist()) for n in (1, 3, 17, 8, 33, 16, 5)]


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """Byte-level tokenizer of 97 ids: single bytes, so that a character can span tokens, and a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ"]
    # the byte-level alphabet's names of the bytes of é (C3 A9) and 🙂 (F0 9F 99 82)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == 256
    pieces = [*letters, "Ã", "©", "ð", "Ł", "Ļ", "Ĥ", "en", "end", "stop", "sĠ"]
    pieces += [chr(c) for c in range(ord("A"), ord("Z") + 1)]
    pieces += [p for p in sorted(alphabet) if p not in pieces][: VOCAB - 1 - len(pieces)]
    raw = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|done|>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ (the demo's, random weights), train.jsonl (60 sums) and heldout.jsonl (10 others).

    reward.py:score there is dense and easy, so that a few steps have gradients: the share of even digits.
    """
    folder = tmp_path_factory.mktemp("arithmetic")
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "arithmetic"))
    try:
        import task
    finally:
        sys.path.pop(0)
    task.make_model(folder / "model", 0)
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(7)]
    for name, rows in (("train", sums[10:]), ("heldout", sums[:10])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def score(completion, answer):\n    return sum(c in '02468' for c in completion) / 5\n"
    )
    return folder


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own operators, as where there is no compiler."""
    monkeypatch.setattr("headrace.models.attention.kernels_are_available", lambda: False)
    monkeypatch.setattr("headrace.rollout.native.attention.kernels_are_available", lambda: False)
    monkeypatch.setattr("headrace.kernels.operators.library", lambda: None)


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> None:
    """Both ways of computing on a CPU."""
    if request.param == "torch":
        request.getfixturevalue("without_kernels")
