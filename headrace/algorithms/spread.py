"""Groups whose samples got different rewards, and the rows of some groups.

Shapes: R rows (samples).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.algorithms.advantages.groups import group_rewards
from headrace.algorithms.stages import counted_rows, greedy_rows
from headrace.data.batch import Batch
from headrace.stages import StageContext


def varied_groups(batch: Batch, context: StageContext) -> list[int]:
    """The numbers, ascending, of the groups whose rewards differ.

    Rows that do not count, and greedy baselines, make no difference.
    """
    ids = batch["group_id"]
    valid = counted_rows(batch, context) & ~greedy_rows(batch)
    groups = group_rewards(torch.as_tensor(batch["reward"], dtype=torch.float64), ids, valid)
    varied: list[int] = torch.unique(ids[groups.varies[groups.index]]).tolist()
    return varied


def numbered_groups(batch: Batch, numbers: Mapping[int, int]) -> Batch:
    """The rows whose group has a new number in `numbers`, with that."""
    part = batch.select([r for r, group in enumerate(batch["group_id"].tolist()) if group in numbers])
    renumbered = torch.tensor([numbers[group] for group in part["group_id"].tolist()], dtype=torch.int64)
    return part.with_columns({"group_id": renumbered})
