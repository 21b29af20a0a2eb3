"""Runs over given responses under sequence parallelism give what one process gives, adapters included."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_cluster_runs import TOLERANCE, metrics
from test_preference import run

LORA = ["lora.rank=4", "lora.alpha=8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, adapters",
    [("sft", []), ("sft", LORA), ("reward-model", []), ("dpo", [])],
    ids=["sft", "sft-lora", "reward-model", "dpo"],
)
def test_given_responses_under_sp(
    arithmetic: Path, pairs: Path, tmp_path: Path, command: str, adapters: list[str]
) -> None:
    data = arithmetic / "train.jsonl" if command == "sft" else pairs / "train.jsonl"
    settings = ["run.device=cpu", "train.steps=4", *adapters]
    settings += ["data.completion=answer"] if command == "sft" else []
    for name, more in (("alone", []), ("sp2", ["cluster.parallelism={sp: 2}"])):
        assert run(command, arithmetic, data, tmp_path, *settings, *more, f"run.name={name}") == 0
    ours, theirs = metrics(tmp_path / "alone"), metrics(tmp_path / "sp2")
    assert len(ours) >= 4
    if command == "dpo":  # the policy is still its reference, and rounding alone makes the margins
        assert ours[0].pop("dpo/accuracy") + theirs[0].pop("dpo/accuracy") > 0
    for a, b in zip(ours, theirs, strict=True):
        assert b == pytest.approx(a, rel=TOLERANCE, abs=TOLERANCE)
    first, second = (
        load_file(next((tmp_path / n / "model").glob("*.safetensors"))) for n in ("alone", "sp2")
    )
    assert first.keys() == second.keys()
    assert max(float((first[k] - second[k]).abs().max()) for k in first) < TOLERANCE
