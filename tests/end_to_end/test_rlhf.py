"""The example's chain by its own files: SFT, then a reward model and PPO, or DPO. Short, and (marked `learn`) whole."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.observe.run_dir import RunDirectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "rlhf"

SHORT = {
    "sft": ["train.steps=2"],
    "reward-model": ["train.steps=2", "eval.limit_rows=20"],
    "train": [
        "train.steps=2",
        "train.prompts_per_step=4",
        "train.samples_per_update=8",
        "critic.warmup_steps=1",
    ],
    "dpo": ["train.steps=2", "eval.limit_rows=20"],
    "eval": ["data.limit_rows=8"],
}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's ingredients in the current folder, which the configurations name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    # by its file: another example has a make_task of its own, which may be imported in this process too
    spec = importlib.util.spec_from_file_location("make_task", EXAMPLE / "make_task.py")
    assert spec is not None
    assert spec.loader is not None
    make_task = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_task", make_task)
    spec.loader.exec_module(make_task)
    make_task.make(make_task.OUT)


def step(command: str, config: str, *more: str) -> None:
    assert main([command, str(EXAMPLE / f"{config}.yaml"), "run.progress=off", *more]) == 0


def metrics(run: str) -> list[dict[str, float]]:
    return RunDirectory(Path("rlhf_run") / run).read_metrics()


def test_two_steps_of_everything(task: None, capsys: pytest.CaptureFixture[str]) -> None:
    for command, config in (
        ("sft", "sft"),
        ("reward-model", "reward_model"),
        ("train", "ppo"),
        ("dpo", "dpo"),
    ):
        step(command, config, *SHORT[command])
        assert metrics(config)[-1]["step"] == 2
        assert (Path("rlhf_run") / config / "model" / "model.safetensors").is_file()
    capsys.readouterr()
    for model in ("ppo", "dpo"):
        step("eval", "eval", f"model=rlhf_run/{model}/model", *SHORT["eval"])
        assert json.loads(capsys.readouterr().out)["eval/rows"] == 8
    assert metrics("reward_model")[0]["eval/rows"] == metrics("dpo")[0]["eval/rows"] == 20
    ppo = metrics("ppo")[0]
    assert "reward/part/rising" in ppo
    assert ppo["reward/std"] > 0


def test_held_out_prompts_and_pairs_are_held_out(task: None) -> None:
    """No order of a held-out prompt's digits is learned from, and every held-out pair is right."""

    def read(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in Path(f"rlhf_run/task/{name}.jsonl").read_text().splitlines()]

    held_out = {"".join(sorted(row["prompt"])) for name in ("heldout", "heldout_pairs") for row in read(name)}
    for name in ("worksheets", "prompts", "pairs"):
        assert held_out.isdisjoint("".join(sorted(row["prompt"])) for row in read(name))
    import make_task

    for row in read("heldout_pairs"):
        too_long = len(row["rejected"]) > make_task.DIGITS_SHOWN
        assert too_long or make_task.out_of_order(row["chosen"]) < make_task.out_of_order(row["rejected"])


def rising(model: str, capsys: pytest.CaptureFixture[str]) -> float:
    capsys.readouterr()
    step("eval", "eval", f"model=rlhf_run/{model}/model")
    found: float = json.loads(capsys.readouterr().out)["eval/accuracy"]
    return found


@pytest.mark.learn
def test_the_chain_learns_what_the_teacher_likes(task: None, capsys: pytest.CaptureFixture[str]) -> None:
    for command, config in (
        ("sft", "sft"),
        ("reward-model", "reward_model"),
        ("train", "ppo"),
        ("dpo", "dpo"),
    ):
        step(command, config)
    for run in ("reward_model", "dpo"):
        measured = [m["eval/accuracy"] for m in metrics(run) if "eval/accuracy" in m]
        assert measured[0] == pytest.approx(0.5, abs=0.15)
        assert measured[-1] > 0.8
    before = rising("sft", capsys)
    assert before < 0.2
    assert rising("ppo", capsys) > before + 0.4
    assert rising("dpo", capsys) > before + 0.4
