"""One episode: the ids fed and sampled so far, what they earned, and how they become rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.agents.environment import Environment
from headrace.data.batch import Batch
from headrace.data.prompts import group_numbers
from headrace.rollout.engine import Completion

EPISODE_COLUMNS = ("turn_rewards", "environment_reward", "num_turns", "episode")
ASSISTANT, ENVIRONMENT = "assistant", "environment"


@dataclass
class Episode:
    """The columns of `mask` and below have one value per id of the whole sequence, prompt included.

    `ids` only ever grows, so each turn is fed exactly what the turns before it were. `reward` is None once a turn
    could not be scored. `end` is the finish reason, None while the episode goes on.
    """

    row: int  # of the prompts' batch
    sample_index: int
    environment: Environment | None = None
    prompt: str = ""
    prompt_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    untruncated_logprobs: list[float] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0
    reward: float | None = 0.0
    end: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def feed(self, ids: Sequence[int]) -> None:
        """Adds ids that the policy did not sample: the prompt, or an environment's text."""
        self._add(ids, False, [0.0] * len(ids), [0.0] * len(ids))

    def sampled(self, completion: Completion, text: str) -> None:
        """Adds one turn of the model."""
        self._add(completion.token_ids, True, completion.logprobs, completion.untruncated_logprobs)
        self.turns += 1
        self.messages.append({"role": ASSISTANT, "content": text})

    def earn(self, reward: float | None) -> None:
        """What the turn just sampled earned; kept at its last token, too."""
        if reward is None or self.reward is None:
            self.reward = None
            return
        self.reward += reward
        self.turn_rewards[-1] += reward

    @property
    def sampled_ids(self) -> list[int]:
        return [token for token, own in zip(self.ids, self.mask, strict=True) if own]

    @property
    def completion(self) -> str:
        """The text of the last turn."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == ASSISTANT), "")

    def _add(
        self, ids: Sequence[int], own: bool, logprobs: Sequence[float], untruncated: Sequence[float]
    ) -> None:
        self.ids += ids
        self.mask += [own] * len(ids)
        self.logprobs += logprobs
        self.untruncated_logprobs += untruncated
        self.turn_rewards += [0.0] * len(ids)


def batch_of(episodes: Sequence[Episode], prompts: Batch, truncates: bool) -> Batch:
    """The rows of a rollout: the prompts' columns, and what each episode came to.

    Besides the columns of a rollout of one turn: `turn_rewards` (float32 [N]: what each turn earned, at its last
    sampled token), `environment_reward` (float64 [R]: their sum; NaN for an episode to be left out), `num_turns`
    (int64 [R]) and `episode` (the messages after the prompt). `completion` is the text of the last turn;
    `completion_ids` and `num_tokens` are the sampled ids of all turns and their number.
    """
    tokens: dict[str, list[list[Any]]] = {
        "input_ids": [e.ids for e in episodes],
        "response_mask": [e.mask for e in episodes],
        "rollout_logprobs": [e.logprobs for e in episodes],
        "turn_rewards": [e.turn_rewards for e in episodes],
    }
    if truncates:
        tokens["rollout_untruncated_logprobs"] = [e.untruncated_logprobs for e in episodes]
    dtypes = dict.fromkeys(tokens, torch.float32) | {
        "input_ids": torch.int64,
        "response_mask": torch.bool,
    }
    owners = [e.row for e in episodes]
    rows: dict[str, Any] = dict(prompts.without_columns(["prompt_ids"]).select(owners).rows)
    sampled = [e.sampled_ids for e in episodes]
    rows |= {
        "prompt": [e.prompt for e in episodes],
        "group_id": group_numbers(prompts)[owners],
        "sample_index": torch.tensor([e.sample_index for e in episodes], dtype=torch.int64),
        "completion": [e.completion for e in episodes],
        "completion_ids": sampled,
        "finish_reason": [str(e.end) for e in episodes],
        "num_tokens": torch.tensor([len(ids) for ids in sampled], dtype=torch.int64),
        "num_turns": torch.tensor([e.turns for e in episodes], dtype=torch.int64),
        "greedy_baseline": torch.zeros(len(episodes), dtype=torch.bool),
        "environment_reward": torch.tensor(
            [float("nan") if e.reward is None else e.reward for e in episodes], dtype=torch.float64
        ),
        "episode": [e.messages for e in episodes],
    }
    return Batch.from_rows(tokens, rows, dtypes)
