"""The compiled kernels for CPUs beside the torch operators that they take the place of, in one run.

    python benchmarks/cpu_kernels.py
    python benchmarks/cpu_kernels.py --heads 16 --kv-heads 8 --head-dim 128 --mean-length 500

Attention of a training pack (forward and backward), of a decode step over the paged cache, RMSNorm, silu-gates and
whole gated feed-forward layers (of a pack, and of a decode step without gradients), in float32. Both sides take turns;
times are medians in milliseconds. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.kernels import build
from headrace.models.attention import PackedAttention
from headrace.models.gates import gated, use_fast_gates
from headrace.models.norm import use_fast_norms
from headrace.rollout.native.attention import PagedDecodeAttention
from headrace.rollout.native.kv_cache import PagedKVCache

BLOCK = 16
CPU = torch.device("cpu")


@contextmanager
def without_kernels() -> Iterator[None]:
    with (
        mock.patch("headrace.models.attention.kernels_are_available", return_value=False),
        mock.patch("headrace.rollout.native.attention.kernels_are_available", return_value=False),
        mock.patch("headrace.kernels.operators.library", return_value=None),
    ):
        yield


def timed(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each side, and how many times as fast the kernels are."""
    spent: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds + 2):
        for side, call in sides.items():
            start = time.perf_counter()
            call()
            spent[side].append((time.perf_counter() - start) * 1e3)
    out = {f"{side}_ms": statistics.median(times[2:]) for side, times in spent.items()}
    return {**out, "torch_over_kernels": out["torch_ms"] / out["kernels_ms"]}


def forward_and_backward(compute: Callable[[], Tensor], up: Tensor) -> Callable[[], None]:
    return lambda: compute().backward(up)


def packs(a: argparse.Namespace, lengths: list[int], random: Callable[..., Tensor]) -> dict[str, Any]:
    tokens = sum(lengths)
    q, k, v = (random(tokens, h, a.head_dim).requires_grad_() for h in (a.heads, a.kv_heads, a.kv_heads))
    up = random(tokens, a.heads, a.head_dim)
    kernels = PackedAttention(lengths, CPU)
    with without_kernels():
        plain = PackedAttention(lengths, CPU)

    def of(attention: PackedAttention) -> Callable[[], Tensor]:
        return lambda: attention.attend(0, q, k, v, scale=a.head_dim**-0.5, window=None)

    sides = {"torch": forward_and_backward(of(plain), up), "kernels": forward_and_backward(of(kernels), up)}
    return {"tokens": tokens, **timed(sides, a.rounds)}


def decode(a: argparse.Namespace, lengths: list[int], random: Callable[..., Tensor]) -> dict[str, Any]:
    rows, longest = len(lengths), max(lengths)
    width = -(-longest // BLOCK)
    cache = PagedKVCache(1, rows * width, BLOCK)
    every = torch.arange(rows * width * BLOCK)
    cache.write(
        0, every, random(len(every), a.kv_heads, a.head_dim), random(len(every), a.kv_heads, a.head_dim)
    )
    table = np.random.default_rng(0).permutation(rows * width).reshape(rows, width)
    seen = np.array(sorted(lengths, reverse=True))
    q, k, v = (random(rows, h, a.head_dim) for h in (a.heads, a.kv_heads, a.kv_heads))

    def step() -> None:
        attention = PagedDecodeAttention(cache, table, seen, CPU)
        for _ in range(a.layers):
            attention.attend(0, q, k, v, scale=a.head_dim**-0.5, window=None)

    def plain() -> None:
        with without_kernels():
            step()

    with torch.inference_mode():
        return {"sequences": rows, "layers": a.layers, **timed({"torch": plain, "kernels": step}, a.rounds)}


def pointwise(a: argparse.Namespace, tokens: int, random: Callable[..., Tensor]) -> dict[str, Any]:
    size = a.heads * a.head_dim
    x, gate, up = (
        random(*s).requires_grad_() for s in ((tokens, size), (tokens, 4 * size), (tokens, 4 * size))
    )
    plain, fast = torch.nn.RMSNorm(size, eps=1e-6), torch.nn.RMSNorm(size, eps=1e-6)
    use_fast_norms(fast)
    norms = {
        "torch": forward_and_backward(lambda: plain(x), x.detach()),
        "kernels": forward_and_backward(lambda: fast(x), x.detach()),
    }
    gates = {
        "torch": forward_and_backward(lambda: F.silu(gate) * up, gate.detach()),
        "kernels": forward_and_backward(lambda: gated(gate, up), gate.detach()),
    }
    return {"rms_norm": timed(norms, a.rounds), "gate": timed(gates, a.rounds)}


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(inner, hidden, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def feed_forward(
    a: argparse.Namespace, tokens: int, rows: int, random: Callable[..., Tensor]
) -> dict[str, Any]:
    size = a.heads * a.head_dim
    torch.manual_seed(0)
    plain = FeedForward(size, 4 * size)
    fast = copy.deepcopy(plain)
    use_fast_gates(fast)
    x, few, up = random(tokens, size).requires_grad_(), random(rows, size), random(tokens, size)
    trained = {
        "torch": forward_and_backward(lambda: plain(x), up),
        "kernels": forward_and_backward(lambda: fast(x), up),
    }
    with torch.inference_mode():
        step = timed({"torch": lambda: plain(few), "kernels": lambda: fast(few)}, 5 * a.rounds)
    return {
        "feed_forward": {"inner": 4 * size, **timed(trained, a.rounds)},
        "feed_forward_decode": {"sequences": rows, "inner": 4 * size, **step},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument(
        "--mean-length", type=int, default=80, help="tokens; lengths are geometric, up to four times it"
    )
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=3, help="of a decode step")
    parser.add_argument("--rounds", type=int, default=20)
    a = parser.parse_args()
    if build.missing() is not None:
        raise SystemExit(f"there are no kernels here: {build.missing()}")
    generator = torch.Generator().manual_seed(0)
    lengths = np.minimum(
        np.random.default_rng(0).geometric(1 / a.mean_length, a.sequences), 4 * a.mean_length
    ).tolist()

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    report = {
        "benchmark": "cpu_kernels",
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(),
                    "torch_threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "shape": {"heads": a.heads, "kv_heads": a.kv_heads, "head_dim": a.head_dim, "mean_length": a.mean_length},
        "results": {
            "pack_forward_backward": packs(a, lengths, random),
            "decode_step": decode(a, lengths, random),
            **pointwise(a, sum(lengths), random),
            **feed_forward(a, sum(lengths), len(lengths), random),
        },
    }  # fmt: skip
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
