"""How often the answers to held-out prompts are right, before and after the chain: the end of `make rlhf`.

Run from the repository's root once the runs are done: python examples/rlhf/compare.py
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.cli import main as headrace
from headrace.observe.run_dir import RunDirectory

HERE = Path(__file__).parent
OUT = Path("rlhf_run")
MODELS = {"sft": "before: SFT", "ppo": "after PPO", "dpo": "after DPO"}
PROMPTS_SHOWN = 6


def main() -> int:
    measured = {}
    for model in MODELS:
        printed = io.StringIO()
        arguments = [f"model={OUT / model / 'model'}", f"run.name=answers-{model}", "run.progress=off"]
        with contextlib.redirect_stdout(printed):
            if code := headrace(["eval", str(HERE / "eval.yaml"), *arguments]):
                return code
        measured[model] = json.loads(printed.getvalue())
    show(Console(), measured)
    return 0


def show(console: Console, measured: dict[str, dict[str, float]]) -> None:
    rows = measured["sft"]["eval/rows"]
    table = Table(
        title=f"{rows} held-out prompts, answered greedily", box=box.SIMPLE_HEAD, title_style="bold"
    )
    table.add_column("")
    for label in MODELS.values():
        table.add_column(label, justify="right")
    for metric, text in (
        ("eval/accuracy", "the prompt's digits in rising order"),
        ("eval/part/same_digits", "the prompt's digits in any order"),
    ):
        table.add_row(text, *(f"{measured[model][metric]:.1%}" for model in MODELS))
    answers = {model: samples(model) for model in MODELS}
    table.add_section()
    for prompt in list(answers["sft"])[:PROMPTS_SHOWN]:
        table.add_row(prompt, *(answers[model][prompt] for model in MODELS))
    console.print(table)


def samples(model: str) -> dict[str, str]:
    """The answer to each prompt in the newest evaluation of `model`."""
    newest = max(OUT.glob(f"answers-{model}-eval-*"))
    lines = RunDirectory(newest).samples.read_text().splitlines()
    return {s["prompt"]: s["completion"] for s in map(json.loads, lines)}


if __name__ == "__main__":
    sys.exit(main())
