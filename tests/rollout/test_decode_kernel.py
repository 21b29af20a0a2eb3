"""What is known of the decode kernel without a GPU: its spans, what it lacks, and how a rollout does without it."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from headrace.models.causal_lm import CausalLM
from headrace.rollout.native import decode_kernel, graphs
from headrace.rollout.native.decode_kernel import MAX_SPANS, PROGRAMS, num_spans
from headrace.rollout.native.kv_cache import PagedKVCache


def test_spans_keep_a_device_busy_and_no_more() -> None:
    for rows in range(1, 600):
        for kv_heads in (1, 2, 8):
            spans = num_spans(rows, kv_heads)
            assert spans == 1 or spans * rows * kv_heads <= PROGRAMS
            assert spans == MAX_SPANS or 2 * spans * rows * kv_heads > PROGRAMS


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "find_spec", lambda name: None)
    assert "Triton" in str(decode_kernel.missing.__wrapped__())
    monkeypatch.setattr(decode_kernel, "find_spec", lambda name: name)
    monkeypatch.setattr(decode_kernel.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert "C compiler" in str(decode_kernel.missing.__wrapped__())
    monkeypatch.setenv("CC", "tcc")
    assert decode_kernel.missing.__wrapped__() is None


def test_a_kernel_that_cannot_be_built_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], CausalLM], caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler without Python's headers ends with an error of its process."""

    def fail(*args: object) -> None:
        raise subprocess.CalledProcessError(1, ["gcc"])

    monkeypatch.setattr(graphs, "_recording_stream", fail)
    recorded = graphs.DecodeGraphs(tiny("llama"), PagedKVCache(3, 2, 16, spare=True), rows=2, width=1)
    ids, positions, table = np.array([1]), np.array([3]), np.array([[0]])
    with caplog.at_level(logging.WARNING):
        assert [recorded.hidden_states(ids, positions, table) for _ in range(3)] == [None] * 3
    assert caplog.text.count("decoding goes on without CUDA graphs") == 1
