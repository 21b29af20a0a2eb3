"""Peak memory of one training step at a vocabulary of 152k, as the tokens of a micro-batch grow.

    python benchmarks/vocab_memory.py                    # CUDA where there is one, else the CPU (smaller sizes)

headrace: `TorchEngine.update` on a small random Qwen3 with a vocabulary of 151,936. The other side computes the same
loss from the model's full logits, the plain way. Both sides see the same packed sequences. Prints one JSON object: peak
bytes above what the model and its optimizer hold, per number of tokens, and the slope in bytes a token. A float32
logit row of this vocabulary alone is 607,744 bytes.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import resource
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

import headrace
from headrace.algorithms.reduction import token_weights
from headrace.data.batch import Batch
from headrace.models.hf import wrap
from headrace.training.optimizer import OptimizerSettings
from headrace.training.torch_engine import TorchEngine
from headrace.training.value_loss import SupervisedLoss

VOCABULARY = 151_936
ROW_TOKENS = 1024


def model(device: str) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def batch_of(tokens: int) -> Batch:
    generator = torch.Generator().manual_seed(tokens)
    rows = tokens // ROW_TOKENS
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[::ROW_TOKENS] = False
    batch = Batch([ROW_TOKENS] * rows, {"input_ids": ids, "response_mask": mask})
    return batch.with_columns({"loss_weight": token_weights(mask, batch.offsets, "token_mean")})


def headrace_side(hf: Any) -> Callable[[Batch], None]:
    engine = TorchEngine(
        wrap(hf, None, device=hf.device),
        prefix="sft",
        tokens_per_microbatch=1 << 30,
        optimizer=OptimizerSettings(learning_rate=1e-6),
    )
    return lambda batch: (engine.update(batch, SupervisedLoss()).means(), None)[1]


def plain_side(hf: Any) -> Callable[[Batch], None]:
    hf.set_attn_implementation("sdpa")
    hf.requires_grad_(True)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-6)

    def update(batch: Batch) -> None:
        ids = batch["input_ids"].view(-1, ROW_TOKENS).to(hf.device)
        logits = hf(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])
        (-logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def peak_bytes(device: str, update: Callable[[Batch], None], tokens: int) -> int | None:
    """Peak above the resting level during one update; None when it does not fit."""
    batch = batch_of(tokens)
    gc.collect()
    try:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            update(batch)
            return torch.cuda.max_memory_allocated() - before
        before = reset_resident_peak()
        update(batch)
        return resource_peak() - before
    except torch.OutOfMemoryError:
        return None


def reset_resident_peak() -> int:
    """Linux: forgets the peak so far; returns the resident bytes now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def resource_peak() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [4096, 8192, 16384, 32768, 65536] if device == "cuda" else [1024, 2048, 4096]
    parser.add_argument("--tokens", type=int, nargs="+", default=default)
    a = parser.parse_args()
    hf = model(device)
    peaks: dict[str, dict[int, int | None]] = {}
    for name, side in (("headrace", headrace_side), ("full_logits", plain_side)):
        update = side(copy.deepcopy(hf))
        update(batch_of(ROW_TOKENS))  # the optimizer's state and the kernels' workspaces exist from here on
        peaks[name] = {tokens: peak_bytes(device, update, tokens) for tokens in a.tokens}
        del update
    slope = {}
    for name, values in peaks.items():
        known = [(n, b) for n, b in values.items() if b is not None]
        slope[name] = (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0]) if len(known) > 1 else None
    report = {
        "benchmark": "vocab_memory",
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(),
                    "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__, "headrace": headrace.__version__},
        "workload": {"vocabulary": VOCABULARY, "hidden": 512, "layers": 2, "parameters": hf.num_parameters(),
                     "dtype": str(hf.dtype), "row_tokens": ROW_TOKENS, "float32_logit_row_bytes": 4 * VOCABULARY},
        "peak_bytes_above_rest": peaks,
        "slope_bytes_per_token": slope,
    }  # fmt: skip
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
