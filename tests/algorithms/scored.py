"""Steps of responses as advantage functions get them, and the plain-Python reading of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from headrace.algorithms.registry import Scored

NAN = float("nan")


@dataclass
class Row:
    """A response: `length` sampled tokens after one of the prompt; a KL penalty a token."""

    reward: float
    group: int
    valid: bool = True
    length: int = 1
    greedy: float = 0.0
    penalty: float = 0.0
    value: float = 0.0

    @property
    def token_rewards(self) -> list[float]:
        return [-self.penalty] * (self.length - 1) + [-self.penalty + self.reward]

    @property
    def total(self) -> float:
        return sum(self.token_rewards)


def scored(rows: list[Row]) -> Scored:
    """One prompt token, then the response; a row that is not valid has a reward of NaN and no masked token."""
    token_rewards: list[float] = []
    mask: list[bool] = []
    values: list[float] = []
    for r in rows:
        token_rewards += [0.0, *(r.token_rewards if r.valid else [0.0] * r.length)]
        mask += [False] + [r.valid] * r.length
        values += [NAN] + [r.value] * r.length
    return Scored(
        rewards=torch.tensor([r.total if r.valid else NAN for r in rows], dtype=torch.float64),
        token_rewards=torch.tensor(token_rewards, dtype=torch.float64),
        group_ids=torch.tensor([r.group for r in rows], dtype=torch.int64),
        valid=torch.tensor([r.valid for r in rows], dtype=torch.bool),
        mask=torch.tensor(mask, dtype=torch.bool),
        offsets=torch.tensor([0, *(r.length + 1 for r in rows)]).cumsum(0),
        values=torch.tensor(values, dtype=torch.float32),
        greedy_rewards=torch.tensor([r.greedy for r in rows], dtype=torch.float64),
    )


def per_row(result: Any, rows: list[Row]) -> list[list[float]]:
    """An advantage [R] or [N] as a list of the values of each row's sampled tokens."""
    values = result.tolist()
    if len(values) == len(rows):
        return [[v] * r.length for v, r in zip(values, rows, strict=True)]
    out, start = [], 0
    for r in rows:
        out.append(values[start + 1 : start + 1 + r.length])
        start += r.length + 1
    return out


some_rewards = st.sampled_from([0.0, 0.1, 0.35, 1.0, -2.0, 1 / 3])
some_rows = st.lists(
    st.builds(
        Row,
        reward=some_rewards,
        group=st.integers(-1, 2),
        valid=st.booleans() | st.just(True),
        length=st.integers(1, 4),
        greedy=some_rewards,
        penalty=st.sampled_from([0.0, 0.05]),
        value=st.sampled_from([0.0, 0.5, -0.25]),
    ),
    min_size=1,
    max_size=10,
)
