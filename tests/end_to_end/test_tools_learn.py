"""examples/tools: a model that cannot multiply learns to ask a calculator."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace.agents.environment import Step, load_environment
from headrace.cli import main
from headrace.models.hf import load_tokenizer
from headrace.observe.run_dir import RunDirectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's task."""
    folder = tmp_path_factory.mktemp("tools")
    before = list(sys.path)
    sys.path.insert(0, str(EXAMPLE))
    try:
        import make_task
    finally:
        sys.path[:] = before
    make_task.make(folder / "task")
    return folder


def run(folder: Path, command: str, recipe: str, model: str, data: str, *more: str) -> RunDirectory:
    paths = [
        f"model={folder / model / 'model'}",
        f"data.path={folder / 'task' / data}",
        f"eval.path={folder / 'task' / 'heldout.jsonl'}",
    ]
    assert main([command, str(EXAMPLE / recipe), *paths, f"run.dir={folder}", *more]) == 0
    return RunDirectory(folder / recipe.removesuffix(".yaml"))


def accuracies(directory: RunDirectory) -> list[float]:
    return [m["eval/accuracy"] for m in directory.read_metrics() if "eval/accuracy" in m]


def test_the_example_s_files_fit_together(folder: Path) -> None:
    few = ["eval.limit_rows=4", "train.warmup_updates=0", "run.overwrite=true", "run.tensorboard=false"]
    warm = run(
        folder, "sft", "sft.yaml", "task", "worksheets.jsonl", *few, "train.steps=10", "data.limit_rows=200"
    )
    assert "eval/agent/turns_mean" in warm.read_metrics()[-1]
    small = ["train.steps=1", "train.prompts_per_step=8", "rollout.samples_per_prompt=4"]
    trained = run(folder, "train", "grpo.yaml", "sft", "train.jsonl", *few, *small, "data.limit_rows=50")
    samples = [json.loads(line) for line in trained.samples.read_text().splitlines()]
    assert all(s["episode"][0]["role"] == "assistant" for s in samples)


def test_worksheets_show_what_the_environment_would_have_written(folder: Path) -> None:
    make = load_environment(f"{EXAMPLE}/environment.py:Calculator")
    tokenizer = load_tokenizer(str(folder / "task" / "model"))
    rows = [json.loads(line) for line in (folder / "task" / "worksheets.jsonl").read_text().splitlines()]
    calls = [row for row in rows if row["answer"].startswith("<tool_call>")]
    shown = {row["prompt"]: row["answer"] for row in rows if "<tool_response>" in row["prompt"]}
    assert 0.25 < len(calls) / (len(rows) - len(calls)) < 0.35
    for row in calls[:50]:
        environment = make()
        environment.reset({"answer": "0"})
        said = row["prompt"] + row["answer"] + "".join(environment.step(row["answer"]).text)
        answer = shown[said]
        assert environment.step(answer) == Step(done=True, reward=0.0)
        ids = tokenizer(said + answer)["input_ids"]
        assert len(ids) == 6 + 7 + 2 + 2 * len(answer)  # the four words are one token each
        assert tokenizer.decode(ids) == said + answer


@pytest.mark.learn
def test_the_model_learns_to_use_the_calculator(folder: Path) -> None:
    warm = run(folder, "sft", "sft.yaml", "task", "worksheets.jsonl", "run.overwrite=true")
    assert accuracies(warm)[-1] < 0.5
    trained = run(folder, "train", "grpo.yaml", "sft", "train.jsonl", "run.overwrite=true")
    measured = accuracies(trained)
    assert measured[-1] - measured[0] >= 0.2
    assert measured[-1] >= 0.9
    assert trained.read_metrics()[-1]["eval/agent/part/tool_calls"] >= 0.9
