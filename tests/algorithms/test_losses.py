"""Token losses by hand-worked numbers; gradients against central differences in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.losses.nll import nll
from headrace.algorithms.losses.ppo_clip import ppo_clip
from headrace.algorithms.losses.value import value_loss


def t(values):
    return torch.tensor(values, dtype=torch.float64)


def ppo(ratios, advantages, **clips):
    settings_ = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None} | clips
    logprobs = (t(ratios).log() - 1.0).requires_grad_()
    out = ppo_clip(logprobs, t([-1.0] * len(ratios)), t(advantages), **settings_)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    return out, gradient


def test_asymmetric_clip_by_hand():
    ratios = [1.0, 1.0, 1.25, 1.5, 0.5, 0.5, 1.5, 0.75]
    advantages = [2.0, -2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0]
    out, gradient = ppo(ratios, advantages)
    assert out.loss.tolist() == pytest.approx([-2.0, 2.0, -2.5, -2.6, -1.0, 1.6, 3.0, 1.6])
    assert out.clipped.tolist() == [False, False, False, True, False, True, False, True]
    assert gradient.tolist() == pytest.approx([-2.0, 2.0, -2.5, 0.0, -1.0, 0.0, 3.0, 0.0])
    assert out.ratio.tolist() == pytest.approx(ratios)
    assert not out.dual_clipped.any()


def test_dual_clip_by_hand():
    out, gradient = ppo([2.9, 3.1, 3.1, 0.5], [-1.0, -1.0, 1.0, -1.0], dual_clip=3.0)
    assert out.loss.tolist() == pytest.approx([2.9, 3.0, -1.3, 0.8])
    assert out.dual_clipped.tolist() == [False, True, False, False]
    assert out.clipped.tolist() == [False, False, True, True]
    assert gradient.tolist() == pytest.approx([2.9, 0.0, 0.0, 0.0])


def test_first_on_policy_update_is_the_policy_gradient():
    logprobs = torch.tensor([-1.5, -0.1, -30.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    out = ppo_clip(logprobs, logprobs.detach(), advantages, clip_low=0.0, clip_high=0.0, dual_clip=3.0)
    out.loss.sum().backward()
    assert out.ratio.tolist() == [1.0, 1.0, 1.0]
    assert not out.clipped.any()
    assert not out.dual_clipped.any()
    assert logprobs.grad.tolist() == [-1.0, 2.0, -0.5]


def test_extreme_ratios_stay_finite():
    logprobs = torch.tensor([0.0, -1000.0, 0.0, -1000.0], requires_grad=True)
    old = torch.tensor([-1000.0, 0.0, -1000.0, 0.0])
    out = ppo_clip(
        logprobs, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2, dual_clip=None
    )
    out.loss.sum().backward()
    assert out.loss.tolist() == pytest.approx([-1.2, -math.exp(-20), math.exp(20), 0.8], rel=1e-5)
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_only_logprobs_receive_a_gradient():
    inputs = [torch.tensor([x], requires_grad=True) for x in (-1.0, -1.1, 2.0)]
    ppo_clip(*inputs, clip_low=0.2, clip_high=0.2, dual_clip=None).loss.sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is None
    assert inputs[2].grad is None


away_from_kinks = st.floats(-1.5, 1.5).filter(
    lambda d: min(abs(math.exp(d) - k) for k in (0.8, 1.3, 3.0)) > 1e-3
)


@settings(max_examples=80, deadline=None)
@given(away_from_kinks, st.floats(-3, 3), st.sampled_from([None, 3.0]))
def test_ppo_gradient_against_differences(d, advantage, dual):
    def loss(x: float) -> float:
        r = math.exp(x)
        out = max(-advantage * r, -advantage * min(max(r, 0.8), 1.3))
        return min(out, -dual * advantage) if dual and advantage < 0 else out

    logprobs = t([d]).requires_grad_()
    out = ppo_clip(logprobs, t([0.0]), t([advantage]), clip_low=0.2, clip_high=0.3, dual_clip=dual)
    out.loss.sum().backward()
    step = 1e-6
    assert out.loss.item() == pytest.approx(loss(d), abs=1e-12)
    assert logprobs.grad.item() == pytest.approx((loss(d + step) - loss(d - step)) / (2 * step), abs=1e-6)
    if abs(advantage) > 1e-9:
        assert (out.clipped | out.dual_clipped).item() == (logprobs.grad.item() == 0)


@pytest.mark.parametrize(
    "bad", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -0.1}, {"dual_clip": 1.0}]
)
def test_ppo_bounds_are_checked(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ppo([1.0], [1.0], **bad)


def test_value_loss_by_hand():
    # old value 1, return 3, clip 0.5: the value may move within 0.5 … 1.5
    values = t([1.2, 2.0, 0.0, 5.0]).requires_grad_()
    loss, clipped = value_loss(values, t([1.0] * 4), t([3.0] * 4), clip=0.5)
    # 0.5 * 1.8^2;  max(0.5 * 1, 0.5 * 1.5^2);  max(0.5 * 9, 0.5 * 2.5^2);  max(0.5 * 4, 0.5 * 1.5^2)
    assert loss.tolist() == pytest.approx([1.62, 1.125, 4.5, 2.0])
    assert clipped.tolist() == [False, True, False, False]
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == pytest.approx([-1.8, 0.0, -3.0, 2.0])


def test_value_loss_without_clip():
    values = t([1.0, 4.0]).requires_grad_()
    loss, clipped = value_loss(values, t([0.0, 0.0]), t([3.0, 3.0]), clip=None)
    assert loss.tolist() == [2.0, 0.5]
    assert clipped.tolist() == [False, False]
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == [-2.0, 1.0]


def test_value_not_moved_yet_is_never_clipped():
    values = torch.tensor([0.1, 0.7, -3.3])
    _, clipped = value_loss(values, values.clone(), torch.tensor([5.0, -5.0, 0.1]), clip=0.2)
    assert not clipped.any()
    with pytest.raises(ValueError, match="clip"):
        value_loss(values, values, values, clip=0.0)


def test_nll():
    assert nll(t([-0.5, 0.0])).tolist() == [0.5, 0.0]
