"""The state of every global source of random numbers, as plain values for JSON.

headrace draws nothing from them while it trains (its own draws come from seeds that belong to the sample), but the
user's reward functions and stages may.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seeds torch (all devices), numpy and random; `seed` is below 2^32."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def rng_state() -> dict[str, Any]:
    """A copy of the state of torch, its CUDA devices, numpy and random."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in cuda],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(numbers), gauss],
    }


def load_rng_state(state: dict[str, Any]) -> None:
    """Continues the sequences of `rng_state()`; those of CUDA devices only where there are as many."""
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(text) for text in state["cuda"]])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
