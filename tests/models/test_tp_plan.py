"""How modules are cut over tp, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers as t

from headrace.errors import ConfigError
from headrace.models.mesh import Mesh, Parallelism
from headrace.models.shards import Shards, part_of
from headrace.models.tp_plan import COLUMN, PARTIAL, ROW, tp_plan

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None,
}  # fmt: skip


def test_the_plan_is_that_of_transformers_by_full_names() -> None:
    plan = tp_plan(t.Qwen3ForCausalLM(t.Qwen3Config(**SHAPE, head_dim=16)), 2)
    layer = {k.removeprefix("model.layers.1."): v for k, v in plan.items() if k.startswith("model.layers.1.")}
    assert layer == {
        **{f"self_attn.{p}_proj": COLUMN for p in "qkv"},
        **{f"self_attn.{p}_norm": PARTIAL for p in "qk"},
        "self_attn.o_proj": ROW,
        "mlp.gate_proj": COLUMN,
        "mlp.up_proj": COLUMN,
        "mlp.down_proj": ROW,
    }
    assert len(plan) == 2 * len(layer)


def test_a_config_without_a_plan_gets_the_usual_one(monkeypatch) -> None:
    with_plan = tp_plan(t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)), 2)
    monkeypatch.setattr(t.LlamaConfig, "base_model_tp_plan", None)
    assert tp_plan(t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)), 2) == with_plan


def test_what_transformers_would_do_with_the_embedding_is_left_out(monkeypatch) -> None:
    """Some of its versions plan tied embeddings by rows."""
    plain = tp_plan(t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)), 2)
    planned = {**t.LlamaConfig.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    monkeypatch.setattr(t.LlamaConfig, "base_model_tp_plan", planned)
    assert tp_plan(t.LlamaForCausalLM(t.LlamaConfig(**SHAPE, tie_word_embeddings=True)), 2) == plain


def test_all_that_is_not_divisible_is_named_at_once() -> None:
    shape = {**SHAPE, "intermediate_size": 50}
    with pytest.raises(ConfigError) as error:
        tp_plan(t.LlamaForCausalLM(t.LlamaConfig(**shape)), 3)
    assert error.value.violations == [
        "parallelism.tp=3 does not fit LlamaForCausalLM: 4 attention heads are not divisible by it",
        "parallelism.tp=3 does not fit LlamaForCausalLM: 2 key/value heads are not divisible by it",
        "parallelism.tp=3 does not fit LlamaForCausalLM: 50 MLP columns are not divisible by it",
    ]


@pytest.mark.parametrize(
    "hf, said",
    [
        (
            lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97)),
            "attn.c_attn'",
        ),
        (lambda: t.Phi3ForCausalLM(t.Phi3Config(**SHAPE)), "colwise_gather_output"),
        (lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**SHAPE)), "rowwise_split_input"),
    ],
    ids=["fused matrices", "fused linear layers", "norms over several heads"],
)
def test_cuts_that_are_not_built_are_refused_by_name(hf, said) -> None:
    with pytest.raises(ConfigError) as error:
        tp_plan(hf(), 2)
    assert any(said in text for text in error.value.violations)


@pytest.mark.parametrize("length", [0, 1, 2, 5, 97])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_parts_are_those_of_torch_chunk(length: int, parts: int) -> None:
    ours = [list(part_of(length, parts, i)) for i in range(parts)]
    theirs = [c.tolist() for c in torch.arange(length).chunk(parts)] if length else []
    assert [p for p in ours if p] == theirs
    assert len(ours) == parts


def test_a_mesh_of_one_keeps_everything_whole() -> None:
    whole = torch.arange(6.0).view(3, 2)
    shards = Shards()
    assert torch.equal(shards.cut("w", whole), whole)
    assert shards.join("w", whole) is whole
    assert (Mesh().most(3), Mesh().gather("x")) == (3, ["x"])


def test_a_mesh_without_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="no process group"):
        Mesh(Parallelism(tp=2))
    with pytest.raises(ConfigError, match="tp=0"):
        Parallelism(tp=0, zero3=2)
