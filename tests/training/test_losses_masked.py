"""A NaN at a token outside the loss mask reaches neither the loss nor the gradient, inside a row that counts too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace.config import AlgorithmConfig
from headrace.data.batch import Batch
from headrace.training.engine import TokenOutputs
from headrace.training.policy_loss import PolicyLoss
from headrace.training.value_loss import ValueLoss

MASK = torch.tensor([False, True, True, False])
WEIGHT = torch.tensor([0.0, 0.5, 0.5, 0.0])


def poisoned(column: Tensor) -> Tensor:
    return torch.where(MASK, column, math.nan)


def policy_batch() -> dict[str, Tensor]:
    logprobs = torch.tensor([0.0, -1.0, -2.0, -0.5])
    return {
        "loss_mask": MASK,
        "loss_weight": WEIGHT,
        "advantages": torch.tensor([0.0, 1.0, 3.0, 1.0]),
        "logprobs": logprobs,
        "rollout_logprobs": logprobs,
        "reference_logprobs": logprobs - 0.25,
    }


@pytest.mark.parametrize("name", ["advantages", "logprobs", "rollout_logprobs", "reference_logprobs"])
def test_policy_loss(name: str) -> None:
    columns = policy_batch()
    columns[name] = poisoned(columns[name])
    logprobs = torch.tensor([0.0, -1.0, -2.0, -0.5], requires_grad=True)
    entropy = torch.tensor([math.nan, 1.0, 2.0, math.nan], requires_grad=True)
    settings = AlgorithmConfig(kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.01)
    loss, metrics = PolicyLoss(settings, measure_gap=True)(
        TokenOutputs(logprobs=logprobs, entropy=entropy), Batch([4], columns)
    )
    loss.backward()
    # ratio 1: -A; k2 at d = 1/4: value 1/32, gradient 1/4; the entropy is a bonus
    assert loss.item() == pytest.approx(-(0.5 + 1.5) + 0.1 / 32 - 0.01 * 1.5)
    assert logprobs.grad is not None
    assert entropy.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.5 + 0.0125, -1.5 + 0.0125, 0.0])
    assert entropy.grad.tolist() == pytest.approx([0.0, -0.005, -0.005, 0.0])
    assert all(math.isfinite(value) for value in metrics.means().values())


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(clip: float | None) -> None:
    columns = {
        "loss_mask": MASK,
        "loss_weight": WEIGHT,
        "values": poisoned(torch.ones(4)),
        "returns": poisoned(torch.full((4,), 2.0)),
    }
    values = torch.ones(4, requires_grad=True)
    loss, _ = ValueLoss(clip)(TokenOutputs(values=values), Batch([4], columns))
    loss.backward()
    assert loss.item() == 0.5
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, -0.5, -0.5, 0.0]
