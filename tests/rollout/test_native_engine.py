"""The native engine against Hugging Face's own eager forward over the whole sequence, without a cache."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.models.attention import PackedAttention
from headrace.models.causal_lm import CausalLM
from headrace.models.hf import load_causal_lm
from headrace.rollout.engine import Completion, Request, SamplingParams, sample_seed
from headrace.rollout.native.engine import NativeEngine

Prompts = list[tuple[int, ...]]
Tiny = Callable[[str], CausalLM]
ARCHITECTURES = ["llama", "qwen2-tied", "qwen3", "gemma3", "gpt2"]
VOCAB = 97  # of the models in tests/conftest.py
GREEDY = SamplingParams(temperature=0, max_new_tokens=12)


def eager(model: CausalLM) -> Any:
    hf = copy.deepcopy(model.hf)
    hf.set_attn_implementation("eager")
    return hf


@torch.no_grad()
def logprobs_of(hf: Any, ids: Sequence[int]) -> np.ndarray:
    """log-softmax [len(ids), V] by the model's own forward; row t is the distribution of token t + 1."""
    logits = hf(input_ids=torch.tensor([ids], device=hf.device), use_cache=False).logits[0]
    return logits.double().log_softmax(-1).cpu().numpy()


def greedy_by_hand(hf: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    ids, logps = list(prompt), []
    for _ in range(count):
        last = logprobs_of(hf, ids)[-1]
        ids.append(int(last.argmax()))
        logps.append(float(last.max()))
    return ids[len(prompt) :], logps


def ids_of(results: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.token_ids for c in row] for row in results]


def requests_for(prompts: Prompts, samples: int) -> list[Request]:
    return [Request(p, tuple(sample_seed(1, 0, i, j) for j in range(samples))) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_a_full_forward_at_every_step(name: str, tiny: Tiny, prompts: Prompts) -> None:
    model = tiny(name)
    hf = eager(model)
    want = [greedy_by_hand(hf, p, 12) for p in prompts]
    requests = [Request(p, (0,)) for p in prompts]
    settings: list[dict[str, Any]] = [
        {},
        {"max_concurrent_sequences": 3, "block_tokens": 4, "max_prefill_tokens": 20},
        {"block_tokens": 4, "kv_cache_tokens": 56},
        {"block_tokens": 1, "kv_cache_tokens": 70, "max_concurrent_sequences": 5},
    ]
    for setting in settings:
        engine = NativeEngine(model, **setting)
        got = engine.generate(requests, GREEDY)
        assert ids_of(got) == [[ids] for ids, _ in want], setting
        for (completion,), (_, logps) in zip(got, want, strict=True):
            np.testing.assert_allclose(completion.logprobs, logps, atol=2e-4)
            np.testing.assert_allclose(completion.untruncated_logprobs, logps, atol=2e-4)
        assert engine.stats.leaked_blocks == 0
        assert engine.stats.generated_tokens == 12 * len(prompts)
        assert "kv_cache_tokens" not in setting or engine.stats.preemptions > 0


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_sampled_logprobs_are_those_of_the_models_own_forward(
    name: str, tiny: Tiny, prompts: Prompts
) -> None:
    model = tiny(name)
    hf = eager(model)
    params = SamplingParams(temperature=1.3, top_p=0.9, max_new_tokens=10)
    results = NativeEngine(model, block_tokens=4).generate(requests_for(prompts, 2), params)
    for prompt, row in zip(prompts, results, strict=True):
        for completion in row:
            logps = logprobs_of(hf, [*prompt, *completion.token_ids])[len(prompt) - 1 : -1] / 1.3
            logps -= np.log(np.exp(logps).sum(-1, keepdims=True))
            for t, token in enumerate(completion.token_ids):
                assert completion.untruncated_logprobs[t] == pytest.approx(logps[t, token], abs=2e-4)
                order = np.argsort(-logps[t], kind="stable")
                size = int(np.searchsorted(np.exp(logps[t][order]).cumsum(), 0.9)) + 1
                assert token in order[:size]
                kept = np.log(np.exp(logps[t][order[:size]]).sum())
                assert completion.logprobs[t] == pytest.approx(logps[t, token] - kept, abs=4e-4)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_new_tokens=12), SamplingParams(top_k=9, top_p=0.9, max_new_tokens=12)],
    ids=["plain", "filtered"],
)
def test_samples_do_not_depend_on_batch_order_or_concurrency(
    params: SamplingParams, tiny: Tiny, prompts: Prompts
) -> None:
    model = tiny("qwen2-tied")
    requests = requests_for(prompts, 3)
    base = ids_of(NativeEngine(model).generate(requests, params))
    assert len({tuple(ids) for row in base for ids in row}) > len(prompts)  # siblings differ
    for setting in (
        {"max_concurrent_sequences": 1},
        {"max_concurrent_sequences": 4, "block_tokens": 2},
        {"block_tokens": 4, "kv_cache_tokens": 64},
        {"max_prefill_tokens": 1},
    ):
        assert ids_of(NativeEngine(model, **setting).generate(requests, params)) == base, setting
    backwards = ids_of(NativeEngine(model).generate(requests[::-1], params))
    assert backwards[::-1] == base
    alone = [NativeEngine(model).generate([r], params)[0] for r in requests]
    assert ids_of(alone) == base


