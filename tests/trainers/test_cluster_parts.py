"""Checkpoints of whole runs that every rank wrote its part of: continued elsewhere, exported, and a full disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_cluster_runs import GRPO, LAYOUTS, PPO, assert_equal_runs, resume, run

from headrace.checkpoint.resume import read_checkpoint
from headrace.cli import main


@pytest.fixture(scope="session")
def one(arithmetic: Path) -> Path:
    return run(arithmetic, "saves-alone", {**PPO, "checkpoint": {"every_steps": 2, "keep": 9}})


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after", [("zero3x2", "pp2"), ("zero3x2", None), ("zero3x2xtp2", "tp2"), (None, "tp2")]
)
def test_saved_in_parts_and_continued(
    arithmetic: Path, one: Path, capsys: Any, before: str | None, after: str | None
) -> None:
    settings = {**PPO, "checkpoint": {"every_steps": 2, "keep": 9}}
    name = f"saves-{before}-{after}"
    directory = run(arithmetic, name, settings, *([LAYOUTS[before]] if before else []))
    step = directory / "checkpoints" / "step_2"
    ranks = {None: 1, "zero3x2": 2, "zero3x2xtp2": 4}[before]
    files = [f"{role}{part}.safetensors" for role in ("actor", "critic") for part in parts(ranks)]
    assert sorted(p.name for p in step.glob("*.safetensors")) == files
    alone = read_checkpoint(one / "checkpoints" / "step_2")
    for role in ("actor", "critic"):
        with read_checkpoint(step).tensors(role) as got, alone.tensors(role) as expected:
            assert {n: got.shape(n) for n in got} == {n: expected.shape(n) for n in expected}
    held = sum(t.nbytes for name in files for t in load_file(step / name).values())
    assert held == sum(
        t.nbytes
        for file in (one / "checkpoints" / "step_2").glob("*.safetensors")
        for t in load_file(file).values()
    )
    exported = directory.with_name(f"{name}-exported")
    assert main(["export", str(directory), str(exported), "--checkpoint=latest"]) == 0
    final, made = (load_file(folder / "model.safetensors") for folder in (directory / "model", exported))
    assert final.keys() == made.keys()
    assert all(torch.equal(final[k], made[k]) for k in final)
    overrides = [LAYOUTS[after]] if after else []
    capsys.readouterr()
    assert main(["plan", str(arithmetic / f"{name}.yaml"), "run.resume=true", *overrides]) == 0
    assert "step_5" in capsys.readouterr().out
    resume(directory, *overrides)
    assert_equal_runs(one, directory)


def parts(ranks: int) -> list[str]:
    return [""] if ranks == 1 else [f"-{i + 1:05}-of-{ranks:05}" for i in range(ranks)]


FULL = '''
import resource
from pathlib import Path
import torch.distributed as dist

METRICS = Path(__file__).parent / "runs" / "saves-full" / "metrics.jsonl"

def score(completion, answer):
    """In step 2 files of rank 1 may have 1 MB, and its part of the state has 3."""
    if dist.is_initialized() and dist.get_rank() == 1:
        done = METRICS.read_text().count("\\n") if METRICS.exists() else 0
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000 if done == 1 else most, most))
    return sum(c in "02468" for c in completion) / 5
'''


@pytest.mark.slow
def test_a_rank_whose_disk_is_full(arithmetic: Path, capsys: Any) -> None:
    """That save fails, the run goes on with the one before, and the next save is good."""
    (arithmetic / "full.py").write_text(FULL)
    settings = {
        **GRPO,
        "train": {**GRPO["train"], "steps": 3},
        "reward": {"function": f"{arithmetic}/full.py:score"},
        "checkpoint": {"every_steps": 1, "keep": 9},
        "eval": {},
    }
    directory = run(arithmetic, "saves-full", settings, "cluster.parallelism={zero3: 2}")
    said = capsys.readouterr()
    assert (
        "step_2: the checkpoint cannot be written (actor-00002-of-00002.safetensors: File too large); the checkpoint"
        " before it, step_1, is still good; the run goes on without it"
    ) in said.out + said.err
    there = {p.name for p in (directory / "checkpoints").iterdir()}
    assert there == {"step_1", "step_3", "latest"}
    assert json.loads((directory / "checkpoints" / "step_3" / "state.json").read_text())["step"] == 3
