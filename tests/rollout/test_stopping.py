from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.rollout.native.stopping import PATIENCE, StopText


class Bytes:
    """A tokenizer whose ids are bytes: every multi-byte character spans tokens."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def first_stop(ids: list[int], stops: tuple[str, ...], look_from: int = 0) -> int | None:
    text = StopText(Bytes(), stops)
    for i, token in enumerate(ids):
        if text.push(token, i >= look_from):
            return i
    return None


def brute_force(ids: list[int], stops: tuple[str, ...]) -> int | None:
    """The first token after which the text decoded so far holds a stop string."""
    for i in range(len(ids)):
        if any(s in Bytes().decode(ids[: i + 1]) for s in stops):
            return i
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "é", "🙂", "日", "\n"]), max_size=30).map("".join),
    st.lists(
        st.sampled_from(["a", "ba", "é\n", "🙂", "a🙂b", "日日", "bbb", "abab"]), min_size=1, max_size=3
    ),
)
def test_equals_searching_the_whole_decoded_text(text: str, stops: list[str]) -> None:
    ids = list(text.encode())
    assert first_stop(ids, tuple(stops)) == brute_force(ids, tuple(stops))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0x41, 0x42, 0xC3, 0xA9, 0xF0, 0x9F, 0x99, 0x82, 0xFF]), max_size=80),
    st.sampled_from([("AB",), ("é",), ("🙂", "BBA"), ("AéB",)]),
)
def test_broken_bytes_hide_no_stop_string(ids: list[int], stops: tuple[str, ...]) -> None:
    assert first_stop(ids, stops) == brute_force(ids, stops)


def test_a_stop_string_before_an_unfinished_character_counts_at_once() -> None:
    class Two:
        def decode(self, ids: list[int], **_: Any) -> str:
            return b"".join([b"xEND\xf0\x9f", b"\x99\x82"][i] for i in ids).decode("utf-8", errors="replace")

    assert StopText(Two(), ("END",)).push(0)


def test_a_string_completed_while_nobody_looked_is_not_found_later() -> None:
    assert first_stop(list(b"abENDcd"), ("END",), look_from=6) is None
    assert first_stop(list(b"abENDcdEND"), ("END",), look_from=6) == 9
    assert first_stop(list(b"abENDcd"), ("END", "a-longer-one"), look_from=5) is None
    # one that ends in the first token looked at counts, wherever it began
    assert first_stop(list(b"abENDcd"), ("END",), look_from=4) == 4


def test_each_token_decodes_a_bounded_window() -> None:
    class Counting(Bytes):
        longest = 0

        def decode(self, ids: list[int], **_: Any) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    for ids in (list(b"plain text ") * 50, [0xFF] * 500, list("🙂".encode()) * 100):
        tokenizer = Counting()
        text = StopText(tokenizer, ("never",))
        for token in ids:
            text.push(token)
        assert tokenizer.longest <= 3 * PATIENCE


def test_a_special_token_can_be_a_stop_string(byte_tokenizer: Any) -> None:
    done = byte_tokenizer.convert_tokens_to_ids("<|done|>")
    text = StopText(byte_tokenizer, ("<|done|>",))
    assert [text.push(t) for t in (0, 1, done)] == [False, False, True]


@pytest.mark.parametrize("pieces", [["s", "t", "o", "p"], ["stop"], ["a", "stop"]])
def test_with_a_real_byte_level_tokenizer(byte_tokenizer: Any, pieces: list[str]) -> None:
    ids = byte_tokenizer.convert_tokens_to_ids(pieces)
    text = StopText(byte_tokenizer, ("stop",))
    assert [text.push(t) for t in ids] == [False] * (len(ids) - 1) + [True]
    smile = byte_tokenizer.convert_tokens_to_ids(["ð", "Ł", "Ļ", "Ĥ"])
    text = StopText(byte_tokenizer, ("🙂",))
    assert [text.push(t) for t in smile] == [False, False, False, True]
