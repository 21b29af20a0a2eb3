"""Tokens shared out over ranks: slices, and the exchange in attention against plain float64 attention.

The ranks are threads of this process; tests/training/test_mesh_layouts.py has real ones.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers as t
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.errors import ConfigError
from headrace.models.hf import wrap
from headrace.models.mesh import Mesh, Parallelism
from headrace.models.sequence_parallel import PackSlice, SlicedAttention, kv_copies, sp_problems
from headrace.models.sharding import shard_model


class Thread:
    """A rank's place on a mesh that has `sp` alone, and its group."""

    def __init__(self, number: int, ranks: int, meeting: threading.Barrier, left: list[Any]) -> None:
        self.number, self.ranks, self.meeting, self.left = number, ranks, meeting, left

    def size(self, axis: str = "sp") -> int:
        return self.ranks if axis == "sp" else 1

    def rank(self, axis: str = "sp") -> int:
        return self.number if axis == "sp" else 0

    def group(self, axis: str) -> Any:
        return self if axis == "sp" and self.ranks > 1 else None

    def swap(self, own: Tensor) -> list[Tensor]:
        """What every rank gave."""
        self.left[self.number] = own.detach().clone()
        self.meeting.wait()
        every = list(self.left)
        self.meeting.wait()
        return every


def all_to_all_single(output: Tensor, parts: Tensor, group: Thread) -> None:
    for source, whole in enumerate(group.swap(parts)):
        output[source] = whole[group.number]


def all_gather(outputs: list[Tensor], own: Tensor, group: Thread) -> None:
    for output, whole in zip(outputs, group.swap(own), strict=True):
        output.copy_(whole)


def on_ranks(ranks: int, work: Callable[[Any], Any]) -> list[Any]:
    """`work` of every rank's mesh at the same time; what each returned."""
    meeting, left = threading.Barrier(ranks, timeout=10), [None] * ranks
    meshes = [Thread(n, ranks, meeting, left) for n in range(ranks)]
    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all_single),
        mock.patch.object(dist, "all_gather", all_gather),
        ThreadPoolExecutor(ranks) as pool,
    ):
        return [done.result() for done in [pool.submit(work, mesh) for mesh in meshes]]


def alone(number: int, ranks: int) -> Any:
    return Thread(number, ranks, threading.Barrier(1), [None])


@given(st.integers(0, 23), st.integers(1, 6), st.data())
@settings(max_examples=100, deadline=None)
def test_every_token_is_on_one_rank(tokens: int, ranks: int, data: st.DataObject) -> None:
    flat = torch.arange(100, 100 + tokens)
    parts = [PackSlice(tokens, alone(n, ranks)) for n in range(ranks)]
    assert {len(part.of(flat)) for part in parts} == {math.ceil(tokens / ranks)}
    whole = torch.cat([part.of(flat) for part in parts])
    assert whole[:tokens].tolist() == flat.tolist()
    assert whole[tokens:].tolist() == [0] * (len(whole) - tokens)
    chosen = data.draw(st.lists(st.integers(0, tokens - 1), max_size=9)) if tokens else []
    places, seen = torch.tensor(chosen, dtype=torch.int64), []
    for part in parts:
        here, own = part.find(places)
        assert part.of(flat)[own].tolist() == flat[places[here]].tolist()
        seen += here.tolist()
    assert sorted(seen) == list(range(len(places)))


