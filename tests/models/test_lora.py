"""LoRA adapters against weights merged by hand in float64, and what they must leave alone."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
from typing import Any

import pytest
import torch

from headrace.algorithms.reduction import token_weights
from headrace.config import LoraConfig
from headrace.data.batch import Batch
from headrace.errors import ConfigError, MissingExtraError
from headrace.models.attention import PackedAttention
from headrace.models.causal_lm import CausalLM, ScalarModel, verify_against_hf
from headrace.models.heads import critic_from
from headrace.models.hf import copy_causal_lm
from headrace.models.lora import adapters_off, linear_layers
from headrace.models.starting_policy import StartingPolicy
from headrace.roles.role import adapt
from headrace.rollout.engine import Request, SamplingParams
from headrace.rollout.native.engine import NativeEngine
from headrace.training.optimizer import OptimizerSettings
from headrace.training.torch_engine import TorchEngine
from headrace.training.value_loss import SupervisedLoss, ValueLoss

ARCHITECTURES = ["llama", "qwen2-tied", "qwen3", "gemma3", "gpt2"]
IDS = torch.tensor([5, 80, 2, 41, 41, 7, 1, 9, 30, 31])
LORA = LoraConfig(rank=4, alpha=6)


def hidden(model: CausalLM | ScalarModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.hidden_states(ids, torch.arange(len(ids)), PackedAttention([len(ids)], "cpu"))


def with_adapters(model: CausalLM, lora: LoraConfig = LORA, spread: float = 0.2) -> CausalLM:
    """Adapters with B drawn from a normal distribution of deviation `spread` (0: as a run starts)."""
    torch.manual_seed(1)
    adapt(model, lora, "base")
    for name, parameter in model.trained_parameters().items():
        if ".lora_B." in name and spread:
            torch.nn.init.normal_(parameter, std=spread)
    return model


def merged_by_hand(plain: Any, model: CausalLM, scale: float) -> Any:
    """transformers' own model in float64 whose weights are W + scale x B A, from the adapters' numbers alone."""
    hf = copy.deepcopy(plain).double()
    hf.set_attn_implementation("eager")
    adapters = model.trained_parameters()
    with torch.no_grad():
        for name in {n.split(".lora_")[0] for n in adapters}:
            a, b = (adapters[f"{name}.lora_{x}.default.weight"].double() for x in "AB")
            weight = hf.get_submodule(name).weight
            delta = scale * (b @ a)
            weight += delta.T if type(hf.get_submodule(name)).__name__ == "Conv1D" else delta
    return hf.eval()


def base_hashes(model: CausalLM) -> dict[str, str]:
    trained = set(model.trained_parameters())
    everything = dict(model.hf.named_parameters()) | dict(model.hf.named_buffers())
    return {
        name: hashlib.sha256(value.detach().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in everything.items()
        if name not in trained
    }


def rows(model: CausalLM) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = [8, 3, 12]
    mask = torch.cat([torch.arange(n) >= 2 for n in lengths])
    ids = torch.randint(0, model.vocab_size, (sum(lengths),), generator=generator)
    batch = Batch(lengths, {"input_ids": ids, "response_mask": mask})
    return batch.with_columns({"loss_weight": token_weights(mask, batch.offsets, "token_mean")})


def engine_of(model: CausalLM | ScalarModel, rate: float = 1e-2, **more: Any) -> TorchEngine:
    return TorchEngine(model, prefix="sft", optimizer=OptimizerSettings(rate), **more)


# ---- what adapters compute


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_start_as_exactly_nothing(build_model: Any, name: str) -> None:
    model = build_model(name)
    before = hidden(model)
    with_adapters(model, spread=0.0)
    assert torch.equal(hidden(model), before)
    assert any(p.any() for n, p in model.trained_parameters().items() if ".lora_A." in n)


@pytest.mark.parametrize("lora", [LORA, LoraConfig(rank=3, alpha=12)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_forward_equals_weights_merged_by_hand(build_model: Any, name: str, lora: LoraConfig) -> None:
    model = build_model(name)
    plain = copy.deepcopy(model.hf)
    with_adapters(model, lora)
    verify_against_hf(model)
    theirs = merged_by_hand(plain, model, lora.alpha / (lora.rank or 0))
    with torch.no_grad():
        expected = theirs(input_ids=IDS[None], use_cache=False).logits[0]
        without = plain.base_model(input_ids=IDS[None], headrace_attention=PackedAttention([10], "cpu"))
        ours = model.head().logits(hidden(model)).double()
    torch.testing.assert_close(ours, expected, atol=3e-4, rtol=1e-4)
    assert not torch.allclose(hidden(model), without.last_hidden_state[0], atol=0.1)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_rollout_equals_base_and_adapters(build_model: Any, name: str) -> None:
    """Log-probabilities that the rollout reports, against the model merged by hand."""
    model = build_model(name)
    plain = copy.deepcopy(model.hf)
    with_adapters(model)
    engine = NativeEngine(model, max_concurrent_sequences=4, block_tokens=4)
    prompt = tuple(IDS.tolist())
    (completions,) = engine.generate([Request(prompt, (1, 2, 3))], SamplingParams(max_new_tokens=6))
    theirs = merged_by_hand(plain, model, 1.5)
    for completion in completions:
        ids = torch.tensor([*prompt, *completion.token_ids])
        with torch.no_grad():
            logp = theirs(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        expected = [float(logp[len(prompt) - 1 + i, t]) for i, t in enumerate(completion.token_ids)]
        assert completion.logprobs == pytest.approx(expected, abs=2e-3)


def test_dropout_in_the_model_does_not_reach_the_adapters() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from headrace.models.hf import wrap

    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    hf = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3))
    model = with_adapters(wrap(hf, None, gradient_checkpointing=True))
    assert torch.equal(hidden(model), hidden(model))


# ---- what trains and what does not


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_is_the_same_to_the_bit_after_100_updates(build_model: Any, dtype: torch.dtype) -> None:
    model = build_model("qwen2-tied")
    model.to(dtype)
    with_adapters(model, spread=0.0)
    before, adapters = base_hashes(model), copy.deepcopy(model.trainable_state())
    engine, batch = engine_of(model), rows(model)
    losses = [engine.update(batch, SupervisedLoss()).means()["sft/loss"] for _ in range(100)]
    assert losses[-1] < 0.5 * losses[0]
    assert base_hashes(model) == before
    assert all(not torch.equal(value, adapters[n]) for n, value in model.trainable_state().items())
    # and the base's own output is what it was
    plain = build_model("qwen2-tied")
    plain.to(dtype)
    with adapters_off(model.hf):
        assert torch.equal(hidden(model), hidden(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_holds_adapters_only(build_model: Any, dtype: torch.dtype) -> None:
    model = build_model("llama")
    model.to(dtype)
    with_adapters(model)
    engine = engine_of(model)
    engine.update(rows(model), SupervisedLoss())
    assert engine.optimizer is not None
    state = engine.optimizer.state_dict()
    numbers = sum(p.numel() for p in model.trained_parameters().values())
    moments = [m for s in state["adam"] for m in s.values() if m.dim() > 0]
    assert sum(m.numel() for m in moments) == 2 * numbers
    assert all(m.dtype == torch.float32 for m in moments)
    masters = [m for m in state["masters"] if m is not None]
    assert sum(m.numel() for m in masters) == (numbers if dtype == torch.bfloat16 else 0)
    assert numbers < 0.2 * sum(p.numel() for p in model.hf.parameters())


def test_masters_keep_changes_smaller_than_bfloat16_can_hold(build_model: Any) -> None:
    model = build_model("llama")
    model.to(torch.bfloat16)
    with_adapters(model)
    engine, batch = engine_of(model, rate=1e-6), rows(model)
    before = {k: v.clone() for k, v in model.trainable_state().items()}
    engine.update(batch, SupervisedLoss())
    assert engine.optimizer is not None
    masters = engine.optimizer.state_dict()["masters"]
    name = next(n for n in before if ".lora_B." in n)
    master = masters[list(before).index(name)]
    large = before[name].abs() > 1e-3  # where half a unit in the last place is more than the step of 1e-6
    assert large.any()
    assert torch.equal(model.trainable_state()[name][large], before[name][large])  # rounds to what it was
    assert not torch.equal(master, before[name].float())  # and is not lost


def test_gradient_checkpointing_gives_the_same_gradients(build_model: Any) -> None:
    found = []
    for checkpointing in (False, True):
        model = with_adapters(build_model("qwen3"))
        if checkpointing:
            model.use_gradient_checkpointing()
        calls: list[int] = []
        model.hf.model.layers[0].self_attn.register_forward_pre_hook(lambda *_, c=calls: c.append(1))
        engine = engine_of(model)
        engine.optimizer = None  # the gradients are wanted as they are
        batch = rows(model)
        done = engine._pass(batch)
        value, _ = SupervisedLoss()(engine._head(done, done.run(0, None), with_entropy=False), batch)
        value.backward()
        assert len(calls) == (2 if checkpointing else 1)
        found.append({n: p.grad.clone() for n, p in model.trained_parameters().items()})
        assert all(p.grad is None for n, p in model.hf.named_parameters() if n not in found[-1])
    assert all(g.any() for g in found[0].values())
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-6, rtol=1e-5, msg=name)


def test_a_frozen_engine_trains_nothing(build_model: Any) -> None:
    model = with_adapters(build_model("llama"))
    TorchEngine(model, prefix="actor")
    assert not any(p.requires_grad for p in model.parameters())
    engine_of(model)
    trains = {n for n, p in model.hf.named_parameters() if p.requires_grad}
    assert trains == set(model.trained_parameters())
    assert all(".lora_A." in n or ".lora_B." in n for n in trains)


def test_a_tied_weight_is_trained_once(build_model: Any) -> None:
    whole = build_model("qwen2-tied")
    names = set(whole.trainable_state())
    assert names == set(dict(whole.hf.named_parameters()))
    assert "lm_head.weight" not in names


# ---- the frozen reference


@pytest.mark.parametrize("spread", [0.0, 0.2], ids=["fresh", "continued"])
def test_the_reference_is_the_start_without_a_copy_of_the_base(build_model: Any, spread: float) -> None:
    model = with_adapters(build_model("qwen3"), spread=spread)
    copied = copy_causal_lm(model)
    start = StartingPolicy(model)
    engine, batch = engine_of(model), rows(model)
    reference = TorchEngine(start, prefix="reference")
    for _ in range(3):
        engine.update(batch, SupervisedLoss())
        now = hidden(model)
        assert torch.equal(hidden(start), hidden(copied))
        expected = TorchEngine(copied, prefix="reference").outputs(batch).logprobs
        assert torch.equal(reference.outputs(batch).logprobs, expected)
        assert torch.equal(hidden(model), now)
        assert not torch.equal(hidden(start), now)
    assert {p.data_ptr() for p in start.parameters()} == {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("spread", [0.0, 0.2], ids=["fresh", "continued"])
def test_adapters_are_back_after_an_error(build_model: Any, spread: float) -> None:
    model = with_adapters(build_model("llama"), spread=spread)
    start = StartingPolicy(model)
    engine_of(model).update(rows(model), SupervisedLoss())
    before, flags = hidden(model), [p.requires_grad for p in model.parameters()]

    class Broken:
        def attend(self, *args: Any, **keywords: Any) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        start.hidden_states(IDS, torch.arange(len(IDS)), Broken())
    assert torch.equal(hidden(model), before)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert any(flags)


def test_switching_keeps_what_was_frozen_frozen_and_masters_summing(build_model: Any) -> None:
    model = with_adapters(build_model("llama"))
    model.set_trainable(False)
    with adapters_off(model.hf):
        pass
    assert not any(p.requires_grad for p in model.parameters())
    model.to(torch.bfloat16)
    engine, batch = engine_of(model), rows(model)
    with adapters_off(model.hf):
        hidden(model)
    before = {k: v.clone() for k, v in model.trainable_state().items()}
    assert engine.update(batch, SupervisedLoss()).means()["sft/grad_norm"] > 0
    assert any(not torch.equal(v, before[k]) for k, v in model.trainable_state().items())


# ---- the critic


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_critic_shares_the_base_and_has_its_own_adapters(build_model: Any, name: str) -> None:
    actor = with_adapters(build_model(name))
    critic = critic_from(actor)
    torch.testing.assert_close(hidden(critic), hidden(actor), atol=1e-5, rtol=1e-4)
    assert critic.scalars(hidden(critic)).tolist() == [0.0] * len(IDS)
    own = {p.data_ptr() for p in critic.trained_parameters().values()}
    base = {p.data_ptr() for p in critic.parameters()} - own
    assert not own & {p.data_ptr() for p in actor.parameters()}
    assert base <= {p.data_ptr() for p in actor.parameters()}
    assert [n for n in critic.trained_parameters() if "lora" not in n] == ["score.weight"]
    before, policy = base_hashes(actor), hidden(actor)
    torch.nn.init.normal_(critic.hf.score.weight)
    start = {k: v.clone() for k, v in critic.trainable_state().items()}
    batch = rows(actor)
    blank = torch.zeros(batch.num_tokens)
    batch = batch.with_columns({"loss_mask": batch["response_mask"], "values": blank, "returns": blank + 1})
    engine_of(critic).update(batch, ValueLoss(None))
    assert all(not torch.equal(v, start[k]) for k, v in critic.trainable_state().items())
    assert base_hashes(actor) == before
    assert torch.equal(hidden(actor), policy)


# ---- targets


def test_only_the_targets_are_adapted(build_model: Any) -> None:
    model = with_adapters(build_model("llama"), LoraConfig(rank=2, targets=["q_proj", "1.mlp.up_proj"]))
    found = sorted(
        n.removesuffix(".lora_A.default.weight") for n in model.trained_parameters() if "lora_A" in n
    )
    layers = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    assert found == sorted([*layers, "model.layers.1.mlp.up_proj"])


def test_all_linear_is_every_matrix_but_embedding_and_head(build_model: Any) -> None:
    for name, per_layer in (("llama", 7), ("gpt2", 4)):
        model = build_model(name)
        names = linear_layers(model.hf)
        assert len(names) == per_layer * model.num_layers
        with_adapters(model)
        assert len(model.trained_parameters()) == 2 * len(names)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_prj"], r"no layer is named 'q_prj'; the linear layers of LlamaForCausalLM are q_proj, k_proj"),
        (["proj"], "no layer is named 'proj'"),
        (["embed_tokens"], r"'embed_tokens' is a Embedding, not a linear layer; the linear layers"),
        (["input_layernorm"], "'input_layernorm' is a LlamaRMSNorm, not a linear layer"),
        (["self_attn"], "'self_attn' is a LlamaAttention, not a linear layer"),
        (["lm_head"], "'lm_head' is the output head, which gets no adapter"),
        (["all-linear", "lm_head"], "no layer is named 'all-linear'"),
        (["*"], r"no layer is named '\*'"),
    ],
)
def test_targets_that_will_not_do(build_model: Any, targets: list[str], said: str) -> None:
    model = build_model("llama")
    before = hidden(model)
    with pytest.raises(ConfigError, match=f"^lora.targets: .*{said}"):
        adapt(model, LoraConfig(rank=4, targets=["q_proj", *targets]), "base")
    assert torch.equal(hidden(model), before)
    assert model.adapters is None
    assert len(model.trained_parameters()) == len(list(model.hf.parameters()))


def test_every_wrong_target_is_reported(build_model: Any) -> None:
    with pytest.raises(ConfigError) as error:
        adapt(build_model("gpt2"), LoraConfig(rank=4, targets=["q_proj", "wte"]), "base")
    assert len(error.value.violations) == 2
    assert "c_attn, c_proj, c_fc" in error.value.violations[0]


def test_without_peft_one_sentence_names_the_extra(build_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(MissingExtraError, match=r"^lora\.rank needs the package `peft`.*headrace\[lora\]"):
        adapt(build_model("llama"), LORA, "base")


def test_other_settings_than_the_adapters_are_refused(build_model: Any) -> None:
    model = with_adapters(build_model("llama"))
    adapt(model, LORA, "here")
    adapt(model, LoraConfig(), "here")
    other = LoraConfig(rank=8, alpha=16, targets=["q_proj"])
    with pytest.raises(ConfigError) as error:
        adapt(model, other, "here")
    assert [v.split(" contradicts")[0] for v in error.value.violations] == [
        "lora.rank: 8",
        "lora.alpha: 16.0",
        "lora.targets: ['q_proj']",
    ]
    with pytest.raises(ConfigError, match=r"lora\.rank: 0 contradicts the adapter in 'here', which has 4"):
        adapt(model, LoraConfig(rank=0), "here")
