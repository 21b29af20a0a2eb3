"""Data sets of prompts and of supervised sequences: every row tokenized and checked before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.data.batch import Batch, RowColumn
from headrace.data.dataset import Rows
from headrace.data.fitting import Fitting, over_limit_kind, report_over_limit
from headrace.data.prompt_builder import (
    Problems,
    PromptBuilder,
    RowProblem,
    require_characters,
    require_column,
    use_chat_template,
)
from headrace.errors import ConfigError, DataError

__all__ = ["PromptBuilder", "PromptDataset", "SFTDataset", "use_chat_template"]

logger = logging.getLogger(__name__)

COMPLETION_COLUMNS = ("completion", "response", "answer", "output")

RESERVED_COLUMNS = frozenset(
    {
        "prompt_id",
        "prompt_ids",
        "prompt",
        "input_ids",
        "response_mask",
        "rollout_logprobs",
        "rollout_untruncated_logprobs",
        "group_id",
        "sample_index",
        "greedy_baseline",
        "completion",
        "completion_ids",
        "pair_id",
        "is_chosen",
        "finish_reason",
        "num_tokens",
        "logprobs",
        "reference_logprobs",
        "reward",
        "reward_model_score",
        "values",
        "returns",
        "advantages",
        "loss_mask",
        "turn_rewards",
        "environment_reward",
        "num_turns",
        "episode",
    }
)
"""Names that headrace gives to columns of a batch; a data column may not have them."""


class PromptDataset:
    """Prompts of a data set, tokenized and checked. `dropped` and `truncated` count rows over the limit."""

    def __init__(
        self,
        rows: Rows,
        kept: Sequence[int],
        texts: Sequence[str],
        ids: Sequence[tuple[int, ...]],
        dropped: int,
        truncated: int,
    ) -> None:
        """`kept`: the row in `rows` of each prompt. Use `build`."""
        self.rows = rows
        self.name = rows.name
        self.kept = list(kept)
        self.texts = list(texts)
        self.prompt_ids = list(ids)
        self.dropped = dropped
        self.truncated = truncated

    @classmethod
    def build(cls, rows: Rows, builder: PromptBuilder, key: str = "data") -> PromptDataset:
        """Tokenizes every row. `key` is the section that errors name ("data" or "eval").

        Raises one DataError with every kind of problem: a missing column, a data column with a reserved name, null
        and empty prompts, messages no template takes, and, under the policy "error", prompts over the limit.
        """
        column = builder.column(rows, key)
        _refuse_reserved(rows, builder, column, key)
        problems = Problems(rows.name)
        texts: list[str] = []
        readable: list[int] = []
        for i in range(len(rows)):
            try:
                texts.append(builder.text(rows.row(i), column))
                readable.append(i)
            except RowProblem as problem:
                problems.add(problem.kind, rows.where(i))
        limit, policy = builder.max_prompt_tokens, builder.data.over_limit
        setting = (
            "data.max_prompt_tokens"
            if limit >= builder.data.max_prompt_tokens
            else "rollout.max_sequence_tokens or the model's positions, less rollout.max_new_tokens"
        )
        kept: list[int] = []
        kept_texts: list[str] = []
        kept_ids: list[tuple[int, ...]] = []
        dropped = truncated = 0
        for i, text, ids in zip(readable, texts, builder.ids(texts), strict=True):
            if len(ids) == len(builder.prefix):
                problems.add("the prompt has no tokens", rows.where(i))
                continue
            if len(ids) > limit:
                if policy == "error":
                    problems.add(
                        over_limit_kind("prompt", limit, setting), f"{rows.where(i)}: {len(ids)} tokens"
                    )
                    continue
                if policy == "drop":
                    dropped += 1
                    continue
                truncated += 1
                ids = builder.truncate_left(ids, limit)
                text = builder.tokenizer.decode(ids[len(builder.prefix) :])
            kept.append(i)
            kept_texts.append(text)
            kept_ids.append(tuple(ids))
        problems.raise_any(f"{key}.path")
        report_over_limit(rows, dropped, truncated, len(kept), f"{key}.path")
        _report_unknown(rows, kept, kept_ids, builder.tokenizer.unk_token_id)
        return cls(rows, kept, kept_texts, kept_ids, dropped, truncated)

    @property
    def longest_tokens(self) -> int:
        """Of the prompts; responses come on top."""
        return max(map(len, self.prompt_ids))

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Row columns only: `prompt_id` (int64 tensor [R]: the row in the data set, counted from 0), `prompt_ids`
        (tuples of ids), `prompt` (the text given to the model, without the prefix), and every data column."""
        data = [self.rows.row(self.kept[i]) for i in indices]
        columns: dict[str, RowColumn] = {c: [row[c] for row in data] for c in self.rows.columns}
        columns["prompt_id"] = torch.tensor([self.kept[i] for i in indices], dtype=torch.int64)
        columns["prompt_ids"] = [self.prompt_ids[i] for i in indices]
        columns["prompt"] = [self.texts[i] for i in indices]
        return Batch([0] * len(data), rows=columns)


