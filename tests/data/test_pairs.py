"""Preference pairs: from a row's two columns to ids, masks and whole pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import DataConfig
from headrace.data.batch import Batch
from headrace.data.dataset import load_rows
from headrace.data.pairs import TURN, PairDataset, shared_prompt
from headrace.data.prompt_builder import PromptBuilder
from headrace.data.prompts import PromptDataset
from headrace.errors import ConfigError, DataError

BOS, EOS, USER, ASSISTANT, SYSTEM = range(5)
CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
Make = Callable[..., Any]


def a(text: str) -> list[int]:
    """Ids of printable ASCII, spaces and newlines (see conftest)."""
    odd = {"\n": 5 + 94 + 94 + 10, " ": 5 + 94 + 94 + 32}
    return [odd.get(c, 5 + ord(c) - ord("!")) for c in text]


def build(
    tokenizer: Any,
    rows: list[dict[str, Any]],
    limit: int | None = None,
    needs_prompt: bool = True,
    **data: Any,
) -> PairDataset:
    builder = PromptBuilder(tokenizer, DataConfig(**data))
    return PairDataset.build(load_rows(rows), builder, max_sequence_tokens=limit, needs_prompt=needs_prompt)


def rows_of(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    return [
        (batch.row_values("input_ids", r).tolist(), batch.row_values("response_mask", r).tolist())
        for r in range(batch.num_rows)
    ]


def row(prompt: list[int], response: list[int]) -> tuple[list[int], list[bool]]:
    return prompt + response, [False] * len(prompt) + [True] * len(response)


def refused(tokenizer: Any, rows: list[dict[str, Any]], **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        build(tokenizer, rows, **data)
    return "\n".join(caught.value.violations)


# ---- forms


def test_responses_to_a_prompt_column(byte_tokenizer: Make) -> None:
    rows = [
        {"prompt": "ab", "chosen": "cde", "rejected": "f"},
        {"prompt": "g", "chosen": "h</s>", "rejected": "i"},
    ]
    batch = build(byte_tokenizer(prepends=True), rows).batch([1, 0])
    assert rows_of(batch) == [
        row([BOS, *a("g")], [*a("h"), EOS]),
        row([BOS, *a("g")], [*a("i"), EOS]),
        row([BOS, *a("ab")], [*a("cde"), EOS]),
        row([BOS, *a("ab")], [*a("f"), EOS]),
    ]
    assert batch["pair_id"].tolist() == [1, 1, 0, 0]
    assert batch["is_chosen"].tolist() == [True, False, True, False]


def test_columns_of_other_names_and_a_template(byte_tokenizer: Make) -> None:
    rows = [{"x": "ab", "good": "c", "bad": "d", "prompt": "unused"}]
    pairs = build(byte_tokenizer(), rows, template="{x}:", chosen="good", rejected="bad")
    assert rows_of(pairs.batch([0])) == [row(a("ab:"), [*a("c"), EOS]), row(a("ab:"), [*a("d"), EOS])]


def test_whole_texts_of_hh_rlhf(byte_tokenizer: Make) -> None:
    """The last shared turn is the prompt's end, though both answers begin with the same word; one BOS."""
    prompt = "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: bye\n\nAssistant:"
    rows = [{"chosen": prompt + " So long", "rejected": prompt + " So"}]
    pairs = build(byte_tokenizer(prepends=True, chat_template=CHAT), rows)
    assert rows_of(pairs.batch([0])) == [
        row([BOS, *a(prompt)], [*a(" So long"), EOS]),
        row([BOS, *a(prompt)], [*a(" So"), EOS]),
    ]


def test_an_answer_of_nothing_is_its_end_token(byte_tokenizer: Make) -> None:
    prompt = "\n\nHuman: hi\n\nAssistant:"
    pairs = build(byte_tokenizer(), [{"chosen": prompt + " x", "rejected": prompt}])
    assert rows_of(pairs.batch([0]))[1] == row(a(prompt), [EOS])


def test_conversations(byte_tokenizer: Make) -> None:
    """As data sets with a prompt column beside whole conversations have them: the prompt column is not used."""
    asked = [{"role": "user", "content": "q"}]
    rows = [
        {
            "prompt": "q",
            "chosen": [*asked, {"role": "assistant", "content": "r"}],
            "rejected": [*asked, {"role": "assistant", "content": "s"}],
        }
    ]
    prompt = [USER, *a("q\n"), ASSISTANT]
    expected = [row(prompt, [*a("r"), EOS]), row(prompt, [*a("s"), EOS])]
    tokenizer = byte_tokenizer(chat_template=CHAT)
    assert rows_of(build(tokenizer, rows).batch([0])) == expected
    single = [{"prompt": asked, "chosen": rows[0]["chosen"][1:], "rejected": rows[0]["rejected"][1:]}]
    assert rows_of(build(tokenizer, single).batch([0])) == expected


