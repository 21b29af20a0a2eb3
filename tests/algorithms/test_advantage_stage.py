"""The advantage stage: from a batch's rewards to what an advantage function is given, and back to columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.algorithms.kl_controller import KLController
from headrace.algorithms.registry import ADVANTAGES, Scored, register_advantage
from headrace.algorithms.stages import advantage_stage
from headrace.config import AlgorithmConfig, Config, RolloutConfig
from headrace.data.batch import Batch
from headrace.errors import RunError
from headrace.observe.metrics import MetricSums
from headrace.stages import StageContext

NAN = float("nan")
seen: list[Scored] = []


@pytest.fixture(autouse=True)
def _spy() -> Iterator[None]:
    """Advantage "spy": keeps what it was given and returns the rewards."""

    @register_advantage("spy")
    def spy(scored: Scored, settings: AlgorithmConfig) -> torch.Tensor:
        seen.append(scored)
        return scored.rewards

    seen.clear()
    yield
    for name in ("spy", "bad"):
        ADVANTAGES.pop(name, None)


def batch(rewards: list[float], lengths: list[int], groups: list[int] | None = None, **columns: Any) -> Batch:
    """Rows of one prompt token and `lengths` sampled ones, ended by "stop"."""
    mask = [x for n in lengths for x in [False] + [True] * n]
    rows = {
        "reward": torch.tensor(rewards, dtype=torch.float64),
        "group_id": torch.tensor(groups or [0] * len(lengths)),
        "finish_reason": ["stop"] * len(lengths),
        "num_tokens": torch.tensor(lengths),
    }
    return Batch([n + 1 for n in lengths], {"response_mask": torch.tensor(mask)}, rows).with_columns(columns)


def run(
    name: str, given: Batch, kl: KLController | None = None, max_new_tokens: int = 10, **algorithm: Any
) -> tuple[Any, dict[str, float]]:
    config = Config(
        algorithm=AlgorithmConfig(**algorithm), rollout=RolloutConfig(max_new_tokens=max_new_tokens)
    )
    context = StageContext(config, 1, 1, MetricSums(), kl=kl)
    return advantage_stage(name)(given, context), context.metrics.means()


def test_rewards_stand_at_the_last_token_and_sum_to_the_rows() -> None:
    out, metrics = run("spy", batch([2.0, NAN, -1.0], [2, 1, 3]))
    (scored,) = seen
    assert scored.token_rewards.tolist() == [0, 0, 2, 0, 0, 0, 0, 0, -1]
    assert scored.valid.tolist() == [True, False, True]
    assert scored.mask.tolist() == [False, True, True, False, False, False, True, True, True]
    assert scored.rewards[scored.valid].tolist() == [2.0, -1.0]
    assert out["advantages"].tolist() == [0, 2, 2, 0, 0, 0, -1, -1, -1]
    assert out["advantages"].dtype == torch.float32
    assert out["loss_mask"].tolist() == scored.mask.tolist()
    assert metrics == {"advantage/mean": pytest.approx(0.2), "advantage/std": pytest.approx(math.sqrt(2.16))}


KL = {"kl_coefficient": 0.5, "kl_placement": "reward", "kl_estimator": "k1"}


def with_kl(given: Batch) -> Batch:
    """log-ratios of 0.1, 0.2, … at the tokens in turn, NaN at the prompts'."""
    ratio = torch.arange(given.num_tokens) * 0.1
    reference = torch.where(given["response_mask"], -1.0 - ratio, NAN)
    return given.with_columns({"logprobs": torch.full_like(ratio, -1.0), "reference_logprobs": reference})


def test_a_kl_in_the_reward_is_paid_by_token_and_by_response() -> None:
    given = with_kl(batch([2.0, 3.0], [2, 1]))  # log-ratios 0.1, 0.2 and 0.4
    _, metrics = run("spy", given, **KL)
    (scored,) = seen
    assert scored.token_rewards.tolist() == pytest.approx([0, -0.05, 1.9, 0, 2.8])
    assert scored.rewards.tolist() == pytest.approx([1.85, 2.8])
    assert metrics["reward/kl_penalty"] == pytest.approx(0.7 / 3)
    run("spy", given, kl=KLController(1.0, 5.0), **KL)  # the run's coefficient wins over the configured one
    assert seen[1].rewards.tolist() == pytest.approx([1.7, 2.6])
    run("spy", given, **{**KL, "kl_placement": "loss"})
    assert seen[2].rewards.tolist() == [2.0, 3.0]


def test_a_kl_in_the_reward_works_for_groups() -> None:
    """2 - 0.15 and 3 - 0.2 of one prompt: mean 2.325."""
    out, metrics = run("grpo", with_kl(batch([2.0, 3.0], [2, 1])), normalize_std=False, **KL)
    assert out["advantages"].tolist() == pytest.approx([0, -0.475, -0.475, 0, 0.475])
    assert metrics["reward/zero_spread_group_fraction"] == 0.0


def test_long_responses_pay() -> None:
    """The last 4 of 10 tokens: 6 pay nothing, 8 half, 10 all. The task's own rewards stay what they are."""
    given = batch([1.0, 1.0, 1.0, NAN], [6, 8, 10, 10])
    _, metrics = run("spy", given, overlong_fraction=0.4)
    assert seen[0].rewards[:3].tolist() == pytest.approx([1.0, 0.5, 0.0])
    assert metrics["reward/overlong_penalty"] == pytest.approx(0.5)
    assert given["reward"][:3].tolist() == [1.0, 1.0, 1.0]


