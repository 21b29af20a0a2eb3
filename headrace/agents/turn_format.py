"""From an environment's text to the ids that stand between two turns of the model.

The ids that the model sampled are never decoded and encoded again: what is made here is only what follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from headrace.config import DataConfig
from headrace.data.prompt_builder import PromptBuilder
from headrace.errors import AgentError, ConfigError

QUESTION = "What is it?"
ANSWER = "It is this."
REASONED = f"<think>\nIt could be that.\n</think>\n\n{ANSWER}"
OBSERVED = "That is so."


def check_turns(tokenizer: Any, role: str, run: DataConfig, own: DataConfig) -> None:
    """Whether episodes of several turns can be made from prompts of the data's `own` settings, before a model is loaded.

    Raises ConfigError for a chat template that will not do, and where the prompts are made by other settings than
    those of the `run`, which the turns after them follow.
    """
    for key in ("format", "system_prompt"):
        if getattr(own, key) != getattr(run, key):
            raise ConfigError(
                f"data.{key}: with agent.environment, set it in the configuration of the run and not in HFDataset"
            )
    TurnFormat(tokenizer, PromptBuilder(tokenizer, run).format, role, ())


class TurnFormat:
    """`between` gives the ids after a response: as text where prompts are plain, else by the chat template.

    `end_ids` are the ids that end a response. Raises ConfigError for a chat template that renders earlier turns in
    another way than they were generated: the model would be trained on conversations it never meets.
    """

    def __init__(
        self, tokenizer: Any, prompt_format: Literal["chat", "plain"], role: str, end_ids: Sequence[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.format = prompt_format
        self.role = role
        self.end_ids = frozenset(end_ids)
        if prompt_format == "chat":
            self._opening = self._render([{"role": "user", "content": QUESTION}])
            # what may hold the end of the assistant's turn: the ids before the environment's text
            self._closing = self._continuation(ANSWER, self._checked_tail().partition(OBSERVED)[0])

    def between(self, response_text: str, last_id: int, texts: Sequence[str]) -> list[int]:
        """The ids of the environment's `texts` after a response that ends with `last_id`, up to where the model is
        to go on. With a chat template: the rest of the assistant's turn (its end token, unless it was sampled), the
        environment's messages, and the opening of the next assistant turn. Raises AgentError when the template
        refuses the messages.
        """
        if self.format == "plain":
            return self._continuation(response_text, "".join(texts))
        from jinja2 import TemplateError

        try:
            tail = self._tail(ANSWER, texts)
        except (TemplateError, TypeError) as error:
            raise AgentError(f"the chat template refuses the environment's message: {error}") from error
        if tail is None:
            raise AgentError(
                "the chat template renders the turns before the environment's message differently"
            )
        ids = self._continuation(ANSWER, tail)
        if last_id in self.end_ids and last_id in self._closing:
            end = self._closing.index(last_id) + 1
            if ids[:end] == self._closing[:end]:
                ids = ids[end:]
        return ids

    def _continuation(self, before: str, text: str) -> list[int]:
        """The ids `text` has after `before`, unless a token would straddle the two; then those it has alone."""
        bare, joint, alone = (self._ids(t) for t in (before, before + text, text))
        return joint[len(bare) :] if joint[: len(bare)] == bare else alone

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _render(self, messages: list[dict[str, str]]) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    def _tail(self, answer: str, texts: Sequence[str]) -> str | None:
        """What the template writes after the assistant's `answer`; None when what stands before it changed."""
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
        whole = self._render([*messages, *({"role": self.role, "content": text} for text in texts)])
        generated = self._opening + answer
        return whole[len(generated) :] if whole.startswith(generated) else None

    def _checked_tail(self) -> str:
        """What the template writes after a response, the environment's text being OBSERVED. Raises ConfigError."""
        from jinja2 import TemplateError

        advice = "give one that keeps them as model.chat_template, or use data.format=plain"
        try:
            plain, reasoned = (self._tail(answer, [OBSERVED]) for answer in (ANSWER, REASONED))
        except (TemplateError, TypeError) as error:
            raise ConfigError(
                f"model.chat_template: the template refuses an environment's message of role '{self.role}' ({error});"
                " set `role` of the environment to one it knows, or give another template"
            ) from error
        if plain is None:
            raise ConfigError(
                "model.chat_template: the template is not append-only: it renders an earlier assistant turn in another"
                f" way than the model generated it; {advice}"
            )
        if reasoned is None:
            raise ConfigError(
                "model.chat_template: the template removes the reasoning (<think>…</think>) of earlier assistant turns"
                f" before a message of role '{self.role}', so the model would be trained on conversations it never meets;"
                f" {advice}"
                + ("" if self.role == "tool" else ". Some templates keep it before messages of role 'tool'")
            )
        if OBSERVED not in plain:
            raise ConfigError(
                f"model.chat_template: the template leaves out messages of role '{self.role}'; set `role` of the"
                " environment to one it knows, or give another template"
            )
        return plain
