"""What each rank holds of a model: against the parameters that `shard_model` leaves on it, for every rank of a layout.

The processes of a layout are played one after the other by this one, with torch's process group that sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.models.causal_lm import CausalLM, ScalarModel
from headrace.models.inventory import Inventory, Weight, inventory_of
from headrace.models.mesh import Mesh, Parallelism
from headrace.models.sharding import shard_model

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 33,  # not divisible by anything that is tried
}
CONFIGS = {
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),  # biases
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),  # norms of each head
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
}
LAYOUTS = [
    (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 3, 1, 1), (1, 1, 2, 1), (1, 2, 2, 1), (2, 2, 2, 1),
    (1, 1, 1, 2), (1, 1, 1, 3), (1, 1, 2, 2), (1, 2, 1, 2), (2, 2, 2, 2),
]  # fmt: skip


def make(name: str, scalar: bool) -> Any:
    config = CONFIGS[name]
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    config.num_labels = 1
    with torch.device("meta"):
        return kind.from_config(config)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("copies, zero3, tp, pp", LAYOUTS)
def test_every_rank_holds_what_it_is_said_to(
    name: str, scalar: bool, copies: int, zero3: int, tp: int, pp: int
) -> None:
    found = inventory_of(make(name, scalar))
    world = copies * zero3 * tp * pp
    for rank in range(world):
        with as_rank(rank, world):
            hf = make(name, scalar)
            model = ScalarModel(hf, None) if scalar else CausalLM(hf, None, ())
            shard_model(model, Mesh(Parallelism(copies, zero3, tp, pp)))
            held = {
                n: (p.to_local() if isinstance(p, DTensor) else p).numel() for n, p in hf.named_parameters()
            }
        at = {"tp": (rank % tp, tp), "zero3": (rank // tp % zero3, zero3)}
        stage = rank // (world // pp)
        here = [w for w in found.weights if stage in found.stages(w, pp)]
        assert {w.name: w.numel(**at) for w in here} == held
        assert found.numel(**at, pp=(stage, pp)) == sum(held.values())


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    layers = draw(st.integers(1, 5))
    weights = []
    for i in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        dim = draw(st.none() | st.integers(0, len(shape) - 1))
        layer = draw(st.none() | st.integers(0, layers - 1))
        ends = draw(st.sets(st.sampled_from(["first", "last"]), min_size=1)) if layer is None else set()
        weights.append(Weight(f"w{i}", shape, dim, layer, frozenset(ends)))
    return Inventory(tuple(weights), layers)


@given(inventories(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=100, phases=[Phase.explicit, Phase.generate])
def test_the_ranks_together_hold_copies_of_the_model(
    found: Inventory, tp: int, zero3: int, pp: int, copies: int
) -> None:
    """Every element once for each copy; what tp does not cut on each tp rank, what is tied in both end stages."""
    together = copies * sum(
        found.numel((t, tp), (z, zero3), (s, pp)) for t in range(tp) for z in range(zero3) for s in range(pp)
    )
    expected = 0
    for w in found.weights:
        size = torch.Size(w.shape).numel()
        stages = 2 if pp > 1 and w.ends == {"first", "last"} else 1
        expected += copies * size * (tp if w.tp_dim is None else 1) * stages
    assert together == expected


def test_ends_of_a_pipeline() -> None:
    """Tied: both ends have the embedding. Untied: the first has it, the last the head; the norm is in the last."""
    for name, both in (("qwen2-tied", True), ("qwen3", False)):
        found = {w.name: w for w in inventory_of(make(name, False)).weights}
        inventory = Inventory(tuple(found.values()), 3)
        embedding = inventory.stages(found["model.embed_tokens.weight"], 3)
        assert embedding == ({0, 2} if both else {0})
        assert inventory.stages(found["model.norm.weight"], 3) == {2}
        assert inventory.stages(found["model.layers.1.mlp.up_proj.weight"], 3) == {1}
        assert ("lm_head.weight" in found) is not both


def test_what_zero3_gathers() -> None:
    """A layer of llama: q, o 32x32, k, v 16x32, three MLP matrices 48x32, two norms; outside: embedding and last norm."""
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32
    found = inventory_of(make("llama-tied", False))
    assert found.gathered() == (layer, 33 * 32 + 32)
    assert found.gathered(tp=(0, 2))[0] == (layer - 64) // 2 + 64


def test_a_model_without_a_plan_says_so() -> None:
    from transformers import GPT2Config

    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=40))
    found = inventory_of(hf)
    assert any("a matrix that it cannot cut" in problem for problem in found.tp_problems)
    assert found.zero3_problems == ()
