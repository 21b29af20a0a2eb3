"""Decoding on a CPU with taped steps: the same as with the model's own code, whatever was taped before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from headrace.config import LoraConfig
from headrace.models.causal_lm import CausalLM
from headrace.models.hf import wrap
from headrace.models.lora import adapter_layers, adapters_off, add_adapters
from headrace.rollout.engine import Completion, Request, SamplingParams
from headrace.rollout.native import tapes
from headrace.rollout.native.engine import NativeEngine
from headrace.rollout.native.tapes import tapes_possible

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=25)


def requests(limits: tuple[int, ...] = (25, 12, 20, 3)) -> list[Request]:
    """Sequences of unlike length and unlike end, so that a rollout has many numbers of rows."""
    rng = np.random.default_rng(0)
    return [
        Request(tuple(rng.integers(0, 90, size).tolist()), (1, 2, 3), max_new_tokens=limit)
        for size, limit in zip((1, 3, 17, 33), limits, strict=True)
    ]


def flat(out: list[list[Completion]]) -> list[Completion]:
    return [completion for row in out for completion in row]


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_taped_steps_give_the_same(name: str, temperature: float, tiny: Callable[[str], CausalLM]) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=25)
    plain = NativeEngine(tiny(name), block_tokens=4, replay_steps=False)
    taped = NativeEngine(tiny(name), block_tokens=4)
    want, got = flat(plain.generate(requests(), params)), flat(taped.generate(requests(), params))
    assert plain.stats.replayed_steps == 0
    assert taped.stats.replayed_steps == taped.stats.steps - 1  # all but the prefill
    for a, b in zip(want, got, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def test_what_was_taped_before_changes_no_bit(tiny: Callable[[str], CausalLM]) -> None:
    """A run that is resumed tapes anew in a new process; it has to go on as the old one would have."""
    fresh, used = NativeEngine(tiny("qwen3")), NativeEngine(tiny("qwen3"))
    used.generate(requests((5, 25, 7, 7)), PARAMS)
    for _ in range(2):
        assert flat(used.generate(requests(), PARAMS)) == flat(fresh.generate(requests(), PARAMS))


def test_new_weights_are_used(build_model: Callable[..., CausalLM]) -> None:
    """Those written in place, and those that lie elsewhere."""
    model = build_model("llama")
    engine = NativeEngine(model)
    before = flat(engine.generate(requests(), PARAMS))
    tapes = engine.tapes
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.mul_(1.05)
    in_place = flat(engine.generate(requests(), PARAMS))
    for parameter in model.hf.parameters():
        parameter.data = parameter.data * 1.05
    elsewhere = flat(engine.generate(requests(), PARAMS))
    assert engine.tapes is tapes
    assert before != in_place != elsewhere
    plain = NativeEngine(model, replay_steps=False)
    for a, b in zip(flat(plain.generate(requests(), PARAMS)), elsewhere, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def test_a_model_that_looks_at_values_is_computed_by_its_own_code(caplog: pytest.LogCaptureFixture) -> None:
    """Experts are chosen by what the hidden states are."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=256, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = wrap(MixtralForCausalLM(config), None)
    engine = NativeEngine(model)
    with caplog.at_level(logging.INFO):
        got = flat(engine.generate(requests(), PARAMS))
    assert engine.stats.replayed_steps == 0
    assert "the model's own Python code" in caplog.text
    assert got == flat(NativeEngine(model, replay_steps=False).generate(requests(), PARAMS))


def test_hooks_are_called(build_model: Callable[..., CausalLM]) -> None:
    model = build_model("llama")
    engine = NativeEngine(model)
    assert tapes_possible(model)
    calls: list[int] = []
    handle = next(model.hf.modules()).base_model.register_forward_hook(lambda *args: calls.append(1))
    engine.generate(requests(), PARAMS)
    assert len(calls) == engine.stats.steps
    handle.remove()
    engine.generate(requests(), PARAMS)
    assert engine.stats.replayed_steps == engine.stats.steps - 1


def test_more_sequences_than_run_at_once(tiny: Callable[[str], CausalLM]) -> None:
    """A step that starts sequences beside those that run is not taped; the others are, with a full batch too."""
    few = NativeEngine(tiny("qwen3"), max_concurrent_sequences=5)
    plain = NativeEngine(tiny("qwen3"), max_concurrent_sequences=5, replay_steps=False)
    want, got = flat(plain.generate(requests(), PARAMS)), flat(few.generate(requests(), PARAMS))
    assert [c.token_ids for c in want] == [c.token_ids for c in got]
    assert 0 < few.stats.replayed_steps < few.stats.steps


def same(engine: NativeEngine, asked: list[Request] | None = None) -> bool:
    """Whether a rollout gives what the model's own code gives."""
    plain = NativeEngine(engine.model, replay_steps=False)
    want, got = (flat(e.generate(asked or requests(), PARAMS)) for e in (plain, engine))
    return all(
        a.token_ids == b.token_ids and np.allclose(a.logprobs, b.logprobs, rtol=0, atol=2e-5)
        for a, b in zip(want, got, strict=True)
    )


