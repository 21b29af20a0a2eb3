"""One row of a step on worker groups, wherever its columns lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.cluster.group import WorkerGroup
from headrace.cluster.inprocess import InProcess
from headrace.cluster.layouts import resolve
from headrace.data.batch import Batch
from headrace.flow.cluster import ClusterRuntime

TOY = f"{Path(__file__).parents[1] / 'cluster' / 'toys.py'}:Toy"


@pytest.mark.parametrize("dp", [1, 3])
def test_a_row_of_columns_that_groups_of_two_kinds_wrote(dp: int) -> None:
    """As samples.jsonl wants it: the reward was computed beside the actor on what another group had written."""
    roles = {
        "actor": {"gpu_group": "a", "parallelism": {"dp": dp}},
        "reward_model": {"gpu_group": "b", "parallelism": {"dp": 2}},
    }
    executor = InProcess(resolve({"device": "cpu", "roles": roles}, roles=list(roles)))
    actor, judge = (WorkerGroup(executor, role) for role in roles)
    for group in (actor, judge):
        group.create(TOY, factor=3)
    runtime = ClusterRuntime(executor)
    runtime.home = actor
    lengths = [4, 1, 3, 2, 5]
    texts = ["a", "bb", "ccc", "dddd", "eeeee"]
    ids = torch.arange(sum(lengths))
    rows = actor.put(Batch(lengths, {"input_ids": ids}, {"row": torch.arange(5), "text": texts}))
    rows = judge.call("text_length", rows, reads=["text"]).handle
    assert rows is not None
    calls = executor.traffic.calls
    seen = [runtime.fetch(rows, ["row", "text", "text_length"], number) for number in range(5)]
    assert executor.traffic.calls == calls + 1  # they were brought together once
    assert sorted((int(b["row"][0]), b["text"][0], b["text_length"][0]) for b in seen) == [
        (i, text, i + 1) for i, text in enumerate(texts)
    ]
