"""Ends a private Ray cluster whose controller was killed: some of Ray's own processes outlive that.

Runs as a process of its own, as a file and with the standard library only. Its standard input is held open by the
controller, which first writes what is to be swept up; when it closes without the word `done`, the controller is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SWEEPS = 50
"""At most so many, a tenth of a second apart."""


class Sweeper:
    """The controller's side."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the cluster's own, removed with it."""
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C in a terminal is not for it
            text=True,
        )

    def watch(self) -> None:
        """Names the processes of Ray below this one."""
        for pid in descendants(os.getpid()):
            if pid != self._process.pid and "ray" in _command(pid):
                self._write(f"{pid} {started(pid)}\n")

    def dismiss(self) -> None:
        """The cluster has ended; so does the sweeper."""
        self._write("done\n")
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _write(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(line)
                pipe.flush()


def descendants(pid: int) -> list[int]:
    """Ids of all processes below one; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(folder.name))
        if stat:
            children.setdefault(int(stat[1]), []).append(int(folder.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def started(pid: int) -> str:
    """When a process started, in the kernel's ticks: tells it from a later one with its number."""
    stat = _stat(pid)
    return stat[19] if stat else ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; none for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.read().splitlines()
    if "done" in lines:
        return
    for line in lines:
        pid, _, start = line.partition(" ")
        if start and started(int(pid)) == start:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
    # while a cluster starts, processes come up that nobody has named; they have its folder, and make it anew
    for _ in range(SWEEPS):
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        time.sleep(0.1)
        late = _of_ray(sys.argv[1])
        for other in late:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(other, signal.SIGKILL)
        if not late and not os.path.exists(sys.argv[1]):
            return


def _of_ray(folder: str) -> list[int]:
    """Processes of Ray, or Python ones that it starts, which were given the folder; not a pager of a log in it."""
    commands = {int(path.name): _command(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    commands.pop(os.getpid(), None)
    return [
        pid
        for pid, command in commands.items()
        if folder in command and re.search(r"python|/ray/", command.split()[0])
    ]


if __name__ == "__main__":
    main()