def with_other_activation(model: CausalLM) -> None:
    for module in model.hf.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = torch.nn.GELU()


def with_other_constant(model: CausalLM) -> None:
    for module in model.hf.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1.0


def with_turned_weights(model: CausalLM) -> None:
    for layer in model.hf.model.layers:
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.t()


def with_other_forward(model: CausalLM) -> None:
    mlp = model.hf.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden) * 2


def with_fewer_tokens(model: CausalLM) -> None:
    model.hf.resize_token_embeddings(92)


@pytest.mark.parametrize(
    "change",
    [
        with_other_activation,
        with_other_constant,
        with_turned_weights,
        with_other_forward,
        with_fewer_tokens,
    ],
)
def test_a_model_that_was_changed_is_taped_anew(
    change: Callable[[CausalLM], None], build_model: Callable[..., CausalLM]
) -> None:
    """Also where all weights lie where they lay."""
    model = build_model("llama")
    engine = NativeEngine(model)
    before = flat(engine.generate(requests(), PARAMS))
    change(model)
    assert same(engine)
    assert engine.stats.replayed_steps
    assert flat(engine.generate(requests(), PARAMS)) != before


def test_adapters_are_switched_and_scaled(build_model: Callable[..., CausalLM]) -> None:
    model = build_model("llama")
    add_adapters(model.hf, LoraConfig(rank=4, targets=["all-linear"]), "base")
    with torch.no_grad():
        for name, parameter in model.hf.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    engine = NativeEngine(model)
    assert same(engine)
    with adapters_off(model.hf):
        assert same(engine)
    assert same(engine)
    for layer in adapter_layers(model.hf).values():
        layer.scaling["default"] = 0.1
    assert same(engine)
    assert engine.stats.replayed_steps


def test_what_stays_the_same_is_taped_once(
    build_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(build_model("gemma3"))
    engine.generate(requests(), PARAMS)
    monkeypatch.setattr(tapes, "Tape", None)
    engine.generate(requests(), PARAMS)
    assert engine.stats.replayed_steps


def test_a_tape_computes_with_as_many_threads_as_are_set(
    build_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(build_model("llama"))
    taped: list[int] = []

    class Counted(tapes.Tape):
        def __init__(self, *args: Any) -> None:
            taped.append(torch.get_num_threads())
            super().__init__(*args)

    monkeypatch.setattr(tapes, "Tape", Counted)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            engine.generate(requests(), PARAMS)
    finally:
        torch.set_num_threads(before)
    assert set(taped) == {1, 2}


def test_another_model_and_more_sequences(build_model: Callable[..., CausalLM]) -> None:
    engine = NativeEngine(build_model("llama"), max_concurrent_sequences=2)
    assert same(engine)
    engine.max_concurrent_sequences = 20
    assert same(engine)
    engine.model = build_model("qwen3")
    assert same(engine)


def test_more_sequences_than_positions() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=8, bos_token_id=None, eos_token_id=None
    )
    engine = NativeEngine(wrap(GPT2LMHeadModel(config), None))
    assert same(engine, [Request((5, 6), tuple(range(20)), max_new_tokens=6)])
    assert engine.stats.replayed_steps


def test_an_operator_that_cannot_be_recorded(build_model: Callable[..., CausalLM]) -> None:
    """As torch.cond, which has no rule under a recording and says so with a NotImplementedError."""
    model = build_model("llama")
    mlp = model.hf.model.layers[0].mlp
    own = mlp.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if _get_current_dispatch_mode() is not None:
            raise NotImplementedError("no rule")
        return own(hidden)

    mlp.forward = forward
    engine = NativeEngine(model)
    assert same(engine)
    assert engine.stats.replayed_steps == 0


def test_no_tapes_with_global_hooks_or_autocast(tiny: Callable[[str], CausalLM]) -> None:
    model = tiny("llama")
    assert tapes_possible(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not tapes_possible(model)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, given, out: None)
    try:
        assert not tapes_possible(model)
    finally:
        handle.remove()
    assert tapes_possible(model)


def test_empty_rows_hold_nothing_of_an_earlier_rollout(build_model: Callable[..., CausalLM]) -> None:
    """A module that mixes rows would carry it on, and a resumed run would not be the same."""
    model = build_model("llama")
    mlp = model.hf.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden) + hidden.amax(1, keepdim=True)
    fresh, used = NativeEngine(model), NativeEngine(model)
    used.generate(requests((5, 25, 7, 7)), PARAMS)
    assert flat(used.generate(requests(), PARAMS)) == flat(fresh.generate(requests(), PARAMS))
    assert fresh.stats.replayed_steps
