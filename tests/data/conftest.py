"""Tiny tokenizers, built on the spot. One token per byte, so ids and counts can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Machines are shared, so how long one example takes says nothing.
settings.register_profile("data", deadline=None)
settings.load_profile("data")

SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]


def byte_vocabulary() -> dict[str, int]:
    names = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return {name: i for i, name in enumerate(names)}


def make_byte_tokenizer(
    *,
    bos: str | None = "<s>",
    eos: str | None = "</s>",
    prepends: bool = False,
    chat_template: str | None = None,
    **settings: Any,
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    if prepends:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, SPECIALS.index(str(bos)))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, **settings)
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture
def byte_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return make_byte_tokenizer


@pytest.fixture
def space_tokenizer() -> PreTrainedTokenizerFast:
    """Writes a space before every text, like Llama 2: "ab" is "▁", "a", "b"."""
    vocabulary = {name: i for i, name in enumerate(["<s>", "</s>", "<unk>", "▁", *"abcdefgh:"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )
