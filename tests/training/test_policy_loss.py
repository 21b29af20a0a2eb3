"""The actor's loss with every registered token loss: no dependence on the cut, importance weights, bad losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_torch_engine import check_gradients, gradients, make_batch

from headrace.algorithms.find import LOSSES, LossInputs, LossTerms, register_loss
from headrace.algorithms.reduction import token_weights
from headrace.config import AlgorithmConfig
from headrace.config_presets import PRESETS
from headrace.data.batch import Batch
from headrace.errors import RunError
from headrace.training.engine import TokenOutputs
from headrace.training.policy_loss import PolicyLoss

BUILT_IN = sorted({PRESETS[p].get("loss", "ppo_clip") for p in PRESETS})
IMPORTANCE = ["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    loss=st.sampled_from(BUILT_IN),
    importance=st.sampled_from(IMPORTANCE),
    on_policy=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=2, max_size=6),
    budget=st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_loss_and_gradient_do_not_depend_on_the_cut(
    tiny: Any,
    loss: str,
    importance: str,
    on_policy: bool,
    lengths: list[tuple[int, int]],
    budget: int,
    seed: int,
) -> None:
    """With several updates a step (old log-probabilities given) and with one; some sampled tokens masked out."""
    model = copy.deepcopy(tiny("qwen3"))
    batch = make_batch(model.vocab_size, lengths, seed)
    noise = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    mask = batch["response_mask"] & (noise > 0.15)
    weights = token_weights(mask, batch.offsets, "sequence_mean")
    batch = batch.with_columns({"loss_mask": mask, "loss_weight": weights})
    if on_policy:
        batch = batch.without_columns(["logprobs"])
    algorithm = AlgorithmConfig(
        loss=loss,
        clip_low=0.5,
        clip_high=0.5,
        importance_weights=importance,
        importance_cap=3.0,
        kl_coefficient=0.05,
    )
    measured = PolicyLoss(algorithm, measure_gap=False)
    whole_metrics, whole = gradients(model, batch, measured, tokens_per_microbatch=10_000)
    order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(seed))
    cut_metrics, cut = gradients(model, batch.select(order), measured, tokens_per_microbatch=budget)
    check_gradients(cut, whole)
    assert cut_metrics == pytest.approx(whole_metrics, rel=1e-3, abs=1e-5)


def test_every_loss_is_among_them() -> None:
    assert set(BUILT_IN) <= LOSSES.keys()
    assert len(BUILT_IN) == 4


# ---- importance weights in the loss


def columns(**given_: list[float]) -> Batch:
    """Two rows: a prompt token and two sampled ones; a prompt token and one."""
    mask = torch.tensor([False, True, True, False, True])
    base: dict[str, Any] = {
        "loss_mask": mask,
        "loss_weight": torch.where(mask, 1.0, 0.0),
        "advantages": torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0]),
    }
    return Batch([3, 2], {**base, **{k: torch.tensor(v) for k, v in given_.items()}})


def importance_loss(batch: Batch, mode: str) -> tuple[float, list[float], dict[str, float]]:
    logprobs = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5], requires_grad=True)
    settings_ = AlgorithmConfig(importance_weights=mode, importance_cap=2.0)
    total, metrics = PolicyLoss(settings_, measure_gap=False)(
        TokenOutputs(logprobs=logprobs, entropy=torch.zeros(5)), batch
    )
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad.tolist(), metrics.means()


LOG2 = math.log(2)


@pytest.mark.parametrize("several_updates", [False, True])
@pytest.mark.parametrize(
    "mode, weights, mean, capped",
    [
        ("token_truncate", [2.0, 0.375, 1.0], (4 + 0.375 + 1) / 3, 1 / 3),
        ("token_mask", [0.0, 0.375, 1.0], (4 + 0.375 + 1) / 3, 1 / 3),
        ("sequence_truncate", [1.5, 1.5, 1.0], (1.5 + 1.5 + 1) / 3, 0.0),
        ("off", [1.0, 1.0, 1.0], None, None),
    ],
)
def test_importance_weights_by_hand(
    several_updates: bool, mode: str, weights: list[float], mean: float | None, capped: float | None
) -> None:
    """Trainer over rollout: 4 and 3/8 in the first row (product 3/2), 1 in the second; the policy ratio is 1."""
    batch = columns(rollout_logprobs=[9.0, -1.0 - 2 * LOG2, -2.0 - math.log(0.375), 9.0, -0.5])
    if several_updates:
        batch = batch.with_columns({"logprobs": torch.tensor([9.0, -1.0, -2.0, 9.0, -0.5])})
    total, gradient, metrics = importance_loss(batch, mode)
    wanted = [0.0, -weights[0], -weights[1], 0.0, -2.0 * weights[2]]
    assert gradient == pytest.approx(wanted, abs=1e-5)
    assert total == pytest.approx(sum(wanted), abs=1e-5)
    assert metrics.get("importance/weight_mean") == (mean if mean is None else pytest.approx(mean, abs=1e-5))
    assert metrics.get("importance/capped_fraction") == (capped if capped is None else pytest.approx(capped))


def test_the_trainer_before_the_step_is_what_weighs() -> None:
    """A later update: the weight is that of the old log-probabilities, the ratio that of the new to the old."""
    old = [9.0, -1.1, -2.1, 9.0, -0.5]
    batch = columns(logprobs=old, rollout_logprobs=[9.0, -1.1 - LOG2 / 2, -2.1, 9.0, -0.5])
    _, gradient, _ = importance_loss(batch, "token_truncate")
    r = math.exp(0.1)
    assert gradient == pytest.approx([0.0, -r * 2**0.5, -r, 0.0, -2.0], abs=1e-5)


def test_filters_do_not_enter() -> None:
    """Where the rollout filtered, its log-probabilities before the filters are compared with."""
    free = [9.0, -1.0, -2.0, 9.0, -0.5]
    batch = columns(rollout_logprobs=[9.0, -0.1, -0.1, 9.0, 0.0], rollout_untruncated_logprobs=free)
    assert importance_loss(batch, "sequence_mask")[2]["importance/weight_mean"] == pytest.approx(1.0)


# ---- losses of one's own


@pytest.fixture
def _bad() -> Iterator[None]:
    yield
    LOSSES.pop("bad", None)


@pytest.mark.usefixtures("_bad")
@pytest.mark.parametrize(
    "result, part",
    [
        (lambda x, b: x, "returned a Tensor; wanted LossTerms"),
        (
            lambda x, b: LossTerms(x.sum(), x, b),
            r"`loss` is \(\); wanted a tensor of one value a token, \(3,\)",
        ),
        (lambda x, b: LossTerms(x, 1.0, b), "`ratio` is float; wanted"),
        (lambda x, b: LossTerms(x, x.detach(), x.detach()), "`clipped` is torch.float32; wanted bool"),
        (lambda x, b: LossTerms(x, x, b, {"actor/kl": x[:1]}), r"`actor/kl` is \(1,\)"),
    ],
)
def test_what_a_loss_returns_is_checked(result: Any, part: str) -> None:
    @register_loss("bad")
    def bad(inputs: LossInputs, settings: AlgorithmConfig) -> Any:
        return result(inputs.logprobs, inputs.logprobs > 0)

    outputs = TokenOutputs(logprobs=torch.zeros(5, requires_grad=True), entropy=torch.zeros(5))
    with pytest.raises(RunError, match="loss 'bad'.* " + part if part.startswith("ret") else part):
        PolicyLoss(AlgorithmConfig(loss="bad"), measure_gap=False)(outputs, columns())


def test_the_coefficient_of_the_run_wins() -> None:
    batch = columns(reference_logprobs=[0.0, -2.0, -2.0, 0.0, -0.5]).with_columns(
        {"advantages": torch.zeros(5)}
    )
    settings_ = AlgorithmConfig(kl_coefficient=0.5, kl_estimator="k2")
    outputs = TokenOutputs(logprobs=torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5]), entropy=torch.zeros(5))
    for given_, used in ((None, 0.5), (3.0, 3.0)):
        total, metrics = PolicyLoss(settings_, measure_gap=False, kl_coefficient=given_)(outputs, batch)
        assert total.item() == pytest.approx(used * 0.5)
        assert metrics.means()["actor/kl"] == pytest.approx(0.5 / 3)