@pytest.mark.parametrize("tokens, ranks", [(7, 3), (2, 4), (6, 2), (5, 1)])
def test_slices_are_joined(tokens: int, ranks: int) -> None:
    states = torch.randn(tokens, 3)
    for joined in on_ranks(ranks, lambda mesh: (p := PackSlice(tokens, mesh)).join(p.of(states))):
        assert torch.equal(joined, states)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: list[list[int]], scale: float, window: int | None
) -> Tensor:
    """Causal attention token by token, each as the first sequence that has it sees it; [C, A, D]."""
    group = query.shape[1] // key.shape[1]
    out: list[Tensor | None] = [None] * len(query)
    for tokens in sequences:
        for i, token in enumerate(tokens):
            if out[token] is not None:
                continue
            seen = tokens[max(0, i + 1 - window) if window else 0 : i + 1]
            heads = []
            for h in range(query.shape[1]):
                scores = key[seen, h // group] @ query[token, h] * scale
                heads.append(scores.softmax(0) @ value[seen, h // group])
            out[token] = torch.stack(heads)
    return torch.stack([o for o in out if o is not None])


@st.composite
def packs(draw: st.DrawFn) -> dict[str, Any]:
    """Ranks, heads that they divide, key/value heads that divide those, and sequences that may begin alike."""
    ranks = draw(st.integers(1, 4))
    heads = ranks * draw(st.integers(1, 3))
    kv = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    rows = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    shared = draw(st.integers(0, 3))
    sequences, count = [], shared
    for row in rows:
        sequences.append([*range(shared), *range(count, count + row)])
        count += row
    window = draw(st.none() | st.integers(1, 4))
    widths = draw(st.sampled_from([(2, 2), (3, 1)]))  # of keys and of values, which may differ
    return {
        "ranks": ranks, "heads": heads, "kv": kv, "sequences": sequences, "shared": shared, "tokens": count,
        "window": window, "widths": widths,
    }  # fmt: skip


@given(packs(), st.integers(0, 10**6))
@settings(max_examples=60, phases=[Phase.explicit, Phase.generate], deadline=None)
def test_the_exchange_equals_plain_float64_attention(pack: dict[str, Any], seed: int) -> None:
    """Outputs and gradients, with shared beginnings, windows, and key/value heads in any number."""
    g = torch.Generator().manual_seed(seed)
    tokens, (width, out_width) = pack["tokens"], pack["widths"]
    sizes = [(pack["heads"], width), (pack["kv"], width), (pack["kv"], out_width), (pack["heads"], out_width)]
    *inputs, wanted = (torch.randn(tokens, *size, generator=g, dtype=torch.float64) for size in sizes)
    for x in inputs:
        x.requires_grad_()
    options: dict[str, Any] = {"scale": 0.7, "window": pack["window"]}
    expected = plain_attention(*inputs, pack["sequences"], **options)
    (expected * wanted).sum().backward()

    def work(mesh: Any) -> list[Tensor]:
        part = PackSlice(tokens, mesh)
        expand = torch.tensor([i for s in pack["sequences"] for i in s]) if pack["shared"] else None
        lengths = [len(s) for s in pack["sequences"]]
        own = [part.of(x.detach()).clone().requires_grad_() for x in inputs]
        out = part.attention(lengths, torch.device("cpu"), expand).attend(0, *own, **options)
        (out * part.of(wanted)).sum().backward()
        return [out.detach(), *(x.grad for x in own)]

    ranks = on_ranks(pack["ranks"], work)
    for found, right in zip(zip(*ranks, strict=True), [expected, *(x.grad for x in inputs)], strict=True):
        whole = torch.cat(found)
        torch.testing.assert_close(whole[:tokens], right.detach(), atol=1e-12, rtol=1e-12)
        assert not whole[tokens:].any()


@pytest.mark.parametrize(
    "heads, ranks, copies", [(1, 4, 4), (2, 4, 2), (4, 2, 1), (3, 2, 2), (8, 8, 1), (6, 4, 2)]
)
def test_key_value_heads_are_repeated_only_as_often_as_needed(heads: int, ranks: int, copies: int) -> None:
    assert kv_copies(heads, ranks) == copies


# what is refused

SHAPE = {"vocab_size": 33, "hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 1}


@contextmanager
def processes(world: int) -> Any:
    """This process as the first of `world`, whose groups send nothing."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_heads_that_it_does_not_divide_are_refused() -> None:
    model = wrap(t.LlamaForCausalLM(t.LlamaConfig(**SHAPE, num_attention_heads=6)), None, verify=False)
    assert [sp_problems(model.hf, sp) for sp in (1, 2, 3, 6)] == [[]] * 4
    with (
        processes(4),
        pytest.raises(ConfigError, match=r"parallelism.sp=4 does not fit LlamaForCausalLM: 6 att"),
    ):
        shard_model(model, Mesh(Parallelism(sp=4)))
    with (
        processes(4),
        pytest.raises(ConfigError, match=r"sp=2 does not fit LlamaForCausalLM: 3 attention heads"),
    ):
        shard_model(model, Mesh(Parallelism(sp=2, tp=2)))


def test_a_layer_with_other_heads_is_refused() -> None:
    """Some models have layers with heads of their own number."""
    attention: Any = SlicedAttention(mock.Mock(), alone(0, 2))
    states = torch.zeros(1, 3, 2)
    with pytest.raises(ConfigError, match="sp=2 does not divide the 3 heads of layer 5"):
        attention.attend(5, states, states, states, scale=1.0, window=None)
