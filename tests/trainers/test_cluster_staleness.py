"""A rollout on devices of its own that is a step ahead: the numbers of one process, and the time that it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_cluster_runs import PPO, assert_equal_runs, metrics, resume, run

AHEAD: dict[str, Any] = {
    "rollout": {"samples_per_prompt": 4, "max_new_tokens": 5, "staleness": 1},
    "algorithm": {"importance_weights": "token_truncate", "gap_warn": 9.0},
    "train": {"steps": 5, "prompts_per_step": 8, "samples_per_update": 16, "learning_rate": 1e-3},
    "checkpoint": {"every_steps": 2, "keep": 9},
}
APART = (
    "cluster.layout={{device: cpu, groups: {{train: {train}, generate: {generate}}}, roles: {{actor: {{gpu_group: train,"
    " parallelism: {{{degrees}}}}}, rollout: {{gpu_group: generate}}}}}}"
)
LAYOUTS = {
    "one and one": APART.format(train=1, generate=1, degrees=""),
    "zero3x2 and dp2": APART.format(train=2, generate=2, degrees="zero3: 2"),
    "tp2 and one": APART.format(train=2, generate=1, degrees="tp: 2"),
}


def bars(directory: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Of timeline.jsonl the last line of each step and stage: the first step has two rollouts, its own and the next."""
    lines = [json.loads(text) for text in (directory / "timeline.jsonl").read_text().splitlines()]
    return {(line["step"], line["stage"]): line for line in lines}


@pytest.fixture(scope="session")
def ahead_alone(arithmetic: Path) -> Path:
    return run(arithmetic, "ahead-alone", AHEAD)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_their_own_equal_one_process(arithmetic: Path, ahead_alone: Path, layout: str) -> None:
    directory = run(arithmetic, f"ahead-{layout.replace(' ', '-')}", AHEAD, LAYOUTS[layout])
    assert_equal_runs(ahead_alone, directory)
    # two updates a step; the second rollout still has the weights that the run began with
    lags = [line["rollout/weight_lag_updates"] for line in metrics(directory) if line["step"] > 0]
    assert lags == [0, 2, 2, 2, 2]
    found, overlaps = bars(directory), []
    assert (5, "rollout") not in found
    for step in range(1, 5):
        rollout, update = found[step, "rollout"], found[step, "update"]
        assert (rollout["group"], update["group"]) == ("generate", "train")
        both = min(rollout["end_s"], update["end_s"]) - max(rollout["begin_s"], update["begin_s"])
        overlaps.append(both)
    # on a busy machine a rollout of some milliseconds may end before the update begins, but not each
    assert max(overlaps) > 0


@pytest.mark.slow
def test_ppo_on_three_groups(arithmetic: Path) -> None:
    """A critic that starts alone, a reference beside it, several updates and passes a step."""
    settings = {
        **PPO,
        "rollout": AHEAD["rollout"],
        "algorithm": {**PPO["algorithm"], **AHEAD["algorithm"]},
    }
    three = (
        "cluster.layout={device: cpu, groups: {train: 1, generate: 1, others: 1}, roles: {actor: {gpu_group: train},"
        " rollout: {gpu_group: generate}, critic: {gpu_group: others}, reference: {gpu_group: others}}}"
    )
    one = run(arithmetic, "ahead-ppo-alone", settings)
    assert_equal_runs(one, run(arithmetic, "ahead-ppo", settings, three))
    # step 1 has no update of the actor, so what is made beside it and beside step 2 is of the same weights
    lags = [line["rollout/weight_lag_updates"] for line in metrics(one) if line["step"] > 0]
    assert lags == [0, 0, 8, 8, 8]


@pytest.mark.slow
def test_saved_in_one_process_and_resumed_on_groups(arithmetic: Path, ahead_alone: Path) -> None:
    directory = run(arithmetic, "ahead-resumed", AHEAD)
    resume(directory, LAYOUTS["zero3x2 and dp2"])
    assert_equal_runs(ahead_alone, directory)


@pytest.mark.slow
def test_saved_on_groups_and_resumed_in_one_process(arithmetic: Path, ahead_alone: Path) -> None:
    directory = run(arithmetic, "ahead-brought-home", AHEAD, LAYOUTS["zero3x2 and dp2"])
    resume(directory)
    assert_equal_runs(ahead_alone, directory)
