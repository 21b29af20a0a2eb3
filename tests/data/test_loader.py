from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.batch import Batch
from headrace.data.loader import Loader, all_batches
from headrace.errors import ConfigError, DataError


class Numbers:
    name = "numbers"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def batch(self, indices: Sequence[int]) -> Batch:
        return Batch([0] * len(indices), rows={"i": list(indices)})


def take(loader: Loader, steps: int) -> list[list[int]]:
    return [loader.next()["i"] for _ in range(steps)]


@given(st.integers(1, 30), st.data(), st.booleans(), st.integers(0, 2**40))
def test_an_epoch_has_every_row_at_most_once(rows: int, data: Any, shuffle: bool, seed: int) -> None:
    per_step = data.draw(st.integers(1, rows))
    loader = Loader(Numbers(rows), per_step, shuffle=shuffle, seed=seed)
    assert loader.steps_per_epoch == rows // per_step
    for epoch in range(3):
        assert loader.epoch == epoch
        steps = take(loader, loader.steps_per_epoch)
        seen = [i for step in steps for i in step]
        assert all(len(step) == per_step for step in steps)
        assert len(set(seen)) == len(seen) == per_step * loader.steps_per_epoch
        assert set(seen) <= set(range(rows))


def test_order() -> None:
    plain = Loader(Numbers(5), 2, shuffle=False, seed=0)
    assert take(plain, 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    loader = Loader(Numbers(50), 50, shuffle=True, seed=0)
    first, second = take(loader, 2)
    assert first != second
    assert first != list(range(50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert take(Loader(Numbers(50), 50, shuffle=True, seed=1), 1) != [first]


def test_order_does_not_depend_on_global_randomness() -> None:
    torch.manual_seed(1)
    random.seed(1)
    one = take(Loader(Numbers(20), 3, shuffle=True, seed=5), 10)
    torch.manual_seed(2)
    random.seed(2)
    state = torch.get_rng_state()
    assert take(Loader(Numbers(20), 3, shuffle=True, seed=5), 10) == one
    assert torch.equal(torch.get_rng_state(), state)


@given(st.integers(0, 25), st.booleans())
def test_a_saved_position_continues_exactly(steps: int, shuffle: bool) -> None:
    whole = take(Loader(Numbers(11), 3, shuffle=shuffle, seed=9), 40)
    loader = Loader(Numbers(11), 3, shuffle=shuffle, seed=9)
    take(loader, steps)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = Loader(Numbers(11), 3, shuffle=shuffle, seed=9)
    take(resumed, 2)
    resumed.load_state_dict(state)
    assert resumed.epoch == steps // 3
    assert take(resumed, 40 - steps) == whole[steps:]


@pytest.mark.parametrize(
    "other, named",
    [
        (Loader(Numbers(12), 3, shuffle=True, seed=9), "data.path"),
        (Loader(Numbers(11), 3, shuffle=True, seed=8), "run.seed"),
        (Loader(Numbers(11), 2, shuffle=True, seed=9), "train.prompts_per_step"),
        (Loader(Numbers(11), 3, shuffle=False, seed=9), "data.shuffle"),
    ],
)
def test_a_position_of_other_data_is_refused(other: Loader, named: str) -> None:
    state = Loader(Numbers(11), 3, shuffle=True, seed=9).state_dict()
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(state)
    assert [v.startswith(named) for v in caught.value.violations] == [True]


def test_a_damaged_position_is_refused() -> None:
    loader = Loader(Numbers(11), 3, shuffle=True, seed=9)
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="has no step"):
        loader.load_state_dict({k: v for k, v in state.items() if k != "step"})
    with pytest.raises(ConfigError, match="step 3"):
        loader.load_state_dict({**state, "step": 3})


@pytest.mark.parametrize(
    ("rows", "rows_per_step", "step"),
    [(60, 4, 9), (60, 6, 6), (60, 5, 7), (30, 4, 4), (120, 4, 18), (60, 59, 0)],
)
def test_near_a_position_of_other_batches(rows: int, rows_per_step: int, step: int) -> None:
    """After 9 steps of 4 of 60 rows, 36 are read; of 30 that is 18, of 120 it is 72."""
    loader = Loader(Numbers(60), 4, shuffle=True, seed=9)
    for _ in range(15 + 9):
        loader.next()
    other = Loader(Numbers(rows), rows_per_step, shuffle=True, seed=9)
    other.move_near(loader.state_dict())
    assert (other.state_dict()["epoch"], other.state_dict()["step"]) == (1, step)
    expected = Loader(Numbers(rows), rows_per_step, shuffle=True, seed=9)
    for _ in range(expected.steps_per_epoch + step):
        expected.next()
    assert other.next()["i"] == expected.next()["i"]


def test_three_rows_and_a_step_of_eight() -> None:
    with pytest.raises(DataError, match=r"data\.path: numbers has 3 usable rows.*8.*train\.prompts_per_step"):
        Loader(Numbers(3), 8, shuffle=True, seed=0)
    with pytest.raises(DataError, match=r"train\.samples_per_update"):
        Loader(Numbers(3), 8, shuffle=True, seed=0, key="train.samples_per_update")


def test_ten_rows_in_batches_of_four() -> None:
    assert [b["i"] for b in all_batches(Numbers(10), 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [b["i"] for b in all_batches(Numbers(4), 4)] == [[0, 1, 2, 3]]
    with pytest.raises(ConfigError):
        next(all_batches(Numbers(4), 0))
