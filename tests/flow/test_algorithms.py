"""Every algorithm by its name alone, from the actor to its update, on the tiny model."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import configuration, even, go, lines, same, weights

from headrace.algorithms.registry import ADVANTAGES, LOSSES
from headrace.algorithms.stages import advantage_stage
from headrace.config_load import load_config
from headrace.config_presets import PRESETS
from headrace.data.batch import Batch
from headrace.errors import ConfigError
from headrace.flow.flow import Flow
from headrace.models.hf import load_causal_lm
from headrace.observe.metrics import MetricSums
from headrace.roles.actor import Actor
from headrace.stages import StageContext


@pytest.mark.parametrize("name", PRESETS)
def test_runs_and_moves_the_weights(arithmetic: Path, tmp_path: Path, name: str) -> None:
    """With a KL, wherever the preset puts it, and two updates a step."""
    result, steps, actor = go(
        arithmetic,
        tmp_path,
        algorithm={"name": name, "kl_coefficient": 0.05},
        train={"samples_per_update": 8, "steps": 2},
    )
    assert not same(weights(actor), load_causal_lm(str(arithmetic / "model")).hf.state_dict())
    for step in steps:
        assert step["actor/updates"] == 2
        assert step["actor/grad_norm"] > 0
        assert step["rollout/samples"] >= 16
        assert all(math.isfinite(v) for v in step.values() if isinstance(v, float))
        assert ("reward/kl_penalty" in step) == (PRESETS[name].get("kl_placement") == "reward")
        assert ("critic/loss" in step) == (name == "ppo")
        assert ("reward/greedy_mean" in step) == (name == "remax")
        assert ("rollout/refills" in step) == (name == "dapo")
    assert all(s["sample_index"] >= 0 for s in lines(result.directory, "samples.jsonl"))
    written = load_config(result.directory / "config.yaml", [], None)
    assert {k: getattr(written.algorithm, k) for k in PRESETS[name]} == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_but_truncated_responses_that_are_masked(arithmetic: Path, tmp_path: Path, name: str) -> None:
    """One token each, none of them the end: no loss, no NaN, the weights as they were."""
    _, steps, actor = go(
        arithmetic,
        tmp_path,
        algorithm={"name": name, "mask_truncated": True},
        rollout={"max_new_tokens": 1, "min_new_tokens": 1},
        train={"steps": 1},
    )
    (step,) = steps
    assert step["rollout/truncated_fraction"] == 1.0
    assert step.get("actor/loss", 0.0) == 0.0
    assert all(math.isfinite(v) for v in step.values() if isinstance(v, float))
    assert same(weights(actor), load_causal_lm(str(arithmetic / "model")).hf.state_dict())


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_dropout_of_the_model_is_off(arithmetic: Path, tmp_path: Path, name: str) -> None:
    """A model whose configuration has attention dropout: the first update of a step has ratio 1 and clips nothing."""
    model = tmp_path / "model"
    shutil.copytree(arithmetic / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    changes = {"model": {"path": str(model)}, "train": {"steps": 1}}
    _, (alone,), _ = go(arithmetic, tmp_path / "a", algorithm={"name": name}, **changes)
    assert (alone["actor/ratio_mean"], alone["actor/clip_fraction"]) == (1.0, 0.0)
    # with the log-probabilities from a forward pass of their own, too
    kl = {"name": name, "kl_coefficient": 0.01, "kl_placement": "reward"}
    _, (step,), _ = go(arithmetic, tmp_path / "b", algorithm=kl, **changes)
    assert step["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert step["actor/clip_fraction"] == 0.0


# ---- the greedy baseline of ReMax


def generated(arithmetic: Path, tmp_path: Path, *, evaluation: bool, **sections: dict[str, Any]) -> Batch:
    config = configuration(arithmetic, tmp_path, {"algorithm": {"name": "remax"}, **sections})
    actor = Actor(config.model)
    actor.prepare(config, total_updates=1, trains=False)
    ids = [tuple(actor.tokenizer(p).input_ids) for p in ("1+2=", "9+3=", "4+4=")]
    prompts = Batch(
        [0] * 3, rows={"prompt_ids": ids, "prompt_id": torch.arange(3), "answer": ["3", "12", "8"]}
    )
    return actor.generate(prompts, StageContext(config, 1, 1, MetricSums(), evaluation=evaluation))


def test_the_actor_adds_one_greedy_response_a_prompt(arithmetic: Path, tmp_path: Path) -> None:
    rollout = {"samples_per_prompt": 2, "max_new_tokens": 4, "temperature": 0.7, "top_k": 5}
    batch = generated(arithmetic, tmp_path, evaluation=False, rollout=rollout)
    assert batch["greedy_baseline"].tolist() == [False] * 6 + [True] * 3
    assert batch["group_id"].tolist() == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert batch["sample_index"].tolist() == [0, 1] * 3 + [-1] * 3
    assert batch["answer"] == ["3", "3", "12", "12", "8", "8", "3", "12", "8"]
    per_row = [batch.row_values("response_mask", r).any().item() for r in range(9)]
    assert per_row == [True] * 6 + [False] * 3  # it was not sampled
    # what evaluation, which is greedy, says to the same prompts
    greedy = generated(arithmetic, tmp_path, evaluation=True, rollout=rollout, eval={"temperature": 0.0})
    assert greedy.num_rows == 3
    assert not greedy["greedy_baseline"].any()
    assert batch["completion"][6:] == greedy["completion"]


def test_a_greedy_response_is_scored_and_left_out_of_all_else(arithmetic: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def score(responses: list[str]) -> list[dict[str, float]]:
        seen.append(responses)
        greedy = len(responses) == 4 * 3 + 4
        assert greedy or len(responses) == 10
        return [{"reward": float(i % 3), "place": float(i)} for i in range(len(responses))]

    result, steps, _ = go(
        arithmetic,
        tmp_path,
        score,
        held_out=str(arithmetic / "heldout.jsonl"),
        algorithm={"name": "remax"},
        rollout={"samples_per_prompt": 3},
        run={"samples_per_step": 100},
        train={"steps": 1, "samples_per_update": 6},
    )
    assert [len(r) for r in seen] == [10, 16, 10]
    step = next(s for s in steps if s["step"] == 1)
    assert step["reward/mean"] == 1.0  # 0 1 2 0 1 2 …, twelve of them
    assert step["reward/part/place"] == pytest.approx(sum(range(12)) / 12)
    assert step["reward/greedy_mean"] == pytest.approx((0 + 1 + 2 + 0) / 4)
    assert (step["rollout/samples"], step["actor/updates"]) == (12, 2)
    assert step["gap/abs_logprob_max"] < 1e-4
    trained = [s for s in lines(result.directory, "samples.jsonl") if s["step"] == 1]
    assert len(trained) == 12
    # 0 1 2 against a greedy 0, 1, 2 and 0
    assert step["advantage/mean"] == pytest.approx(
        sum((s["reward"] - g) * s["num_tokens"] for s, g in zip(by_prompt(trained), GREEDY, strict=True))
        / sum(s["num_tokens"] for s in trained)
    )


GREEDY = [0.0] * 3 + [1.0] * 3 + [2.0] * 3 + [0.0] * 3


def by_prompt(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sample files keep the rows' order: three samples of each prompt after another."""
    assert [s["sample_index"] for s in samples] == [0, 1, 2] * 4
    return samples


