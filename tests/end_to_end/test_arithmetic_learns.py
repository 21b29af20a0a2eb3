"""The demo's task for real: SFT, then GRPO and PPO, each raising held-out greedy accuracy (minutes; marked `learn`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.observe.run_dir import RunDirectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's task and its model after SFT."""
    folder = tmp_path_factory.mktemp("arithmetic")
    sys.path.insert(0, str(EXAMPLE))
    try:
        import task
    finally:
        sys.path.remove(str(EXAMPLE))
    task.make(folder / "task")
    code = main(
        [
            "sft",
            str(EXAMPLE / "sft.yaml"),
            f"model={folder / 'task' / 'model'}",
            f"data.path={folder / 'task' / 'worksheets.jsonl'}",
            f"eval.path={folder / 'task' / 'heldout.jsonl'}",
            f"run.dir={folder}",
        ]
    )
    assert code == 0
    return folder


def accuracies(run: Path) -> list[float]:
    return [m["eval/accuracy"] for m in RunDirectory(run).read_metrics() if "eval/accuracy" in m]


@pytest.mark.learn
def test_the_warm_start_is_mostly_wrong(warm_start: Path) -> None:
    assert accuracies(warm_start / "sft")[-1] < 0.5


@pytest.mark.learn
@pytest.mark.parametrize(("recipe", "reached"), [("grpo", 0.9), ("ppo", 0.8)])
def test_reinforcement_raises_held_out_accuracy(warm_start: Path, recipe: str, reached: float) -> None:
    code = main(
        [
            "train",
            str(EXAMPLE / f"{recipe}.yaml"),
            f"model={warm_start / 'sft' / 'model'}",
            f"data.path={warm_start / 'task' / 'train.jsonl'}",
            f"eval.path={warm_start / 'task' / 'heldout.jsonl'}",
            f"run.dir={warm_start}",
        ]
    )
    assert code == 0
    measured = accuracies(warm_start / recipe)
    assert measured[-1] - measured[0] >= 0.2
    assert measured[-1] >= reached