def test_samples_of_a_prompt_share_its_blocks_and_equal_separate_requests(tiny: Tiny) -> None:
    model = tiny("llama")
    prompt = tuple(i % VOCAB for i in range(42))
    seeds = tuple(range(100, 108))
    params = SamplingParams(max_new_tokens=6)
    engine = NativeEngine(model, block_tokens=4)
    together = engine.generate([Request(prompt, seeds)], params)[0]
    # 10 full blocks once; tokens 41 … 47 (the sixth is never stored) fill two more blocks per sample
    assert engine.stats.peak_blocks == 10 + 2 * 8
    assert engine.stats.prefill_tokens == 42
    apart = engine.generate([Request(prompt, (s,)) for s in seeds], params)
    assert engine.stats.peak_blocks == 12 * 8
    assert [c.token_ids for c in together] == [row[0].token_ids for row in apart]
    np.testing.assert_allclose(
        [x for c in together for x in c.logprobs], [x for row in apart for x in row[0].logprobs], atol=1e-5
    )
    # few places at once: the prompt is still computed only once
    few = NativeEngine(model, block_tokens=4, max_concurrent_sequences=3)
    assert ids_of(few.generate([Request(prompt, seeds)], params)) == ids_of([together])
    assert few.stats.prefill_tokens == 42


def test_stops(tiny: Tiny, build_model: Callable[..., CausalLM], byte_tokenizer: Any) -> None:
    plain = tiny("llama")
    prompt = (5, 6, 7)
    free = NativeEngine(plain).generate([Request(prompt, (0,))], GREEDY)[0][0]
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12)
    at = next(i for i, t in enumerate(free.token_ids) if i >= 3 and t not in free.token_ids[:i])
    end = free.token_ids[at]

    def run(model: CausalLM, **changes: Any) -> Completion:
        params = SamplingParams(**{"temperature": 0, "max_new_tokens": 12, **changes})
        return NativeEngine(model).generate([Request(prompt, (0,))], params)[0][0]

    with_eos = copy.copy(plain)
    with_eos.eos_token_ids = (VOCAB - 1, end) if end != VOCAB - 1 else (end,)
    for got in (run(with_eos), run(plain, stop_token_ids=(end,)), run(with_eos, max_new_tokens=at + 1)):
        assert got.finish_reason == "stop"  # the last: EOS exactly at the limit
        assert got.token_ids == free.token_ids[: at + 1]  # the end id is kept
        assert len(got.logprobs) == len(got.untruncated_logprobs) == len(got.weight_versions) == at + 1
    short = run(with_eos, max_new_tokens=at)
    assert (short.finish_reason, short.token_ids) == ("length", free.token_ids[:at])
    one = run(with_eos, max_new_tokens=1)
    assert (one.finish_reason, len(one.token_ids)) == ("length", 1)
    assert run(plain, max_new_tokens=1, stop_token_ids=(free.token_ids[0],)).finish_reason == "stop"

    spelled = build_model("llama", byte_tokenizer)
    spelled.eos_token_ids = ()
    texts = [byte_tokenizer.decode(free.token_ids[: i + 1]) for i in range(12)]
    stop = texts[5][-2:]
    first = next(i for i, text in enumerate(texts) if stop in text)
    got = run(spelled, stop=("never this", stop))
    assert (got.finish_reason, got.token_ids) == ("stop", free.token_ids[: first + 1])
    with pytest.raises(ConfigError, match=r"rollout\.stop: stop strings need a tokenizer"):
        run(plain, stop=("x",))


