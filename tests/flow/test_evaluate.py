"""Held-out evaluation: each row once, pass@k, the error of the accuracy, the best checkpoint, samples to compare."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_resume import go_back, merged, start
from tiny_run import Sections, even, lines

from headrace.flow.evaluate import best_step


def evaluated(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k.startswith("eval/")}


def test_pass_at_k_and_its_error(arithmetic: Path, tmp_path: Path) -> None:
    """10 rows with 4 samples each; sample i of row r is correct when r > 2 i, and row 0's last has no reward.

    So row r has 0, 1, 1, 2, 2, 3, 3, 4, 4, 4 correct samples.
    """
    calls: list[int] = []

    def score(completion: str, prompt_id: int, sample_index: int) -> float | None:
        calls.append(prompt_id)
        if prompt_id == 0 and sample_index == 3:
            return None
        return 1.0 if prompt_id > 2 * sample_index else 0.5

    sections: Sections = {
        "train": {"steps": 1},
        "rollout": {"max_concurrent_sequences": 3},  # batches of 3 rows: 3 + 3 + 3 + 1
        "eval": {"samples_per_prompt": 4, "temperature": 1.0},
    }
    start(arithmetic, tmp_path, score, held_out=True, **sections)
    first = evaluated(lines(tmp_path / "r")[0])
    counts = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert sorted(calls[:40]) == sorted(list(range(10)) * 4)  # every row, each sample once
    assert first["eval/rows"] == 40
    assert first["eval/accuracy"] == pytest.approx(24 / 39)
    shares = np.array(counts) / np.array([3] + [4] * 9)
    assert first["eval/accuracy_stderr"] == pytest.approx(shares.std(ddof=1) / math.sqrt(10))
    assert first["eval/pass_at_1"] == pytest.approx(shares.mean())
    # pairs without a correct sample: of 3 for row 0 all, of 6 for one correct 3, for two 1
    assert first["eval/pass_at_2"] == pytest.approx(1 - (1 + 2 * 3 / 6 + 2 * 1 / 6) / 10)
    assert first["eval/pass_at_4"] == 1.0  # row 0 has only three samples and no part in it
    assert not [k for k in first if k.startswith("eval/pass_at_") and k[-1] not in "124"]


def test_one_sample_has_no_pass_at_k(arithmetic: Path, tmp_path: Path) -> None:
    start(arithmetic, tmp_path, held_out=True, train={"steps": 1})
    first = evaluated(lines(tmp_path / "r")[0])
    assert not [k for k in first if "pass_at" in k]
    p = first["eval/accuracy"]
    assert first["eval/accuracy_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / 9))


@pytest.mark.parametrize(("wanted", "rows"), [(0, 0), (3, 8), (9, 9), (99, 10)])
def test_the_same_rows_are_kept_each_time(arithmetic: Path, tmp_path: Path, wanted: int, rows: int) -> None:
    sections: Sections = {
        "run": {"samples_per_step": wanted},
        "train": {"steps": 2},
        "eval": {"every_steps": 1, "samples_per_prompt": 2},
    }
    start(arithmetic, tmp_path, held_out=True, **sections)
    if rows == 0:
        assert not (tmp_path / "r" / "eval_samples.jsonl").exists()
        return
    samples = lines(tmp_path / "r", "eval_samples.jsonl")
    assert [(s["step"], s["prompt_id"]) for s in samples] == [(t, r) for t in (0, 1, 2) for r in range(rows)]
    prompts = [row["prompt"] for row in lines(arithmetic, "heldout.jsonl")]
    for sample in samples:
        assert sample["prompt"] == prompts[sample["prompt_id"]]
        assert sample["reward"] == pytest.approx(even(sample["completion"]))
        assert sample["sample_index"] == 0


def test_the_best_by_accuracy_then_reward_then_first() -> None:
    def measured(accuracy: float | None, reward: float | None) -> dict[str, float]:
        given = {"eval/accuracy": accuracy, "eval/reward_mean": reward, "eval/rows": 3.0}
        return {k: v for k, v in given.items() if v is not None}

    assert best_step({}) is None
    assert best_step({0: measured(0.9, 1.0)}) is None  # there is no checkpoint of the start
    assert best_step({0: measured(0.9, 1.0), 2: measured(0.1, 0.1)}) == 2
    assert best_step({2: measured(0.5, 0.1), 4: measured(0.4, 0.9)}) == 2
    assert best_step({2: measured(0.0, 0.1), 4: measured(0.0, 0.3), 6: measured(0.0, 0.2)}) == 4
    assert best_step({6: measured(0.5, 0.3), 2: measured(0.5, 0.3)}) == 2
    assert best_step({2: measured(None, None), 4: measured(None, -1.0)}) == 4


def test_the_best_checkpoint_stays(arithmetic: Path, tmp_path: Path) -> None:
    """The reward of held-out rows is best at step 2 of 5; the newest and the best are kept, also over a restart."""
    at = {0: 0.5, 1: 0.2, 2: 0.8, 3: 0.4, 4: 0.8, 5: 0.1}
    step, seen = 0, 0

    def score(completion: str, prompt_id: int, finish_reason: str) -> float:
        nonlocal step, seen
        seen += 1
        if seen <= 10:  # 10 held-out rows come before the first step and after each, 16 samples in each
            return at[step]
        if seen == 26:
            step, seen = step + 1, 0
        return even(completion)

    sections: Sections = {
        "train": {"steps": 4},
        "eval": {"every_steps": 1},
        "checkpoint": {"every_steps": 0, "keep": 1},
    }
    result = start(arithmetic, tmp_path, score, held_out=True, **sections)
    assert [result.evaluations[t]["eval/reward_mean"] for t in range(5)] == pytest.approx(
        [0.5, 0.2, 0.8, 0.4, 0.8]
    )
    folder = tmp_path / "r" / "checkpoints"
    assert {p.name for p in folder.iterdir()} == {"step_2", "step_4", "latest", "best"}
    assert (folder / "best").read_text() == "step_2\n"
    step, seen = 5, 10
    longer = merged(sections, train={"steps": 5}, run={"resume": True})

    def later(completion: str) -> float:
        nonlocal seen
        seen += 1
        return 0.1 if seen > 26 else even(completion)

    resumed = start(arithmetic, tmp_path, later, held_out=True, **longer)
    assert resumed.evaluations[5]["eval/reward_mean"] == pytest.approx(0.1)
    assert (folder / "best").read_text() == "step_2\n"
    assert {p.name for p in folder.iterdir()} == {"step_2", "step_4", "step_5", "latest", "best"}


def test_another_evaluation_starts_the_comparison_anew(
    arithmetic: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sections: Sections = {
        "eval": {"every_steps": 1, "path": str(arithmetic / "heldout.jsonl")},
        "checkpoint": {"keep": 9, "every_steps": 1},
    }
    start(arithmetic, tmp_path, held_out=True, **sections)
    go_back(tmp_path / "r", 1)
    changed = merged(sections, eval={"temperature": 0.7}, run={"resume": True})
    with caplog.at_level("INFO"):
        result = start(arithmetic, tmp_path, held_out=True, **changed)
    assert "earlier ones do not count" in caplog.text
    assert list(result.evaluations) == [2]
    assert (tmp_path / "r" / "checkpoints" / "best").read_text() == "step_2\n"


def test_the_best_can_be_loaded(arithmetic: Path, tmp_path: Path) -> None:
    """What `best` names holds the weights of that step, under the model's own names."""
    sections: Sections = {"train": {"steps": 2}, "eval": {"every_steps": 1}}
    start(arithmetic, tmp_path, lambda completion: 0.5, held_out=True, **sections)
    folder = tmp_path / "r" / "checkpoints"
    best = load_file(folder / (folder / "best").read_text().strip() / "actor.safetensors")
    start_model = load_file(arithmetic / "model" / "model.safetensors")
    # equal rewards teach nothing, so every weight is still the start's
    assert all(torch.equal(best[f"weight/{name}"], tensor) for name, tensor in start_model.items())
