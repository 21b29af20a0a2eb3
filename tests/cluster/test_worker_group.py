"""Calls over simulated ranks: what each gets, that order and columns come back, and what the controller carries."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cluster.group import WorkerGroup, fetch
from headrace.cluster.handle import Handle
from headrace.cluster.inprocess import InProcess
from headrace.cluster.layouts import resolve
from headrace.data.batch import Batch
from headrace.errors import ConfigError, RunError

TOY = f"{Path(__file__).parent / 'toys.py'}:Toy"


def cluster(**degrees: dict[str, int]) -> tuple[InProcess, list[WorkerGroup]]:
    """Roles on groups of their own."""
    roles = {role: {"gpu_group": role, "parallelism": d} for role, d in degrees.items()}
    executor = InProcess(resolve({"device": "cpu", "roles": roles}, roles=list(roles)))
    groups = [WorkerGroup(executor, role) for role in roles]
    for group in groups:
        group.create(TOY, factor=3)
    return executor, groups


def rows(lengths: list[int], **columns: Any) -> Batch:
    ids = torch.arange(sum(lengths)) % 17 + 1
    return Batch(lengths, {"input_ids": ids}, {"row": torch.arange(len(lengths)), **columns})


DEGREES = st.fixed_dictionaries({"dp": st.integers(1, 4), "tp": st.integers(1, 2), "pp": st.integers(1, 2)})


@settings(max_examples=40, deadline=None)
@given(DEGREES, DEGREES, st.lists(st.integers(0, 9), min_size=1, max_size=14))
def test_any_two_layouts_give_what_one_worker_gives(
    first: dict[str, int], second: dict[str, int], lengths: list[int]
) -> None:
    executor, (a, b) = cluster(actor=first, critic=second)
    batch = rows(
        lengths, text=[f"t{i}" * i for i in range(len(lengths))], group=torch.arange(len(lengths)) % 3
    )
    given_rows = a.put(batch)
    scaled = a.call("scaled", given_rows, reads=["input_ids"]).handle
    assert scaled is not None
    measured = b.call("text_length", scaled, reads=["text"])
    both = scaled.merged(measured.handle or Handle(), measured.written)
    mean = b.call("group_mean", both, reads=["group", "sum"], together="group").handle
    assert mean is not None
    back = fetch(executor, mean)
    sums = [float(batch.row_values("input_ids", r).sum()) for r in range(len(lengths))]
    assert back.lengths.tolist() == lengths
    assert back["row"].tolist() == list(range(len(lengths)))
    assert torch.equal(back["input_ids"], batch["input_ids"])
    assert torch.equal(back["scaled"], batch["input_ids"].double() * 3)
    assert back["sum"].tolist() == sums
    assert back["text_length"] == [2 * i if i < 10 else 3 * i for i in range(len(lengths))]
    for group in range(3):
        own = sums[group::3]
        assert back["group_mean"].tolist()[group::3] == pytest.approx(
            [sum(own) / len(own)] * len(own) if own else []
        )


@settings(max_examples=25, deadline=None)
@given(DEGREES, DEGREES, st.integers(1, 9))
def test_rows_made_by_workers_stand_in_the_order_of_those_they_were_made_from(
    first: dict[str, int], second: dict[str, int], prompts: int
) -> None:
    executor, (a, b) = cluster(actor=first, critic=second)
    given_rows = a.put(Batch([0] * prompts, rows={"row": torch.arange(prompts)}))
    made = a.call("repeat", given_rows).handle
    assert made is not None
    moved = b.call("scaled", made).handle
    assert moved is not None
    want = [f"prompt {p} sample {s}" for p in range(prompts) for s in range(2)]
    assert fetch(executor, made, ["text"])["text"] == want
    assert fetch(executor, moved, ["text", "sum"])["text"] == want


def test_tp_and_pp_ranks_get_the_same_rows_and_dp_ranks_share_them() -> None:
    _, (a,) = cluster(actor={"dp": 2, "tp": 2, "pp": 2})
    seen = a.call("seen", a.put(rows([8, 1, 1, 1, 5]))).every_value
    by_index: dict[int, list[Any]] = {}
    for rank, value in enumerate(seen):
        by_index.setdefault(a.parallelism.coordinates(rank)[0], []).append((value["row"], value["tokens"]))
    assert [values[0] for values in by_index.values()] == [([0], 8), ([1, 2, 3, 4], 8)]
    assert all(values == [values[0]] * 4 for values in by_index.values())


def test_a_rank_without_rows_is_called_and_its_columns_have_their_types() -> None:
    executor, (a, b) = cluster(actor={"dp": 4}, critic={"dp": 3})
    result = a.call("scaled", a.put(rows([5, 2])))
    assert result.handle is not None
    assert result.handle.columns == {"input_ids": "token", "row": "row", "scaled": "token", "sum": "row"}
    again = b.call("scaled", result.handle)
    assert [v["row"] for v in b.call("seen", again.handle).values] == [[0], [1], []]
    assert fetch(executor, again.handle or Handle(), ["sum"])["sum"].dtype == torch.float64


def test_one_token_a_row_is_still_a_token_column() -> None:
    executor, (a,) = cluster(actor={"dp": 2})
    handle = a.call("scaled", a.put(rows([1, 1, 1, 3]))).handle
    assert handle is not None
    # one rank has three rows of one token, the other one row of three
    assert (handle.columns["scaled"], handle.columns["sum"]) == ("token", "row")
    assert len(fetch(executor, handle)["scaled"]) == 6


def test_rows_that_lie_right_do_not_move() -> None:
    _, (a, b) = cluster(actor={"dp": 2}, critic={"dp": 2})
    given_rows = a.put(rows([3, 4, 5, 6]))
    first = a.call("scaled", given_rows)
    assert first.moved_bytes == a.call("scaled", first.handle).moved_bytes == 0
    over = b.call("scaled", first.handle, reads=["input_ids"])
    assert over.moved_bytes >= 18 * 8
    assert b.call("scaled", over.handle, reads=["input_ids"]).moved_bytes == 0


def test_rollouts_are_balanced_anew_unless_told_not_to() -> None:
    _, (a,) = cluster(actor={"dp": 2})
    made = a.call("repeat", a.put(Batch([0] * 4, rows={"row": torch.tensor([4, 4, 4, 4])}))).handle
    assert made is not None
    left = a.call("scaled", made, balance=False)
    assert left.moved_bytes == 0
    assert a.call("scaled", made).handle is not None


def test_pairs_stay_whole_without_being_asked() -> None:
    _, (a,) = cluster(actor={"dp": 3})
    pairs = torch.tensor([0, 1, 2, 0, 1, 2])
    seen = a.call("seen", a.put(rows([9, 1, 4, 1, 8, 4], pair_id=pairs)))
    assert sorted(v["row"] for v in seen.values) == [[0, 3], [1, 4], [2, 5]]


def test_the_controller_carries_the_same_for_any_number_of_rows() -> None:
    sizes = []
    for count in (4, 4000):
        _, (a, b) = cluster(actor={"dp": 2, "tp": 2}, critic={"dp": 2})
        made = a.call("scaled", a.put(rows([20] * count)))
        result = b.call("scaled", made.handle, reads=["input_ids"])
        sizes.append(result.controller_bytes)
    assert abs(sizes[0] - sizes[1]) < 64  # a few more digits


def test_rows_nobody_needs_are_dropped_by_the_workers() -> None:
    executor, (a,) = cluster(actor={"dp": 2, "tp": 2})
    handle: Handle | None = a.put(rows([3, 4, 5, 6]))
    for _ in range(20):
        handle = a.call("scaled", handle, reads=["input_ids"]).handle
    del handle
    gc.collect()
    a.call("place")
    assert [len(w._shards) for w in executor.workers] == [0, 0, 0, 0]
    assert not any(w._plans for w in executor.workers)


def test_colocated_roles_live_in_the_same_workers() -> None:
    placement = resolve(
        {"actor": {"parallelism": {"tp": 2}}, "rollout": {"parallelism": {"dp": 2}}}, roles=["actor"]
    )
    executor = InProcess(placement, device="cpu")
    actor, rollout = WorkerGroup(executor, "actor"), WorkerGroup(executor, "rollout")
    actor.create(TOY, factor=2)
    rollout.create(TOY, factor=5)
    assert len(executor.workers) == 2
    made = rollout.call("repeat", rollout.put(Batch([0] * 3, rows={"row": torch.arange(3)}))).handle
    updated = actor.call("scaled", made, reads=["input_ids"])
    assert [v[4] for v in actor.call("place").every_value] == [0, 1]  # tp ranks of the actor
    back = fetch(executor, updated.handle or Handle(), ["input_ids", "scaled"])
    assert torch.equal(back["scaled"], back["input_ids"].double() * 2)


@pytest.mark.parametrize(
    "act, error, part",
    [
        (lambda a: a.call("nothing"), RunError, "Toy has no method 'nothing'"),
        (lambda a: a.call("scaled", a.put(rows([1])), reads=["no"]), RunError, "no column 'no'; the rows have"),
        (lambda a: a.call("place", arguments={"x": torch.ones(1)}), RunError, "only plain values"),
        (lambda a: a.call("wide"), RunError, "over 65536 bytes"),
        (lambda a: a.create("toys"), ConfigError, "names no factory"),
        (lambda a: a.create("headrace.data.batch:Bath"), ConfigError, "has no 'Bath'"),
        (lambda a: WorkerGroup(a.executor, "judge"), RunError, "no role 'judge'"),
        (lambda a: a.call("fail", arguments={"rank": 0, "how": "raise"}), ValueError, "the toy broke"),
        (lambda a: a.call("scaled", Handle()), RunError, "without columns"),
    ],
)  # fmt: skip
def test_errors(act: Any, error: type[Exception], part: str) -> None:
    _, (a,) = cluster(actor={"dp": 1})
    with pytest.raises(error, match=part):
        act(a)


def test_an_error_says_where_it_happened() -> None:
    _, (a,) = cluster(actor={"dp": 2})
    with pytest.raises(ValueError) as caught:
        a.call("fail", arguments={"rank": 0, "how": "raise"})
    assert caught.value.__notes__ == ["in actor.fail of worker 0"]


def test_columns_over_other_rows_do_not_merge() -> None:
    _, (a,) = cluster(actor={"dp": 1})
    with pytest.raises(RunError, match="over different rows"):
        a.put(rows([1])).merged(a.put(rows([1])), ["row"])


def test_rows_lie_on_the_cpu_whatever_the_worker_computes_on() -> None:
    """Functions of a flow work on them there; an engine takes its micro-batches to the device itself."""
    executor = InProcess(resolve("cpu_2"), device="meta")
    group = WorkerGroup(executor, "actor")
    group.create(TOY)
    given = group.put(rows([3, 1, 4, 2]))
    assert group.call("devices", given).values == (["cpu"], ["cpu"])
    moved = group.call("repeat", given).handle
    assert moved is not None
    assert group.call("devices", moved).values == (["cpu"], ["cpu"])
