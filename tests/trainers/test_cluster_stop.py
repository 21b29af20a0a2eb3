"""Ctrl-C within a rollout of several ranks: soon heeded, by all ranks after the same turn, and nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_cluster_faults import steps_done, wait_for_step
from test_cluster_runs import LAYOUTS, assert_equal_runs, run
from test_cluster_staleness import LAYOUTS as STALE

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))
from test_ray import descendants, gone, needs_ray  # noqa: E402

SLOW = '''
"""While slow.txt is there, each draw of a rollout takes as many seconds as it says; started.txt says that one did."""
import time
from pathlib import Path
import headrace.rollout.native.engine as native

HERE, draw = Path(__file__).parent, native.sample

def slowly(*arguments):
    if (HERE / "slow.txt").exists():
        (HERE / "started.txt").write_text("yes")
        time.sleep(float((HERE / "slow.txt").read_text() or 0))
    return draw(*arguments)

native.sample = slowly
'''
SETTINGS: dict[str, Any] = {
    "rollout": {"samples_per_prompt": 4, "max_new_tokens": 5, "max_concurrent_sequences": 4},
    "train": {"steps": 8, "prompts_per_step": 8, "learning_rate": 1e-3},
    "checkpoint": {"every_steps": 3},
}


AHEAD = {
    **SETTINGS,
    "rollout": {**SETTINGS["rollout"], "staleness": 1},
    "algorithm": {"importance_weights": "token_truncate", "gap_warn": 9.0},
}


def launch(
    arithmetic: Path, folder: Path, *overrides: str, settings: dict[str, Any] = SETTINGS
) -> subprocess.Popen[str]:
    (folder / "slow.py").write_text(SLOW)
    config = {
        **settings,
        "run": {"name": "r", "dir": str(folder), "device": "cpu", "progress": "plain", "tensorboard": False},
        "model": {"path": str(arithmetic / "model")},
        "data": {"path": str(arithmetic / "train.jsonl")},
        "reward": {"function": f"{arithmetic}/reward.py:score"},
        "algorithm": {**settings.get("algorithm", {}), "plugin": f"{folder}/slow.py"},
        "cluster": {"timeout_s": 60},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", "train", str(folder / "run.yaml"), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def stop_in_a_rollout(
    process: subprocess.Popen[str], folder: Path, to_all: bool, each_s: float = 1.0
) -> tuple[str, float]:
    """Ctrl-C in a rollout of some 40 draws of `each_s`; the output, and the seconds it took."""
    (folder / "slow.txt").write_text(f"{each_s}")
    deadline = time.monotonic() + 60
    while not (folder / "started.txt").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.5)
    started = time.monotonic()
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    (folder / "slow.txt").unlink()
    return output, time.monotonic() - started


@pytest.fixture(scope="module")
def alone(arithmetic: Path) -> Path:
    """The same run in one process, left alone."""
    settings = {**SETTINGS, "eval": {"path": None}}
    return run(arithmetic, "stop-alone", settings)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, to_all", [("dp2", True), ("tp2", False), ("zero3x2", False), ("dp2xtp2", False), ("pp2", True)]
)
def test_all_ranks_leave_a_rollout(
    arithmetic: Path, alone: Path, tmp_path: Path, layout: str, to_all: bool
) -> None:
    """Under zero3 and pp the rollout has whole copies of the weights; under tp ranks need each other in each turn."""
    process = launch(arithmetic, tmp_path, LAYOUTS[layout])
    wait_for_step(tmp_path, process, 2)
    every = descendants(process.pid)
    output, seconds = stop_in_a_rollout(process, tmp_path, to_all)
    assert process.returncode == 130, output
    assert seconds < 20, output
    assert "failed: " not in output
    done = steps_done(tmp_path)
    assert done == list(range(1, len(done) + 1))
    assert len(done) < 8
    directory = tmp_path / "r"
    assert (directory / "checkpoints" / "latest").read_text() == f"step_{len(done)}\n"
    assert f"at the user's request, after step {len(done)}" in output
    logs = sorted((directory / "logs").glob("*-rank-*.log"))
    ends = {
        log.stem: re.findall(rf"step {len(done) + 1} .*broken off after turn (\d+)", log.read_text())
        for log in logs
    }
    # a rank with rows of its own may have been through before things got slow
    assert [turns for turns in ends.values() if turns], ends
    assert all(len(turns) <= 1 for turns in ends.values()), ends
    if "tp2" in layout:  # neighbours have the same rows
        turns = [ends[f"all-rank-{rank}"] for rank in range(len(ends))]
        assert turns[0::2] == turns[1::2]
    assert gone(every)
    again = launch(arithmetic, tmp_path, LAYOUTS[layout], "run.resume=true")
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    assert_equal_runs(alone, directory)


@needs_ray
@pytest.mark.slow
def test_a_rollout_made_ahead_is_waited_for(arithmetic: Path, tmp_path: Path) -> None:
    """Its rows are of weights that are gone, so the checkpoint has to have them."""
    whole = run(arithmetic, "stop-ahead-alone", {**AHEAD, "eval": {"path": None}})
    apart = STALE["one and one"]
    process = launch(arithmetic, tmp_path, apart, settings=AHEAD)
    wait_for_step(tmp_path, process, 2)
    output, seconds = stop_in_a_rollout(process, tmp_path, False, each_s=0.2)
    assert process.returncode == 130, output
    assert seconds > 3
    done = steps_done(tmp_path)
    newest = tmp_path / "r" / "checkpoints" / f"step_{len(done)}"
    assert (newest / "ahead.safetensors").is_file()
    again = launch(arithmetic, tmp_path, apart, "run.resume=true", settings=AHEAD)
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    assert_equal_runs(whole, tmp_path / "r")
