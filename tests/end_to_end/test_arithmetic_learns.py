"""The demo's task for real: SFT, then every algorithm raises held-out greedy accuracy (minutes; marked `learn`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.config_presets import PRESETS
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


def train(warm_start: Path, recipe: str, *overrides: str) -> int:
    return main(
        [
            "train",
            str(EXAMPLE / f"{recipe}.yaml"),
            f"model={warm_start / 'sft' / 'model'}",
            f"data.path={warm_start / 'task' / 'train.jsonl'}",
            f"eval.path={warm_start / 'task' / 'heldout.jsonl'}",
            f"run.dir={warm_start}",
            *overrides,
        ]
    )


@pytest.mark.learn
@pytest.mark.parametrize(("recipe", "reached"), [("grpo", 0.9), ("ppo", 0.8)])
def test_the_examples_reach_what_they_promise(warm_start: Path, recipe: str, reached: float) -> None:
    assert train(warm_start, recipe) == 0
    measured = accuracies(warm_start / recipe)
    assert measured[-1] - measured[0] >= 0.2
    assert measured[-1] >= reached


@pytest.mark.learn
@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_raises_held_out_accuracy(warm_start: Path, name: str) -> None:
    """By its name alone, over the settings of the GRPO example; 20 steps are a tenth of that example's."""
    short = ["train.steps=20", "eval.every_steps=0", "run.tensorboard=false"]
    assert train(warm_start, "grpo", f"algorithm.name={name}", f"run.name=short-{name}", *short) == 0
    before, after = accuracies(warm_start / f"short-{name}")
    assert after - before >= 0.2


def timeline(run: Path) -> dict[int, dict[str, tuple[float, float]]]:
    """Step → stage → when it began and ended, in seconds of the step."""
    out: dict[int, dict[str, tuple[float, float]]] = {}
    for line in map(json.loads, (run / "timeline.jsonl").read_text().splitlines()):
        out.setdefault(line["step"], {})[line["stage"]] = (line["begin_s"], line["end_s"])
    return out


@pytest.mark.learn
@pytest.mark.parametrize(
    ("recipe", "layout", "reached"), [("grpo", "cpu_2", 0.9), ("ppo", "cpu_4_split", 0.8)]
)
def test_they_learn_as_much_over_several_processes(
    warm_start: Path, recipe: str, layout: str, reached: float
) -> None:
    """With four groups the critic, the reference and the actor work at the same time."""
    assert train(warm_start, recipe, f"cluster={layout}", f"run.name={recipe}-{layout}") == 0
    measured = accuracies(warm_start / f"{recipe}-{layout}")
    assert measured[-1] - measured[0] >= 0.2
    assert measured[-1] >= reached
    if layout == "cpu_4_split":
        steps = timeline(warm_start / f"{recipe}-{layout}").values()
        pairs = [(s["values"], s["reference"]) for s in steps] + [(s["critic"], s["update"]) for s in steps]
        overlapping = sum(a[0] < b[1] and b[0] < a[1] for a, b in pairs)
        assert overlapping > len(pairs) / 2
