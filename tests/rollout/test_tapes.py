"""Decoding on a CPU with taped steps: the same as with the model's own code, whatever was taped before."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.models.causal_lm import CausalLM
from headrace.models.hf import wrap
from headrace.rollout.engine import Completion, Request, SamplingParams
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