def test_no_space_is_written_before_a_response(space_tokenizer: Any) -> None:
    # ids: <s> 0, </s> 1, <unk> 2, ▁ 3, a 4 ... h 11, ':' 12
    batch = build(space_tokenizer, [{"prompt": "ab:", "chosen": "cd", "rejected": "e"}]).batch([0])
    assert batch["input_ids"].tolist() == [0, 3, 4, 5, 12, 6, 7, 1, 0, 3, 4, 5, 12, 8, 1]


@pytest.mark.parametrize(
    "chosen, rejected, prompt",
    [
        ("Q: 2+2? A: 4", "Q: 2+2? A: 5", "Q: 2+2? A:"),
        ("the cat sat", "the cat ran", "the cat"),
        ("line\n\nyes", "line\n\nno", "line"),
        ("3+4=7", "3+4=8", "3+4="),
        ("a b", "a b c", "a"),
        ("same words", "same words", "same"),
        ("x", "x", ""),
        ("yes", "no", ""),
        (" yes", " no", " "),
        ("q\n\nAssistant: a\n\nAssistant: b", "q\n\nAssistant: a c", "q\n\nAssistant:"),
    ],
)
def test_where_whole_texts_part(chosen: str, rejected: str, prompt: str) -> None:
    assert chosen[: shared_prompt(chosen, rejected)] == prompt


@given(st.text("ab \n:", max_size=12), st.text("ab \n", max_size=6), st.text("ab \n", max_size=6))
def test_the_parts_make_the_whole(start: str, one: str, other: str) -> None:
    """The prompt is a beginning of both; with a turn, the answers begin right after it."""
    for between in ("", TURN):
        chosen, rejected = start + between + one, start + between + other
        cut = shared_prompt(chosen, rejected)
        assert chosen[:cut] == rejected[:cut]
        if between:
            assert chosen[cut:] == one
            assert rejected[cut:] == other
        elif chosen and rejected:
            assert cut < len(chosen)
            assert cut < len(rejected)


# ---- problems


def test_problems_name_rows_and_columns(byte_tokenizer: Make) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [good, good | {"chosen": None}, good | {"rejected": " "}, good | {"prompt": None}]
    text = refused(byte_tokenizer(), [*rows, good | {"chosen": 3}, good | {"rejected": None}])
    assert "data.path: the given rows: column 'chosen' is null (row 2; 1 row)" in text
    assert "column 'rejected' is null (row 6; 1 row)" in text
    assert "column 'rejected' is empty (row 3; 1 row)" in text
    assert "column 'prompt' is null (row 4; 1 row)" in text
    assert "column 'chosen' is a int; expected the completion's text (row 5; 1 row)" in text


def test_missing_columns_are_all_named(byte_tokenizer: Make) -> None:
    text = refused(byte_tokenizer(), [{"better": "a", "worse": "b"}])
    for side in ("chosen", "rejected"):
        assert f"data.{side}: the given rows (data.path) has no column '{side}'" in text
    assert "set data.chosen to one of better, worse" in text
    text = refused(byte_tokenizer(), [{"better": "a", "rejected": "b"}], chosen="beter")
    assert text.startswith("data.chosen: ")
    assert "did you mean 'better'?" in text
    rows = [{"chosen": "a b", "rejected": "a c"}]
    assert "'chosen' is the column of data.chosen too" in refused(byte_tokenizer(), rows, rejected="chosen")


def test_forms_that_do_not_fit(byte_tokenizer: Make) -> None:
    asked = [{"role": "user", "content": "q"}]
    answer = [{"role": "assistant", "content": "r"}]
    chat = byte_tokenizer(chat_template=CHAT)
    assert "one of column 'chosen' and column 'rejected' is a conversation" in refused(
        chat, [{"chosen": asked + answer, "rejected": "x"}]
    )
    assert "does not end with the assistant's answer" in refused(
        chat, [{"chosen": answer + asked, "rejected": asked + answer}]
    )
    other = [{"role": "user", "content": "p"}]
    assert "differ before their last answer" in refused(
        chat, [{"chosen": asked + answer, "rejected": other + answer}]
    )
    assert "there is no prompt; name its column" in refused(chat, [{"chosen": answer, "rejected": answer}])
    whole = [{"chosen": "a b", "rejected": "a c"}]
    assert "data.format 'chat' and data.system_prompt do nothing" in refused(chat, whole, format="chat")
    assert "do nothing" in refused(chat, whole, system_prompt="s")


def test_texts_without_a_shared_beginning(byte_tokenizer: Make) -> None:
    """Fine after a BOS, and for a reward model, which scores whole texts; else the first token has no probability."""
    rows = [{"chosen": "yes", "rejected": "no"}]
    assert "share no beginning" in refused(byte_tokenizer(), rows)
    assert rows_of(build(byte_tokenizer(prepends=True), rows).batch([0]))[1] == row([BOS], [*a("no"), EOS])
    ids, mask = rows_of(build(byte_tokenizer(), rows, needs_prompt=False).batch([0]))[1]
    assert (ids, mask) == ([*a("no"), EOS], [False, True, True])


