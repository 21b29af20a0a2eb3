"""The adaptive KL coefficient (Ziegler et al. 2019, section 2.2) and DAPO's length penalty, by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from headrace.algorithms.kl_controller import KLController
from headrace.algorithms.overlong import overlong_penalty
from headrace.errors import ConfigError


def test_by_hand():
    """Errors 0.1, then 1.0 cut to 0.2, then -0.5 cut to -0.2, then 0."""
    control = KLController(0.5, target=2.0)
    seen = []
    for kl in (2.2, 4.0, 1.0, 2.0):
        control.update(kl)
        seen.append(control.coefficient)
    assert seen == pytest.approx([0.505, 0.505 * 1.02, 0.505 * 1.02 * 0.98, 0.505 * 1.02 * 0.98])


def test_without_a_target_it_stays():
    control = KLController(0.5)
    control.update(100.0)
    assert control.coefficient == 0.5


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_no_number_changes_nothing(kl):
    control = KLController(0.5, target=2.0)
    control.update(kl)
    assert control.coefficient == 0.5


def test_a_resumed_one_goes_on():
    control = KLController(0.5, target=2.0)
    control.update(9.0)
    state = json.loads(json.dumps(control.state_dict()))
    other = KLController(0.5, target=2.0)
    other.load_state_dict(state)
    for c in (control, other):
        c.update(1.9)
    assert other.coefficient == control.coefficient == pytest.approx(0.5 * 1.02 * 0.995)
    fixed = KLController(0.25)
    fixed.load_state_dict(state)
    assert fixed.coefficient == 0.25  # what is configured now


@pytest.mark.parametrize(
    "state", [{}, {"coefficient": "0.5"}, {"coefficient": math.nan}, {"coefficient": -1.0}]
)
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ConfigError, match="KL coefficient"):
        KLController(0.5, target=2.0).load_state_dict(state)


# ---- length penalty


def test_length_penalty_by_hand():
    """The last 4 of 20 tokens: nothing up to 16, a quarter a token from there, 1 at the limit."""
    tokens = torch.tensor([1, 15, 16, 17, 18, 19, 20])
    assert overlong_penalty(tokens, 20, 0.2).tolist() == pytest.approx([0, 0, 0, 0.25, 0.5, 0.75, 1.0])
    assert overlong_penalty(tokens, 20, 1.0).tolist() == pytest.approx([t / 20 for t in tokens.tolist()])


def test_a_penalty_of_nothing():
    assert overlong_penalty(torch.tensor([3, 20]), 20, 0.0).tolist() == [0.0, 0.0]


def test_a_window_below_one_token_still_ends_at_one():
    assert overlong_penalty(torch.tensor([4, 5]), 5, 0.01).tolist() == pytest.approx([0.0, 1.0])
