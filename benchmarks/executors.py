"""What Ray costs: a GRPO step with one worker as a Ray process, beside the same step in this process.

    OMP_NUM_THREADS=1 python benchmarks/executors.py

The model, prompts and sizes of grpo_step_cpu.py; two copies of the run, with the same seed and so the same tokens, take
turns step by step, the one that begins changing each time. Prints one JSON object: seconds a step (median and least of
each side), the median of the pairs' ratios, and the overhead, that ratio less 1. CPU seconds are those of this process
and the worker. RAY_worker_niceness=15 is what a run has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_step_cpu import PROMPTS, SAMPLES, make_model

WARM_STEPS = 2


def score(completion: str) -> float:
    return completion.count("w7") / (1 + completion.count(" "))


class Side:
    """One of two equal runs, a step at a time."""

    def __init__(
        self, runtime: Any, folder: Path, limit: int, steps: int, workers: list[int] | None = None
    ) -> None:
        from headrace.checkpoint.rng import seed_all
        from headrace.config_load import from_mapping
        from headrace.data.loader import Loader
        from headrace.flow.prepare import prepare_both
        from headrace.roles.actor import Actor
        from headrace.trainers.launch import dataset_of, training_flow

        config = from_mapping({
            "run": {"device": "cpu"},
            "model": {"path": str(folder)},
            "data": {"path": str(folder / "prompts.jsonl")},
            "reward": {"function": f"{Path(__file__).resolve()}:score"},
            "rollout": {"max_new_tokens": limit, "samples_per_prompt": SAMPLES},
            "train": {"steps": steps, "prompts_per_step": PROMPTS, "learning_rate": 1e-6},
        })  # fmt: skip
        self.runtime, self.config, self.steps = runtime, config, steps
        self.workers = workers or []
        dataset = dataset_of(config)
        actor = Actor(config.model, config.run.device)
        self.flow, _ = training_flow(config, actor, config.reward.function, dataset)
        data, _ = prepare_both(self.flow, dataset, None)
        self.loader = Loader(data.dataset, data.rows_per_step, shuffle=True, seed=0)
        seed_all(0)
        runtime.prepare(self.flow, steps)

    def step(self, number: int) -> dict[str, float]:
        from headrace.algorithms.kl_controller import KLController
        from headrace.flow.collect import run_step
        from headrace.flow.interrupt import InterruptGuard
        from headrace.observe.metrics import MetricSums
        from headrace.observe.progress import Progress
        from headrace.stages import StageContext

        context = StageContext(self.config, number, self.steps, MetricSums(), kl=KLController(0.0, None))
        cpu, started = self.cpu_s(), time.perf_counter()
        run_step(
            self.runtime, self.flow, self.loader, context, Progress(self.steps, "bench"), InterruptGuard()
        )
        spent = time.perf_counter() - started
        cpu = self.cpu_s() - cpu
        made = context.metrics.means()
        stages = {k: v for k, v in made.items() if k.startswith("time/")}
        return {"step_s": spent, "cpu_s": cpu, "response_tokens": made["rollout/tokens"], **stages}

    def cpu_s(self) -> float:
        """CPU seconds so far of this process and of the worker's, to 0.01 s."""
        ticks = 0
        for pid in self.workers:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def workers() -> list[int]:
    """The processes of ranks below this one."""
    from headrace.cluster.sweeper import descendants

    return [
        pid for pid in descendants(os.getpid()) if b"RankProcess" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def median(steps: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(s[key] for s in steps) for key in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=64, help="max_new_tokens")
    parser.add_argument("--pairs", type=int, default=20, help="steps of each side, two more not counted")
    a = parser.parse_args()
    # Ray would give its process one thread, torch takes all cores here
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # and niceness 15, which costs nothing on a quiet machine and much beside other work: not what is measured here
    os.environ.setdefault("RAY_worker_niceness", "0")

    import torch
    import transformers

    import headrace
    from headrace.cluster.layouts import resolve
    from headrace.cluster.ray import RayExecutor
    from headrace.flow.cluster import ClusterRuntime
    from headrace.flow.runtime import LocalRuntime

    steps = a.pairs + WARM_STEPS
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as held:
        folder = Path(scratch) / "model"
        make_model(folder)
        executor = held.enter_context(RayExecutor(resolve("cpu_1"), Path(scratch) / "logs"))
        sides = {
            "in_process": Side(LocalRuntime(), folder, a.limit, steps),
            "ray": Side(ClusterRuntime(executor), folder, a.limit, steps, workers()),
        }
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(1, steps + 1):
            for name in list(sides) if number % 2 else reversed(sides):
                measured[name].append(sides[name].step(number))
            tokens = [m[-1]["response_tokens"] for m in measured.values()]
            if tokens[0] != tokens[1]:
                raise SystemExit(f"step {number}: the sides drew different tokens: {tokens}")
    counted = {name: m[WARM_STEPS:] for name, m in measured.items()}
    ratios = [
        there["step_s"] / here["step_s"]
        for here, there in zip(counted["in_process"], counted["ray"], strict=True)
    ]
    results: dict[str, Any] = {
        name: {**median(m), "least_step_s": min(s["step_s"] for s in m)} for name, m in counted.items()
    }
    results["cpu_ray_over_in_process"] = results["ray"]["cpu_s"] / results["in_process"]["cpu_s"]
    results["ray_over_in_process"] = statistics.median(ratios)
    results["ray_over_in_process_of_least"] = (
        results["ray"]["least_step_s"] / results["in_process"]["least_step_s"]
    )
    results["overhead_fraction"] = results["ray_over_in_process"] - 1
    versions = {"python": platform.python_version(), "torch": torch.__version__, "ray": version("ray"),
                "transformers": transformers.__version__, "headrace": headrace.__version__}  # fmt: skip
    report = {
        "benchmark": "executors",
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(),
                    "torch_threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]},
        "versions": versions,
        "workload": {"parameters": "0.8M", "prompts": PROMPTS, "samples_per_prompt": SAMPLES, "prompt_tokens": 16,
                     "max_new_tokens": a.limit, "pairs": a.pairs},
        "results": results,
    }  # fmt: skip
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
