"""The demo: a small model learns to add from nothing but "right" and "wrong".

Makes a model, its tokenizer and addition problems; warms the model up on worksheets in which most sums are one too
high; then lets GRPO reward its own right answers. Run from the repository's root: `make demo`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from pathlib import Path

import task
from rich.console import Console

from headrace.cli import main as headrace
from headrace.observe.run_dir import RunDirectory
from headrace.observe.summary import ascii_curve, before_after_table

HERE = Path(__file__).parent
OUT = Path("demo_run")
PROBLEMS_SHOWN = 6


def main() -> int:
    console, started = Console(), time.perf_counter()
    console.rule("1/4  a model and its problems, made on the spot")
    task.make(OUT / "task")
    console.print(f"0.5M-parameter Qwen3 and addition problems in {OUT / 'task'}")
    console.rule("2/4  warm start: headrace sft examples/arithmetic/sft.yaml")
    if code := headrace(["sft", str(HERE / "sft.yaml"), "run.overwrite=true"]):
        return code
    console.rule("3/4  GRPO: headrace train examples/arithmetic/grpo.yaml")
    if code := headrace(["train", str(HERE / "grpo.yaml"), "run.overwrite=true"]):
        return code
    console.rule("4/4  the same held-out problems, before and after")
    for name, model in (("before", "sft"), ("after", "grpo")):
        if code := evaluate(name, OUT / model / "model"):
            return code
    show(console)
    console.print(
        f"\n{time.perf_counter() - started:.0f} s in all. Curves: .venv/bin/tensorboard --logdir {OUT}",
        highlight=False,
    )
    return 0


def evaluate(name: str, model: Path) -> int:
    """Greedy answers to every held-out problem; every one of them is kept in the run's samples.jsonl."""
    arguments = [f"model={model}", f"run.name={name}", "run.progress=off"]
    with contextlib.redirect_stdout(io.StringIO()):  # its metrics stand in the table below
        return headrace(["eval", str(HERE / "grpo.yaml"), *arguments])


def show(console: Console) -> None:
    steps = RunDirectory(OUT / "grpo").read_metrics()
    measured = [s for s in steps if "eval/accuracy" in s]
    labels = {"eval/accuracy": "right answers", "eval/response_tokens_mean": "tokens per answer"}
    title = f"{measured[0]['eval/rows']:.0f} held-out problems, answered greedily"
    console.print(before_after_table(measured[0], measured[-1], labels=labels, title=title))
    console.print("reward over the GRPO steps: the share of right answers sampled at temperature 1")
    console.print(ascii_curve([s["reward/mean"] for s in steps if "reward/mean" in s]))
    console.print("\nsample responses")
    answers = {name: samples(name) for name in ("before", "after")}
    for prompt, (text, reward) in list(answers["before"].items())[:PROBLEMS_SHOWN]:
        later, later_reward = answers["after"][prompt]
        console.print(
            f"  {prompt:>7} {text:>4} {mark(reward)}   ->  {later:>4} {mark(later_reward)}", highlight=False
        )
    console.print(f"\nwritten to {OUT}/sft and {OUT}/grpo, each with:", highlight=False)
    console.print(
        "  config.yaml  metrics.jsonl  samples.jsonl  eval_samples.jsonl  tensorboard/  checkpoints/  model/"
    )


def samples(name: str) -> dict[str, tuple[str, float]]:
    newest = max(OUT.glob(f"{name}-eval-*"))
    lines = RunDirectory(newest).samples.read_text().splitlines()
    return {s["prompt"]: (s["completion"], s["reward"]) for s in map(json.loads, lines)}


def mark(reward: float) -> str:
    return "right" if reward == 1 else "wrong"


if __name__ == "__main__":
    sys.exit(main())
