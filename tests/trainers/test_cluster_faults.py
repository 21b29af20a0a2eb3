"""A rank that raises, dies or hangs in a stage of a run, and signals: named, soon over, nothing left, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))
from test_ray import descendants, gone, private_folders  # noqa: E402

BREAK = '''
import os, signal, time
from pathlib import Path
import torch.distributed as dist
from headrace.algorithms.losses.ppo_clip import ppo_clip_loss
from headrace.algorithms.registry import register_loss

HERE = Path(__file__).parent

def broken(stage):
    """What rank 1 does in this stage once it is told to; the steps before that are good."""
    flag = HERE / "flag.txt"
    if not flag.exists() or not dist.is_initialized() or dist.get_rank() != 1:
        return
    where, how = flag.read_text().split()
    if where != stage:
        return
    (HERE / "reached.txt").write_text("yes")
    if how == "raise":
        raise ValueError("the toy broke")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)

def score(completion, answer):
    broken("reward")
    return sum(c in "02468" for c in completion) / 5

def slow(completion, answer):
    time.sleep(0.05)
    return score(completion, answer)

@register_loss("broken")
def broken_loss(inputs, settings):
    broken("update")
    return ppo_clip_loss(inputs, settings)
'''


def launch(
    arithmetic: Path, folder: Path, steps: int, reward: str, timeout_s: float, **group: Any
) -> subprocess.Popen[str]:
    (folder / "broken.py").write_text(BREAK)
    config = {
        "run": {"name": "r", "dir": str(folder), "device": "cpu", "progress": "plain", "tensorboard": False},
        "model": {"path": str(arithmetic / "model")},
        "data": {"path": str(arithmetic / "train.jsonl")},
        "reward": {"function": f"{folder}/broken.py:{reward}"},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 5},
        "algorithm": {"plugin": f"{folder}/broken.py", "loss": "broken"},
        "train": {"steps": steps, "prompts_per_step": 8, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 1},
        "cluster": {"layout": "cpu_2", "timeout_s": timeout_s},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", "train", str(folder / "run.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_for_step(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    file, deadline = folder / "r" / "metrics.jsonl", time.monotonic() + 200
    while time.monotonic() < deadline:
        if file.exists() and file.read_text().count("\n") >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError("the run did not get so far")


def steps_done(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["reward", "update"])
@pytest.mark.parametrize(
    "how, said", [("raise", "ValueError: the toy broke"), ("kill", "its process died"), ("hang", "it is at ")]
)
def test_a_rank_breaks_in_a_stage(arithmetic: Path, tmp_path: Path, stage: str, how: str, said: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    process = launch(arithmetic, tmp_path, 10_000, "score", timeout_s=15)
    wait_for_step(tmp_path, process, 2)
    every = descendants(process.pid)
    folders = private_folders(every)
    (tmp_path / "flag.txt").write_text(f"{stage} {how}")
    started = time.monotonic()
    output, _ = process.communicate(timeout=90)
    assert time.monotonic() - started < 60
    assert process.returncode == 1
    assert (tmp_path / "reached.txt").exists()
    assert said in output
    assert f"stage '{stage}' of flow 'grpo', step {steps_done(tmp_path)[-1] + 1} (actor): rank 1" in output
    assert gone(every)
    assert set(os.listdir("/dev/shm")) <= shared
    assert not [folder for folder in folders if folder.exists()]
    latest = (tmp_path / "r" / "checkpoints" / "latest").read_text().strip()
    assert latest == f"step_{steps_done(tmp_path)[-1]}"
    assert f"checkpoints/{latest}; the same command with run.resume=true continues" in output
    assert output.count("failed: ") == 1
    assert "raylet" not in output  # Ray has a message of its own for a process that died


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, to_all", [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_a_signal_ends_the_run_with_what_it_has(
    arithmetic: Path, tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    """Ctrl-C in a terminal goes to every process of the group; SIGTERM to all of them ends the ranks as well."""
    shared = set(os.listdir("/dev/shm"))
    process = launch(arithmetic, tmp_path, 10_000, "slow", timeout_s=60)
    wait_for_step(tmp_path, process, 1)
    every = descendants(process.pid)
    (os.killpg if to_all else os.kill)(process.pid, number)
    output, _ = process.communicate(timeout=60)
    if (number, to_all) == (signal.SIGTERM, True):
        assert process.returncode in (1, 130), output
    else:
        assert process.returncode == 130, output
        assert (tmp_path / "r" / "model" / "model.safetensors").is_file()
    latest = (tmp_path / "r" / "checkpoints" / "latest").read_text().strip()
    assert latest == f"step_{steps_done(tmp_path)[-1]}"
    assert gone(every)
    assert set(os.listdir("/dev/shm")) <= shared