class SFTDataset:
    """Prompts with their known completions, tokenized and checked. `dropped` and `truncated` count rows over a limit."""

    def __init__(
        self,
        rows: Rows,
        kept: Sequence[int],
        ids: Sequence[tuple[list[int], list[int]]],
        dropped: int,
        truncated: int,
    ) -> None:
        """`ids`: prompt ids and completion ids of each kept row. Use `build`."""
        self.rows = rows
        self.name = rows.name
        self.kept = list(kept)
        self.ids = list(ids)
        self.dropped = dropped
        self.truncated = truncated

    @classmethod
    def build(
        cls, rows: Rows, builder: PromptBuilder, *, max_sequence_tokens: int | None = None, key: str = "data"
    ) -> SFTDataset:
        """Tokenizes every row: the prompt as in reinforcement learning, then the completion and one EOS.

        The completion is a text column, or the last message where the prompt column holds messages that end with
        the assistant's (only that last message is learned). `max_sequence_tokens` (default: the builder's
        `max_prompt_tokens`) bounds prompt + completion, data.max_prompt_tokens the prompt. Under "truncate_left" the
        prompt is cut, never the completion; a row whose completion leaves no room for a prompt is dropped.
        Raises one DataError with every kind of problem, ConfigError for a tokenizer without EOS.
        """
        eos = end_token(builder.tokenizer)
        problems = Problems(rows.name)
        readable, pairs = _prompt_and_completion(rows, builder, problems, key)
        longest = builder.max_prompt_tokens if max_sequence_tokens is None else max_sequence_tokens
        fitting = Fitting(builder, longest, problems)
        kept: list[int] = []
        kept_ids: list[tuple[list[int], list[int]]] = []
        for i, whole, completion in zip(readable, *sequence_ids(builder, pairs, eos), strict=True):
            prompt = fitting.prompt(whole, len(completion), rows.where(i))
            if prompt is None:
                continue
            kept.append(i)
            kept_ids.append((prompt, completion))
        problems.raise_any(f"{key}.path")
        report_over_limit(rows, fitting.dropped, fitting.truncated, len(kept), f"{key}.path")
        return cls(rows, kept, kept_ids, fitting.dropped, fitting.truncated)

    @property
    def longest_tokens(self) -> int:
        return max(len(prompt) + len(completion) for prompt, completion in self.ids)

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Token columns `input_ids` (int64 [N]) and `response_mask` (bool [N]: true on the completion and its EOS);
        row column `prompt_id` (int64 [R]: the row in the data set, counted from 0)."""
        picked = [self.ids[i] for i in indices]
        return Batch.from_rows(
            {
                "input_ids": [p + c for p, c in picked],
                "response_mask": [[False] * len(p) + [True] * len(c) for p, c in picked],
            },
            {"prompt_id": torch.tensor([self.kept[i] for i in indices], dtype=torch.int64)},
            {"input_ids": torch.int64, "response_mask": torch.bool},
        )


def end_token(tokenizer: Any) -> int:
    """The id that ends a given completion. Raises ConfigError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("model.tokenizer: has no end-of-sequence token, so a completion could not end")
    return int(tokenizer.eos_token_id)


