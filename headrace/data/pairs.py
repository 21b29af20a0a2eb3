"""Pairs of a chosen and a rejected response to one prompt, tokenized and checked before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.config import DataConfig
from headrace.data.batch import Batch
from headrace.data.dataset import Rows
from headrace.data.fitting import Fitting, report_over_limit
from headrace.data.prompt_builder import PROMPT_COLUMNS, Problems, PromptBuilder, RowProblem, require_column
from headrace.data.prompts import completion_text, end_token, sequence_ids
from headrace.errors import DataError

logger = logging.getLogger(__name__)

TURN = "\n\nAssistant:"  # what comes before each answer in texts of the form of hh-rlhf


@dataclass(frozen=True)
class Pair:
    """Token ids of one prompt (with its prefix) and of the two responses, each with its end token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class PairDataset:
    """Preference pairs. `dropped` and `truncated` count pairs over a limit."""

    def __init__(
        self, rows: Rows, kept: Sequence[int], pairs: Sequence[Pair], dropped: int, truncated: int
    ) -> None:
        """`kept`: the row in `rows` of each pair. Use `build`."""
        self.rows = rows
        self.name = rows.name
        self.kept = list(kept)
        self.pairs = list(pairs)
        self.dropped = dropped
        self.truncated = truncated

    @classmethod
    def build(
        cls,
        rows: Rows,
        builder: PromptBuilder,
        *,
        max_sequence_tokens: int | None = None,
        needs_prompt: bool = True,
        key: str = "data",
    ) -> PairDataset:
        """Tokenizes every row: the prompt once, then each response after it and one end token.

        The columns data.chosen and data.rejected hold, both in the same form,
        - conversations: messages that end with the assistant's answer and before it are the same on both sides;
        - responses to the prompt of data.prompt, data.template or a prompt column: texts, or one message each;
        - where there is no prompt column, whole texts (hh-rlhf), used as they are, without a chat template. They are
          parted by `shared_prompt`.

        Limits and what happens beyond them are those of SFTDataset; a pair is kept or dropped as a whole, and its
        prompt is cut for both. `needs_prompt` refuses texts that share no beginning where the tokenizer puts nothing
        before a text either: their first token has no log-probability. `key` is the section that errors name.
        Raises one DataError with every kind of problem, ConfigError for a tokenizer without EOS.
        """
        eos = end_token(builder.tokenizer)
        columns = _columns(rows, builder.data, key)
        prompt_column = _prompt_column(rows, builder, columns, key)
        problems = Problems(rows.name)
        readable: list[int] = []
        texts: list[tuple[str, str, str]] = []
        for i in range(len(rows)):
            try:
                text = _texts(rows.row(i), builder, columns, prompt_column)
                if needs_prompt and not text[0] and not builder.prefix:
                    raise RowProblem(
                        "the chosen and the rejected text share no beginning that could be the prompt; name the"
                        " prompt's column as data.prompt"
                    )
            except RowProblem as problem:
                problems.add(problem.kind, rows.where(i))
                continue
            readable.append(i)
            texts.append(text)
        prompts, chosen = sequence_ids(builder, [(p, c) for p, c, _ in texts], eos)
        _, rejected = sequence_ids(builder, [(p, r) for p, _, r in texts], eos)
        longest = builder.max_prompt_tokens if max_sequence_tokens is None else max_sequence_tokens
        fitting = Fitting(builder, longest, problems)
        kept: list[int] = []
        pairs: list[Pair] = []
        for i, text, whole, better, worse in zip(readable, texts, prompts, chosen, rejected, strict=True):
            if better == worse:
                same = (
                    "hold the same response"
                    if text[1] == text[2]
                    else "hold responses that the tokenizer makes the same tokens of"
                )
                problems.add(
                    f"columns '{columns[0]}' and '{columns[1]}' {same}; nothing can be learned from such a pair,"
                    " leave it out",
                    rows.where(i),
                )
                continue
            prompt = fitting.prompt(whole, max(len(better), len(worse)), rows.where(i))
            if prompt is not None:
                kept.append(i)
                pairs.append(Pair(prompt, better, worse))
        problems.raise_any(f"{key}.path")
        report_over_limit(rows, fitting.dropped, fitting.truncated, len(kept), f"{key}.path")
        if prompt_column is not None or builder.template is not None:
            _report_repeated_prompts(rows, texts)
        return cls(rows, kept, pairs, fitting.dropped, fitting.truncated)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def longest_tokens(self) -> int:
        return max(len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in self.pairs)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Two rows a pair, the chosen one first.

        Token columns `input_ids` (int64 [N]) and `response_mask` (bool [N]: true on the response and its end token);
        row columns `pair_id` (int64 [R]: the row in the data set, counted from 0) and `is_chosen` (bool [R]).
        """
        sides = [
            (p.prompt, side) for p in (self.pairs[i] for i in indices) for side in (p.chosen, p.rejected)
        ]
        mask = [[False] * len(p) + [True] * len(side) for p, side in sides]
        for row in mask:
            row[0] = False  # without a prompt, the first token has no log-probability
        return Batch.from_rows(
            {"input_ids": [p + side for p, side in sides], "response_mask": mask},
            {
                "pair_id": torch.tensor([self.kept[i] for i in indices for _ in range(2)], dtype=torch.int64),
                "is_chosen": torch.tensor([True, False] * len(indices)),
            },
            {"input_ids": torch.int64, "response_mask": torch.bool},
        )


def _report_repeated_prompts(rows: Rows, texts: Sequence[tuple[str, str, str]]) -> None:
    """Warns of what is allowed and probably not meant."""
    if texts and all(c.startswith(p) and r.startswith(p) for p, c, r in texts):
        logger.warning(
            "%s: every chosen and rejected text begins with its own prompt, which then stands twice; if they are"
            " whole texts, leave the prompt's column out of the data",
            rows.name,
        )


def shared_prompt(chosen: str, rejected: str) -> int:
    """Where two whole texts part: the number of leading characters that are their prompt.

    After the last "\\n\\nAssistant:" that both share. Without one, before the last white space of what they share, so
    that no word is parted; without white space, after all they share, but before the end of the shorter.
    """
    length = min(len(chosen), len(rejected))
    shared = next((i for i in range(length) if chosen[i] != rejected[i]), length)
    turn = chosen.rfind(TURN, 0, shared)
    if turn >= 0:
        return turn + len(TURN)
    words = chosen[: max(0, min(shared, length - 1))]
    cut = max((i for i, c in enumerate(words) if c.isspace()), default=0)
    return len(words[:cut].rstrip()) or len(words)


def _columns(rows: Rows, data: DataConfig, key: str) -> tuple[str, str]:
    """The names of the chosen and the rejected column. Raises DataError for all that are missing."""
    problems: list[str] = []
    found: list[str] = []
    for side, setting in (("chosen", data.chosen), ("rejected", data.rejected)):
        name = setting if setting is not None else side
        if name in rows.columns:
            found.append(name)
        elif setting is not None:
            try:
                require_column(setting, rows, f"data.{side}")
            except DataError as error:
                problems += error.violations
        else:
            problems.append(
                f"data.{side}: {rows.name} ({key}.path) has no column '{side}'; set data.{side} to one of"
                f" {', '.join(rows.columns)}"
            )
    if not problems and found[0] == found[1]:
        problems.append(f"data.rejected: '{found[1]}' is the column of data.chosen too; name two columns")
    if problems:
        raise DataError(problems)
    return found[0], found[1]


def _prompt_column(rows: Rows, builder: PromptBuilder, taken: tuple[str, str], key: str) -> str | None:
    """The prompt's column; None where a template is used or the texts bring their prompts along."""
    if builder.template is not None or builder.data.prompt is not None:
        return builder.column(rows, key)
    return next((c for c in PROMPT_COLUMNS if c in rows.columns and c not in taken), None)