def test_no_end_token(byte_tokenizer: Make) -> None:
    with pytest.raises(ConfigError, match="end-of-sequence"):
        build(byte_tokenizer(eos=None), [{"prompt": "a", "chosen": "b", "rejected": "c"}])


def test_limits_take_whole_pairs(byte_tokenizer: Make, caplog: pytest.LogCaptureFixture) -> None:
    """6 tokens: a prompt of 2 with responses of 2 and 4 (end included) fits, of 2 and 5 does not."""
    rows = [
        {"prompt": "ab", "chosen": "c", "rejected": "def"},
        {"prompt": "ab", "chosen": "cdef", "rejected": "d"},
        {"prompt": "abcd", "chosen": "e", "rejected": "f"},
    ]
    text = refused(byte_tokenizer(), rows, limit=6, max_prompt_tokens=3)
    assert "the sequence of prompt and completion is longer than 6 tokens" in text
    assert "(row 2: 7 tokens; 1 row)" in text
    assert "the prompt is longer than 3 tokens (data.max_prompt_tokens)" in text
    dropped = build(byte_tokenizer(), rows, limit=6, over_limit="drop", max_prompt_tokens=3)
    assert (len(dropped), dropped.dropped, dropped.truncated) == (1, 2, 0)
    cut = build(byte_tokenizer(), rows, limit=6, over_limit="truncate_left", max_prompt_tokens=3)
    assert (len(cut), cut.dropped, cut.truncated) == (3, 0, 2)
    assert rows_of(cut.batch([1])) == [row(a("b"), [*a("cdef"), EOS]), row(a("b"), [*a("d"), EOS])]
    assert cut.batch([2])["pair_id"].tolist() == [2, 2]
    assert "2 of 3 rows dropped" in caplog.text


def test_equal_sides_are_refused(byte_tokenizer: Make) -> None:
    rows = [
        {"prompt": "a", "chosen": c, "rejected": r}
        for c, r in (("b", "c"), ("b", "b"), ("d", "e"), ("d", "d"))
    ]
    text = refused(byte_tokenizer(), rows)
    assert "columns 'chosen' and 'rejected' hold the same response" in text
    assert "(row 2, row 4; 2 rows)" in text


def test_sides_that_become_equal_are_refused(byte_tokenizer: Make) -> None:
    """A tokenizer may lose what tells two responses apart; here each has an end token of its own."""
    end = byte_tokenizer().eos_token
    text = refused(byte_tokenizer(), [{"prompt": "a", "chosen": "b", "rejected": "b" + end}])
    assert "hold responses that the tokenizer makes the same tokens of" in text


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
def test_half_characters_are_refused_by_row(byte_tokenizer: Make, column: str) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    text = refused(byte_tokenizer(), [good, good | {column: "a\ud800"}])
    assert "holds \\ud800, half of a surrogate pair and no character (row 2; 1 row)" in text


def test_dialogues_without_a_common_prompt(byte_tokenizer: Make) -> None:
    """In the form of hh-rlhf the prompt ends with a turn that both have; answers may differ from any turn on."""
    rows = [
        {"chosen": f"\n\nHuman: {q}\n\nAssistant: r", "rejected": "\n\nHuman: q\n\nAssistant: s"}
        for q in "qp"
    ]
    text = refused(byte_tokenizer(), rows)
    assert (
        "differ before the first '\\n\\nAssistant:' that both have; a pair has one prompt (row 2; 1 row)"
        in text
    )
    assert "a pair has one prompt" in refused(byte_tokenizer(), [{"chosen": f"q{TURN} a", "rejected": "q a"}])
    start = f"q{TURN}"
    longer = build(byte_tokenizer(), [{"chosen": f"{start} a\n\nHuman: p{TURN} b", "rejected": f"{start} c"}])
    assert rows_of(longer.batch([0]))[1] == row(a(start), [*a(" c"), EOS])


def test_prompts_that_stand_twice_are_noticed(byte_tokenizer: Make, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "ab", "chosen": "abc", "rejected": "abd"}]
    build(byte_tokenizer(), rows)
    assert "begins with its own prompt, which then stands twice" in caplog.text
    caplog.clear()
    build(byte_tokenizer(), [*rows, {"prompt": "x", "chosen": "y", "rejected": "z"}])
    assert caplog.text == ""


def test_the_names_of_pair_columns_are_reserved(byte_tokenizer: Make) -> None:
    builder = PromptBuilder(byte_tokenizer(), DataConfig())
    with pytest.raises(DataError, match="pair_id, a name that headrace gives"):
        PromptDataset.build(load_rows([{"prompt": "a", "pair_id": 1}]), builder)