def test_min_new_tokens_forbids_end_ids(tiny: Tiny) -> None:
    model = copy.copy(tiny("qwen2-tied"))
    hf = eager(model)
    prompt = (1, 2, 3, 4)
    free = NativeEngine(model).generate([Request(prompt, (0,))], GREEDY)[0][0].token_ids
    model.eos_token_ids = (free[0],)
    params = SamplingParams(temperature=0, max_new_tokens=12, min_new_tokens=4)
    got = NativeEngine(model).generate([Request(prompt, (0,))], params)[0][0]
    assert free[0] not in got.token_ids[:4]
    rows = logprobs_of(hf, [*prompt, *got.token_ids])[len(prompt) - 1 : -1]
    for t, token in enumerate(got.token_ids):
        allowed = np.arange(VOCAB) != free[0] if t < 4 else np.ones(VOCAB, dtype=bool)
        assert token == np.where(allowed, rows[t], -np.inf).argmax()
        assert got.untruncated_logprobs[t] == pytest.approx(rows[t, token], abs=2e-4)
        kept = np.log(np.exp(rows[t][allowed]).sum())
        assert got.logprobs[t] == pytest.approx(rows[t, token] - kept, abs=2e-4)
    # a limit equal to the minimum ends by length, whatever the model wants
    same = SamplingParams(max_new_tokens=3, min_new_tokens=3, stop_token_ids=tuple(range(1, VOCAB)))
    for completion in NativeEngine(model).generate([Request(prompt, tuple(range(20)))], same)[0]:
        assert completion.finish_reason == "length"
        assert completion.token_ids == [0, 0, 0] or free[0] == 0
        assert completion.logprobs == pytest.approx([0, 0, 0], abs=1e-6)


def test_generation_config_of_the_folder_has_no_effect(
    tmp_path: Path, build_model: Callable[..., CausalLM], byte_tokenizer: Any, prompts: Prompts
) -> None:
    hf = build_model("qwen2-tied").hf
    results = []
    for folder, settings in {
        "plain": {},
        "peculiar": {
            "do_sample": True,
            "top_p": 0.8,
            "top_k": 20,
            "temperature": 0.3,
            "repetition_penalty": 1.5,
        },
    }.items():
        hf.save_pretrained(tmp_path / folder)
        byte_tokenizer.save_pretrained(tmp_path / folder)
        (tmp_path / folder / "generation_config.json").write_text(json.dumps(settings))
        model = load_causal_lm(str(tmp_path / folder))
        assert getattr(model.hf.generation_config, "top_k", None) == settings.get("top_k")
        results.append(
            NativeEngine(model).generate(requests_for(prompts, 2), SamplingParams(max_new_tokens=8))
        )
    assert results[0] == results[1]
    for row in results[1]:
        for completion in row:
            assert completion.logprobs == completion.untruncated_logprobs


