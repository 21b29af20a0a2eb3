"""Workers as Ray processes: the same calls as simulated ones, collectives, isolation, faults, leaving nothing behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.cluster.group import WorkerGroup
from headrace.cluster.inprocess import InProcess
from headrace.cluster.layouts import resolve
from headrace.cluster.placement import Placement
from headrace.cluster.pulse import BrokenOff
from headrace.cluster.ray import RayExecutor
from headrace.cluster.ray_cluster import allowed_environment
from headrace.cluster.sweeper import descendants
from headrace.cluster.workers import Executor
from headrace.data.batch import Batch
from headrace.errors import ConfigError, MissingExtraError, RunError, WorkerError

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
TOY = f"{Path(__file__).parent / 'toys.py'}:Toy"
ROLES = {
    "actor": {"gpu_group": "a", "parallelism": {"dp": 3}},
    "rollout": {"gpu_group": "a", "parallelism": {"tp": 3}},
    "critic": {"gpu_group": "b", "parallelism": {"dp": 1}},
}


def placement() -> Placement:
    return resolve({"device": "cpu", "roles": ROLES}, roles=list(ROLES))


def groups_of(executor: Executor) -> list[WorkerGroup]:
    groups = [WorkerGroup(executor, role) for role in ROLES]
    for group in groups:
        group.create(TOY, factor=3)
    return groups


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_TOY", "passed on")
        patch.setenv("SECRET_OF_THE_CONTROLLER", "kept")
        executor = RayExecutor(placement(), tmp_path_factory.mktemp("run") / "logs", timeout_s=60)
    with executor:
        yield executor


@pytest.fixture(scope="module")
def groups(cluster: RayExecutor) -> list[WorkerGroup]:
    return groups_of(cluster)


def prompts() -> Batch:
    return Batch([0] * 5, rows={"row": torch.arange(5), "name": list("abcde")})


def dataflow(executor: Executor, groups: list[WorkerGroup]) -> Batch:
    """Rows made, moved to another parallelism and another group, merged again."""
    actor, rollout, critic = groups
    made = rollout.call("repeat", rollout.put(prompts())).handle
    scaled = actor.call("scaled", made, reads=["input_ids"])
    text = critic.start("text_length", made, reads=["text"])
    mean = actor.call(
        "group_mean", scaled.handle.merged(made, ["group"]), reads=["group", "sum"], together="group"
    )  # type: ignore[union-attr]
    measured = text.result()
    whole = mean.handle.merged(measured.handle, measured.written)  # type: ignore[union-attr, arg-type]
    return actor.fetch(whole)


@needs_ray
def test_processes_give_what_simulated_ranks_give(cluster: RayExecutor, groups: list[WorkerGroup]) -> None:
    simulated = InProcess(placement(), device="cpu")
    want, got = dataflow(simulated, groups_of(simulated)), dataflow(cluster, groups)
    assert got.columns == want.columns
    assert got.lengths.tolist() == want.lengths.tolist()
    for name, column in want.tokens.items():
        assert torch.equal(got[name], column)
    for name, values in want.rows.items():
        assert list(got[name]) == list(values)


@needs_ray
def test_each_rank_is_a_process_and_colocated_roles_share_it(groups: list[WorkerGroup]) -> None:
    actor, rollout, critic = (g.call("place").every_value for g in groups)
    assert [place[:4] for place in actor] == [[0, 4, 0, 0], [1, 4, 1, 1], [2, 4, 2, 2]]
    assert [place[4] for place in rollout] == [0, 1, 2]
    assert critic[0][:3] == [3, 4, 0]
    pids = [place[-1] for place in actor]
    assert len({*pids, critic[0][-1], os.getpid()}) == 5
    assert [place[-1] for place in rollout] == pids


@needs_ray
def test_collectives_run_over_the_group_also_with_ranks_without_rows(groups: list[WorkerGroup]) -> None:
    batch = Batch([3, 2], {"input_ids": torch.tensor([1, 2, 3, 4, 5])})
    assert groups[0].call("total", groups[0].put(batch)).every_value == (15, 15, 15)


@needs_ray
def test_the_controller_carries_no_rows(cluster: RayExecutor, groups: list[WorkerGroup]) -> None:
    actor, _, critic = groups
    carried, moved = [], []
    for tokens in (4, 4000):
        handle = actor.put(Batch([tokens] * 8, {"input_ids": torch.ones(8 * tokens, dtype=torch.int64)}))
        before = cluster.traffic.data_bytes
        result = critic.call("scaled", handle)
        assert cluster.traffic.data_bytes == before
        carried.append(result.controller_bytes)
        moved.append(result.moved_bytes)
    assert abs(carried[0] - carried[1]) < 64
    assert moved[1] > 8 * 4000 * 8


@needs_ray
def test_ranks_get_the_allowed_environment_and_write_logs_of_their_own(
    cluster: RayExecutor, groups: list[WorkerGroup]
) -> None:
    names = ["HEADRACE_TOY", "SECRET_OF_THE_CONTROLLER"]
    values = groups[0].call("environment", arguments={"names": names}).values
    assert values == ({"HEADRACE_TOY": "passed on", "SECRET_OF_THE_CONTROLLER": None},) * 3
    assert sorted(p.name for p in cluster.logs.iterdir()) == [
        "a-rank-0.log", "a-rank-1.log", "a-rank-2.log", "b-rank-3.log",
    ]  # fmt: skip


@needs_ray
def test_nothing_of_a_private_cluster_listens_beyond_loopback(groups: list[WorkerGroup]) -> None:
    pids = {place[-1] for g in groups for place in g.call("place").every_value}
    inodes = {
        os.readlink(fd)[8:-1]
        for pid in pids | set(descendants(os.getpid()))
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if os.path.islink(fd) and os.readlink(fd).startswith("socket:")
    }
    listening = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    addresses = {f[1].split(":")[0] for f in listening if f[3] == "0A" and f[9] in inodes}
    assert addresses
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@needs_ray
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_ranks_say_how_far_they_are_and_break_off(
    cluster: RayExecutor, groups: list[WorkerGroup], apart: bool
) -> None:
    """Ranks with the same rows after the same turn, or one would wait in a collective for good; others at once."""
    actor, rollout, _ = groups
    group = actor if apart else rollout
    # 3 x 2000 turns of 20 ms a rank alone, 9 x 2000 together: minutes
    handle = group.put(Batch([1] * 9, rows={"row": torch.arange(9)}))
    heard: list[float | None] = []

    def report(fraction: float | None) -> bool:
        heard.append(fraction)
        return len([fraction for fraction in heard if fraction is not None]) > 2

    started, sizes = time.monotonic(), cluster.traffic.reply_bytes
    call = group.start("turns", handle, arguments={"each": 2000, "seconds": 0.02, "apart": apart})
    with pytest.raises(BrokenOff):
        call.result(report)
    assert time.monotonic() - started < 30
    assert cluster.traffic.reply_bytes - sizes < 200
    known = [fraction for fraction in heard if fraction is not None]
    assert known == sorted(known)
    assert 0 < known[0] <= known[-1] < 0.5
    ends = [cluster.log_path(r).read_text().splitlines()[-1] for r in group.ranks]
    assert all(f"{group.name}.turns: broken off after turn " in line for line in ends)
    if not apart:
        assert len({line.rpartition("broken off")[2] for line in ends}) == 1
    again = group.start("turns", handle, arguments={"each": 2, "seconds": 0.0, "apart": apart})
    assert again.result(lambda fraction: False).values == ((6, 6, 6) if apart else (18,))


@needs_ray
def test_a_rank_that_raises_is_named_and_all_are_released(
    cluster: RayExecutor, groups: list[WorkerGroup]
) -> None:
    """Last on this cluster, which it ends."""
    pids = [place[-1] for g in groups for place in g.call("place").every_value]
    started = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"actor\.fail: rank 1 \(a 1, host .+\) failed: ValueError: the toy broke"
    ):
        groups[0].call("fail", arguments={"rank": 1, "how": "raise"})
    assert time.monotonic() - started < 20
    with pytest.raises(WorkerError, match="the toy broke"):
        groups[2].call("place")
    assert gone(pids)
    assert "the toy broke" in cluster.log_path(1).read_text()


SCRIPT = """
import sys
from pathlib import Path
from headrace.cluster.group import WorkerGroup
from headrace.cluster.layouts import resolve
from headrace.cluster.ray import RayExecutor
if __name__ == "__main__":
    with RayExecutor(resolve("cpu_2"), Path(sys.argv[1]), timeout_s=float(sys.argv[4])) as executor:
        actor = WorkerGroup(executor, "actor")
        actor.create(sys.argv[2])
        print("pids", *(place[-1] for place in actor.call("place").every_value), flush=True)
        actor.call("fail", arguments={"rank": 1, "how": sys.argv[3]})
