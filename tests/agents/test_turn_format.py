"""What stands between two turns: exactly the ids the chat template writes there."""

from __future__ import annotations

from typing import Any

import pytest
from characters import CHATML, make_tokenizer

from headrace.agents.turn_format import TurnFormat, check_turns
from headrace.config import DataConfig
from headrace.errors import AgentError, ConfigError

HEADERS = (  # trims the content and ends a turn by its token alone
    "{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
TURNS = (  # names the assistant otherwise and knows no tools
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
FORGETFUL = (  # drops the reasoning of turns that a user message follows
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)  # opens a reasoning that it does not write for earlier turns


@pytest.fixture
def characters() -> Any:
    return make_tokenizer()


def turns(tokenizer: Any, template: str | None, role: str = "user", ends: tuple[str, ...] = ()) -> TurnFormat:
    tokenizer.chat_template = template
    ids = tokenizer.convert_tokens_to_ids(list(ends or ("<|im_end|>", "<|eot|>", "<end_turn>", "<eos>")))
    return TurnFormat(tokenizer, "chat" if template else "plain", role, ids)


def text_between(form: TurnFormat, response: str, *texts: str) -> str:
    """What follows `response`, whose last token is that of its end."""
    last = form.tokenizer(response, add_special_tokens=False)["input_ids"][-1]
    return form.tokenizer.decode(form.between(response, last, texts))


@pytest.mark.parametrize(
    ("template", "end", "role", "between"),
    [
        (CHATML, "<|im_end|>", "user", "\n<|im_start|>user\n4 is\n2+2<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "<|im_end|>", "tool", "\n<|im_start|>tool\n4 is\n2+2<|im_end|>\n<|im_start|>assistant\n"),
        (HEADERS, "<|eot|>", "tool", "<|start|>tool<|stop|>\n\n4 is\n2+2<|eot|><|start|>assistant<|stop|>\n\n"),
        (TURNS, "<end_turn>", "user", "\n<turn>user\n4 is\n2+2<end_turn>\n<turn>model\n"),
        (FORGETFUL, "<|im_end|>", "tool", "\n<|im_start|>tool\n4 is\n2+2<|im_end|>\n<|im_start|>assistant\n"),
    ],
    ids=["chatml user", "chatml tool", "headers", "turns", "reasoning kept for tools"],
)  # fmt: skip
def test_prompt_response_and_what_follows_are_what_the_template_renders(
    characters: Any, template: str, end: str, role: str, between: str
) -> None:
    form = turns(characters, template, role)
    assert text_between(form, f"It is{end}", "4 is\n2+2") == between
    # and the whole conversation is the template's own rendering of it
    asked = [{"role": "user", "content": "What?"}]
    prompt = characters.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    said = [{"role": "assistant", "content": "It is"}, {"role": role, "content": "4 is\n2+2"}]
    whole = characters.apply_chat_template(asked + said, add_generation_prompt=True, tokenize=False)
    assert f"{prompt}It is{end}{between}" == whole


def test_a_response_cut_before_its_end_token_gets_it_from_the_template(characters: Any) -> None:
    form = turns(characters, CHATML)
    assert text_between(form, "2+2=", "4") == (
        "<|im_end|>\n<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_end_token_than_the_template_s_is_followed_by_the_template_s(characters: Any) -> None:
    form = turns(characters, CHATML)
    assert text_between(form, "It is<eos>", "4").startswith("<|im_end|>\n<|im_start|>user\n")


def test_an_end_token_in_the_environment_s_text_is_not_taken_for_the_response_s(characters: Any) -> None:
    form = turns(characters, CHATML, ends=("<|im_end|>", "<eos>"))
    assert text_between(form, "It is<eos>", "<eos>4").startswith("<|im_end|>\n<|im_start|>user\n<eos>4")


def test_several_messages(characters: Any) -> None:
    form = turns(characters, HEADERS, "tool")
    expected = (
        "<|start|>tool<|stop|>\n\na<|eot|><|start|>tool<|stop|>\n\nb<|eot|><|start|>assistant<|stop|>\n\n"
    )
    assert text_between(form, "x<|eot|>", "a", "b") == expected


def test_plain_text_stands_as_it_is(characters: Any) -> None:
    form = turns(characters, None)
    assert text_between(form, "2+2=", "4\n", "5\n") == "4\n5\n"
    assert text_between(form, "2+2<eos>", "") == ""


def test_no_space_is_put_before_plain_text() -> None:
    """As tokenizers of the SentencePiece kind do at the start of any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"▁": 0, "a": 1, "4": 2, "<unk>": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split("", "isolated")]
    )
    raw.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    assert tokenizer("4")["input_ids"] == [0, 2]
    assert TurnFormat(tokenizer, "plain", "user", ()).between("a", 1, ["4"]) == [2]


@pytest.mark.parametrize(
    ("template", "role", "said"),
    [
        (FORGETFUL, "user", "removes the reasoning .* Some templates keep it before messages of role 'tool'"),
        (OPENED, "user", "not append-only"),
        (TURNS, "tool", "refuses an environment's message of role 'tool'"),
        (CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"), "tool",
         "leaves out messages of role 'tool'"),
    ],
    ids=["reasoning stripped", "reasoning opened", "role refused", "role left out"],
)  # fmt: skip
def test_templates_that_will_not_do_are_refused_by_name(
    characters: Any, template: str, role: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.chat_template: .*{said}"):
        turns(characters, template, role)


def test_a_message_the_template_refuses_later(characters: Any) -> None:
    refusing = CHATML.replace(
        "<|im_start|>{{ m.role }}",
        "{% if 'bad' in m.content %}{{ raise_exception('no') }}{% endif %}<|im_start|>{{ m.role }}",
    )
    with pytest.raises(AgentError, match="refuses the environment's message: no"):
        turns(characters, refusing).between("x", 5, ["bad"])


def test_prompts_and_turns_must_be_made_by_the_same_settings(characters: Any) -> None:
    characters.chat_template = CHATML
    check_turns(characters, "user", DataConfig(), DataConfig(max_prompt_tokens=5))
    with pytest.raises(ConfigError, match=r"data\.format: with agent\.environment"):
        check_turns(characters, "user", DataConfig(), DataConfig(format="plain"))
