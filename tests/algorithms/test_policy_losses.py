"""Every registered loss by hand-worked numbers, against plain-Python loops, and by its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.find import LOSSES, LossInputs, LossTerms
from headrace.algorithms.reduction import token_weights
from headrace.config import AlgorithmConfig
from headrace.config_presets import PRESETS

BUILT_IN = sorted({PRESETS[p].get("loss", "ppo_clip") for p in PRESETS})
Token = tuple[float, float, float, int]  # log-probability, that before the update, advantage, row


def inputs(tokens: list[Token], num_rows: int | None = None) -> LossInputs:
    new, old, advantage, rows = (list(column) for column in zip(*tokens, strict=True))
    t = torch.tensor
    return LossInputs(
        t(new, dtype=torch.float64, requires_grad=True),
        t(old, dtype=torch.float64),
        t(advantage, dtype=torch.float64),
        t(rows, dtype=torch.int64),
        num_rows or max(rows) + 1,
    )


def loss(name: str, tokens: list[Token], **settings_: float) -> tuple[LossTerms, list[float]]:
    """The terms, and the gradient of their sum in the log-probabilities."""
    given_ = inputs(tokens)
    terms = LOSSES[name](given_, AlgorithmConfig(**settings_))
    (gradient,) = torch.autograd.grad(terms.loss.sum(), given_.logprobs)
    return terms, gradient.tolist()


# ---- by hand


def test_policy_gradient_by_hand() -> None:
    terms, gradient = loss("policy_gradient", [(-1.0, -1.0, 2.0, 0), (-0.5, -1.5, -3.0, 1)])
    assert terms.loss.tolist() == [2.0, -1.5]
    assert gradient == [-2.0, 3.0]
    assert terms.ratio.tolist() == pytest.approx([1.0, math.e])
    assert terms.clipped.tolist() == [False, False]


def test_cispo_by_hand() -> None:
    """Ratios 1, 8 (cut to 1.5), 1/4 (kept: no lower bound). Each keeps its gradient, weight x -A."""
    log = math.log
    tokens = [(-1.0, -1.0, 2.0, 0), (-1.0, -1.0 - log(8), 1.0, 0), (-2.0, -2.0 + log(4), -4.0, 1)]
    terms, gradient = loss("cispo", tokens, clip_low=1.0, clip_high=0.5)
    assert terms.ratio.tolist() == pytest.approx([1.0, 8.0, 0.25])
    assert terms.clipped.tolist() == [False, True, False]
    assert terms.loss.tolist() == pytest.approx([2.0, 1.5, -2.0])  # -w A log p
    assert gradient == pytest.approx([-2.0, -1.5, 1.0])
    terms, gradient = loss("cispo", tokens, clip_low=0.5, clip_high=0.5)
    assert terms.clipped.tolist() == [False, True, True]
    assert gradient == pytest.approx([-2.0, -1.5, 2.0])


def test_gspo_by_hand() -> None:
    """Row 0: log-ratios 0.1 and 0.3, so s = e^0.2 = 1.2214. Row 1: -0.1 alone, s = 0.9048. Bounds 0.8 and 1.2."""
    tokens = [(-1.0, -1.1, 1.0, 0), (-1.0, -1.3, 1.0, 0), (-2.1, -2.0, 3.0, 1)]
    terms, gradient = loss("gspo", tokens, clip_low=0.2, clip_high=0.2)
    s0, s1 = math.exp(0.2), math.exp(-0.1)
    assert terms.ratio.tolist() == pytest.approx([s0, s0, s1])
    assert terms.clipped.tolist() == [True, True, False]  # the second token's own ratio would be 1.35
    assert terms.loss.tolist() == pytest.approx([-1.2, -1.2, -3.0 * s1])
    assert gradient == pytest.approx([0.0, 0.0, -3.0 * s1])
    wide, gradient = loss("gspo", tokens, clip_low=0.2, clip_high=0.3)
    assert wide.loss.tolist() == pytest.approx([-s0, -s0, -3.0 * s1])
    assert gradient == pytest.approx([-s0, -s0, -3.0 * s1])


def test_a_bad_response_that_became_likely_is_not_clipped_by_gspo() -> None:
    terms, gradient = loss("gspo", [(-1.0, -1.5, -2.0, 0)], clip_low=0.2, clip_high=0.2)
    assert terms.clipped.tolist() == [False]
    assert gradient == pytest.approx([2.0 * math.exp(0.5)])
    terms, gradient = loss("gspo", [(-1.5, -1.0, -2.0, 0)], clip_low=0.2, clip_high=0.2)
    assert terms.clipped.tolist() == [True]
    assert gradient == [0.0]


def test_ppo_clip_reports_its_dual_clip() -> None:
    terms, _ = loss("ppo_clip", [(0.0, -math.log(4), -1.0, 0)], dual_clip=3.0)
    assert terms.loss.tolist() == [3.0]
    assert {k: v.tolist() for k, v in terms.extra.items()} == {"actor/dual_clip_fraction": [True]}
    assert loss("ppo_clip", [(0.0, -1.0, -1.0, 0)])[0].extra == {}


# ---- against plain loops


def bounded(a: float, r: float, low: float, high: float) -> float:
    return max(-a * r, -a * min(max(r, 1 - low), 1 + high))


def slow_ppo(tokens: list[Token], c: AlgorithmConfig) -> list[float]:
    out = []
    for new, old, a, _ in tokens:
        value = bounded(a, math.exp(new - old), c.clip_low, c.clip_high)
        out.append(min(value, -c.dual_clip * a) if c.dual_clip and a < 0 else value)
    return out


def slow_gspo(tokens: list[Token], c: AlgorithmConfig) -> list[float]:
    """The response's form: the loss of a response stands at each of its tokens."""
    out = []
    for _, _, a, row in tokens:
        own = [new - old for new, old, _, other in tokens if other == row]
        out.append(bounded(a, math.exp(sum(own) / len(own)), c.clip_low, c.clip_high))
    return out