"""


@needs_ray
@pytest.mark.parametrize(
    "how, timeout_s, number, ends_with",
    [
        ("kill", 60, None, "its process died"),
        pytest.param("hang", 3, None, "it is at ", marks=pytest.mark.slow),
        pytest.param("stop", 3, None, "does not answer", marks=pytest.mark.slow),
        ("hang", 60, signal.SIGTERM, ""),
        pytest.param("hang", 60, signal.SIGINT, "KeyboardInterrupt", marks=pytest.mark.slow),
        pytest.param("hang", 60, signal.SIGKILL, "", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_faults_and_signals_leave_nothing_behind(
    tmp_path: Path, how: str, timeout_s: float, number: int | None, ends_with: str
) -> None:
    script = tmp_path / "launch.py"
    script.write_text(SCRIPT)
    shared = set(os.listdir("/dev/shm"))
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(script), str(tmp_path / "logs"), TOY, how, str(timeout_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    line = process.stdout.readline()  # type: ignore[union-attr]
    assert line.startswith("pids"), process.communicate()[1]
    every = descendants(process.pid)
    assert len(every) > 3
    folders = private_folders(every)
    assert folders
    if number is not None:
        time.sleep(1)
        process.send_signal(number)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - started < 45
    assert ends_with in errors
    if number is None:
        assert "rank 1 (all 1, host" in errors
    assert gone(every)
    assert set(os.listdir("/dev/shm")) <= shared
    assert not [folder for folder in folders if folder.exists()]


ONCE = """
import sys
from pathlib import Path
from headrace.cluster.group import WorkerGroup
from headrace.cluster.layouts import resolve
from headrace.cluster.ray import RayExecutor
if __name__ == "__main__":
    with RayExecutor(resolve("cpu_1"), Path(sys.argv[1])) as executor:
        actor = WorkerGroup(executor, "actor")
        actor.create(sys.argv[2])
        print(actor.call("place").values)
