"""Whole runs of a tiny model: what is written, what is measured, and that the numbers are right."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import Sections, configuration, even, go, lines, same, weights

from headrace.config_load import load_config
from headrace.errors import RunError
from headrace.flow.run import steps_of
from headrace.models.hf import load_causal_lm
from headrace.observe.metrics import describe
from headrace.roles.actor import Actor

# ---- what a run leaves behind


def test_the_run_directory(arithmetic: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sections: Sections = {
        "run": {"tensorboard": True, "samples_per_step": 3},
        "train": {"steps": 3},
        "rollout": {"max_concurrent_sequences": 1},  # an evaluation batch is 4 times as much
        "eval": {"every_steps": 2, "path": str(arithmetic / "heldout.jsonl")},
    }
    result, steps, actor = go(arithmetic, tmp_path, held_out=sections["eval"]["path"], **sections)
    folder = result.directory
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "timeline.jsonl",
        "eval_samples.jsonl",
        "tensorboard",
        "checkpoints",
        "model",
        "environment.json",
        "report.html",
    }
    config = configuration(arithmetic, tmp_path, sections)
    assert load_config(folder / "config.yaml", command=None) == config

    assert [s["step"] for s in steps] == [0, 1, 2, 3]
    for step in steps:
        for name in step.keys() - {"step", "time"}:
            assert describe(name).unit
    # evaluation: before, in between, at the end; 10 rows in batches of 4, each once
    assert [s.get("eval/rows") for s in steps] == [10, None, 10, 10]
    assert sorted(result.evaluations) == [0, 2, 3]
    assert [s.get("data/epoch") for s in steps[1:]] == pytest.approx([1 / 15, 2 / 15, 3 / 15])

    samples = lines(folder, "samples.jsonl")
    assert [s["step"] for s in samples] == [1] * 3 + [2] * 3 + [3] * 3
    train_rows = lines(arithmetic, "train.jsonl")
    for sample in samples:
        assert sample["prompt"] == train_rows[sample["prompt_id"]]["prompt"]
        assert sample["reward"] == pytest.approx(even(sample["completion"]))
        assert 1 <= sample["num_tokens"] <= 5

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    (reward,) = [[(e.step, e.value) for e in events.Scalars("reward/mean")]]
    assert reward == [(s["step"], pytest.approx(s["reward/mean"])) for s in steps[1:]]

    assert result.model == folder / "model"
    saved = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = torch.tensor([tokenizer("3+4=", add_special_tokens=False).input_ids])
    live = copy.deepcopy(actor.model.hf)
    live.set_attn_implementation("sdpa")
    saved.set_attn_implementation("sdpa")
    assert same(saved.state_dict(), live.state_dict())
    assert torch.allclose(saved(ids).logits, live(ids).logits, atol=1e-5)
    first = load_causal_lm(str(arithmetic / "model"))
    assert not same(weights(actor), first.hf.state_dict())  # it did learn something
    assert list(tmp_path.iterdir()) == [folder]


def test_an_epoch_leaves_out_the_rest(arithmetic: Path, tmp_path: Path) -> None:
    """60 rows, 25 a step: 2 steps an epoch, so 3 steps for 1.5 epochs."""
    result, steps, _ = go(
        arithmetic,
        tmp_path,
        train={"steps": None, "epochs": 1.5, "prompts_per_step": 25},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 2},
    )
    assert result.steps == 3
    assert [s["data/epoch"] for s in steps] == [0.5, 1.0, 1.5]
    assert [s["rollout/samples"] for s in steps] == [50, 50, 50]


def test_a_fraction_of_epochs_is_meant_as_written() -> None:
    """1.1 * 10 is 11.000000000000002 in floating point."""
    assert [steps_of(e, 10) for e in (0.01, 1.0, 1.1, 1.11, 2.3)] == [1, 10, 11, 12, 23]


def test_a_step_is_kept_when_its_evaluation_fails(arithmetic: Path, tmp_path: Path) -> None:
    """10 rows before the first step, 16 samples in it; the next call belongs to the evaluation after it."""
    calls: list[str] = []

    def score(completion: str) -> float:
        calls.append(completion)
        if len(calls) > 26:
            raise OSError("the grader is gone")
        return even(completion)

    with pytest.raises(RunError, match="the grader is gone"):
        go(arithmetic, tmp_path, score, str(arithmetic / "heldout.jsonl"), eval={"every_steps": 1})
    first, second = lines(tmp_path / "r")
    assert (first["step"], second["step"]) == (0, 1)
    assert second["actor/updates"] == 1
    assert "eval/accuracy" not in second
    assert (tmp_path / "r" / "model" / "config.json").is_file()


# ---- on-policy numbers


def test_a_step_of_one_update_is_on_policy(arithmetic: Path, tmp_path: Path) -> None:
    _, steps, _ = go(arithmetic, tmp_path, rollout={"temperature": 0.7})
    for step in steps:
        assert step["gap/abs_logprob_max"] < 1e-4
        assert step["actor/ratio_mean"] == 1.0
        assert step["actor/clip_fraction"] == 0.0
        assert step["actor/updates"] == 1
        assert step["actor/skipped_updates"] == 0
        assert step["actor/grad_norm"] > 0


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.5, "min_new_tokens": 2}])
def test_filtered_sampling_is_compared_without_its_filter(
    arithmetic: Path, tmp_path: Path, filters: dict[str, Any]
) -> None:
    """A filter renormalises; compared naively the gap would be ln(13 / 3) or so."""
    _, steps, _ = go(arithmetic, tmp_path, rollout=filters, train={"samples_per_update": 8})
    assert max(s["gap/abs_logprob_max"] for s in steps) < 1e-4
    assert steps[0]["actor/ratio_mean"] == pytest.approx(1.0, abs=0.2)


def test_several_updates_a_step(arithmetic: Path, tmp_path: Path) -> None:
    _, steps, actor = go(
        arithmetic, tmp_path, train={"samples_per_update": 8, "passes_per_step": 3, "learning_rate": 5e-3}
    )
    assert [s["actor/updates"] for s in steps] == [6, 6]  # 16 samples / 8 x 3 passes
    assert all(s["actor/ratio_mean"] != 1.0 for s in steps)
    assert all(s["gap/abs_logprob_max"] < 1e-4 for s in steps)  # measured before the first update
    optimizer = actor.engine.optimizer
    assert optimizer is not None
    assert optimizer.updates == 12
    assert actor._rollout is not None
    assert actor._rollout.weight_version == 12


def test_rollouts_carry_the_version_of_their_weights(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[int]] = []
    before = Actor._assemble

    def assemble(self: Actor, prompts: Any, completions: Any, *rest: Any, **more: Any) -> Any:
        seen.append({v for group in completions for c in group for v in c.weight_versions})
        return before(self, prompts, completions, *rest, **more)

    monkeypatch.setattr(Actor, "_assemble", assemble)
    go(arithmetic, tmp_path, train={"steps": 3, "samples_per_update": 8})
    assert seen == [{0}, {2}, {4}]


def test_the_gap_stops_the_run_and_keeps_the_model(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout whose log-probabilities are 0.5 off."""
    before = Actor._assemble

    def assemble(self: Actor, *args: Any, **keywords: Any) -> Any:
        rows = before(self, *args, **keywords)
        return rows.with_columns({"rollout_logprobs": rows["rollout_logprobs"] - 0.5})

    monkeypatch.setattr(Actor, "_assemble", assemble)
    with pytest.raises(RunError, match=r"step 1: .* differ by 0\.5 nats .*gap_stop \(0\.2\)"):
        go(arithmetic, tmp_path, algorithm={"gap_stop": 0.2})
    assert (tmp_path / "r" / "model" / "model.safetensors").is_file()
    (line,) = lines(tmp_path / "r")
    assert line["gap/abs_logprob_mean"] == pytest.approx(0.5, abs=1e-4)


