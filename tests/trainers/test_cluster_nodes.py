"""Runs that join a Ray cluster of several nodes: equal to one process; what a lost node or a mistake leaves behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ray_nodes import Nodes
from test_cluster_faults import BREAK, ROOT, steps_done, wait_for_step
from test_cluster_runs import PPO, assert_equal_runs, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs 127.0.0.2 and so on"),
]
GROUPS = "groups: {a: 1, c: 1, r: 1}, roles: {actor: {gpu_group: a}, critic: {gpu_group: c}, reference: {gpu_group: r}}"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Three nodes of one CPU each."""
    folder = Path(tempfile.mkdtemp(prefix="hrn-", dir="/tmp"))
    made = Nodes(folder, 3)
    yield made
    made.close()
    shutil.rmtree(folder)


def launch(
    nodes: Nodes, folder: Path, arithmetic: Path, *overrides: str, **settings: Any
) -> subprocess.Popen[str]:
    """PPO from the command line with a reward and a loss that break when told to; run directory `folder`/r."""
    (folder / "broken.py").write_text(BREAK)
    config = {
        **PPO,
        "run": {"name": "r", "dir": str(folder), "device": "cpu", "progress": "plain", "tensorboard": False},
        "model": {"path": str(arithmetic / "model")},
        "data": {"path": str(arithmetic / "train.jsonl")},
        "reward": {"function": f"{folder}/broken.py:score"},
        **settings,
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", "train", str(folder / "run.yaml"), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **nodes.environment,
            "RAY_ADDRESS": nodes.address,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
        start_new_session=True,
    )


def places(directory: Path) -> dict[int, tuple[str, str]]:
    """Rank → (address, node) as its log begins."""
    found = {}
    for log in (directory / "logs").glob("*-rank-*.log"):
        match = re.search(r"on host \S+ \(([\d.]+)\), Ray node (\w+)", log.read_text())
        assert match is not None
        found[int(log.stem.rpartition("-")[2])] = (match[1], match[2])
    return found


def left_behind(nodes: Nodes) -> list[Any]:
    """What a run still has in the cluster: named actors, placement groups, CPUs in use. Ray takes seconds to notice."""
    for _ in range(100):
        state = nodes.state()
        busy = len(state["nodes"]) - state["free"]
        found = [*state["actors"], *state["groups"], *([f"{busy} CPUs"] if busy else [])]
        if not found:
            return []
        time.sleep(0.2)
    return found


def test_split_ppo_over_three_nodes(nodes: Nodes, arithmetic: Path, tmp_path: Path) -> None:
    settings = {"reward": {"function": f"{arithmetic}/reward.py:score"}}
    settings |= {"eval": {"path": str(arithmetic / "heldout.jsonl"), "every_steps": 2}}
    alone = run(arithmetic, "ppo-no-nodes", PPO)
    process = launch(nodes, tmp_path, arithmetic, "cluster=cpu_4_split", **settings)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert_equal_runs(alone, tmp_path / "r")
    state = nodes.state()
    assert sorted(places(tmp_path / "r")) == [0, 1, 2]
    # each rank on a node of its own, and those are the cluster's
    assert {node: address for address, node in places(tmp_path / "r").values()} == state["nodes"]
    assert left_behind(nodes) == []
    assert not list((tmp_path / "r" / "logs").glob(".*"))