# ---- KL that adapts, importance weights


def test_the_kl_coefficient_moves_towards_its_target(arithmetic: Path, tmp_path: Path) -> None:
    """The first KL is 0, far below the target: 2 % less. Then it is far above a tiny one: 2 % more."""
    settings = {"kl_coefficient": 0.1, "kl_target": 1e-6}
    train = {"steps": 4, "learning_rate": 5e-3}
    _, steps, _ = go(arithmetic, tmp_path, algorithm=settings, train=train)
    used = [s["actor/kl_coefficient"] for s in steps]
    assert used == pytest.approx([0.1, 0.098, 0.098 * 1.02, 0.098 * 1.02**2])
    assert steps[1]["actor/kl"] > 1e-4
    _, steps, _ = go(arithmetic, tmp_path / "b", algorithm={**settings, "name": "rloo"}, train=train)
    assert [s["actor/kl_coefficient"] for s in steps][:2] == pytest.approx([0.1, 0.098])


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights_on_policy_are_one(arithmetic: Path, tmp_path: Path, mode: str) -> None:
    """Rollout and trainer agree here, so the run is the one without weights; with one update a step and with two."""
    for name, per_update in (("one", 16), ("two", 8)):
        train = {"steps": 2, "samples_per_update": per_update}
        plain = go(arithmetic, tmp_path / name / "plain", train=train)[1]
        weighted = go(
            arithmetic,
            tmp_path / name / "weighted",
            algorithm={"importance_weights": mode, "importance_cap": 1.5},
            train=train,
        )[1]
        for a, b in zip(plain, weighted, strict=True):
            assert b["importance/weight_mean"] == pytest.approx(1.0, abs=1e-5)
            assert b["importance/capped_fraction"] == 0.0
            assert b["actor/policy_loss"] == pytest.approx(a["actor/policy_loss"], abs=1e-5)


