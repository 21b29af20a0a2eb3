"""What can be known of the kernel of paged_kernel.py without Triton: whether it can be built here, and its spans."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec

PROGRAMS = 512  # about four for each multiprocessor of a large GPU: more spans gain nothing then
MAX_SPANS = 16


def num_spans(rows: int, kv_heads: int) -> int:
    """A power of two; 1 where rows and heads alone keep the device busy."""
    spans = 1
    while spans < MAX_SPANS and 2 * spans * rows * kv_heads <= PROGRAMS:
        spans *= 2
    return spans


@cache
def missing() -> str | None:
    """What the kernel lacks on this machine; None where it can be built. torch for CUDA on Linux brings Triton along."""
    if find_spec("triton") is None:
        return "Triton, which comes with torch for CUDA on Linux (pip install triton)"
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
        return "a C compiler, which Triton calls once (apt install gcc)"
    return None


def build_errors() -> tuple[type[Exception], ...]:
    """What is raised where a kernel cannot be built or recorded after all: without Python's headers, say."""
    errors: tuple[type[Exception], ...] = (RuntimeError, OSError, subprocess.SubprocessError)
    if find_spec("triton") is None:
        return errors
    from triton.errors import TritonError

    return (*errors, TritonError)
