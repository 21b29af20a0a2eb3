"""Resident memory over a run with checkpoints: its slope in MB a step, which should be flat.

    python benchmarks/memory_slope.py                     # GRPO of a tiny model, 240 steps, one CPU, a minute or two
    python benchmarks/memory_slope.py --steps 1000

Memory is read from the operating system at each step, after a garbage collection. The slope is that of the
least-squares line over the steps after --warm-up, in which allocators and caches still grow. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

import headrace
from headrace.config_load import from_mapping
from headrace.roles.actor import Actor
from headrace.trainers.launch import train


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--warm-up", type=int, default=40, help="steps left out of the line")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints; 0: none")
    return parser.parse_args()


def resident_mb() -> float:
    """Resident memory of this process, in units of 10^6 bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def make_model(folder: Path) -> None:
    """The arithmetic example's tiny model, with random weights."""
    path = Path(__file__).parents[1] / "examples" / "arithmetic" / "task.py"
    spec = importlib.util.spec_from_file_location("task", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} cannot be loaded")
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    task.make_model(folder, 0)


def main() -> None:
    a = arguments()
    resident: list[float] = []

    def score(completions: list[str]) -> list[float]:
        """Called once a step."""
        gc.collect()
        resident.append(resident_mb())
        return [sum(c in "02468" for c in text) / 5 for text in completions]

    with tempfile.TemporaryDirectory() as work:
        make_model(Path(work) / "model")
        rows = [{"prompt": f"{x}+{y}=", "answer": str(x + y)} for x in range(10) for y in range(10)]
        config = from_mapping(
            {
                "run": {"dir": work, "name": "r", "progress": "off", "save_final": False},
                "model": {"path": f"{work}/model"},
                "rollout": {"samples_per_prompt": 4, "max_new_tokens": 5},
                "algorithm": {"kl_coefficient": 0.01},
                "train": {"steps": a.steps, "prompts_per_step": 4, "learning_rate": 1e-4},
                "checkpoint": {"every_steps": a.every, "keep": 2 if a.every else 0},
            }
        )
        train(config, Actor(config.model), score, rows)
        written = len(list((Path(work) / "r" / "metrics.jsonl").read_text().splitlines()))
    kept = resident[a.warm_up :]
    slope = float(np.polyfit(np.arange(len(kept)), np.array(kept), 1)[0]) if len(kept) > 1 else float("nan")
    report = {
        "benchmark": "memory_slope",
        "steps": written,
        "checkpoint_every_steps": a.every,
        "slope_mb_per_step": round(slope, 5),
        "resident_mb_first_after_warm_up": round(kept[0], 1) if kept else None,
        "resident_mb_last": round(resident[-1], 1),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "headrace": headrace.__version__,
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