# ---- one's own, from the command line


OWN = """
from headrace import LossTerms, register_advantage, register_loss

@register_advantage("half", grouped=True)
def half(scored, settings):
    return scored.rewards / 2

@register_loss("plain")
def plain(inputs, settings):
    loss = -inputs.advantages * inputs.logprobs
    return LossTerms(loss, 0 * loss.detach(), loss > 1e9)
"""


def test_a_plugin_from_the_command_line(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli import main

    (tmp_path / "own_of_a_run.py").write_text(OWN)
    (tmp_path / "run.yaml").write_text(
        f"run: {{dir: {tmp_path}, name: r, progress: off, tensorboard: false}}\n"
        f"model: {arithmetic / 'model'}\ndata: {arithmetic / 'train.jsonl'}\n"
        f"reward: {arithmetic / 'reward.py'}:score\n"
        "rollout: {samples_per_prompt: 4, max_new_tokens: 4}\n"
        "train: {steps: 1, prompts_per_step: 4, learning_rate: 1e-3}\n"
        "algorithm: {plugin: own_of_a_run.py, advantage: half, loss: plain}\n"
    )
    monkeypatch.chdir(arithmetic)
    monkeypatch.setattr("sys.path", list(sys.path))
    try:
        assert main(["train", str(tmp_path / "run.yaml")]) == 0
        (step,) = lines(tmp_path / "r")
        assert step["actor/ratio_mean"] == 0.0
        wrong = ["algorithm.advantage=halv", "algorithm.loss=plane", "run.overwrite=true"]
        assert main(["train", str(tmp_path / "run.yaml"), *wrong]) == 2
        err = capsys.readouterr().err
        assert "no advantage 'halv'; did you mean 'half'?" in err
        assert "no loss 'plane'; did you mean 'plain'?" in err
        one = ["algorithm.advantage=half", "rollout.samples_per_prompt=1", "run.overwrite=true"]
        assert main(["train", str(tmp_path / "run.yaml"), *one]) == 2
        assert "half compares the samples of a prompt" in capsys.readouterr().err
    finally:
        ADVANTAGES.pop("half", None)
        LOSSES.pop("plain", None)


def test_a_stage_and_a_setting_that_disagree(arithmetic: Path, tmp_path: Path) -> None:
    actor = Actor(configuration(arithmetic, tmp_path).model)
    flow = Flow("two minds", configuration(arithmetic, tmp_path, {"algorithm": {"advantage": "rloo"}}))
    rollout = flow.add_stage("rollout", actor.generate)
    reward = flow.add_stage("reward", even, depends_on=rollout)
    flow.add_stage("advantage", advantage_stage("remax"), depends_on=reward)
    flow.add_stage("update", actor.update, depends_on="advantage")
    with pytest.raises(ConfigError, match=r"algorithm.advantage: is 'rloo', but a stage .* computes 'remax'"):
        flow.compile()


def test_a_flow_of_ones_own_with_a_greedy_baseline(arithmetic: Path, tmp_path: Path) -> None:
    """The stage alone says that greedy responses are needed; settings of a stage keep what the preset is."""
    config = configuration(arithmetic, tmp_path, {"algorithm": {"name": "dr_grpo"}})
    actor = Actor(config.model)
    flow = Flow("mine", config)
    rollout = flow.add_stage("rollout", actor.generate, samples_per_prompt=1)
    reward = flow.add_stage("reward", even, depends_on=rollout)
    flow.add_stage("advantage", advantage_stage("remax"), depends_on=reward)
    flow.add_stage("update", actor.update, depends_on="advantage", kl_estimator="k2")
    compiled = flow.compile()
    a = compiled.config.algorithm
    assert (a.advantage, a.reduction, a.kl_estimator) == ("remax", "constant", "k2")
    compiled.run(str(arithmetic / "train.jsonl"), steps=1)
    (step,) = lines(tmp_path / "r")
    assert step["rollout/samples"] == 4
    assert "reward/greedy_mean" in step
