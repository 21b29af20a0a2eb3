"""The reward model scores equal rows once. What it scores with a real model: tests/flow/test_run_roles.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.config import Config, ModelConfig
from headrace.data.batch import Batch
from headrace.observe.metrics import MetricSums
from headrace.roles.reward_model import RewardModel
from headrace.stages import StageContext


class Engine:
    """Scores a row by its tokens, read as digits; and a little off, by how many rows it is given."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def outputs(self, batch: Batch) -> Any:
        self.rows.append(batch.num_rows)
        rows = [batch.row_values("input_ids", r).tolist() for r in range(batch.num_rows)]
        scores = torch.tensor([float("".join(map(str, ids))) + batch.num_rows / 100 for ids in rows])
        return SimpleNamespace(scores=scores)


@pytest.mark.parametrize(
    "rows, scored, repeated",
    [
        ([[5, 6, 7], [8, 9], [5, 6, 7], [5, 6], [8, 9], [5, 6, 7]], [567, 89, 567, 56, 89, 567], 3 / 6),
        ([[1, 2], [2, 1], [1], [1, 2, 0]], [12, 21, 1, 120], 0.0),
    ],
)
def test_equal_rows_are_scored_once(rows: list[list[int]], scored: list[float], repeated: float) -> None:
    model = RewardModel(ModelConfig(path="m"), "cpu")
    engine = model._engine = Engine()  # type: ignore[assignment]
    batch = Batch.from_rows(
        {"input_ids": rows, "response_mask": [[True] * len(r) for r in rows]},
        {},
        {"input_ids": torch.int64, "response_mask": torch.bool},
    )
    context = StageContext(Config(), 1, 1, MetricSums())
    scores = model.score(batch, context)["reward_model_score"]
    different = len({tuple(r) for r in rows})
    assert engine.rows == [different]  # type: ignore[attr-defined]
    assert scores.tolist() == pytest.approx([s + different / 100 for s in scored])
    assert context.metrics.means()["reward/repeated_fraction"] == repeated
    assert model.score(batch.select([]), context)["reward_model_score"].tolist() == []
