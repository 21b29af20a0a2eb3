"""Preference pairs for the tests beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def pairs(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.jsonl (60 pairs) and heldout.jsonl (10): the right sum, and one too high."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (arithmetic / f"{name}.jsonl").read_text().splitlines()]
        made = [
            {"prompt": r["prompt"], "chosen": r["answer"], "rejected": str(int(r["answer"]) + 1)}
            for r in rows
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder
