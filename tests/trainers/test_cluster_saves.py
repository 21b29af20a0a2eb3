"""A save that fails in a worker, as on a full disk: reported, and the run goes on or ends as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))
from test_ray import needs_ray  # noqa: E402

LIMIT = '''
"""Files of the ranks may have 1 MB in the updates and saves of the steps that limit.txt names: no save fits."""
import resource
from pathlib import Path
from headrace.algorithms.losses.ppo_clip import ppo_clip_loss
from headrace.algorithms.registry import register_loss

HERE = Path(__file__).parent
updates = 0

@register_loss("limited")
def limited_loss(inputs, settings):
    global updates
    updates += 1
    wanted = str(updates) in (HERE / "limit.txt").read_text().split()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000 if wanted else most, most))
    return ppo_clip_loss(inputs, settings)
'''


def go(arithmetic: Path, folder: Path, limit: str, layout: str) -> tuple[int, str]:
    """A run of three steps of one pack each; its exit code and what it said."""
    folder.mkdir()
    (folder / "limit.py").write_text(LIMIT)
    (folder / "limit.txt").write_text(limit)
    config = {
        "run": {"name": "r", "dir": str(folder), "device": "cpu", "progress": "plain", "tensorboard": False},
        "model": {"path": str(arithmetic / "model")},
        "data": {"path": str(arithmetic / "train.jsonl")},
        "reward": {"function": f"{arithmetic}/reward.py:score"},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 5},
        "algorithm": {"plugin": f"{folder}/limit.py", "loss": "limited"},
        "train": {"steps": 3, "prompts_per_step": 8, "learning_rate": 1e-3, "tokens_per_microbatch": 65536},
        "checkpoint": {"every_steps": 1, "keep": 9},
        "cluster": {"parallelism": json.loads(layout), "timeout_s": 60},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    process = subprocess.run(
        [sys.executable, "-m", "headrace", "train", str(folder / "run.yaml")],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return process.returncode, process.stderr


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("layout", ['{"dp": 2, "tp": 1}', '{"zero3": 2}'], ids=["dp2", "zero3x2"])
def test_the_run_goes_on_without_a_checkpoint_that_does_not_fit(
    arithmetic: Path, tmp_path: Path, layout: str
) -> None:
    code, said = go(arithmetic, tmp_path / "whole", "", layout)
    assert code == 0, said
    code, said = go(arithmetic, tmp_path / "cut", "2", layout)
    assert code == 0, said
    assert (
        "step_2: the checkpoint cannot be written (File too large); the checkpoint before it, step_1, is still good;"
        " the run goes on without it" in said
    )
    assert "failed: " not in said
    checkpoints = tmp_path / "cut" / "r" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step_1", "step_3", "latest"}
    assert hidden(tmp_path / "cut" / "r") == hidden(tmp_path / "whole" / "r")
    one, other = (load_file(tmp_path / n / "r" / "model" / "model.safetensors") for n in ("whole", "cut"))
    assert all(one[key].equal(other[key]) for key in one)


@needs_ray
@pytest.mark.slow
def test_at_the_end_path_and_cause_are_named(arithmetic: Path, tmp_path: Path) -> None:
    """Neither the last checkpoint nor the model fits; the error is that of one process, and no rank is blamed."""
    code, said = go(arithmetic, tmp_path / "cut", "3", '{"dp": 2, "tp": 1}')
    assert code == 1
    model = tmp_path / "cut" / "r" / "model"
    assert f"headrace: {model}: the model cannot be written" in said
    assert "rank " not in said
    assert not model.exists()
    assert {p.name for p in (model.parent / "checkpoints").iterdir()} == {"step_1", "step_2", "latest"}
    assert not [name for name in hidden(model.parent) if name.startswith((".step", ".model"))]
