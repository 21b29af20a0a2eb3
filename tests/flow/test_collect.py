"""Groups without spread are replaced: which rows go on, what is counted, and when it gives up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import go, lines, same, weights

from headrace.data.batch import Batch
from headrace.data.loader import Loader
from headrace.errors import ConfigError
from headrace.flow.collect import MAX_REFILLS, run_step
from headrace.flow.compile import CheckedFlow
from headrace.flow.flow import Flow
from headrace.flow.interrupt import InterruptGuard
from headrace.flow.runtime import LocalRuntime
from headrace.models.hf import load_causal_lm
from headrace.observe.metrics import MetricSums
from headrace.observe.progress import Progress
from headrace.stages import StageContext, stage
from headrace.trainers.rl_trainer import get_hf_model


class Numbers:
    """Prompts 0, 1, 2, … in order."""

    name = "numbers"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def batch(self, indices: Any) -> Batch:
        n = len(indices)
        return Batch(
            [0] * n, rows={"prompt_id": torch.tensor(list(indices), dtype=torch.int64), "prompt": ["a"] * n}
        )


seen: list[dict[str, list[Any]]] = []


@stage(reads=("prompt_id",), writes=("group_id", "sample_index", "finish_reason"), makes_rows=True)
def rollout(batch: Batch, context: StageContext) -> Batch:
    """Two samples a prompt, of one token each."""
    ids = [int(p) for p in batch["prompt_id"] for _ in range(2)]
    owners = [i for i in range(batch.num_rows) for _ in range(2)]
    rows = {
        "prompt_id": torch.tensor(ids),
        "group_id": torch.tensor(owners),
        "sample_index": torch.tensor([0, 1] * batch.num_rows),
        "finish_reason": ["stop"] * len(ids),
    }
    return Batch([0] * len(ids), rows=rows)


def reward_where(differs: Any) -> Any:
    """0 and 1 for the samples of a prompt that `differs`, else 1 and 1."""

    @stage(reads=("prompt_id", "sample_index"), writes=("reward",))
    def reward(batch: Batch, context: StageContext) -> dict[str, Any]:
        pairs = zip(batch["prompt_id"].tolist(), batch["sample_index"].tolist(), strict=True)
        return {"reward": torch.tensor([float(i) if differs(p) else 1.0 for p, i in pairs])}

    return reward


@stage(reads=("reward", "group_id"), writes=(), trains=True)
def learn(batch: Batch, context: StageContext) -> None:
    seen.append({k: list(batch[k].tolist()) for k in ("prompt_id", "group_id", "reward")})


def step(differs: Any, *, rows: int = 60, wanted: int = 3) -> tuple[Batch, dict[str, float], Loader]:
    seen.clear()
    flow = Flow("filtered")
    flow.config.rollout.samples_per_prompt = 2
    flow.config.train.prompts_per_step = wanted
    flow.config.algorithm.filter_groups = True
    first = flow.add_stage("rollout", rollout)
    scored = flow.add_stage("reward", reward_where(differs), depends_on=first)
    flow.add_stage("learn", learn, depends_on=scored)
    checked = flow.compile()
    loader = Loader(Numbers(rows), wanted, shuffle=False, seed=0)
    context = StageContext(checked.config, 1, 1, MetricSums())
    batch = run_step(LocalRuntime(), checked, loader, context, Progress(1, ""), InterruptGuard())
    return batch, context.metrics.means(), loader


def test_even_prompts_differ_by_hand() -> None:
    """Draws 0 1 2, 3 4 5: groups 0 2 4 differ; the step is full after one refill."""
    batch, metrics, loader = step(lambda p: p % 2 == 0)
    assert seen == [
        {"prompt_id": [0, 0, 2, 2, 4, 4], "group_id": [0, 0, 1, 1, 2, 2], "reward": [0.0, 1.0] * 3}
    ]
    assert batch["prompt_id"].tolist() == [0, 0, 2, 2, 4, 4]
    assert metrics["rollout/refills"] == 1
    assert metrics["reward/filtered_group_fraction"] == 0.5
    assert loader.state_dict()["step"] == 2


def test_surplus_groups_are_dropped_in_order() -> None:
    """Draws 0 1 2 (of which 1 2 differ), then 3 4 5 (all): 3 is enough."""
    step(lambda p: p > 0)
    assert seen[0]["prompt_id"] == [1, 1, 2, 2, 3, 3]
    assert seen[0]["group_id"] == [0, 0, 1, 1, 2, 2]


def test_a_full_step_draws_once() -> None:
    _, metrics, loader = step(lambda p: True)
    assert metrics["rollout/refills"] == 0
    assert metrics["reward/filtered_group_fraction"] == 0.0
    assert loader.state_dict()["step"] == 1


def test_it_gives_up_and_goes_on_with_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace"):
        _, metrics, loader = step(lambda p: p in (4, 20))
    assert seen[0]["prompt_id"] == [4, 4, 20, 20]
    assert metrics["rollout/refills"] == MAX_REFILLS
    assert metrics["reward/filtered_group_fraction"] == pytest.approx(31 / 33)
    assert loader.state_dict()["step"] == 1 + MAX_REFILLS
    assert (
        "only 2 of the 3 groups of a step have rewards that differ, after 33 prompts in 11 draws"
        in caplog.text
    )


def test_a_step_without_any_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace"):
        batch, metrics, _ = step(lambda p: False)
    assert seen == []
    assert batch["prompt_id"].tolist() == [0, 0, 1, 1, 2, 2]  # what was drawn first, to be looked at
    assert metrics["reward/filtered_group_fraction"] == 1.0
    assert "there is nothing to learn from; the step is skipped" in caplog.text


def test_a_prompt_comes_once_in_a_step() -> None:
    """Seven rows: after two draws of 3 a new epoch brings 0 to 5 again; 6 is never drawn. It ends by itself."""
    _, metrics, _ = step(lambda p: p == 5, rows=7)
    assert seen[0]["prompt_id"] == [5, 5]
    assert metrics["reward/filtered_group_fraction"] == pytest.approx(5 / 6)
    step(lambda p: p == 5, rows=6)
    assert seen[0]["prompt_id"] == [5, 5]


# ---- what compile refuses


def problems(flow: Flow) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        flow.compile()
    return caught.value.violations


def test_filtering_needs_groups_of_two() -> None:
    flow = Flow("one")
    flow.config.algorithm.filter_groups = True
    flow.config.rollout.samples_per_prompt = 1
    first = flow.add_stage("rollout", rollout)
    scored = flow.add_stage("reward", reward_where(bool), depends_on=first)
    flow.add_stage("learn", learn, depends_on=scored)
    (only,) = problems(flow)
    assert only.startswith("rollout.samples_per_prompt: algorithm.filter_groups drops every group of one")


def test_filtering_needs_rewards_and_nothing_that_trains_before_them() -> None:
    flow = Flow("none")
    flow.config.algorithm.filter_groups = True
    actor = get_hf_model("/nowhere")
    first = flow.add_stage("rollout", actor.generate)
    flow.add_stage("a", lambda prompt: prompt, first, reads=["prompt"], writes=["advantages"])
    flow.add_stage("update", actor.update, depends_on="a")
    assert "algorithm.filter_groups: needs column 'reward'" in problems(flow)[0]
    late = flow.add_stage("late", lambda prompt: prompt, "update", reads=["prompt"], writes=["reward"])
    assert late.name == "late"
    assert "stage 'update' trains and comes before the reward" in problems(flow)[0]


def test_the_cut_is_by_edges(tmp_path: Path) -> None:
    from headrace.config import Config
    from headrace.trainers.recipes import policy_flow

    config = Config()
    config.algorithm.name = "ppo"
    config.algorithm.kl_coefficient = 0.1
    checked: CheckedFlow = policy_flow(config, get_hf_model("/nowhere"), "exact_match").compile()
    head, rest = checked.cut_after("reward")
    assert [s.name for s in head.stages] == ["rollout", "reward"]
    assert [s.name for s in rest.stages] == [
        "reference",
        "values",
        "logprobs",
        "advantage",
        "critic",
        "update",
    ]


# ---- in a run


def by_prompt(completion: str, prompt: str) -> float:
    """Sums of 2 and of 4 are rewarded densely, all others always 1: few groups differ."""
    return sum(c in "02468" for c in completion) / 5 if prompt[0] in "24" else 1.0


def test_dapo_fills_its_steps(arithmetic: Path, tmp_path: Path) -> None:
    result, steps, _ = go(
        arithmetic, tmp_path, by_prompt, algorithm={"name": "dapo"}, run={"samples_per_step": 100}
    )
    for s in steps:
        assert s["rollout/refills"] >= 1
        assert s["reward/zero_spread_group_fraction"] == 0.0
        assert s["rollout/samples"] == 16 * (1 + s["rollout/refills"])
    kept = lines(result.directory, "samples.jsonl")
    assert {s["prompt"][0] for s in kept} <= set("24")
    assert all(len([s for s in kept if s["step"] == n]) == 16 for n in (1, 2))


def test_nothing_to_learn_leaves_the_weights(arithmetic: Path, tmp_path: Path) -> None:
    _, steps, actor = go(
        arithmetic, tmp_path, lambda completion: 1.0, algorithm={"name": "dapo"}, train={"steps": 1}
    )
    assert same(weights(actor), load_causal_lm(str(arithmetic / "model")).hf.state_dict())
    assert "actor/updates" not in steps[0]
    assert steps[0]["reward/mean"] == 1.0
    assert steps[0]["rollout/refills"] == MAX_REFILLS
