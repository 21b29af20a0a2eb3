"""The same GRPO run on one device and on several: seconds of a step and of its stages for each layout.

    python benchmarks/layouts.py                       # on CPU processes, a small model
    python benchmarks/layouts.py --device cuda         # on 2 GPUs, 1.2B parameters in bfloat16

Every layout is a run of its own, from the command line as a user's, one after another, with the same model, rows and
seed; responses have a fixed length. Prints one JSON object: for each layout the means over all steps but the first two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "arithmetic"))

LAYOUTS: dict[str, list[str]] = {
    "one": [],
    "one_without_graphs": ["rollout.replay_steps=false"],
    "dp2": ["cluster.parallelism={dp: 2}"],
    "zero3x2": ["cluster.parallelism={zero3: 2}"],
    "tp2": ["cluster.parallelism={tp: 2}"],
    "pp2": ["cluster.parallelism={pp: 2}"],
    "split": ["--device-map", "{actor: DEVICE:0, rollout: DEVICE:1}"],
    "split_ahead": [
        "--device-map",
        "{actor: DEVICE:0, rollout: DEVICE:1}",
        "rollout.staleness=1",
        "algorithm.importance_weights=token_truncate",
    ],
}
WARM_STEPS = 2
REWARD = 'def score(completion, answer):\n    return sum(c in "02468" for c in completion) / 5\n'


def make(folder: Path, hidden: int, layers: int, dtype: str, device: str) -> int:
    """A Qwen3 of random weights with tied embeddings and the demo's tokenizer. Returns its parameters."""
    import task
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    task.make_model(folder / "task", 0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "task")
    torch.set_default_dtype(getattr(torch, dtype))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=hidden // 256, head_dim=128,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return sum(p.numel() for p in model.parameters())


def measure(folder: Path, name: str, a: argparse.Namespace) -> dict[str, Any]:
    settings = [
        f"model={folder}/model", f"data={folder}/train.jsonl", f"reward={folder}/reward.py:score", f"run.name={name}",
        f"run.dir={folder}/runs", "run.tensorboard=false", "run.progress=off", f"run.device={a.device}",
        f"rollout.samples_per_prompt={a.samples}", f"rollout.max_new_tokens={a.tokens}", "run.save_final=false",
        f"rollout.min_new_tokens={a.tokens}", f"train.prompts_per_step={a.prompts}", "train.learning_rate=1e-6",
        f"train.steps={a.steps}", "checkpoint.keep=0",
    ]  # fmt: skip
    device = "cuda" if a.device == "cuda" else "cpu"
    own = [text.replace("DEVICE", device) for text in LAYOUTS[name]]
    started = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "headrace", "train", *settings, *own],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    took = time.perf_counter() - started
    if run.returncode:
        return {"error": run.stderr.strip().splitlines()[-1:]}
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][WARM_STEPS:]
    keys = [k for k in steps[0] if k.startswith(("time/", "sync/")) or k == "memory/peak_device_bytes"]
    means = {key: sum(s[key] for s in steps) / len(steps) for key in keys}
    return {**means, "step_s_each": [s["time/step_s"] for s in steps], "whole_command_s": took}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--hidden", type=int, help="2048 on cuda, 256 on cpu")
    parser.add_argument("--layers", type=int, help="24 on cuda, 4 on cpu")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, help="of each response: 128 on cuda, 32 on cpu")
    parser.add_argument("--steps", type=int, default=6)
    a = parser.parse_args()
    large = a.device == "cuda"
    a.hidden = a.hidden or (2048 if large else 256)
    a.layers = a.layers or (24 if large else 4)
    a.tokens = a.tokens or (128 if large else 32)

    from headrace.observe.machine import environment

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dtype = "bfloat16" if large else "float32"
        parameters = make(folder, a.hidden, a.layers, dtype, a.device)
        results = {name: measure(folder, name, a) for name in a.layouts}
    report = {
        "benchmark": "layouts",
        "environment": environment(),
        "load_average": os.getloadavg()[0],
        "workload": {"parameters": parameters, "dtype": dtype, **vars(a)},
        "results": results,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
