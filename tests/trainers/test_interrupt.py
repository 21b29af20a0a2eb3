"""Ctrl-C: once for a clean end that keeps what is finished, twice for an end at once. No process stays."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.flow.interrupt import Interrupted, InterruptGuard

SLOW = """
import asyncio, time
calls = 0
def score(completions):
    global calls
    calls += 1
    time.sleep(0.2)
    return [float(i % 2) for i in range(len(completions))]
def stuck(completions):
    global calls
    calls += 1
    if calls == 2:
        open("stuck", "w").close()
        time.sleep(120)
    return [float(i % 2) for i in range(len(completions))]
async def stuck_async(completions):
    global calls
    calls += 1
    if calls == 2:
        open("stuck", "w").close()
        await asyncio.sleep(120)
    return [float(i % 2) for i in range(len(completions))]
"""


def take_terminal() -> None:
    """A new process's standard input becomes its controlling terminal, and losing it is what it is by default."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def start(arithmetic: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts `headrace train` with a reward of SLOW as the leader of its own process group."""
    begun: list[subprocess.Popen[str]] = []

    def run(reward: str, terminal: int | None = None) -> subprocess.Popen[str]:
        (tmp_path / "slow.py").write_text(SLOW)
        command = [sys.executable, "-m", "headrace", "train"]
        command += [f"model={arithmetic / 'model'}", f"data={arithmetic / 'train.jsonl'}"]
        command += [f"reward=slow.py:{reward}", "run.name=r", "rollout.samples_per_prompt=4"]
        command += ["rollout.max_new_tokens=5", "train.prompts_per_step=4", "train.steps=500"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            start_new_session=True,
            stdin=terminal,
            stdout=terminal,
            stderr=subprocess.PIPE if terminal is None else terminal,
            preexec_fn=None if terminal is None else take_terminal,
            text=True,
        )
        begun.append(process)
        return process

    yield run
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def wait_for(condition: Any, process: subprocess.Popen[str], limit_s: float = 90) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(process: subprocess.Popen[str], limit_s: float) -> str:
    """stderr of a process that ends by itself, with no other process of its group left."""
    _, err = process.communicate(timeout=limit_s)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return err


def metrics(run: Path) -> list[dict[str, Any]]:
    text = (run / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_once_keeps_what_is_finished(start: Any, tmp_path: Path, number: int) -> None:
    from transformers import AutoModelForCausalLM

    process = start("score")
    run = tmp_path / "runs" / "r"
    wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size, process)
    process.send_signal(number)
    err = end(process, 30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    steps = metrics(run)
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    assert f"stopped before the end, at the user's request, after step {len(steps)}" in err
    assert f"everything is in {Path('runs') / 'r'}" in err
    AutoModelForCausalLM.from_pretrained(run / "model")
    assert not [p.name for p in run.iterdir() if p.name.startswith(".")]  # nothing half written


@pytest.mark.parametrize("reward", ["stuck", "stuck_async"])
def test_twice_ends_at_once(start: Any, tmp_path: Path, reward: str) -> None:
    process = start(reward)
    wait_for((tmp_path / "stuck").exists, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None  # the first one waits for a safe point
    process.send_signal(signal.SIGINT)
    err = end(process, 10)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "stopped by Ctrl-C; what is finished is in runs/r" in err
    assert [s["step"] for s in metrics(tmp_path / "runs" / "r")] == [1]


def test_a_lost_terminal_ends_a_run_as_ctrl_c_does(start: Any, tmp_path: Path) -> None:
    """A closed window or a dropped connection: nothing can be shown any more, and what is finished is kept."""
    ours, theirs = os.openpty()
    process = start("score", theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    run = tmp_path / "runs" / "r"

    def stepped() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 1 << 16)
        return (run / "metrics.jsonl").is_file() and bool((run / "metrics.jsonl").stat().st_size)

    wait_for(stepped, process)
    os.close(ours)
    assert process.wait(30) == 130
    steps = len(metrics(run))
    assert (run / "checkpoints" / f"step_{steps}").is_dir()
    assert (run / "model" / "config.json").is_file()


def test_a_run_that_was_told_to_outlive_its_terminal_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with InterruptGuard() as guard:
            os.kill(os.getpid(), signal.SIGHUP)
            guard.check()
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_shell_and_the_system_may_both_tell_of_a_lost_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(InterruptGuard, "_drop_terminal", lambda guard: None)
    try:
        with InterruptGuard() as guard:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(Interrupted):
                guard.check()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)
