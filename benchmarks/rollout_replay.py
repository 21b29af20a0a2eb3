"""The native rollout with and without replayed decode steps: the same requests, in turn, in one process.

    python benchmarks/rollout_replay.py                  # on a GPU: CUDA graphs, 1.2B random parameters in bfloat16
    python benchmarks/rollout_replay.py --device cpu     # tapes, 0.8M random parameters in float32
    python benchmarks/rollout_replay.py --model FOLDER   # real weights

Responses have a fixed length. Prints one JSON object: for each workload the seconds of each `generate`, milliseconds of
a step, how many steps were replayed, and peak memory. The first round with replays is the one that records.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

WORKLOADS = {"cuda": [(256, 128), (32, 256), (256, 512)], "cpu": [(8, 128), (64, 128), (256, 128)]}
"""Sequences and new tokens of each."""
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


def random_model(hidden: int, layers: int, device: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    large = device == "cuda"
    head = 128 if large else 32
    config = Qwen3Config(
        vocab_size=32_000 if large else 64, hidden_size=hidden, intermediate_size=(3 if large else 4) * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // head, num_key_value_heads=hidden // (2 * head),
        head_dim=head, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(DTYPES[device])


def measure(model: Any, sequences: int, tokens: int, samples: int, rounds: int) -> list[dict[str, Any]]:
    from headrace.rollout.engine import Request, SamplingParams
    from headrace.rollout.native.engine import NativeEngine

    rng, known = np.random.default_rng(0), model.vocab_size
    requests = [
        Request(tuple(rng.integers(2, known, int(rng.integers(20, 200))).tolist()), tuple(range(samples)))
        for _ in range(sequences // samples)
    ]
    sampling = SamplingParams(max_new_tokens=tokens, min_new_tokens=tokens)
    cuda = model.device.type == "cuda"
    out = []
    engines = [NativeEngine(model, replay_steps=replays) for replays in (False, True)]
    for i in range(2 * rounds):
        engine = engines[i % 2]
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        engine.generate(requests, sampling)
        spent = time.perf_counter() - started
        out.append({
            "replays": bool(i % 2),
            "seconds": spent,
            "ms_per_step": 1e3 * spent / engine.stats.steps,
            "steps": engine.stats.steps,
            "replayed_steps": engine.stats.replayed_steps,
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        })  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or hub id instead of random weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--hidden", type=int, help="2048 on cuda, 128 on cpu")
    parser.add_argument("--layers", type=int, help="24 on cuda, 3 on cpu")
    parser.add_argument("--workloads", nargs="+", metavar="SEQUENCES:TOKENS")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    a.hidden = a.hidden or (2048 if a.device == "cuda" else 128)
    a.layers = a.layers or (24 if a.device == "cuda" else 3)

    from headrace.models.hf import load_causal_lm, wrap
    from headrace.observe.machine import environment

    if a.model:
        model = load_causal_lm(a.model, device=a.device, dtype=DTYPES[a.device])
    else:
        model = wrap(random_model(a.hidden, a.layers, a.device), None, device=a.device, verify=False)
    workloads = [tuple(map(int, w.split(":"))) for w in a.workloads] if a.workloads else WORKLOADS[a.device]
    results = [
        {"sequences": n, "new_tokens": t, "runs": measure(model, n, t, a.samples, a.rounds)}
        for n, t in workloads
    ]
    report = {
        "benchmark": "rollout_replay",
        "environment": environment(),
        "parameters": sum(p.numel() for p in model.hf.parameters()),
        "results": results,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
