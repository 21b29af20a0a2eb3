"""A request may be shorter than the call it is part of, and an episode's turns have seeds of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import ConfigError
from headrace.models.causal_lm import CausalLM
from headrace.rollout.engine import Request, SamplingParams, sample_seed
from headrace.rollout.native.engine import NativeEngine

TEN = SamplingParams(max_new_tokens=10)


def test_each_request_has_its_own_limit(tiny: Callable[[str], CausalLM]) -> None:
    engine = NativeEngine(tiny("llama"), block_tokens=4)
    long = engine.generate([Request((5, 6), (1, 2)), Request((7, 8, 9), (3,))], TEN)
    limits = [3, 1, None, 50]
    requests = [Request((5, 6), (1, 2), 3), Request((7, 8, 9), (3,), 1)]
    requests += [Request((5, 6), (1, 2)), Request((7, 8, 9), (3,), 50)]
    found = engine.generate(requests, TEN)
    for made, full, limit in zip(found, long * 2, limits, strict=True):
        count = min(limit or 10, 10)
        assert [c.token_ids for c in made] == [c.token_ids[:count] for c in full]
        assert [c.finish_reason for c in made] == ["length"] * len(made)


def test_only_the_own_limit_must_fit(tiny: Callable[[str], CausalLM]) -> None:
    """The tiny models have 256 positions."""
    engine = NativeEngine(tiny("llama"), kv_cache_tokens=256)
    (made,) = engine.generate([Request(tuple(range(90)) * 2, (1,), 5)], SamplingParams(max_new_tokens=100))
    assert len(made[0].token_ids) == 5
    for limit in (100, 0):
        with pytest.raises(ConfigError, match="request 0"):
            engine.generate([Request(tuple(range(90)) * 2, (1,), limit)], SamplingParams(max_new_tokens=100))


def test_turns_have_seeds_of_their_own() -> None:
    seeds = [sample_seed(1, 2, 3, 4, turn) for turn in range(5)] + [sample_seed(1, 2, 3, 44)]
    assert len(set(seeds)) == 6
    assert seeds[0] == sample_seed(1, 2, 3, 4)
