"""Every algorithm by its name alone, from the actor to its update, on the tiny model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny_run import go, lines, same, weights

from headrace.config_load import load_config
from headrace.config_presets import PRESETS
from headrace.models.hf import load_causal_lm


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
def test_nothing_but_truncated_responses_that_are_masked(
    arithmetic: Path, tmp_path: Path, name: str
) -> None:
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
