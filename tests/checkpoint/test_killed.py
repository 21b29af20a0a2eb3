"""SIGKILL at any moment, also inside a save: resumed until it ends, the run equals one that was left alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

HELD_OUT = ("eval.every_steps=3", "checkpoint.every_steps=2", "checkpoint.keep=1")


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    clock = ("time", "rollout/tokens_per_s")
    return [
        {
            k: v
            for k, v in json.loads(line).items()
            if k not in clock and not k.startswith(("time/", "memory/"))
        }
        for line in (run / name).read_text().splitlines()
    ]


def assert_same(a: Path, b: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl"):
        assert lines(a, name) == lines(b, name)
    for file in (
        "model/model.safetensors",
        *(str(p.relative_to(a)) for p in a.glob("checkpoints/step_*/*.s*")),
    ):
        one, other = load_file(a / file), load_file(b / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], other[k]) for k in one)
    assert not list(b.rglob(".*"))


class Killed:
    """One run that is killed again and again, and counts what happened to it."""

    def __init__(self, killable: Any, cwd: Path, *argv: str) -> None:
        self.run, self.cwd, self.argv = killable, cwd, argv
        self.kills = 0
        cwd.mkdir()

    def go(self, **order: Any) -> bool:
        """Starts or resumes it. True once it has ended by itself."""
        has_checkpoint = any((self.cwd / "runs" / "r" / "checkpoints").glob("step_*/state.json"))
        how = "run.resume=true" if has_checkpoint else "run.overwrite=true"
        code = self.run(self.cwd, *self.argv, how, **order)
        assert code in (0, -9), (self.cwd / "log.txt").read_text()[-3000:]
        self.kills += code == -9
        if code == -9 and has_checkpoint:  # what was there can still be read
            latest = self.cwd / "runs" / "r" / "checkpoints" / "latest"
            assert not latest.exists() or latest.read_text().startswith("step_")
        return code == 0


@pytest.fixture(scope="module")
def whole(killable: Any, arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs left alone, by their arguments."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*argv: str) -> Path:
        if argv not in made:
            folder = tmp_path_factory.mktemp("whole")
            assert killable(folder, *argv) == 0, (folder / "log.txt").read_text()[-3000:]
            made[argv] = folder / "runs" / "r"
        return made[argv]

    return get


def argv_of(arithmetic: Path, steps: int, *more: str) -> tuple[str, ...]:
    return ("train", f"train.steps={steps}", f"eval={arithmetic / 'heldout.jsonl'}", *HELD_OUT, *more)


def test_killed_inside_saves(killable: Any, whole: Any, arithmetic: Path, tmp_path: Path) -> None:
    """At every third step of what saves do; the next attempt is killed elsewhere."""
    argv = argv_of(arithmetic, 6, "algorithm.kl_coefficient=0.1")
    killed = Killed(killable, tmp_path / "r", *argv)
    for number in (8, 16, 5, 3, 12, 7):
        if killed.go(kill_at_write=number):
            break
    assert killed.go()
    assert killed.kills == 6
    assert_same(whole(*argv), tmp_path / "r" / "runs" / "r")


PPO = ("algorithm=ppo", "critic.warmup_steps=2", "train.samples_per_update=8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [("train.samples_per_update=8", "algorithm.kl_coefficient=0.1"), PPO], ids=["grpo", "ppo"]
)
def test_killed_at_random(
    killable: Any, whole: Any, arithmetic: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """At least 20 times each, by the clock, in as many runs as that takes."""
    argv = argv_of(arithmetic, 30, *more)
    expected, draws, kills, number = whole(*argv), random.Random(0), 0, 0
    while kills < 20:  # a quick machine ends a run after fewer
        number += 1
        killed = Killed(killable, tmp_path / str(number), *argv)
        while not killed.go(kill_after_s=draws.uniform(0.3, 1.2) if killed.kills < 24 else None):
            assert killed.kills < 60
        assert killed.kills > 0
        assert_same(expected, tmp_path / str(number) / "runs" / "r")
        kills += killed.kills


@pytest.mark.slow
def test_killed_at_every_point_of_its_saves(
    killable: Any, whole: Any, arithmetic: Path, tmp_path: Path
) -> None:
    """At the n-th call of fsync, rename or rmtree, for every n until the run ends before it."""
    argv = argv_of(arithmetic, 4, "algorithm.kl_coefficient=0.1")
    expected, number, kills = whole(*argv), 0, 0
    while True:
        number += 1
        killed = Killed(killable, tmp_path / str(number), *argv)
        if killed.go(kill_at_write=number):
            break
        kills += 1
        assert killed.go()
        assert_same(expected, tmp_path / str(number) / "runs" / "r")
    assert kills >= 20
