"""Ctrl-C within a rollout: dropped in workers as in one process, and what goes on is the run that was left alone."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_resume import values
from tiny_run import Sections, configuration, lines

import headrace.flow.run as flow_run
import headrace.rollout.native.engine as native
from headrace.cluster.inprocess import InProcess
from headrace.cluster.layouts import resolve
from headrace.flow.cluster import ClusterRuntime
from headrace.flow.run import RunResult
from headrace.observe.progress import Progress
from headrace.roles.actor import Actor
from headrace.trainers.launch import train

SECTIONS: Sections = {
    "train": {"steps": 3, "prompts_per_step": 4, "learning_rate": 1e-3},
    "algorithm": {"kl_coefficient": 0.1},
    "checkpoint": {"every_steps": 1, "keep": 9},
    "eval": {"every_steps": 2},
}


class Shown(Progress):
    """Notes what a display would show."""

    seen: list[tuple[str | None, float | None]]

    def stage(self, name: str | None, fraction: float | None = None) -> None:
        self.seen.append((name, fraction))


class Draws:
    """Presses Ctrl-C in draw `at` of the rollout engine, counted over the run."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self.count, self.at, self.draw = 0, at, native.sample
        patch.setattr(native, "sample", self)

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        if self.count == self.at:
            signal.raise_signal(signal.SIGINT)
        return self.draw(*arguments)


def on_worker(*arguments: Any) -> ClusterRuntime:
    """The runtime of a cluster, its one worker in this process."""
    return ClusterRuntime(InProcess(resolve("cpu_1", roles=["actor", "reference"])))


def go(folder: Path, out: Path, **run: Any) -> RunResult:
    config = configuration(folder, out, {**SECTIONS, "run": {"seed": 3, **run}})
    reward = f"{folder / 'reward.py'}:score"
    return train(
        config, Actor(config.model), reward, str(folder / "train.jsonl"), str(folder / "heldout.jsonl")
    )


def without_cluster(run: Path) -> list[dict[str, Any]]:
    """Metrics that one process has as well."""
    return [{k: v for k, v in line.items() if not k.startswith("cluster/")} for line in values(run)]


@pytest.fixture(scope="module")
def alone(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that nobody stops, and how often its rollouts draw."""
    out = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        draws = Draws(patch, -1)
        return go(arithmetic, out).directory, draws.count


@pytest.mark.parametrize("share", [0.02, 0.4, 0.62, 0.98])
def test_a_worker_is_stopped_where_one_process_is(
    arithmetic: Path, alone: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """In the first evaluation, in rollouts of steps and in the last evaluation; what is saved is equal, bit for bit."""
    whole, total = alone
    left = {}
    for name in ("process", "worker"):
        with monkeypatch.context() as patch:
            if name == "worker":
                patch.setattr(flow_run, "open_runtime", on_worker)
            draws = Draws(patch, max(1, int(share * total)))
            result = go(arithmetic, tmp_path / name)
            assert result.interrupted
            assert draws.count <= draws.at + 1  # one more may be drawn before the next point
            left[name] = result.directory
    one, other = left["process"], left["worker"]
    assert [line["step"] for line in lines(one)] == [line["step"] for line in lines(other)]
    newest = (one / "checkpoints" / "latest").read_text()
    assert newest == (other / "checkpoints" / "latest").read_text()
    a, b = (load_file(run / "checkpoints" / newest.strip() / "actor.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    assert all(a[key].equal(b[key]) for key in a)
    assert not [path for path in (other / "checkpoints").iterdir() if path.name.startswith(".")]
    with monkeypatch.context() as patch:
        patch.setattr(flow_run, "open_runtime", on_worker)
        assert not go(arithmetic, tmp_path / "worker", resume=True).interrupted
    assert without_cluster(whole) == without_cluster(other)
    for name in ("samples.jsonl", "eval_samples.jsonl", "model/model.safetensors"):
        assert (whole / name).read_bytes() == (other / name).read_bytes()


def test_workers_show_what_one_process_shows(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    for name in ("process", "worker"):
        with monkeypatch.context() as patch:
            shown = Shown(3, "test")
            shown.seen = seen[name] = []
            patch.setattr(flow_run, "make_progress", lambda *a, shown=shown, **k: shown)
            if name == "worker":
                patch.setattr(flow_run, "open_runtime", on_worker)
            go(arithmetic, tmp_path / name)
    rollouts = [fraction for name, fraction in seen["process"] if name == "rollout" and fraction is not None]
    assert len(rollouts) > 6
    assert {0.0, 1.0} < set(rollouts)
    assert seen["worker"] == seen["process"]
