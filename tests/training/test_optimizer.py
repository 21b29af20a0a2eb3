"""MasterAdamW against torch's AdamW, and what float32 masters are for."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from headrace.training.optimizer import MasterAdamW, OptimizerSettings, learning_rate_at


def parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in ((4, 3), (3,), (2, 2))]


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """Through autograd, so that the accumulation hooks run."""
    g = torch.Generator().manual_seed(seed)
    loss = sum((p * (scale * torch.randn(p.shape, generator=g)).to(p.dtype)).sum() for p in params)
    loss.backward()


def test_equals_torch_adamw_in_float32() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer = MasterAdamW(ours, OptimizerSettings(1e-2, weight_decay=0.1, max_grad_norm=None))
    groups = [{"params": [p for p in theirs if p.dim() == 2], "weight_decay": 0.1}]
    groups.append({"params": [p for p in theirs if p.dim() == 1], "weight_decay": 0.0})
    reference = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        assert optimizer.step().applied
        reference.step()
        reference.zero_grad()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_norm_is_clipped_globally() -> None:
    """Gradients (3, 4) over two parameters have norm 5; clipped to 1 they are (0.6, 0.8)."""
    a, b = nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1, 1))
    optimizer = MasterAdamW([a, b], OptimizerSettings(1.0, max_grad_norm=1.0))
    (3 * a + 4 * b).sum().backward()
    result = optimizer.step()
    assert result.grad_norm == pytest.approx(5.0)
    state = optimizer.state_dict()["adam"]
    assert float(state[0]["exp_avg"]) == pytest.approx(0.1 * 0.6, rel=1e-4)
    assert float(state[1]["exp_avg"]) == pytest.approx(0.1 * 0.8, rel=1e-4)


def test_bfloat16_keeps_what_bfloat16_cannot_hold() -> None:
    """A hundred steps of 1e-4 on a weight of 1.0 (whose bfloat16 spacing is 0.0078) add up in the master."""
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], OptimizerSettings(1e-4))
    for _ in range(100):
        (-weight).sum().backward()
        optimizer.step()
    master = optimizer.state_dict()["masters"][0]
    assert float(master) == pytest.approx(1.01, abs=1e-4)
    assert weight.dtype == torch.bfloat16
    assert float(weight.detach()) == float(master.to(torch.bfloat16)) == 1.0078125


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16; 256 micro-batches of gradient 1 after one of 256 must give 512."""
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], OptimizerSettings(1e-3, max_grad_norm=None))
    (256 * weight).sum().backward()
    for _ in range(256):
        weight.sum().backward()
    assert optimizer.step().grad_norm == 512.0


@pytest.mark.parametrize("offload", [False, True])
def test_state_round_trip_continues_exactly(offload: bool) -> None:
    settings = OptimizerSettings(1e-2, offload=offload)
    one, two = parameters(torch.bfloat16), parameters(torch.bfloat16)
    first = MasterAdamW(one, settings)
    for step in range(3):
        give_gradients(one, step)
        first.step()
    second = MasterAdamW(two, settings)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for params, optimizer in ((one, first), (two, second)):
        give_gradients(params, 9)
        optimizer.step()
    assert first.updates == second.updates == 4
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


def test_non_finite_is_skipped_and_cleared() -> None:
    params = parameters(torch.bfloat16)
    before = [p.clone() for p in params]
    optimizer = MasterAdamW(params, OptimizerSettings(1e-2))
    give_gradients(params, 0, scale=float("inf"))
    result = optimizer.step()
    assert not result.applied
    assert not math.isfinite(result.grad_norm)
    assert (optimizer.updates, optimizer.skipped) == (0, 1)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    give_gradients(params, 1)
    assert optimizer.step().applied, "the bad gradients were not carried over"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.775, 0.325, 0.1, 0.1]),
    ],
)
def test_schedules_by_hand(schedule: str, expected: list[float]) -> None:
    """Peak 1, three warm-up updates, down to a tenth: linear over 4 intervals; cosine over 3 (total 7) then flat."""
    total = 8 if schedule != "cosine" else 7
    settings = OptimizerSettings(
        1.0, schedule=schedule, warmup_updates=3, total_updates=total, min_learning_rate_fraction=0.1
    )
    assert [learning_rate_at(u, settings) for u in range(8)] == pytest.approx(expected)
