"""What the controller itself does for one call of a worker group, with 8 to 1,024 workers: milliseconds and bytes.

    python benchmarks/controller_scale.py
    python benchmarks/controller_scale.py --processes 4     # and the same call over so many Ray processes

The workers are simulated: objects in this process behind the transport's seam, each with a real order, a real handle
and a real reply; what they do is left out of the controller's time. No model. Two kinds of calls are timed, for two
batch sizes: one whose rows lie right, and one that moves them between two groups of other parallelism.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from headrace.cluster.group import WorkerGroup
from headrace.cluster.inprocess import InProcess
from headrace.cluster.layouts import resolve
from headrace.cluster.workers import Executor
from headrace.data.batch import Batch

ECHO = f"{Path(__file__).resolve()}:Echo"


class Echo:
    """Writes one row column and a small value, as an update or a log-probability stage does."""

    def __init__(self, site: Any) -> None:
        self.site = site

    def run(self, batch: Batch) -> Any:
        from headrace.cluster.worker import Outcome

        return Outcome(rows={"out": torch.zeros(batch.num_rows)}, value={"loss": 0.5, "rows": batch.num_rows})


def layout(workers: int) -> dict[str, Any]:
    """All workers in one group, twice: colocated roles with other degrees, so that rows move between them."""
    tp = 4 if workers >= 8 else 1
    return {
        "device": "cpu",
        "roles": {
            "actor": {"gpu_group": "all", "parallelism": {"tp": tp, "dp": workers // tp}},
            "critic": {"gpu_group": "all", "parallelism": {"tp": 2, "dp": workers // 2}},
        },
    }


def timed(executor: Executor, workers: int, rows: int, repeats: int) -> dict[str, Any]:
    actor, critic = (WorkerGroup(executor, role) for role in ("actor", "critic"))
    actor.create(ECHO)
    critic.create(ECHO)
    handle = actor.put(Batch([8] * rows, {"input_ids": torch.ones(8 * rows, dtype=torch.int64)}))
    out: dict[str, Any] = {"rows": rows}
    for name, group in (("rows_stay", actor), ("rows_move", critic)):
        group.call("run", handle, reads=["input_ids"])
        times, cpu, walls, carried = [], [], [], 0
        for _ in range(repeats):
            before, began = time.process_time(), time.perf_counter()
            result = group.call("run", handle, reads=["input_ids"])
            walls.append(time.perf_counter() - began)
            cpu.append(time.process_time() - before)
            times.append(result.controller_s)
            carried = result.controller_bytes
        out[name] = {
            "controller_ms": round(1e3 * statistics.median(times), 4),
            "controller_us_per_worker": round(1e6 * statistics.median(times) / workers, 3),
            "controller_bytes": carried,
            "controller_bytes_per_worker": round(carried / workers, 1),
            "call_ms": round(1e3 * statistics.median(walls), 3),
            "process_cpu_ms": round(1e3 * statistics.median(cpu), 3),
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--processes", type=int, default=0, help="real Ray processes for one more measurement"
    )
    parser.add_argument("--stage-s", type=float, default=10.0, help="stage length that the CPU share is of")
    args = parser.parse_args()
    torch.set_num_threads(1)
    simulated = []
    for workers in args.workers:
        executor = InProcess(resolve(layout(workers), roles=["actor", "critic"]), device="cpu")
        sizes = [timed(executor, workers, workers * per, args.repeats) for per in (2, 16)]
        simulated.append({"workers": workers, "batches": sizes})
        print(f"{workers} workers done", file=sys.stderr)
    first, last = simulated[0]["batches"][-1]["rows_move"], simulated[-1]["batches"][-1]["rows_move"]
    report: dict[str, Any] = {
        "what": "controller time and bytes of one worker-group call",
        "simulated": simulated,
        "under_1_ms_at_the_fewest": first["controller_ms"] < 1.0,
        "growth_of_time_over_growth_of_workers": round(
            last["controller_ms"] / first["controller_ms"] / (args.workers[-1] / args.workers[0]), 3
        ),
        "cpu_share_of_a_stage_at_the_most": round(last["controller_ms"] / 1e3 / args.stage_s, 5),
        "stage_s": args.stage_s,
    }
    if args.processes:
        from headrace.cluster.ray import RayExecutor

        with (
            tempfile.TemporaryDirectory() as logs,
            RayExecutor(resolve(layout(args.processes), roles=["actor", "critic"]), Path(logs)) as real,
        ):
            measured = timed(real, args.processes, args.processes * 16, args.repeats)
            report["ray_processes"] = {"workers": args.processes, **measured}
    report["machine"] = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
