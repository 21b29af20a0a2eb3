"""A disk that is really full, or a limit on file sizes that acts like one, inside a save."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_killed import assert_same

STEPS = ("train.steps=3", "checkpoint.every_steps=1", "checkpoint.keep=1")


def log(folder: Path) -> str:
    return (folder / "log.txt").read_text()


def test_a_save_over_the_limit_keeps_the_one_before(killable: Any, arithmetic: Path, tmp_path: Path) -> None:
    """Files may have 3 MB from step 2 on: the model (2 MB) fits, weights with moments (6 MB) do not."""
    evaluated = (*STEPS, f"eval={arithmetic / 'heldout.jsonl'}")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    assert killable(whole, "train", *evaluated) == 0
    assert killable(cut, "train", "train.steps=1", *evaluated[1:]) == 0
    run = cut / "runs" / "r"
    before = (run / "checkpoints" / "step_1" / "actor.safetensors").read_bytes()
    assert killable(cut, "train", *evaluated, "run.resume=true", file_limit=3_000_000) == 1
    assert (
        "step_2: the checkpoint cannot be written (File too large); the checkpoint before it, step_1"
        in log(cut)
    )
    assert "the run goes on without it" in log(cut)
    assert "headrace: runs/r/checkpoints/step_3: the checkpoint cannot be written (File too large)" in log(
        cut
    )
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step_1", "latest", "best"}
    assert (run / "checkpoints" / "step_1" / "actor.safetensors").read_bytes() == before
    assert (run / "model" / "model.safetensors").is_file()  # 2 MB, so it had room
    assert killable(cut, "train", *evaluated, "run.resume=true") == 0
    one, other = (r / "runs" / "r" / "model" / "model.safetensors" for r in (whole, cut))
    assert one.read_bytes() == other.read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=28m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user cannot mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_at_the_last_whole_checkpoint(
    killable: Any, arithmetic: Path, small_disk: Path, tmp_path: Path
) -> None:
    """28 MB hold four checkpoints of 6 MB, until another file takes the room."""
    evaluated = (f"eval={arithmetic / 'heldout.jsonl'}", "eval.every_steps=1", "checkpoint.keep=1")
    whole = tmp_path / "whole"
    whole.mkdir()
    assert killable(whole, "train", "train.steps=3", "checkpoint.every_steps=1", *evaluated) == 0
    first = ("train.steps=1", "checkpoint.every_steps=1", "run.save_final=false", *evaluated)
    assert killable(small_disk, "train", *first) == 0, log(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 18_000_000)
    more = ("train.steps=3", "checkpoint.every_steps=1", "run.resume=true", *evaluated)
    assert killable(small_disk, "train", *more) == 1
    run = small_disk / "runs" / "r"
    assert "the checkpoint cannot be written (No space left on device)" in log(small_disk)
    assert (run / "checkpoints" / "latest").read_text() == "step_1\n"
    filler.unlink()
    assert killable(small_disk, "train", *more) == 0, log(small_disk)
    assert_same(whole / "runs" / "r", run)
