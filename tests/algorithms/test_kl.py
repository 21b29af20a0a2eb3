"""KL estimators: values by hand; expected gradients by enumeration of the policy in float64."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.algorithms.kl import kl


def t(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "estimator, value, slope", [("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", 0.36787944, 0.63212056)]
)
def test_value_and_slope_at_one_token(estimator, value, slope):
    logprobs = t([-1.0]).requires_grad_()
    reference = t([-2.0]).requires_grad_()
    out = kl(logprobs, reference, estimator)
    assert out.item() == pytest.approx(value)
    out.sum().backward()
    assert logprobs.grad.item() == pytest.approx(slope)
    assert reference.grad is None


POLICIES = [
    (t([0.3, -0.8]), t([0.35, 0.65])),
    (t([0.1, -1.0, 0.7, 2.0, 0.0]), t([0.1, 0.2, 0.3, 0.15, 0.25])),
]


def expected_gradient(theta, q, estimator):
    """E_{x ~ p} of the gradient of the estimator in theta, p = softmax(theta), tokens held fixed."""
    leaf = theta.clone().requires_grad_()
    logp = torch.log_softmax(leaf, 0)
    probabilities = logp.detach().exp()
    (gradient,) = torch.autograd.grad((probabilities * kl(logp, q.log(), estimator)).sum(), leaf)
    return gradient


def difference_gradient(function, theta, step=1e-6):
    out = []
    for i in range(len(theta)):
        shift = torch.zeros_like(theta)
        shift[i] = step
        out.append((function(theta + shift) - function(theta - shift)).item() / (2 * step))
    return out


@pytest.mark.parametrize("theta, q", POLICIES)
def test_expected_gradients(theta, q):
    def reverse(x):  # KL(p || q)
        p = torch.softmax(x, 0)
        return (p * (p.log() - q.log())).sum()

    def forward(x):  # KL(q || p)
        p = torch.softmax(x, 0)
        return (q * (q.log() - p.log())).sum()

    true_gradient = difference_gradient(reverse, theta)
    other_gradient = difference_gradient(forward, theta)
    assert max(map(abs, true_gradient)) > 0.01
    assert true_gradient != pytest.approx(other_gradient, abs=1e-3)
    assert expected_gradient(theta, q, "k1").tolist() == pytest.approx([0.0] * len(theta), abs=1e-12)
    assert expected_gradient(theta, q, "k2").tolist() == pytest.approx(true_gradient, abs=1e-8)
    assert expected_gradient(theta, q, "k3").tolist() == pytest.approx(other_gradient, abs=1e-8)


@pytest.mark.parametrize("theta, q", POLICIES)
def test_expected_values(theta, q):
    p = torch.softmax(theta, 0)
    true = (p * (p.log() - q.log())).sum().item()
    for estimator in ("k1", "k3"):
        assert (p * kl(p.log(), q.log(), estimator)).sum().item() == pytest.approx(true)
    assert (p * kl(p.log(), q.log(), "k2")).sum().item() == pytest.approx(
        sum(0.5 * float(a) * math.log(float(a) / float(b)) ** 2 for a, b in zip(p, q, strict=True))
    )
    assert (kl(p.log(), q.log(), "k3") >= 0).all()


def test_equal_policies_and_extremes():
    for estimator in ("k1", "k2", "k3"):
        assert kl(t([-3.0]), t([-3.0]), estimator).item() == 0
    logprobs = torch.tensor([-1000.0, 0.0], requires_grad=True)
    out = kl(logprobs, torch.tensor([0.0, -1000.0]), "k3")
    out.sum().backward()
    assert out.tolist() == pytest.approx([math.exp(20) - 1 - 1000, math.exp(-20) - 1 + 1000], rel=1e-6)
    assert logprobs.grad.tolist() == [1.0, 1.0]


def test_small_differences_keep_their_digits_in_float32():
    out = kl(torch.tensor([-1.0 + 2.0**-12]), torch.tensor([-1.0]), "k3")
    assert out.item() == pytest.approx(0.5 * 2.0**-24, rel=0.05)


def test_unknown_estimator():
    with pytest.raises(ValueError, match="k4"):
        kl(t([0.0]), t([0.0]), "k4")