def test_truncated_rows_leave_every_baseline() -> None:
    given = batch([1.0, 3.0, 8.0], [1, 1, 1]).with_columns({"finish_reason": ["stop", "stop", "length"]})
    for name, wanted in {"grpo": [-1, 1, 0], "rloo": [-2, 2, 0], "batch_mean": [-1, 1, 0]}.items():
        out, _ = run(name, given, mask_truncated=True, normalize_std=False)
        assert out["advantages"].tolist() == [0, wanted[0], 0, wanted[1], 0, 0]
        assert out["loss_mask"].tolist() == [False, True, False, True, False, False]
    advantages, _ = run("reinforce_plus_plus", given, mask_truncated=True)
    assert advantages["advantages"].tolist() == pytest.approx([0, -math.sqrt(0.5), 0, math.sqrt(0.5), 0, 0])


# ---- the greedy baseline


def with_greedy(rewards: list[float], finish: list[str] | None = None) -> Batch:
    """Groups 5 and 9 of two samples each, then their greedy rows (not sampled, so not masked in)."""
    given = batch(rewards, [2, 1, 1, 1, 2, 1], [5, 5, 9, 9, 5, 9])
    mask = given["response_mask"].clone()
    mask[int(given.offsets[4]) :] = False
    columns = {"response_mask": mask, "greedy_baseline": torch.tensor([False] * 4 + [True] * 2)}
    if finish is not None:
        columns["finish_reason"] = finish
    return given.with_columns(columns)


def test_greedy_rows_are_compared_with_and_go() -> None:
    out, metrics = run("remax", with_greedy([1.0, 0.0, 0.5, 2.0, 0.25, 1.0]))
    assert isinstance(out, Batch)
    assert out.num_rows == 4
    assert out["advantages"].tolist() == [0, 0.75, 0.75, 0, -0.25, 0, -0.5, 0, 1.0]
    assert out["reward"].tolist() == [1.0, 0.0, 0.5, 2.0]
    assert metrics["reward/greedy_mean"] == pytest.approx(0.625)


@pytest.mark.parametrize("why", ["no reward", "truncated"])
def test_without_a_greedy_reward_that_counts_a_prompt_teaches_nothing(why: str) -> None:
    finish = ["stop"] * 5 + ["length"]
    given = with_greedy([1.0, 0.0, 0.5, 2.0, 0.25, NAN if why == "no reward" else 1.0], finish)
    out, _ = run("remax", given, mask_truncated=True)
    assert out["loss_mask"].tolist() == [False, True, True, False, True, False, False, False, False]


def test_greedy_rows_enter_no_group() -> None:
    """Should a flow have them and compare otherwise: 1 and 0 of one prompt, whatever its greedy row got."""
    out, metrics = run("grpo", with_greedy([1.0, 0.0, 3.0, 3.0, 70.0, 80.0]), normalize_std=False)
    assert out["advantages"].tolist() == [0, 0.5, 0.5, 0, -0.5, 0, 0, 0, 0]
    assert metrics["reward/zero_spread_group_fraction"] == 0.5


# ---- what a function may return


@pytest.mark.parametrize(
    "result, critic, part",
    [
        (lambda s: None, False, "returned a NoneType; it must return a tensor of one value a response"),
        (
            lambda s: s.rewards[:1],
            False,
            r"returned a tensor \(1,\).* response \[R\] \(2,\) or a token \[N\] \(5,\)",
        ),
        (lambda s: s.token_rewards[:, None], False, r"returned a tensor \(5, 1\)"),
        (
            lambda s: (s.token_rewards, s.token_rewards),
            False,
            r"returned \(a tensor \(5,\), a tensor \(5,\)\)",
        ),
        (lambda s: s.token_rewards, True, ".*declared with needs_critic, it must return"),
        (lambda s: (s.rewards, s.rewards), True, ".*declared with needs_critic, it must return"),
        (lambda s: s.rewards * NAN, False, r"gave nan to row 0, which counts"),
    ],
)
def test_wrong_results_are_named(result: Any, critic: bool, part: str) -> None:
    @register_advantage("bad", needs_critic=critic)
    def bad(scored: Scored, settings: AlgorithmConfig) -> Any:
        return result(scored)

    with pytest.raises(RunError, match="advantage 'bad' " + part):
        run("bad", batch([1.0, 2.0], [2, 1], values=torch.zeros(5)))


def test_what_the_stage_declares() -> None:
    spec = {name: advantage_stage(name).__stage_spec__ for name in ("grpo", "gae", "remax", "batch_mean")}
    always = {"reward", "response_mask", "finish_reason"}
    assert {name: set(s.reads) - always for name, s in spec.items()} == {
        "grpo": {"group_id"},
        "gae": {"values"},
        "remax": {"group_id", "greedy_baseline"},
        "batch_mean": set(),
    }
    assert "returns" in spec["gae"].writes
    assert "returns" not in spec["grpo"].writes


def test_rows_without_a_known_group_stand_alone() -> None:
    run("spy", batch([1.0, 2.0], [1, 1]).without_columns(["group_id", "num_tokens"]), overlong_fraction=0.95)
    assert seen[0].group_ids.tolist() == [0, 1]
    # one token of ten, the penalty rising from half a token on
    assert seen[0].rewards.tolist() == pytest.approx([1.0 - 0.5 / 9.5, 2.0 - 0.5 / 9.5])