def test_the_gap_warns(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, steps, _ = go(arithmetic, tmp_path, algorithm={"gap_warn": 1e-9})
    assert sum("algorithm.gap_warn" in r.getMessage() for r in caplog.records) == len(steps)


# ---- rewards


def test_rows_without_a_reward_count_nowhere(arithmetic: Path, tmp_path: Path) -> None:
    """Leaving sample 0 of each group out equals never having drawn it, as far as the baseline goes."""

    def some(completion: str, sample_index: int) -> dict[str, float | None] | None:
        return None if sample_index == 0 else {"reward": even(completion), "num even": 1.0}

    _, steps, _ = go(arithmetic, tmp_path, score=some, train={"steps": 1})
    assert steps[0]["reward/excluded_fraction"] == 0.25
    assert steps[0]["reward/part/num_even"] == 1.0  # a metric name has no spaces
    samples = lines(tmp_path / "r", "samples.jsonl")
    assert all((s["reward"] is None) == (s["sample_index"] == 0) for s in samples)


def test_no_reward_at_all_changes_nothing(arithmetic: Path, tmp_path: Path) -> None:
    _, steps, actor = go(arithmetic, tmp_path, score=lambda completion: None)
    assert same(weights(actor), load_causal_lm(str(arithmetic / "model")).hf.state_dict())
    assert all(s["actor/updates"] == 0 and s["reward/excluded_fraction"] == 1.0 for s in steps)
    assert all("reward/mean" not in s for s in steps)


def test_truncated_responses_are_masked_out_of_the_loss(arithmetic: Path, tmp_path: Path) -> None:
    """One new token: cut, or the end of sequence exactly at the limit. The ratio is 1, so the loss is minus the mean
    advantage of the rows that count, in whose baseline the cut ones have no part."""
    _, steps, _ = go(
        arithmetic,
        tmp_path,
        score=lambda completion, sample_index: sample_index / 10,
        run={"samples_per_step": 32},
        rollout={"max_new_tokens": 1, "samples_per_prompt": 8},
        algorithm={"mask_truncated": True},
    )
    samples = lines(tmp_path / "r", "samples.jsonl")
    counted = compared = 0
    for step in steps:
        kept = []
        for s in (own := [s for s in samples if s["step"] == step["step"]]):
            assert s["num_tokens"] == 1
            assert s["completion"] == "" or s["finish_reason"] == "length"
            siblings = [o for o in own if o["prompt_id"] == s["prompt_id"] and o["finish_reason"] == "stop"]
            group = torch.tensor([o["reward"] for o in siblings])
            if s["finish_reason"] == "stop":
                kept.append(float((s["reward"] - group.mean()) / group.std()) if len(group) > 1 else 0.0)
                compared += len(group) > 1
        assert len(own) == 32
        counted += len(kept)
        expected = -sum(kept) / len(kept) if kept else 0.0
        assert step["actor/loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert 0 < compared <= counted < 64


def test_when_all_are_truncated_the_loss_is_zero(arithmetic: Path, tmp_path: Path) -> None:
    _, steps, actor = go(
        arithmetic,
        tmp_path,
        rollout={"max_new_tokens": 2, "min_new_tokens": 2},
        algorithm={"mask_truncated": True},
    )
    assert [s["rollout/truncated_fraction"] for s in steps] == [1.0, 1.0]
    assert [s["actor/loss"] for s in steps] == [0.0, 0.0]
    assert [s["actor/updates"] + s["actor/skipped_updates"] for s in steps] == [0, 0]
    assert same(weights(actor), load_causal_lm(str(arithmetic / "model")).hf.state_dict())


def test_async_rewards(arithmetic: Path, tmp_path: Path) -> None:
    running = peak = 0

    async def slow(completion: str) -> float:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.001)
        running -= 1
        return even(completion)

    _, steps, actor = go(arithmetic, tmp_path / "a", score=slow, reward={"max_concurrency": 5})
    _, plain, other = go(arithmetic, tmp_path / "b")
    assert [s["reward/mean"] for s in steps] == [s["reward/mean"] for s in plain]
    assert same(weights(actor), weights(other))
    assert peak == 5
