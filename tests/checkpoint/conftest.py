"""A process that runs `headrace` in children which are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., int]


@pytest.fixture(scope="session")
def killable(arithmetic: Path) -> Iterator[Run]:
    """`killable(cwd, "train", "train.steps=3", kill_after_s=0.5)` → exit code, -9 when it was killed."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "fork_server.py"), str(arithmetic / "model")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"

    def run(cwd: Path, *argv: str, **order: Any) -> int:
        assert server.stdin is not None
        assert server.stdout is not None
        common = [f"model={arithmetic / 'model'}", f"data={arithmetic / 'train.jsonl'}"]
        common += [f"reward={arithmetic / 'reward.py'}:score", "run.tensorboard=false", "run.progress=off"]
        common += ["rollout.samples_per_prompt=4", "rollout.max_new_tokens=5", "train.prompts_per_step=4"]
        common += ["train.learning_rate=1e-3", "run.name=r"]
        order |= {"argv": [argv[0], *common, *argv[1:]], "cwd": str(cwd)}
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        return int(json.loads(server.stdout.readline())["code"])

    yield run
    server.stdin.close()
    server.wait(timeout=10)
    server.stdout.close()
