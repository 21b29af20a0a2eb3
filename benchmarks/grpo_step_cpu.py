"""One GRPO step on the CPU: headrace and TRL's `GRPOTrainer`, the same model, prompts, sizes and machine, in one run.

    pip install trl                                     # 1.16, only for this benchmark
    python benchmarks/grpo_step_cpu.py                  # both limits, both sides; five minutes on two cores
    python benchmarks/grpo_step_cpu.py --only headrace  # without TRL, which then need not be installed
    python benchmarks/grpo_step_cpu.py --processes 2    # each side as two processes of one thread (needs ray)

A random Qwen3 of 0.8M parameters whose vocabulary of 64 holds one end token: every token ends the response with a
chance of about 1/64, so lengths are those of real sampling, a few long and most short. 32 prompts x 8 samples, float32,
one update a step, no KL. The sides take turns in processes of their own. Prints one JSON object: seconds a step (median
over the steps after the first two), where they go, and the ratio, for each limit on the response's length.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VOCABULARY = 64
PROMPTS, SAMPLES = 32, 8
WARM_STEPS = 2


def make_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(PROMPTS * 64):
            words_of_row = torch.randint(2, VOCABULARY, (16,), generator=generator).tolist()
            file.write(json.dumps({"prompt": " ".join(f"w{i}" for i in words_of_row)}) + "\n")


def score(completions: list[str]) -> list[float]:
    return [text.count("w7") / (1 + text.count(" ")) for text in completions]


def headrace_side(folder: Path, limit: int, steps: int, processes: int) -> list[dict[str, float]]:
    from headrace import RLTrainer

    layout = {"device": "cpu", "groups": {"all": processes}, "roles": {"actor": {"gpu_group": "all"}}}

    with tempfile.TemporaryDirectory() as runs:
        RLTrainer(
            actor=str(folder),
            reward_fn=score,
            cluster=None if processes == 1 else layout,
            config={
                "run": {"dir": runs, "name": "bench", "device": "cpu", "progress": "off", "tensorboard": False,
                        "save_final": False},
                "rollout": {"max_new_tokens": limit, "samples_per_prompt": SAMPLES},
                "train": {"steps": steps, "prompts_per_step": PROMPTS, "learning_rate": 1e-6},
            },
        ).train(str(folder / "prompts.jsonl"))  # fmt: skip
        lines = [
            json.loads(line) for line in (Path(runs) / "bench" / "metrics.jsonl").read_text().splitlines()
        ]
    return [
        {
            "step_s": m["time/step_s"],
            "generation_s": m["time/rollout_s"],
            "update_s": m["time/update_s"],
            "response_tokens": m["rollout/tokens"],
        }
        for m in lines
        if m["step"] > 0
    ]


def trl_side(folder: Path, limit: int, steps: int, processes: int) -> list[dict[str, float]]:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    out: list[dict[str, float]] = []
    generation: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        started = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            Clock.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            spent = time.perf_counter() - Clock.started
            out.append({"step_s": spent, "generation_s": sum(generation)})
            generation.clear()

    def reward(completions: list[str], **_: Any) -> list[float]:
        return score(completions)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain_generate = model.generate

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = plain_generate(*args, **kwargs)
        generation.append(time.perf_counter() - started)
        return result

    model.generate = timed_generate
    with tempfile.TemporaryDirectory() as outputs:
        config = GRPOConfig(
            output_dir=outputs, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * SAMPLES // processes, num_generations=SAMPLES,
            max_completion_length=limit, max_steps=steps, learning_rate=1e-6,
            beta=0.0, num_iterations=1, temperature=1.0, top_p=1.0, top_k=0,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, disable_dropout=True,
        )  # fmt: skip
        data = load_dataset(
            "json", data_files=str(folder / "prompts.jsonl"), split="train", cache_dir=outputs
        )
        GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            callbacks=[Clock()],
        ).train()
    return out


SIDES = {"headrace": headrace_side, "trl": trl_side}


def run_side(side: str, folder: Path, limit: int, steps: int, processes: int) -> list[dict[str, float]]:
    """In a process of its own, or several, so that neither side's threads or caches touch the other."""
    script = [
        __file__, "--side", side, "--folder", str(folder), "--limit", str(limit), "--steps", str(steps),
        "--processes", str(processes),
    ]  # fmt: skip
    environment = dict(os.environ)
    launcher: list[str] = []
    if processes > 1:
        environment["OMP_NUM_THREADS"] = "1"
    if processes > 1 and side == "trl":  # headrace starts its own
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"the {side} side failed:\n{done.stderr[-4000:]}")
    # the first process's: each waits for the others in every step
    found = [line for line in done.stdout.splitlines() if line.startswith('[{"step_s"')]
    measured: list[dict[str, float]] = json.loads(found[0])
    return measured[WARM_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limits", type=int, nargs="+", default=[64, 256], help="max_new_tokens")
    parser.add_argument("--steps", type=int, default=6, help="per round, the first two not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="of each side; 1: torch's threads instead")
    parser.add_argument("--only", choices=sorted(SIDES), help="one side alone; no ratio then")
    parser.add_argument("--side", choices=sorted(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.side:
        print(json.dumps(SIDES[a.side](Path(a.folder), a.limit, a.steps, a.processes)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_model(folder)
        results: dict[str, Any] = {}
        sides = [a.only] if a.only else list(SIDES)
        for limit in a.limits:
            steps: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for _ in range(a.rounds):
                for side in sides:
                    steps[side] += run_side(side, folder, limit, a.steps, a.processes)
            of_limit: dict[str, Any] = {
                side: {key: statistics.median(s[key] for s in measured) for key in measured[0]}
                for side, measured in steps.items()
            }
            if len(sides) == 2:
                of_limit["trl_over_headrace"] = of_limit["trl"]["step_s"] / of_limit["headrace"]["step_s"]
            results[f"max_new_tokens_{limit}"] = of_limit
    from importlib.metadata import version

    import torch
    import transformers

    import headrace

    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__, "headrace": headrace.__version__}  # fmt: skip
    if "trl" in sides:
        versions["trl"] = version("trl")

    report = {
        "benchmark": "grpo_step_cpu",
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(),
                    "torch_threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]},
        "versions": versions,
        "workload": {"parameters": "0.8M", "prompts": PROMPTS, "samples_per_prompt": SAMPLES, "prompt_tokens": 16,
                     "processes": a.processes},
        "results": results,
    }  # fmt: skip
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
