from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from headrace.data.special_tokens import repair_gguf_bos, text_prefix, with_prefix

BOS, EOS = 0, 1


def test_prefix_is_what_the_tokenizer_prepends(byte_tokenizer: Callable[..., Any]) -> None:
    assert text_prefix(byte_tokenizer(prepends=True)) == (BOS,)


def test_a_bos_that_is_never_used_is_not_added(byte_tokenizer: Callable[..., Any]) -> None:
    assert text_prefix(byte_tokenizer()) == ()
    gpt2_like = byte_tokenizer(bos="</s>", eos="</s>")
    assert text_prefix(gpt2_like) == ()
    assert text_prefix(byte_tokenizer(bos=None)) == ()


def test_declared_bos_is_added_where_the_post_processor_lost_it(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(add_bos_token=True)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert tokenizer("a").input_ids == tokenizer("a", add_special_tokens=False).input_ids
    assert text_prefix(tokenizer) == (BOS,)


def test_a_template_that_starts_with_bos_makes_plain_text_start_with_it(
    byte_tokenizer: Callable[..., Any],
) -> None:
    assert text_prefix(byte_tokenizer(), chat_probe=[BOS, 7]) == (BOS,)
    assert text_prefix(byte_tokenizer(), chat_probe=[7, BOS]) == ()
    assert text_prefix(byte_tokenizer(bos=None), chat_probe=[7]) == ()


def test_an_eos_put_after_texts_is_no_prefix(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(add_eos_token=True)
    assert tokenizer("a").input_ids[-1] == EOS
    assert text_prefix(tokenizer) == ()
    both = byte_tokenizer(add_bos_token=True, add_eos_token=True)
    assert text_prefix(both) == (BOS,)


def test_a_prefix_of_two_tokens(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(bos=None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> <s> $A", special_tokens=[("<|user|>", 2), ("<s>", 0)]
    )
    assert text_prefix(tokenizer) == (2, 0)


@given(st.integers(0, 3), st.lists(st.integers(1, 9)))
def test_with_prefix_has_it_exactly_once(times: int, rest: list[int]) -> None:
    assert with_prefix([0] * times + rest, (0,)) == [0, *rest]
    assert with_prefix([0] * times + rest, ()) == [0] * times + rest


def write_gguf(path: Path, *, add_bos: bool | None, model: str = "llama") -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "gemma3")
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab", "▁"]
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_bos_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "flag, model, prefix",
    [
        (True, "llama", (BOS,)),
        (False, "llama", ()),
        (None, "llama", (BOS,)),
        (None, "gpt2", ()),
        (True, "gemma4", ()),
    ],
)
def test_gguf_says_whether_bos_is_added(
    tmp_path: Path, byte_tokenizer: Callable[..., Any], flag: bool | None, model: str, prefix: tuple[int, ...]
) -> None:
    write_gguf(tmp_path / "m.gguf", add_bos=flag, model=model)
    tokenizer = byte_tokenizer()
    repair_gguf_bos(tokenizer, tmp_path / "m.gguf")
    assert text_prefix(tokenizer) == prefix
    assert tokenizer("a").input_ids[: len(prefix)] == list(prefix)
    # a second repair changes nothing
    repair_gguf_bos(tokenizer, tmp_path / "m.gguf")
    assert text_prefix(tokenizer) == prefix
