"""Prompts: exactly one BOS whichever way, problems named by row, policies for long prompts (cases 17, 20, 21)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import DataConfig
from headrace.data.dataset import Rows, load_rows
from headrace.data.prompt_builder import fill_template, parse_template, use_chat_template
from headrace.data.prompts import PromptBuilder, PromptDataset
from headrace.errors import ConfigError, DataError

BOS, EOS, USER, ASSISTANT, SYSTEM = range(5)
CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHAT_WITH_BOS = "{{ bos_token }}" + CHAT
Make = Callable[..., Any]


def a(text: str) -> list[int]:
    """Ids of a text: 5 special ids come before the byte alphabet, whose printable ASCII starts with '!' = 5."""
    return [{" ": 5 + 94 + 94 + 32, "\n": 5 + 94 + 94 + 10}.get(c, 5 + ord(c) - ord("!")) for c in text]


def rows_of(*rows: dict[str, Any]) -> Rows:
    return load_rows(list(rows))


def build(
    tokenizer: Any, rows: Rows, limit: int | None = None, key: str = "data", **data: Any
) -> PromptDataset:
    return PromptDataset.build(rows, PromptBuilder(tokenizer, DataConfig(**data), limit), key)


def test_hand_ids_agree_with_the_tokenizer(byte_tokenizer: Make) -> None:
    text = "Hi ~!\nx"
    assert byte_tokenizer()(text).input_ids == a(text)


@pytest.mark.parametrize(
    "settings, template, data, expected",
    [
        ({"prepends": True}, CHAT_WITH_BOS, {}, [BOS, USER, *a("hi\n"), ASSISTANT]),
        ({"prepends": True}, CHAT, {}, [BOS, USER, *a("hi\n"), ASSISTANT]),
        ({"prepends": True}, None, {}, [BOS, *a("hi")]),
        ({"prepends": True}, CHAT, {"format": "plain"}, [BOS, *a("hi")]),
        ({"prepends": True}, None, {"template": "<s>{prompt}"}, [BOS, *a("hi")]),
        ({"prepends": True}, CHAT_WITH_BOS, {"template": "<s>{prompt}", "format": "plain"}, [BOS, *a("hi")]),
        ({}, CHAT_WITH_BOS, {}, [BOS, USER, *a("hi\n"), ASSISTANT]),
        ({}, CHAT_WITH_BOS, {"format": "plain"}, [BOS, *a("hi")]),
        ({}, CHAT, {}, [USER, *a("hi\n"), ASSISTANT]),
        ({}, None, {}, a("hi")),
        ({"bos": "</s>"}, None, {}, a("hi")),
        ({"bos": None}, CHAT, {}, [USER, *a("hi\n"), ASSISTANT]),
        ({"add_bos_token": True, "add_eos_token": True}, None, {}, [BOS, *a("hi")]),
    ],
)
def test_exactly_one_bos(
    byte_tokenizer: Make,
    settings: dict[str, Any],
    template: str | None,
    data: dict[str, Any],
    expected: list[int],
) -> None:
    dataset = build(byte_tokenizer(chat_template=template, **settings), rows_of({"prompt": "hi"}), **data)
    assert dataset.prompt_ids == [tuple(expected)]


def test_messages_and_system_prompt(byte_tokenizer: Make) -> None:
    rows = rows_of({"prompt": [{"role": "user", "content": "a"}]}, {"prompt": "b"})
    dataset = build(byte_tokenizer(chat_template=CHAT), rows, system_prompt="s")
    head = [SYSTEM, *a("s\n"), USER]
    assert dataset.prompt_ids == [(*head, *a("a\n"), ASSISTANT), (*head, *a("b\n"), ASSISTANT)]
    assert dataset.batch([1])["prompt"] == ["<|system|>s\n<|user|>b\n<|assistant|>"]


def test_chat_without_a_template_is_an_error_that_names_both_keys(byte_tokenizer: Make) -> None:
    with pytest.raises(ConfigError, match=r"data\.format.*model\.chat_template"):
        PromptBuilder(byte_tokenizer(), DataConfig(format="chat"))


def test_a_system_prompt_for_plain_text_is_an_error(byte_tokenizer: Make) -> None:
    with pytest.raises(ConfigError, match=r"data\.system_prompt"):
        PromptBuilder(byte_tokenizer(), DataConfig(system_prompt="s"))


def test_chat_template_file(byte_tokenizer: Make, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}!")
    use_chat_template(tokenizer, tmp_path / "t.jinja")
    assert build(tokenizer, rows_of({"prompt": "hi"})).prompt_ids == [tuple(a("hi!"))]
    with pytest.raises(ConfigError, match=r"model\.chat_template.*none\.jinja"):
        use_chat_template(tokenizer, tmp_path / "none.jinja")
    (tmp_path / "bad.jinja").write_text("line\n{% if %}")
    use_chat_template(tokenizer, tmp_path / "bad.jinja")
    with pytest.raises(ConfigError, match=r"model\.chat_template: line 2"):
        PromptBuilder(tokenizer, DataConfig())


def test_limit_of_512(byte_tokenizer: Make, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of(*({"prompt": "x" * n} for n in (511, 512, 513)))
    with pytest.raises(DataError) as caught:
        build(byte_tokenizer(), rows, max_prompt_tokens=512)
    assert len(caught.value.violations) == 1
    for part in ("row 3: 513 tokens", "512", "data.max_prompt_tokens", "drop", "truncate_left"):
        assert part in caught.value.violations[0]
    with pytest.raises(DataError, match=r"512 tokens \(rollout\.max_sequence_tokens.*row 3: 513"):
        build(byte_tokenizer(), rows, 512)
    with caplog.at_level(logging.WARNING):
        dropped = build(byte_tokenizer(), rows, 512, over_limit="drop")
        cut = build(byte_tokenizer(), rows, 512, over_limit="truncate_left")
    assert (len(dropped), dropped.dropped, dropped.truncated) == (2, 1, 0)
    assert (len(cut), cut.dropped, cut.truncated) == (3, 0, 1)
    assert [len(ids) for ids in cut.prompt_ids] == [511, 512, 512]
    assert "1 of 3 rows dropped" in caplog.text
    assert "1 of 3 prompts cut" in caplog.text


def test_the_limit_counts_the_bos_and_truncation_keeps_it(byte_tokenizer: Make) -> None:
    tokenizer = byte_tokenizer(prepends=True)
    assert build(tokenizer, rows_of({"prompt": "abc"}), 4).prompt_ids == [(BOS, *a("abc"))]
    dataset = build(tokenizer, rows_of({"prompt": "abcde"}), 4, over_limit="truncate_left")
    assert dataset.prompt_ids == [(BOS, *a("cde"))]
    assert dataset.batch([0])["prompt"] == ["cde"]


def test_dropped_rows_keep_the_ids_of_the_others(byte_tokenizer: Make) -> None:
    rows = rows_of({"prompt": "xxxxx", "n": 0}, {"prompt": "b", "n": 1}, {"prompt": "c", "n": 2})
    batch = build(byte_tokenizer(), rows, 4, over_limit="drop").batch([1, 0])
    assert batch["prompt_id"].tolist() == [2, 1]
    assert batch["prompt_id"].dtype == torch.int64
    assert (batch["prompt"], batch["n"]) == (["c", "b"], [2, 1])
    assert batch["prompt_ids"] == [tuple(a("c")), tuple(a("b"))]


def test_everything_dropped_is_an_error(byte_tokenizer: Make) -> None:
    with pytest.raises(DataError, match="every row was dropped"):
        build(byte_tokenizer(), rows_of({"prompt": "xxxxx"}), 4, over_limit="drop")


def test_all_problems_at_once_with_rows(byte_tokenizer: Make) -> None:
    good: dict[str, Any] = {"prompt": "fine"}
    rows = rows_of(
        good,
        {"prompt": None},
        {"prompt": "  \n"},
        {"other": 1},
        {"prompt": 7},
        {"prompt": "x" * 30},
        *({"prompt": ""} for _ in range(9)),
    )
    with pytest.raises(DataError) as caught:
        build(byte_tokenizer(), rows, 20)
    text = "\n".join(caught.value.violations)
    assert len(caught.value.violations) == 4
    assert "column 'prompt' is null (row 2, row 4; 2 rows)" in text
    assert "empty (row 3, row 7, row 8, row 9, row 10, ...; 10 rows)" in text
    assert "is a int; expected text or chat messages (row 5; 1 row)" in text
    assert "row 6: 30 tokens" in text


def test_a_file_is_named_with_its_line(byte_tokenizer: Make, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"eval\.path: .*d\.jsonl.*\(line 3; 1 row\)"):
        build(byte_tokenizer(), load_rows(path), key="eval")


def test_missing_columns(byte_tokenizer: Make) -> None:
    rows = rows_of({"qestion": "a", "reply": "b"})
    with pytest.raises(DataError, match=r"data\.prompt.*'question'.*did you mean 'qestion'.*qestion, reply"):
        build(byte_tokenizer(), rows, prompt="question")
    with pytest.raises(
        DataError, match=r"data\.prompt.*prompt, question, .*set data\.prompt to one of qestion, reply"
    ):
        build(byte_tokenizer(), rows)
    with pytest.raises(DataError, match=r"data\.template.*'question'.*did you mean 'qestion'"):
        build(byte_tokenizer(), rows, template="Q: {question}")


@pytest.mark.parametrize(
    "columns, chosen", [(("messages", "question"), "question"), (("query", "problem"), "problem")]
)
def test_prompt_column_by_default(byte_tokenizer: Make, columns: Sequence[str], chosen: str) -> None:
    rows = rows_of({c: f"text of {c}" for c in columns})
    assert build(byte_tokenizer(), rows).batch([0])["prompt"] == [f"text of {chosen}"]


def test_messages_that_cannot_be_prompts(byte_tokenizer: Make) -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = rows_of(
        {"messages": [user, answer]},
        {"messages": []},
        {"messages": [{"role": "user", "content": " "}]},
        {"messages": ["q"]},
        {"messages": [{"role": "system", "content": "own"}, user]},
    )
    with pytest.raises(DataError) as caught:
        build(byte_tokenizer(chat_template=CHAT), rows, system_prompt="s")
    text = "\n".join(caught.value.violations)
    assert "assistant's answer, so there is nothing to answer; leave it out (row 1" in text
    assert "the prompt is empty (row 2, row 3; 2 rows)" in text
    assert "no messages with role and content (row 4" in text
    assert "data.system_prompt; drop one (row 5" in text
    with pytest.raises(DataError, match=r"data\.format"):
        build(byte_tokenizer(), rows_of({"messages": [user]}))


def test_a_template_that_refuses_a_row_names_it(byte_tokenizer: Make) -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    rows = rows_of({"prompt": "fine"}, {"prompt": [{"role": "tool", "content": "t"}]})
    with pytest.raises(DataError, match=r"user first.*\(row 2; 1 row\)"):
        build(byte_tokenizer(chat_template=strict), rows)


def test_data_columns_travel_and_reserved_names_are_refused(byte_tokenizer: Make) -> None:
    rows = rows_of({"question": "q", "answer": "4", "level": 2})
    batch = build(byte_tokenizer(), rows).batch([0, 0])
    assert batch.columns == {"prompt_id", "prompt_ids", "prompt", "question", "answer", "level"}
    assert (batch["answer"], batch["level"], batch.num_rows) == (["4", "4"], [2, 2], 2)
    with pytest.raises(DataError, match=r"data\.path.*the columns prompt, reward, a name"):
        build(byte_tokenizer(), rows_of({"question": "q", "prompt": "p", "reward": 1}), prompt="question")
    assert len(build(byte_tokenizer(), rows_of({"prompt": "p", "x": "y"}), template="{prompt}{x}")) == 1


@pytest.mark.parametrize(
    "template", ["{x.__class__}", "{x[0]}", "{}", "{x!r}", "{x:>9}", "{x", "x}", "no field", "{{x}}"]
)
def test_templates_that_are_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.template"):
        parse_template(template)


TEXT = st.text("a é'\"%\n:!.")


@given(TEXT, st.text("ab {}!:\n"), TEXT)
def test_template_equals_format_map(between: str, x: str, y: str) -> None:
    template = f"{{{{{between}{{x}}{between}{{y}}{{x}}}}}}"
    row = {"x": x, "y": y}
    if (x + y).strip():
        assert fill_template(parse_template(template), row) == template.format_map(row)


def test_template_values_are_never_formatted_again(byte_tokenizer: Make) -> None:
    rows = rows_of({"x": "{y.__class__}", "y": "2"})
    assert build(byte_tokenizer(), rows, template="{x}+{y}").batch([0])["prompt"] == ["{y.__class__}+2"]


def test_null_in_a_template_column(byte_tokenizer: Make) -> None:
    with pytest.raises(DataError, match=r"column 'x' is null \(row 2"):
        build(byte_tokenizer(), rows_of({"x": "a"}, {"x": None}), template="Q: {x}")
    with pytest.raises(DataError, match=r"empty \(row 1"):
        build(byte_tokenizer(), rows_of({"x": " "}), template="Q: {x}")


def test_text_without_tokens_is_reported(space_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = load_rows([{"prompt": "abc"}, {"prompt": "a9b"}, {"prompt": "9"}])
    builder = PromptBuilder(space_tokenizer, DataConfig(format="plain"))
    with caplog.at_level(logging.WARNING):
        PromptDataset.build(rows, builder)
    assert "2 of 3 prompts hold text that the tokenizer has no token for (first: row 2)" in caplog.text
