"""Seconds until `headrace --help` and `headrace plan` have printed and ended, in fresh processes.

    python benchmarks/startup.py            # a tiny model and 2,000 prompts, made on the spot

Prints one JSON object: for each command the wall-clock and the CPU seconds of every repeat and the median, and the
seconds that importing torch and transformers alone takes, which no plan can go below. Wall-clock figures are those
of a machine with nothing else to do only where the load is well below its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMITS_S = {"headrace --help": 0.5, "headrace plan": 3.0}


def timed(command: list[str], repeats: int) -> dict[str, Any]:
    wall, cpu = [], []
    for _ in range(repeats + 1):
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(round(time.perf_counter() - started, 3))
        cpu.append(round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3))
    wall, cpu = wall[1:], cpu[1:]  # the first one reads the files from disk
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "median_wall_s": statistics.median(wall),
        "median_cpu_s": statistics.median(cpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    headrace = [sys.executable, "-m", "headrace"]
    libraries = "import torch; from transformers import AutoTokenizer, AutoConfig"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        task = runpy.run_path(str(ROOT / "examples" / "arithmetic" / "task.py"))
        task["make"](folder, largest=44)
        plan = ["plan", f"model={folder / 'model'}", f"data={folder / 'train.jsonl'}", "reward=numeric_match"]
        small = ["rollout.max_new_tokens=5", f"eval={folder / 'heldout.jsonl'}"]
        commands = {
            "headrace --help": [*headrace, "--help"],
            "headrace plan": [*headrace, *plan, *small],
            "torch and transformers alone": [sys.executable, "-c", libraries],
        }
        times = {name: timed(command, repeats) for name, command in commands.items()}
    from headrace.observe.machine import environment

    record = {"environment": environment(), "load": os.getloadavg()[0], "limits_s": LIMITS_S, "times": times}
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
