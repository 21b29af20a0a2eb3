from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.config import DataConfig
from headrace.data.dataset import load_rows
from headrace.data.prompts import PromptBuilder, SFTDataset
from headrace.errors import ConfigError, DataError

BOS, EOS, USER, ASSISTANT, SYSTEM = range(5)
CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
Make = Callable[..., Any]


def a(text: str) -> list[int]:
    """Ids of printable ASCII without spaces, and of newlines (see conftest)."""
    return [{"\n": 5 + 94 + 94 + 10}.get(c, 5 + ord(c) - ord("!")) for c in text]


def build(tokenizer: Any, rows: list[dict[str, Any]], limit: int | None = None, **data: Any) -> SFTDataset:
    builder = PromptBuilder(tokenizer, DataConfig(**data))
    return SFTDataset.build(load_rows(rows), builder, max_sequence_tokens=limit)


def test_columns_of_a_batch(byte_tokenizer: Make) -> None:
    rows = [{"prompt": "ab", "completion": "cde"}, {"prompt": "f", "completion": "g</s>"}]
    batch = build(byte_tokenizer(prepends=True), rows).batch([1, 0])
    assert batch["input_ids"].tolist() == [BOS, *a("fg"), EOS, BOS, *a("abcde"), EOS]
    assert batch["response_mask"].tolist() == [False, False, True, True] + [False] * 3 + [True] * 4
    assert batch["input_ids"].dtype == torch.int64
    assert batch["response_mask"].dtype == torch.bool
    assert batch.lengths.tolist() == [4, 7]
    assert batch["prompt_id"].tolist() == [1, 0]


def test_chat_and_messages(byte_tokenizer: Make) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    expected = [USER, *a("q\n"), ASSISTANT, *a("r"), EOS]
    tokenizer = byte_tokenizer(chat_template=CHAT)
    for rows in (
        [{"messages": messages}],
        [{"prompt": "q", "answer": "r"}],
        [{"prompt": messages[:1], "completion": messages[1:]}],
    ):
        dataset = build(tokenizer, rows)
        assert dataset.batch([0])["input_ids"].tolist() == expected
        assert dataset.batch([0])["response_mask"].tolist() == [False] * 4 + [True] * 2


def test_only_the_last_of_several_answers_is_learned(byte_tokenizer: Make) -> None:
    turns = [
        {"role": r, "content": c}
        for r, c in (("user", "q"), ("assistant", "r"), ("user", "s"), ("assistant", "t"))
    ]
    batch = build(byte_tokenizer(chat_template=CHAT), [{"messages": turns}]).batch([0])
    learned = batch["input_ids"][batch["response_mask"]]
    assert learned.tolist() == [*a("t"), EOS]


def test_no_space_is_written_before_the_completion(space_tokenizer: Any) -> None:
    # ids: <s> 0, </s> 1, <unk> 2, ▁ 3, a 4 ... h 11, ':' 12
    dataset = build(space_tokenizer, [{"prompt": "ab:", "completion": "cd"}])
    assert dataset.batch([0])["input_ids"].tolist() == [0, 3, 4, 5, 12, 6, 7, 1]
    assert space_tokenizer("cd", add_special_tokens=False).input_ids == [3, 6, 7]


def test_problems_name_rows(byte_tokenizer: Make) -> None:
    rows = [{"prompt": "a", "answer": None}, {"prompt": "a", "answer": " "}, {"prompt": None, "answer": "x"}]
    with pytest.raises(DataError) as caught:
        build(byte_tokenizer(), rows)
    text = "\n".join(caught.value.violations)
    assert "column 'answer' is null (row 1; 1 row)" in text
    assert "column 'answer' is empty (row 2; 1 row)" in text
    assert "column 'prompt' is null (row 3; 1 row)" in text


def test_missing_completion(byte_tokenizer: Make) -> None:
    with pytest.raises(DataError, match=r"data\.completion.*completion, response, answer, output"):
        build(byte_tokenizer(), [{"prompt": "a", "reply": "x"}])
    with pytest.raises(DataError, match=r"data\.completion.*'repl'.*did you mean 'reply'"):
        build(byte_tokenizer(), [{"prompt": "a", "reply": "x"}], completion="repl")
    with pytest.raises(ConfigError, match="end-of-sequence"):
        build(byte_tokenizer(eos=None), [{"prompt": "a", "answer": "x"}])


def test_long_sequences(byte_tokenizer: Make) -> None:
    # with BOS and EOS: 8, 9 and 9 tokens; the last completion leaves no room for a prompt in 8
    rows = [
        {"prompt": "abc", "answer": "def"},
        {"prompt": "abcd", "answer": "efg"},
        {"prompt": "a", "answer": "bcdefg"},
    ]
    tokenizer = byte_tokenizer(prepends=True)
    with pytest.raises(DataError) as caught:
        build(tokenizer, rows, 8)
    assert "row 2: 9 tokens, row 3: 9 tokens" in caught.value.violations[0]
    dropped = build(tokenizer, rows, 8, over_limit="drop")
    assert (dropped.dropped, dropped.truncated, dropped.kept) == (2, 0, [0])
    cut = build(tokenizer, rows, 8, over_limit="truncate_left")
    assert (cut.dropped, cut.truncated, cut.kept) == (1, 1, [0, 1])
    assert cut.batch([1])["input_ids"].tolist() == [BOS, *a("bcdefg"), EOS]


def test_prompt_limit_in_supervised_data(byte_tokenizer: Make) -> None:
    rows = [{"prompt": "abcd", "answer": "e"}]
    with pytest.raises(
        DataError, match=r"prompt is longer than 3 tokens \(data\.max_prompt_tokens\).*row 1: 4"
    ):
        build(byte_tokenizer(), rows, max_prompt_tokens=3)