def test_after_an_update_in_place_the_engine_equals_a_cold_one(
    build_model: Callable[..., CausalLM], prompts: Prompts
) -> None:
    model = build_model("gemma3")
    engine = NativeEngine(model, block_tokens=4)
    requests = requests_for(prompts, 2)
    before = engine.generate(requests, GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    engine.weight_version = 3
    warm = engine.generate(requests, GREEDY)
    cold = NativeEngine(copy.deepcopy(model), block_tokens=4).generate(requests, GREEDY)
    assert ids_of(warm) == ids_of(cold) != ids_of(before)
    for a, b in zip(warm, cold, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-6)
            assert (x.weight_versions, y.weight_versions) == ([3] * 12, [0] * 12)


def test_bfloat16_is_near_float32(build_model: Callable[..., CausalLM], prompts: Prompts) -> None:
    full = build_model("qwen2-tied")
    half = build_model("qwen2-tied")
    half.hf.to(torch.bfloat16)
    got = NativeEngine(half, block_tokens=4).generate(
        requests_for(prompts, 2), SamplingParams(max_new_tokens=8)
    )
    hf = eager(full)
    gaps = []
    for prompt, row in zip(prompts, got, strict=True):
        for completion in row:
            rows = logprobs_of(hf, [*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
            for t, token in enumerate(completion.token_ids):
                gaps.append(abs(rows[t, token] - completion.logprobs[t]))
    # 8 bits of mantissa: about 0.4 % of logits of size 10
    assert np.mean(gaps) < 0.05
    assert max(gaps) < 0.5


def test_the_trainers_model_is_left_as_it_was(build_model: Callable[..., CausalLM]) -> None:
    model = build_model("llama")
    model.use_gradient_checkpointing()
    training = [m.training for m in model.modules()]
    assert any(training)
    engine = NativeEngine(model)
    engine.generate([Request((1, 2, 3), (0, 1))], SamplingParams(max_new_tokens=3))
    assert [m.training for m in model.modules()] == training
    assert all(p.requires_grad and not p.is_inference() and p.grad is None for p in model.parameters())
    # and it trains on: nothing that generation made inside the model stands in the way of a gradient
    ids = torch.arange(5)
    model.hidden_states(ids, ids, PackedAttention([5], "cpu")).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "layers.0" in name)


def test_progress_and_empty_requests(tiny: Tiny) -> None:
    engine = NativeEngine(tiny("gpt2"), max_concurrent_sequences=2)
    calls: list[tuple[int, int]] = []
    requests = [Request((1,), (1, 2, 3)), Request((2,), ()), Request((3, 4), (9,))]
    got = engine.generate(requests, SamplingParams(max_new_tokens=4), lambda s, t: calls.append((s, t)))
    assert [len(row) for row in got] == [3, 0, 1]
    assert calls == [(0, 2), (0, 4), (0, 6), (2, 8), (2, 10), (2, 12), (2, 14), (4, 16)]
    assert engine.generate([], SamplingParams()) == []
    assert engine.generate([Request((1,), ())], SamplingParams(max_new_tokens=9)) == [[]]


def test_wrong_input_is_refused_by_name(tiny: Tiny) -> None:
    model = tiny("gpt2")
    requests = [
        Request((), (0,)),
        Request(tuple([1] * 250), (0,)),
        Request((VOCAB,), (0,)),
        Request((-1,), (0,)),
    ]
    with pytest.raises(ConfigError) as caught:
        NativeEngine(model).generate(requests, SamplingParams(max_new_tokens=7, top_p=1.5))
    problems = caught.value.violations
    assert [p.split(":")[0] for p in problems] == [
        "rollout.top_p",
        "request 0",
        "request 1",
        "request 2",
        "request 3",
    ]
    assert "the prompt is empty" in problems[1]
    assert "data.max_prompt_tokens or rollout.max_new_tokens" in problems[2]
    assert "257" not in problems[2]
    assert "vocabulary of 97" in problems[3]
    NativeEngine(model).generate([Request(tuple([1] * 250), (0,))], SamplingParams(max_new_tokens=6))
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache_tokens: request 0"):
        NativeEngine(model, kv_cache_tokens=32).generate(
            [Request((1,) * 30, (0,))], SamplingParams(max_new_tokens=9)
        )
    with pytest.raises(ConfigError, match=r"rollout\.block_tokens: 0 must be at least 1"):
        NativeEngine(model, block_tokens=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cuda_equals_cpu(name: str, build_model: Callable[..., CausalLM], prompts: Prompts) -> None:
    requests = requests_for(prompts, 3)
    cpu = build_model(name)
    cuda = build_model(name)
    cuda.hf.to("cuda")
    for params in (
        GREEDY,
        SamplingParams(max_new_tokens=12),
        SamplingParams(top_k=9, top_p=0.9, max_new_tokens=12),
    ):
        want = NativeEngine(cpu, block_tokens=4).generate(requests, params)
        for setting in ({"block_tokens": 4}, {"block_tokens": 16, "max_concurrent_sequences": 5}):
            got = NativeEngine(cuda, **setting).generate(requests, params)
            assert ids_of(got) == ids_of(want)
            for a, b in zip(got, want, strict=True):
                for x, y in zip(a, b, strict=True):
                    np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-3)