def slow_cispo(tokens: list[Token], c: AlgorithmConfig) -> list[float]:
    weights = [min(max(math.exp(new - old), 1 - c.clip_low), 1 + c.clip_high) for new, old, _, _ in tokens]
    return [-w * a * new for w, (new, _, a, _) in zip(weights, tokens, strict=True)]


def slow_policy_gradient(tokens: list[Token], c: AlgorithmConfig) -> list[float]:
    return [-a * new for new, _, a, _ in tokens]


SLOW: dict[str, Callable[[list[Token], AlgorithmConfig], list[float]]] = {
    "ppo_clip": slow_ppo,
    "gspo": slow_gspo,
    "cispo": slow_cispo,
    "policy_gradient": slow_policy_gradient,
}

some_tokens = st.lists(
    st.tuples(
        st.floats(-4, -0.01),
        st.floats(-4, -0.01),
        st.sampled_from([-2.0, -0.5, 0.0, 1.0, 3.0]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=9,
)


def test_every_loss_is_tested_against_loops() -> None:
    assert SLOW.keys() == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=60, deadline=None)
@given(tokens=some_tokens, low=st.sampled_from([0.1, 0.5, 1.0]), high=st.sampled_from([0.0, 0.3, 4.0]))
def test_values_against_plain_loops(name: str, tokens: list[Token], low: float, high: float) -> None:
    terms, _ = loss(name, tokens, clip_low=low, clip_high=high, dual_clip=3.0)
    config = AlgorithmConfig(clip_low=low, clip_high=high, dual_clip=3.0)
    assert terms.loss.tolist() == pytest.approx(SLOW[name](tokens, config), rel=1e-9, abs=1e-12)


# gradients

STEP = 1e-6


@pytest.mark.parametrize("name", ["ppo_clip", "policy_gradient"])
@settings(max_examples=40, deadline=None)
@given(tokens=some_tokens)
def test_gradient_is_the_slope_of_the_loss(name: str, tokens: list[Token]) -> None:
    """Central differences of the plain loops, away from the kinks of the clip."""
    config = AlgorithmConfig()
    near_kink = [min(abs(math.exp(n - o) - b) for b in (0.8, 1.2)) < 1e-3 for n, o, _, _ in tokens]
    _, gradient = loss(name, tokens)
    for i, token in enumerate(tokens):
        if not near_kink[i]:
            ends = []
            for sign in (1, -1):
                moved = [*tokens]
                moved[i] = (token[0] + sign * STEP, *token[1:])
                ends.append(sum(SLOW[name](moved, config)))
            assert gradient[i] == pytest.approx((ends[0] - ends[1]) / (2 * STEP), rel=1e-4, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_gspo_has_the_gradient_of_its_sequence_objective(lengths: list[int], seed: int) -> None:
    """With `sequence_mean`: (1 / R) sum over responses of max(-A s, -A clip(s)), s differentiated as it stands."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    new = (-torch.rand(len(rows), generator=generator, dtype=torch.float64)).requires_grad_()
    old = new.detach() + 0.4 * torch.randn(len(rows), generator=generator, dtype=torch.float64)
    advantage = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    config = AlgorithmConfig(name="gspo", clip_low=0.2, clip_high=0.25)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    weight = token_weights(torch.ones(len(rows), dtype=torch.bool), offsets, config.reduction).double()
    terms = LOSSES["gspo"](LossInputs(new, old, advantage[rows], rows, len(lengths)), config)
    (got,) = torch.autograd.grad((weight * terms.loss).sum(), new)

    total = torch.zeros((), dtype=torch.float64)
    for r, a in enumerate(advantage.tolist()):
        own = slice(int(offsets[r]), int(offsets[r + 1]))
        s = (new[own].sum() - old[own].sum()).div(lengths[r]).exp()
        total = total + torch.maximum(-a * s, -a * s.clamp(0.8, 1.25)) / len(lengths)
    (wanted,) = torch.autograd.grad(total, new)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(tokens=some_tokens)
def test_cispo_has_the_gradient_of_a_weighted_policy_gradient(tokens: list[Token]) -> None:
    _, gradient = loss("cispo", tokens, clip_low=0.5, clip_high=1.0)
    wanted = [-a * min(max(math.exp(new - old), 0.5), 2.0) for new, old, a, _ in tokens]
    assert gradient == pytest.approx(wanted, rel=1e-9, abs=1e-12)


# of all of them


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_first_on_policy_update_is_the_policy_gradient(name: str) -> None:
    tokens = [(-1.5, -1.5, 1.0, 0), (-0.1, -0.1, 1.0, 0), (-30.0, -30.0, -2.0, 1)]
    terms, gradient = loss(name, tokens, clip_low=3e-4, clip_high=4e-4)
    assert gradient == pytest.approx([-1.0, -1.0, 2.0])
    assert terms.ratio.tolist() == [1.0] * 3
    assert not terms.clipped.any()


@pytest.mark.parametrize("name", BUILT_IN)
def test_only_the_new_logprobs_get_a_gradient(name: str) -> None:
    whole = inputs([(-1.0, -1.2, 1.0, 0), (-2.0, -1.0, -1.0, 1)])
    old, advantages = whole.old_logprobs.requires_grad_(), whole.advantages.requires_grad_()
    terms = LOSSES[name](replace(whole, old_logprobs=old, advantages=advantages), AlgorithmConfig())
    terms.loss.sum().backward()
    assert whole.logprobs.grad is not None
    assert (old.grad, advantages.grad) == (None, None)
    assert not terms.ratio.requires_grad


@pytest.mark.parametrize("name", BUILT_IN)
def test_vast_ratios_stay_finite(name: str) -> None:
    terms, gradient = loss(name, [(-0.1, -900.0, 1.0, 0), (-900.0, -0.1, -1.0, 1)])
    assert all(map(math.isfinite, [*terms.loss.tolist(), *terms.ratio.tolist(), *gradient]))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_micro_batch_without_a_token(name: str) -> None:
    nothing = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    empty = LossInputs(nothing, nothing.detach(), nothing.detach(), torch.zeros(0, dtype=torch.int64), 3)
    terms = LOSSES[name](empty, AlgorithmConfig())
    assert terms.loss.shape == terms.ratio.shape == terms.clipped.shape == (0,)
    terms.loss.sum().backward()


def test_row_means() -> None:
    whole = inputs([(-1.0, 0, 0, 2), (-2.0, 0, 0, 0), (-3.0, 0, 0, 2)], num_rows=4)
    assert whole.row_mean(whole.logprobs).tolist() == [-2.0, 0.0, -2.0, 0.0]