def _texts(
    row: Mapping[str, Any], builder: PromptBuilder, columns: tuple[str, str], prompt_column: str | None
) -> tuple[str, str, str]:
    """Prompt, chosen and rejected response of a row as texts. Raises RowProblem."""
    chosen, rejected = row[columns[0]], row[columns[1]]
    names = [f"column '{name}'" for name in columns]
    talks = [isinstance(value, list) and len(value) > 1 for value in (chosen, rejected)]
    if all(talks):
        return _conversations(chosen, rejected, builder, names)
    if any(talks):
        raise RowProblem(
            f"one of {names[0]} and {names[1]} is a conversation and the other is not; give both in one form"
        )
    if prompt_column is not None or builder.template is not None:
        prompt = builder.text(row, prompt_column)
        return prompt, completion_text(chosen, names[0]), completion_text(rejected, names[1])
    if builder.data.format == "chat" or builder.data.system_prompt is not None:
        raise RowProblem(
            "whole texts are used as they are, so data.format 'chat' and data.system_prompt do nothing; leave them"
            " out, or name the prompt's column as data.prompt"
        )
    for value, name in zip((chosen, rejected), names, strict=True):
        if isinstance(value, list):
            raise RowProblem(f"{name} is one message and there is no prompt; name its column as data.prompt")
    better, worse = (completion_text(v, name) for v, name in zip((chosen, rejected), names, strict=True))
    cut = shared_prompt(better, worse)
    if not better[:cut].endswith(TURN) and TURN in better + worse:
        raise RowProblem(
            f"the texts of {names[0]} and {names[1]} differ before the first {TURN!r} that both have;"
            " a pair has one prompt"
        )
    return better[:cut], better[cut:], worse[cut:]


def _conversations(
    chosen: list[Any], rejected: list[Any], builder: PromptBuilder, names: Sequence[str]
) -> tuple[str, str, str]:
    if builder.template is not None:
        raise RowProblem("conversations bring their prompts along; drop data.template")
    answers: list[str] = []
    for messages, name in zip((chosen, rejected), names, strict=True):
        last = messages[-1]
        if not isinstance(last, Mapping) or last.get("role") != "assistant":
            raise RowProblem(f"{name} is a conversation that does not end with the assistant's answer")
        answers.append(completion_text(last.get("content"), f"the last message of {name}"))
    if chosen[:-1] != rejected[:-1]:
        raise RowProblem(
            f"the conversations of {names[0]} and {names[1]} differ before their last answer; a pair has one prompt"
        )
    return builder.render(chosen[:-1]), answers[0], answers[1]
