"""Imports everything once, then runs `headrace` in forked children that may be killed at any moment.

Reads one JSON object a line: {"argv": [...], "cwd": folder, "kill_after_s": seconds or null, "kill_at_write": number or
null, "file_limit": bytes or null}. A child is SIGKILLed after so many seconds, or kills itself at its n-th call of
fsync, rename or rmtree (every step of a save is next to one). Answers with {"code": exit code, or -9 when killed}.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

import headrace.trainers.launch  # noqa: E402, F401
from headrace.checkpoint.export import save_hf_folder  # noqa: E402
from headrace.cli import main  # noqa: E402
from headrace.models.heads import critic_from  # noqa: E402
from headrace.models.hf import load_causal_lm  # noqa: E402


def die_at(number: int) -> None:
    """Kills this process just before its `number`-th (from 1) call that makes something durable or visible."""
    left = number

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call

    os.fsync, os.rename, shutil.rmtree = counted(os.fsync), counted(os.rename), counted(shutil.rmtree)


def child(order: dict[str, Any]) -> None:
    os.chdir(order["cwd"])
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order.get("file_limit") is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_limit"], order["file_limit"]))
    if order.get("kill_at_write") is not None:
        die_at(order["kill_at_write"])
    code = 70
    try:
        code = main(order["argv"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(order: dict[str, Any]) -> int:
    process = os.fork()
    if process == 0:
        child(order)
    limit = order.get("kill_after_s")
    deadline = None if limit is None else time.monotonic() + limit
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if deadline is not None and time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            deadline = None
        time.sleep(0.002)


# what transformers imports only when it is used takes seconds
with tempfile.TemporaryDirectory() as folder:
    loaded = load_causal_lm(sys.argv[1])
    critic_from(loaded)
    save_hf_folder(loaded, Path(folder) / "model")
del loaded

answers = os.fdopen(os.dup(1), "w")
answers.write("ready\n")
answers.flush()
for line in sys.stdin:
    answers.write(json.dumps({"code": run(json.loads(line))}) + "\n")
    answers.flush()
