"""examples/lora on the demo's task: two steps on a model of random weights, and for real (`learn`, minutes)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from headrace.cli import main
from headrace.observe.run_dir import RunDirectory

EXAMPLES = Path(__file__).parents[2] / "examples"


def make_task(folder: Path, **sizes: int) -> None:
    sys.path.insert(0, str(EXAMPLES / "arithmetic"))
    try:
        import task
    finally:
        sys.path.remove(str(EXAMPLES / "arithmetic"))
    task.make(folder / "demo_run" / "task", **sizes)


def accuracies(run: str) -> list[float]:
    metrics = RunDirectory(Path("demo_run") / run).read_metrics()
    return [m["eval/accuracy"] for m in metrics if "eval/accuracy" in m]


def test_two_steps_then_the_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's own files, as its README runs them."""
    make_task(tmp_path, largest=9, held_out=10)
    monkeypatch.chdir(tmp_path)
    shutil.copytree("demo_run/task/model", "demo_run/sft/model")
    small = ["train.steps=2", "train.prompts_per_step=4", "rollout.samples_per_prompt=4"]
    assert main(["train", str(EXAMPLES / "lora" / "grpo.yaml"), *small]) == 0
    assert len(accuracies("lora")) == 2
    assert main(["export", "demo_run/lora", "demo_run/merged", "--merged"]) == 0
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[4, 12, 5, 13]])
    adapter, merged = (
        AutoModelForCausalLM.from_pretrained(f"demo_run/{p}") for p in ("lora/model", "merged")
    )
    with torch.no_grad():
        torch.testing.assert_close(adapter(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)
    assert main(["eval", str(EXAMPLES / "lora" / "grpo.yaml"), "model=demo_run/merged"]) == 0


@pytest.mark.learn
def test_adapters_alone_raise_held_out_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["sft", str(EXAMPLES / "arithmetic" / "sft.yaml")]) == 0
    assert main(["train", str(EXAMPLES / "lora" / "grpo.yaml")]) == 0
    before, *_, after = accuracies("lora")
    assert before < 0.5
    assert after >= 0.85
