"""The files of examples/cluster: what they mean, and (slow) that they run; one on a Ray cluster of three nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.layouts import placement_of
from headrace.config_load import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
ROLES = ("actor", "rollout", "critic", "reference", "reward_model")
WORLDS = {"grpo_colocated": 2, "ppo_four_groups": 4, "reward_model_group": 3}


def test_every_example_is_known() -> None:
    assert {f.stem for f in (EXAMPLES / "cluster").glob("*.yaml")} == WORLDS.keys()


@pytest.mark.parametrize("name", WORLDS)
def test_what_they_mean(name: str) -> None:
    config = load_config(EXAMPLES / "cluster" / f"{name}.yaml")
    p = placement_of(config.cluster, ROLES)
    assert (p.device, p.world) == ("cpu", WORLDS[name])
    assert p.apart("actor", "reward_model") == (name != "grpo_colocated")
    assert not p.apart("actor", "rollout")
    assert config.reward.function is not None
    assert Path(config.reward.function.partition(":")[0]).is_file()


def started(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A command in a process of its own, since it is Ray's for as long as that is in use."""
    inherited = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    inherited["PYTHONPATH"] = str(EXAMPLES.parent)
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", *arguments],
        cwd=folder,
        env={**inherited, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def headrace(folder: Path, *arguments: str, **environment: str) -> None:
    command = started(folder, *arguments, **environment)
    said = command.communicate(timeout=500)[1]
    assert command.returncode == 0, said


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples start from, trained for two steps."""
    folder = tmp_path_factory.mktemp("examples")
    python = {"cwd": folder, "check": True, "env": {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}}
    subprocess.run([sys.executable, str(EXAMPLES / "rlhf/make_task.py")], **python)  # type: ignore[call-overload]
    code = "import task; from pathlib import Path; task.make(Path('demo_run/task'))"
    python["env"]["PYTHONPATH"] += f":{EXAMPLES}/arithmetic"  # type: ignore[index]
    subprocess.run([sys.executable, "-c", code], **python)  # type: ignore[call-overload]
    for command, file in (
        ("sft", "arithmetic/sft"),
        ("sft", "rlhf/sft"),
        ("reward-model", "rlhf/reward_model"),
    ):
        headrace(folder, command, str(EXAMPLES / f"{file}.yaml"), "train.steps=2", "eval.limit_rows=10")
    return folder


@pytest.fixture
def three_nodes() -> Iterator[Any]:
    """A Ray cluster with 2, 1 and 1 CPUs, each a node of its own."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        yield cluster
    finally:
        cluster.shutdown()


def metrics(folder: Path, run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_they_run(made: Path, name: str) -> None:
    headrace(made, "train", str(EXAMPLES / f"cluster/{name}.yaml"), "train.steps=2")
    run = "demo_run" if name == "grpo_colocated" else "rlhf_run"
    assert len(list((made / run / name / "logs").iterdir())) == WORLDS[name]
    assert (made / run / name / "model/model.safetensors").is_file()


@pytest.mark.slow
def test_four_groups_on_three_nodes_give_what_one_process_gives(made: Path, three_nodes: Any) -> None:
    short = ["train.steps=3", "critic.warmup_steps=1"]
    joined = {"RAY_ADDRESS": three_nodes.address, "RAY_AUTH_MODE": "disabled"}
    headrace(
        made, "train", str(EXAMPLES / "cluster/ppo_four_groups.yaml"), *short, "run.name=nodes", **joined
    )
    headrace(made, "train", str(EXAMPLES / "rlhf/ppo.yaml"), *short, "run.name=alone")
    keys = {"reward/mean", "reward/repeated_fraction", "critic/loss", "critic/grad_norm", "actor/grad_norm"}
    ours, theirs = (
        [{key: step[key] for key in sorted(keys & step.keys())} for step in metrics(made, f"rlhf_run/{run}")]
        for run in ("nodes", "alone")
    )
    assert set().union(*ours) == keys
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_a_node_that_is_gone_ends_the_run_by_name(made: Path, three_nodes: Any) -> None:
    more = ["train.steps=1000", "run.name=killed", "checkpoint.every_steps=1"]
    command = started(
        made,
        "train",
        str(EXAMPLES / "cluster/ppo_four_groups.yaml"),
        *more,
        RAY_ADDRESS=three_nodes.address,
        RAY_AUTH_MODE="disabled",
    )
    try:
        folder = made / "rlhf_run/killed"
        deadline = time.monotonic() + 300
        while not (folder / "checkpoints/latest").exists():
            assert command.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        three_nodes.remove_node(next(iter(three_nodes.worker_nodes)), allow_graceful=False)
        said = command.communicate(timeout=60)[1]
    finally:
        command.kill()
    assert command.returncode == 1
    (error,) = [line for line in said.splitlines() if line.startswith("headrace: ")]
    for part in ("rank ", "failed: its process died", "its log is "):
        assert part in error
    assert list(folder.glob("checkpoints/step_*"))
