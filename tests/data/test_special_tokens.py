from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from headrace.data.special_tokens import text_prefix, with_prefix

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