"""


@needs_ray
@pytest.mark.slow
def test_ten_simultaneous_launches_all_start(tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text(ONCE)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / f"logs-{i}"), TOY],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(10)
    ]
    for process in running:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert out.startswith("([0, 1, 0, 0, 0, 0,")


def private_folders(pids: list[int]) -> set[Path]:
    """Folders of the private cluster that these processes are of; other clusters of the machine have theirs."""
    commands = [_command(pid) for pid in pids]
    return {folder for folder in Path("/tmp").glob("hr-*") if any(str(folder) in c for c in commands)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def gone(pids: list[int]) -> bool:
    """Whether all these processes end within some seconds."""
    for _ in range(100):
        alive = [p for p in pids if Path(f"/proc/{p}/stat").exists() and _state(p) != "Z"]
        if not alive:
            return True
        time.sleep(0.2)
    return False


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_without_ray_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        RayExecutor(placement(), tmp_path)
    assert caught.value.violations == [
        "a cluster of several processes needs the package `ray`: pip install 'headrace[ray]'"
        " (in a checkout: pip install -e '.[ray]')"
    ]


@needs_ray
def test_a_ray_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="Ray, which is installed but cannot be imported"):
        RayExecutor(resolve("cpu_2"), tmp_path)


def test_a_full_disk_while_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/tmp/hr-1")

    monkeypatch.setattr(RayExecutor, "_connect", full)
    with pytest.raises(RunError, match=r"cannot be started: .*No space left on device: '/tmp/hr-1'"):
        RayExecutor(resolve("cpu_2"), tmp_path)


def test_a_cluster_that_does_not_answer(cluster: RayExecutor, tmp_path: Path) -> None:
    cluster.close()
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: no Ray cluster answers at '127\.0\.0\.1:9'"):
        RayExecutor(placement(), tmp_path, address="127.0.0.1:9")


def test_what_is_passed_on() -> None:
    given = {
        "HF_HOME": "a",
        "NCCL_DEBUG": "b",
        "AWS_SECRET_ACCESS_KEY": "c",
        "CUDA_VISIBLE_DEVICES": "0",
        "XHF_A": "d",
    }
    assert allowed_environment(given) == {"HF_HOME": "a", "NCCL_DEBUG": "b"}
