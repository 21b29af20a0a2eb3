"""Which layers a pipeline stage keeps, and which models cannot be cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as t

from headrace.errors import ConfigError
from headrace.models.attention import PackedAttention
from headrace.models.causal_lm import CausalLM
from headrace.models.hf import wrap
from headrace.models.mesh import Axis, Mesh, Parallelism
from headrace.models.shards import Shards
from headrace.models.stage import cut_stages, split_layers, without_layers

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


class Place(Mesh):
    """A place along pp, without the other processes."""

    def __init__(self, parallelism: Parallelism, rank: int) -> None:
        self.parallelism, self.device, self.device_mesh = parallelism, torch.device("cpu"), None
        self._rank = rank

    def rank(self, axis: Axis) -> int:
        return self._rank if axis == "pp" else 0


def cut(model: CausalLM, parallelism: Parallelism, rank: int) -> CausalLM:
    """A copy of the model with what this rank has."""
    own = CausalLM(copy.deepcopy(model.hf), None, ())
    own.chunks = cut_stages(own.hf, Place(parallelism, rank), own.shards)
    return own


@pytest.mark.parametrize("layers, stages, sizes", [(5, 2, [3, 2]), (4, 4, [1] * 4), (7, 3, [3, 2, 2])])
def test_layers_are_split_in_order_and_evenly(layers: int, stages: int, sizes: list[int]) -> None:
    parts = split_layers(layers, stages)
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(layers))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "parallelism", [Parallelism(pp=2), Parallelism(pp=2, pp_chunks=2), Parallelism(pp=3)]
)
@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3"])
def test_the_chunks_after_one_another_are_the_model(kind: str, parallelism: Parallelism, tied: bool) -> None:
    torch.manual_seed(1)
    config: Any = t.Qwen3Config(**SHAPE, tie_word_embeddings=tied)
    if kind == "Gemma3":
        config = t.Gemma3TextConfig(**SHAPE, tie_word_embeddings=tied, sliding_window=4)
        config.layer_types = [*["sliding_attention", "full_attention"] * 2, "sliding_attention"]
    whole = wrap(getattr(t, f"{kind}ForCausalLM")(config), None)
    lengths = [6, 9]
    ids = torch.randint(0, 97, (15,))
    positions = torch.cat([torch.arange(n) for n in lengths])
    ranks = [cut(whole, parallelism, rank) for rank in range(parallelism.pp)]
    with torch.no_grad():
        expected = whole.run_layers(ids, positions, PackedAttention(lengths, "cpu"))
        hidden = None
        for chunk in range(parallelism.pp_chunks):
            for own in ranks:
                hidden = own.run_layers(ids, positions, PackedAttention(lengths, "cpu"), chunk, hidden)
    assert torch.equal(hidden, expected)
    names = [{name for name, _ in own.hf.named_parameters()} for own in ranks]
    everything = {name for name, _ in whole.hf.named_parameters()}
    assert set.union(*names) == everything
    twice = {name for name in everything if sum(name in own for own in names) > 1}
    assert twice == ({"model.embed_tokens.weight"} if tied else set())
    for own in ranks:
        assert own.shards.stages == {
            name: tuple(r for r, own in enumerate(names) if name in own) for name in everything
        }
        assert without_layers(own.hf) is not None
    assert ranks[-1].head().weight.shape == (97, 32)


def test_the_turns_of_an_interleaved_rank() -> None:
    model = wrap(t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)), None)
    for rank, layers in enumerate([{0, 1, 3}, {2, 4}]):
        names = [n for n, _ in cut(model, Parallelism(pp=2, pp_chunks=2), rank).hf.named_parameters()]
        assert {int(n.split(".")[2]) for n in names if ".layers." in n} == layers


@pytest.mark.parametrize(
    "hf, parallelism, said",
    [
        (lambda: t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)), Parallelism(pp=6), "pp=6 .*it has 5 layers"),
        (
            lambda: t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)),
            Parallelism(pp=2, pp_chunks=3),
            "pp_chunks=3 .*5 layers",
        ),
        (
            lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97)),
            Parallelism(pp=2),
            "GPT2LMHeadModel is not an embedding, a list of layers and a norm",
        ),
    ],
    ids=["layers", "turns", "a second embedding"],
)
def test_models_that_do_not_fit_are_refused(hf: Any, parallelism: Parallelism, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cut_stages(hf(), Place(parallelism, 0), Shards())


def test_a_model_that_scales_what_enters_its_layers_is_refused() -> None:
    """Each stage would scale once more."""
    hf = t.GraniteForCausalLM(t.GraniteConfig(**SHAPE, embedding_multiplier=3.0))
    cut_stages(hf, Place(Parallelism(pp=2), 1), Shards())
    with pytest.raises(ConfigError, match="GraniteForCausalLM does more than its layers"):
        without_layers(hf)


def test_turns_are_for_several_ranks() -> None:
    with pytest.raises(ConfigError, match="pp_chunks=2 is for pp above 1"):
        Parallelism(pp_chunks=2)
    assert Parallelism(pp=2, pp_chunks=3, tp=2).size == 4