@pytest.mark.parametrize("how", ["raise", "interrupt", "kill"])
def test_nothing_stays_in_the_cluster(nodes: Nodes, arithmetic: Path, tmp_path: Path, how: str) -> None:
    """Hosts that are described get a node each; a rank raises, Ctrl-C, or the controller itself is killed."""
    layout = "cluster.layout={device: cpu, nodes: [{name: n, count: 2}], groups: {all: all}}"
    process = launch(nodes, tmp_path, arithmetic, layout, "train.steps=10000", "checkpoint.every_steps=1")
    wait_for_step(tmp_path, process, 2)
    assert nodes.state()["free"] == len(nodes.state()["nodes"]) - 2
    assert len({node for _, node in places(tmp_path / "r").values()}) == 2
    started = time.monotonic()
    if how == "raise":
        (tmp_path / "flag.txt").write_text("reward raise")
    else:
        os.killpg(process.pid, signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - started < 60
    assert process.returncode == {"raise": 1, "interrupt": 130, "kill": -9}[how], output
    if how == "raise":
        said = " ".join(output.split())
        assert re.search(
            r"stage 'reward' of .* rank 1 \(all 1, host \S+ \(127\.0\.0\.\d\)\) failed: .*the toy broke", said
        )
    assert left_behind(nodes) == []


@pytest.mark.parametrize("group", ["actor", "critic", "reference"])
def test_a_node_is_killed_in_the_middle_of_a_step(
    nodes: Nodes, arithmetic: Path, tmp_path: Path, group: str
) -> None:
    """What notices is chance: a stage, also of a group that wants rows from the lost node, or a checkpoint."""
    overrides = ["cluster=cpu_4_split", "checkpoint.every_steps=1"]
    process = launch(nodes, tmp_path, arithmetic, *overrides, "train.steps=10000")
    wait_for_step(tmp_path, process, 2)
    found = places(tmp_path / "r")
    rank = ["actor", "critic", "reference"].index(group)
    started = time.monotonic()
    nodes.kill(found[rank][1])
    nodes.add()
    output, _ = process.communicate(timeout=90)
    assert time.monotonic() - started < 60
    assert process.returncode == 1
    where = re.escape(found[rank][0])
    assert re.search(
        r"(stage '\w+' of flow 'ppo', step \d+ \(\w+\)|\w+\.(save_state|stay)|reading rows from the workers): "
        rf"rank {rank} \({group} 0, host \S+ \({where}\)\) failed: its process died \(.*node.*\)",
        " ".join(output.split()),
    ), output
    assert found[rank][1] not in nodes.state()["nodes"]
    assert left_behind(nodes) == []
    latest = (tmp_path / "r" / "checkpoints" / "latest").read_text().strip()
    done = int(latest.removeprefix("step_"))
    assert done in (steps_done(tmp_path)[-1], steps_done(tmp_path)[-1] - 1)
    process = launch(nodes, tmp_path, arithmetic, *overrides, f"train.steps={done + 2}", "run.resume=true")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert steps_done(tmp_path)[-1] == done + 2
    assert left_behind(nodes) == []


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["cluster.parallelism={dp: 4}"], "cluster.layout: needs 4 CPUs; the Ray cluster has 3 on 4 node(s)"),
        (
            [f"cluster.layout={{device: cpu, nodes: [{{name: n, devices_per_node: 3}}], {GROUPS}}}"],
            "cluster.layout.nodes: describe hosts of which 3 CPUs are used, each to be a node; the Ray cluster's nodes"
            " have 1, 1, 1, 0",
        ),
    ],
)
def test_a_cluster_that_is_too_small(
    nodes: Nodes, arithmetic: Path, tmp_path: Path, overrides: list[str], said: str
) -> None:
    assert len(nodes.state()["nodes"]) == 3
    started = time.monotonic()
    process = launch(nodes, tmp_path, arithmetic, *overrides)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - started < 40
    assert process.returncode == 2
    assert said in " ".join(output.split())
    assert left_behind(nodes) == []
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("listens", [False, True])
def test_a_wrong_address(nodes: Nodes, arithmetic: Path, tmp_path: Path, listens: bool) -> None:
    """Nothing listens, or something that is no Ray cluster."""
    with socket.socket() as other:
        other.bind(("127.0.0.9", 0))
        if listens:
            other.listen()
        wrong = Nodes.__new__(Nodes)
        wrong.environment, wrong.address = nodes.environment, f"127.0.0.9:{other.getsockname()[1]}"
        started = time.monotonic()
        process = launch(wrong, tmp_path, arithmetic, "cluster=cpu_2")
        output, _ = process.communicate(timeout=240)
    assert time.monotonic() - started < 60
    assert process.returncode == 2
    assert f"RAY_ADDRESS: {'cannot join a' if listens else 'no'} Ray cluster" in output
    assert wrong.address in output


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, for a mount")
@pytest.mark.parametrize("what", ["run.dir", "model.path"])
def test_a_host_without_the_shared_folder(nodes: Nodes, arithmetic: Path, tmp_path: Path, what: str) -> None:
    (tmp_path / "runs").mkdir()
    model = tmp_path / "model"
    shutil.copytree(arithmetic / "model", model)
    odd = nodes.add(hidden=tmp_path / "runs" if what == "run.dir" else model)
    try:
        process = launch(
            nodes, tmp_path, arithmetic, f"run.dir={tmp_path}/runs", f"model.path={model}",
            "cluster.parallelism={dp: 4}", "train.prompts_per_step=4"
        )  # fmt: skip
        output, _ = process.communicate(timeout=240)
        said = " ".join(output.split())
        assert process.returncode == 2, output
        if what == "run.dir":
            address = re.escape(nodes.state()["nodes"][odd])
            assert re.search(rf"run\.dir: host \S+ \({address}\) does not see the folder", said)
        else:
            assert re.search(r"rank \d .*model\.path: ", said)
        assert left_behind(nodes) == []
    finally:
        nodes.kill(odd)