def _prompt_and_completion(
    rows: Rows, builder: PromptBuilder, problems: Problems, key: str
) -> tuple[list[int], list[tuple[str, str]]]:
    """The rows that can be read, and their prompt and completion texts."""
    column = builder.column(rows, key)
    setting = builder.data.completion
    if setting is not None:
        target: str | None = require_column(setting, rows, "data.completion")
    else:
        target = next((c for c in COMPLETION_COLUMNS if c in rows.columns and c != column), None)
    readable: list[int] = []
    pairs: list[tuple[str, str]] = []
    for i in range(len(rows)):
        row = rows.row(i)
        value = row[column] if column is not None else None
        try:
            answered = _answered(value) if setting is None else None
            if answered is not None:
                prompt = builder.render(answered[:-1])
                where = f"the last message of column '{column}'"
                completion = completion_text(answered[-1]["content"], where)
            elif target is None:
                raise DataError(
                    f"data.completion: {rows.name} ({key}.path) has none of the columns"
                    f" {', '.join(COMPLETION_COLUMNS)}, and no messages that end with the assistant's;"
                    f" set data.completion to one of {', '.join(rows.columns)}"
                )
            else:
                prompt = builder.text(row, column)
                completion = completion_text(row[target], f"column '{target}'")
        except RowProblem as problem:
            problems.add(problem.kind, rows.where(i))
            continue
        readable.append(i)
        pairs.append((prompt, completion))
    return readable, pairs


def _answered(value: Any) -> list[Any] | None:
    """`value` where it is messages that end with the assistant's."""
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[-1], Mapping):
        return None
    return value if value[-1].get("role") == "assistant" and "content" in value[-1] else None


def completion_text(value: Any, where: str) -> str:
    """A text, or the text of a list with one assistant message. Raises RowProblem."""
    if _is_one_message(value):
        value = value[0]["content"]
    if value is None:
        raise RowProblem(f"{where} is null")
    if not isinstance(value, str):
        raise RowProblem(f"{where} is a {type(value).__name__}; expected the completion's text")
    if not value.strip():
        raise RowProblem(f"{where} is empty")
    return require_characters(value, where)


def _is_one_message(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 1
        and isinstance(value[0], Mapping)
        and "content" in value[0]
    )


def sequence_ids(
    builder: PromptBuilder, pairs: Sequence[tuple[str, str]], eos: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompt ids and completion ids, one EOS at the end of each completion.

    The completion's ids are those it has after its prompt, unless a token would straddle the two: so tokenizers
    that write a space before every text do not write one before the completion.
    """
    bare = builder.plain_ids([p for p, _ in pairs])
    joint = builder.plain_ids([p + c for p, c in pairs])
    alone = builder.plain_ids([c for _, c in pairs])
    completions: list[list[int]] = []
    for prompt, both, completion in zip(bare, joint, alone, strict=True):
        ids = both[len(prompt) :] if both[: len(prompt)] == prompt else completion
        while ids and ids[-1] == eos:
            ids = ids[:-1]
        completions.append([*ids, eos])
    return builder.with_prefix(bare), completions


def _report_unknown(rows: Rows, kept: list[int], ids: list[tuple[int, ...]], unknown: int | None) -> None:
    """Warns of text the tokenizer cannot write: the model sees the same unknown token for all of it."""
    hit = [
        row for row, sequence in zip(kept, ids, strict=True) if unknown is not None and unknown in sequence
    ]
    if hit:
        logger.warning(
            "%s: %d of %d prompts hold text that the tokenizer has no token for (first: %s)",
            rows.name,
            len(hit),
            len(kept),
            rows.where(hit[0]),
        )


def _refuse_reserved(rows: Rows, builder: PromptBuilder, column: str | None, key: str) -> None:
    source: set[str] = {"prompt"} if column == "prompt" else set()
    if builder.template is not None:
        source = {name for _, name in builder.template if name == "prompt"}
    clash = [c for c in rows.columns if c in RESERVED_COLUMNS and c not in source]
    if clash:
        raise DataError(
            f"{key}.path: {rows.name} has the column{'s' if len(clash) > 1 else ''} {', '.join(clash)}, a name that"
            " headrace gives to its own columns; rename it in the data, or read the data through a file.py:function"
        )


def group_numbers(prompts: Batch) -> torch.Tensor:
    """[P] int64: the number of each prompt's group: its place in the step, which whoever shares rows out has noted."""
    if "group_id" in prompts:
        return torch.as_tensor(prompts["group_id"])
    return torch.arange(prompts.num_rows)
