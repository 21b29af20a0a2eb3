"""Scripts of users: what workers get of them, and what happens when they import one that starts a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cluster import workers
from headrace.errors import ConfigError
from headrace.rewards.loading import load_function

SCRIPT = """
import functools
from headrace import RLTrainer, get_hf_model
from neighbour import bonus


def logged(function):
    @functools.wraps(function)
    def outer(*a, **k):
        return function(*a, **k)
    return outer


@logged
def score(completion, answer):
    return float(completion == answer) + bonus(completion)


def main():
    actor = get_hf_model("model", parallel_config={"dp": 2}, gpu_group="pair", device="cpu")
    run = {"dir": "runs", "name": "script", "tensorboard": False, "progress": "off"}
    trainer = RLTrainer(actor, score, run=run, rollout_batch_size=4, samples_per_prompt=4, max_new_tokens=3)
    result = trainer.train("train.jsonl", steps=1, learning_rate=1e-2)
    trainer.actor.save("kept")
    print(result.metrics["reward/mean"])
"""


@pytest.fixture
def script(arithmetic: Path) -> Path:
    neighbour = "def bonus(completion):\n    return 2.0 + sum(c in '02468' for c in completion)\n"
    (arithmetic / "neighbour.py").write_text(neighbour)
    file = arithmetic / "script.py"
    file.write_text(f'{SCRIPT}\n\nif __name__ == "__main__":\n    main()\n')
    return file


def test_a_script_with_its_own_reward(script: Path) -> None:
    """The reward is a decorated function of the script, which imports its neighbour; the actor is saved afterwards."""
    folder = script.parent
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 2.0
    # a start takes long, and a script hears of it as a command does
    assert "starting Ray on this host, for 2 processes" in done.stderr
    assert (folder / "runs/script/logs/pair-rank-1.log").is_file()
    start, kept, left = (
        (folder / f / "model.safetensors").read_bytes() for f in ("model", "kept", "runs/script/model")
    )
    assert kept == left != start


def test_a_worker_that_imports_a_script_starts_no_run(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr(workers, "_ranks_here", [0])
    assert load_function(f"{script}:score")("", answer="") == 3.0
    unguarded = script.parent / "unguarded.py"
    unguarded.write_text(f"{SCRIPT}\n\nmain()\n")
    before = set(script.parent.iterdir())
    with pytest.raises(ConfigError, match=r"if __name__ == '__main__':.*unguarded\.py, line"):
        load_function(f"{unguarded}:score")
    assert {p for p in script.parent.iterdir() if p.name != "__pycache__"} == before
