"""Rollout speed: headrace's native engine and transformers' `generate`, on the same weights, in one process.

    python benchmarks/rollout_cpu.py                      # a small random Qwen3, CPU, under a minute
    python benchmarks/rollout_cpu.py --model FOLDER       # real weights

Both sides sample P prompts of different lengths, n samples each, at temperature 1, and return token ids and their
log-probabilities. Responses end at one of a share of the vocabulary (so lengths differ) or at the limit; only
tokens up to that end count. The sides alternate, after one unmeasured round each. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import headrace
from headrace.models.hf import wrap
from headrace.rollout.engine import Request, SamplingParams, sample_seed
from headrace.rollout.native.engine import NativeEngine


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Hugging Face folder (default: a random 5M-parameter Qwen3)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--end-share", type=float, default=0.02, help="share of the vocabulary that ends a response"
    )
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def load(path: str | None) -> Any:
    torch.manual_seed(0)
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=4096, num_key_value_heads=2, head_dim=64, **shape, **ids)
    ).eval()


def native_side(
    hf: Any, prompts: list[list[int]], ends: list[int], a: argparse.Namespace
) -> Callable[[int], int]:
    engine = NativeEngine(wrap(copy.deepcopy(hf), None))
    sampling = SamplingParams(max_new_tokens=a.max_new_tokens, stop_token_ids=tuple(ends))

    def run(number: int) -> int:
        requests = [
            Request(tuple(p), tuple(sample_seed(0, number, i, s) for s in range(a.samples)))
            for i, p in enumerate(prompts)
        ]
        return sum(len(c.token_ids) for group in engine.generate(requests, sampling) for c in group)

    return run


def hf_side(
    hf: Any, prompts: list[list[int]], ends: list[int], a: argparse.Namespace
) -> Callable[[int], int]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    ending = torch.tensor(ends)

    def run(number: int) -> int:
        torch.manual_seed(number)
        with torch.no_grad():
            out = hf.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                num_return_sequences=a.samples, max_new_tokens=a.max_new_tokens, eos_token_id=ends,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        new = out.sequences[:, longest:]
        for i, logits in enumerate(
            out.logits
        ):  # the sampled tokens' log-probabilities, which the other side gives too
            logits.float().log_softmax(-1).gather(1, new[:, i, None])
        ended = torch.isin(new, ending)
        before = ended.cumsum(1) - ended.long()  # ends seen before this token
        return int((before == 0).sum())

    return run


def main() -> None:
    a = arguments()
    hf = load(a.model)
    vocabulary = hf.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 65, (a.prompts,), generator=generator).tolist()
    prompts = [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    ends = torch.randperm(vocabulary, generator=generator)[: max(1, int(a.end_share * vocabulary))].tolist()
    sides = {"native": native_side(hf, prompts, ends, a), "hf_generate": hf_side(hf, prompts, ends, a)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {name: [] for name in sides}
    for number in range(a.repeats + 1):
        for name, run in sides.items():
            started = time.perf_counter()
            count = run(number)
            if number > 0:
                seconds[name].append(time.perf_counter() - started)
                tokens[name].append(count)
    speed = {name: [n / s for n, s in zip(tokens[name], seconds[name], strict=True)] for name in sides}
    report = {
        "benchmark": "rollout_cpu",
        "machine": {"platform": platform.platform(), "processor": processor(), "cpus": os.cpu_count(),
                    "torch_threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__, "headrace": headrace.__version__},
        "workload": {"model": a.model or "random Qwen3", "parameters": hf.num_parameters(), "dtype": str(hf.dtype),
                     "prompts": a.prompts, "samples_per_prompt": a.samples, "prompt_tokens": sum(lengths),
                     "max_new_tokens": a.max_new_tokens, "end_share": a.end_share},
        "sides": {name: {"seconds": seconds[name], "tokens": tokens[name],
                         "tokens_per_s_median": statistics.median(speed[name])} for name in sides},
        "native_over_hf_generate": statistics.median(speed["native"]) / statistics.median(speed["hf_generate"]),
    }  # fmt: skip
    print(json.dumps(report, indent=2))


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
