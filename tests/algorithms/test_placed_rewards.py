"""Where rewards stand among the tokens: per-turn rewards at their turns, the rest at the end."""

from __future__ import annotations

import torch

from headrace.algorithms.stages import gae_advantages, placed_rewards
from headrace.config_load import from_mapping
from headrace.data.batch import Batch
from headrace.observe.metrics import MetricSums
from headrace.stages import StageContext

# row 0: prompt, two sampled, two of the environment, one sampled; row 1: prompt, one sampled
MASK = [[False, True, True, False, False, True], [False, True]]
TURNS = [[0.0, 0.0, 2.0, 0.0, 0.0, 0.5], [0.0, 1.0]]
NAN = float("nan")


def batch(reward: list[float], turns: bool = True, **tokens: list[list[float]]) -> Batch:
    columns = {"response_mask": MASK, **({"turn_rewards": TURNS} if turns else {}), **tokens}
    dtypes = {name: torch.bool if name == "response_mask" else torch.float32 for name in columns}
    rows = {"reward": torch.tensor(reward, dtype=torch.float64), "finish_reason": ["stop", "stop"]}
    return Batch.from_rows(columns, rows, dtypes)


def test_each_turn_keeps_its_own_and_the_rest_comes_last() -> None:
    b = batch([3.0, 1.0])  # row 0: 2.5 by the environment and 0.5 by a reward function
    assert placed_rewards(b["reward"], b, b["response_mask"]).tolist() == [0, 0, 2, 0, 0, 1, 0, 1]


def test_without_turn_rewards_all_comes_last() -> None:
    b = batch([3.0, 1.0], turns=False)
    assert placed_rewards(b["reward"], b, b["response_mask"]).tolist() == [0, 0, 0, 0, 0, 3, 0, 1]


def test_a_row_that_is_left_out_has_none() -> None:
    b = batch([3.0, NAN])
    mask = b["response_mask"] & torch.tensor([True] * 6 + [False] * 2)
    assert placed_rewards(b["reward"], b, mask).tolist() == [0, 0, 2, 0, 0, 1, 0, 0]


def test_gae_sees_a_turn_s_reward_at_that_turn() -> None:
    """gamma 0.5, lambda 0, all values 1: advantage = reward + 0.5 * next value - value, over sampled tokens alone."""
    values = [[1.0] * 6, [1.0] * 2]
    config = from_mapping(
        {"algorithm": {"name": "ppo", "gamma": 0.5, "gae_lambda": 0.0, "whiten_advantages": False}}
    )
    out = gae_advantages(batch([3.0, NAN], values=values), StageContext(config, 1, 1, MetricSums()))
    # tokens 1, 2 and 5 of row 0: 0 + 0.5 - 1; 2 + 0.5 - 1; 1 + 0 - 1
    assert out["advantages"].tolist() == [0, -0.5, 1.5, 0, 0, 0, 0, 0]
    assert out["loss_mask"].tolist() == [False, True, True, False, False, True, False, False]
