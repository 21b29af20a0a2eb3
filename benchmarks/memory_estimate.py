"""The memory estimate of `headrace plan` against the peak that a real run of two steps measures.

    python benchmarks/memory_estimate.py                       # small random models on the CPU, some minutes
    python benchmarks/memory_estimate.py --device cuda --large # on a GPU

Models of random weights are made on the spot, each run in a process of its own. On the CPU the peak is the resident
memory of the process, on a GPU what torch allocated (so the libraries' share is left out of the estimate). Prints
one JSON object; `ratio` is estimate / measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# name: kind, (hidden, inner, layers, heads, vocabulary)
SMALL = {
    "qwen3, 8M": ("qwen3", (256, 1024, 6, 4, 8192)),
    "qwen3, 29M": ("qwen3", (512, 1536, 8, 8, 8192)),
    "llama, 55M": ("llama", (640, 2048, 8, 10, 8192)),
}
LARGE = {
    "qwen3, 0.6B": ("qwen3", (1024, 3072, 28, 16, 151936)),
    "llama, 1.2B": ("llama", (2048, 8192, 16, 32, 128256)),
}
VARIANTS = {
    "grpo": [],
    "grpo, gradient checkpointing": ["model.gradient_checkpointing=true"],
    "grpo, lora of rank 16": ["lora.rank=16"],
    "ppo with reference, lora of rank 16": [
        "algorithm.name=ppo",
        "algorithm.kl_coefficient=0.01",
        "lora.rank=16",
    ],
    "ppo with reference": ["algorithm.name=ppo", "algorithm.kl_coefficient=0.01"],
}
WORDS = 500


def make_model(folder: Path, kind: str, sizes: tuple[int, int, int, int, int]) -> None:
    """Random weights, and a tokenizer of one token a word, as a Hugging Face folder."""
    import torch
    import transformers as t
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.utils import logging

    logging.disable_progress_bar()
    classes = {
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM),
        "llama": (t.LlamaConfig, t.LlamaForCausalLM),
    }
    vocabulary = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    hidden, inner, layers, heads, vocab = sizes
    config, model = classes[kind]
    torch.manual_seed(0)
    made = model(
        config(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=kind != "llama",
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_data(file: Path, words: int) -> None:
    chance = random.Random(0)
    rows = [" ".join(f"w{chance.randrange(WORDS)}" for _ in range(words)) for _ in range(64)]
    file.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    (file.parent / "reward.py").write_text("def score(completion):\n    return len(completion) % 7\n")


def one(overrides: list[str]) -> dict[str, Any]:
    """The estimate and the measured peak of one run, in bytes; in a process of its own."""
    from headrace.config_load import load_config
    from headrace.observe.run_dir import RunDirectory
    from headrace.trainers.launch import run_train
    from headrace.trainers.plan import make_plan

    config = load_config(None, overrides)
    memory = make_plan(config).memory
    run_train(config)
    last = RunDirectory(Path(config.run.dir) / str(config.run.name)).read_metrics()[-1]
    on_gpu = "memory/peak_device_bytes" in last and config.run.device != "cpu"
    libraries = sum(part.bytes for part in memory.always if part.what == "libraries")
    return {
        "estimate_bytes": memory.peak - (libraries if on_gpu else 0),
        "measured_bytes": int(last["memory/peak_device_bytes" if on_gpu else "memory/peak_resident_bytes"]),
        "largest": {part.what: part.bytes for part in memory.largest(4)},
    }


def measure(device: str, large: bool) -> list[dict[str, Any]]:
    out = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_data(folder / "data.jsonl", 400 if large else 100)
        for name, (kind, sizes) in (LARGE if large else SMALL).items():
            make_model(folder / name, kind, sizes)
            for variant, settings in VARIANTS.items():
                overrides = [
                    f"model={folder / name}",
                    f"data={folder / 'data.jsonl'}",
                    f"reward={folder / 'reward.py'}:score",
                    f"run.dir={folder / 'runs'}",
                    f"run.name={name} {variant}",
                    "run.tensorboard=false",
                    "run.save_final=false",
                    "run.progress=off",
                    f"run.device={device}",
                    "train.steps=2",
                    "train.prompts_per_step=8",
                    f"rollout.samples_per_prompt={8 if large else 4}",
                    f"rollout.max_new_tokens={400 if large else 60}",
                    f"train.tokens_per_microbatch={16384 if large else 4096}",
                    *settings,
                ]
                command = [sys.executable, __file__, "--one", json.dumps(overrides)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                result = json.loads(done.stdout.splitlines()[-1])
                result["ratio"] = round(result["estimate_bytes"] / result["measured_bytes"], 3)
                out.append({"model": name, "run": variant, **result})
                sys.stderr.write(f"{name}, {variant}: {result['ratio']}\n")
                shutil.rmtree(folder / "runs")  # checkpoints of ten runs would fill a disk
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large", action="store_true", help="models of 0.6B and 1.2B parameters, for a GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(json.loads(arguments.one))))
        return
    from headrace.observe.machine import environment

    results = measure(arguments.device, arguments.large)
    import torch

    device = torch.cuda.get_device_name() if arguments.device != "cpu" else platform.machine()
    print(
        json.dumps(
            {"environment": environment(), "device": device, "load": os.getloadavg()[0], "runs": results},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
