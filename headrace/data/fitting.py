"""Prompts over the token limit: refused, dropped or cut, and counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.data.dataset import Rows
from headrace.data.prompt_builder import Problems, PromptBuilder
from headrace.errors import DataError

logger = logging.getLogger(__name__)


@dataclass
class Fitting:
    """Fits prompts beside given completions, by data.over_limit.

    data.max_prompt_tokens bounds the prompt, `max_sequence_tokens` prompt and completion together.
    """

    builder: PromptBuilder
    max_sequence_tokens: int
    problems: Problems
    dropped: int = 0
    truncated: int = 0

    def prompt(self, ids: list[int], completion_tokens: int, where: str) -> list[int] | None:
        """The prompt as it is used, cut on the left where that is the policy; None where its row is not used.

        A row whose completion leaves no room for a prompt is dropped under "truncate_left" too: completions are
        never cut. `where` is how a problem names the row.
        """
        policy, longest = self.builder.data.over_limit, self.builder.data.max_prompt_tokens
        room = min(longest, self.max_sequence_tokens - completion_tokens)
        if len(ids) <= room:
            return ids
        if policy == "error":
            if len(ids) > longest:
                kind, tokens = over_limit_kind("prompt", longest, "data.max_prompt_tokens"), len(ids)
            else:
                setting = "rollout.max_sequence_tokens or the model's positions"
                what = "sequence of prompt and completion"
                kind = over_limit_kind(what, self.max_sequence_tokens, setting)
                tokens = len(ids) + completion_tokens
            self.problems.add(kind, f"{where}: {tokens} tokens")
            return None
        if policy == "drop" or room <= len(self.builder.prefix):
            self.dropped += 1
            return None
        self.truncated += 1
        return self.builder.truncate_left(ids, room)


def over_limit_kind(what: str, limit: int, setting: str) -> str:
    return (
        f"the {what} is longer than {limit} tokens ({setting}); raise that limit, or set data.over_limit to drop or"
        " truncate_left"
    )


def report_over_limit(rows: Rows, dropped: int, truncated: int, left: int, key: str) -> None:
    """Logs what the policy did. Raises DataError when nothing is left."""
    if dropped:
        logger.warning("%s: %d of %d rows dropped (over the token limit)", rows.name, dropped, len(rows))
    if truncated:
        logger.warning(
            "%s: %d of %d prompts cut on the left (over the token limit)", rows.name, truncated, len(rows)
        )
    if not left:
        raise DataError(f"{key}: {rows.name}: every row was dropped as over the token limit")
