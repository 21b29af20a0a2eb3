"""The memory estimate: its terms by hand, and the refusal at the start of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import configuration, even, go

from headrace.errors import ConfigError
from headrace.flow import memory
from headrace.flow.memory import estimate_memory
from headrace.flow.memory_terms import Estimate, Load, Part, layer_bytes, tokens_at_once
from headrace.models.shape import ModelShape
from headrace.observe.machine import Memory
from headrace.roles.actor import Actor
from headrace.trainers.recipes import policy_flow, sft_flow

LOAD = Load(longest=10, rows_per_update=16, rows_at_once=16, prompts_at_once=4)
# the demo's model: 14 tokens of vocabulary, hidden 128, inner 512, 2 layers, 4 and 2 heads of 32, head not tied
LAYER = 128 * 32 * (4 + 2) * 2 + 3 * 128 * 512 + 2 * 128 + 2 * 32
PARAMETERS = 2 * 14 * 128 + 2 * LAYER + 128


def estimate(folder: Path, tmp_path: Path, load: Load = LOAD, **sections: dict[str, Any]) -> Estimate:
    config = configuration(folder, tmp_path, sections)
    flow = policy_flow(config, Actor(config.model, config.run.device), even).compile()
    return estimate_memory(flow, load)


def sizes(parts: list[Part]) -> dict[str, int]:
    return {part.what: part.bytes for part in parts}


def test_what_is_there_all_the_time(arithmetic: Path, tmp_path: Path) -> None:
    """float32: weights 4 bytes, Adam's two moments 8; a critic has no vocabulary but one row of its head."""
    sections: dict[str, dict[str, Any]] = {
        "algorithm": {"name": "ppo", "kl_coefficient": 0.1},
        "run": {"device": "cpu"},
    }
    always = sizes(estimate(arithmetic, tmp_path, **sections).always)
    critic = PARAMETERS - 14 * 128 + 128
    assert always == {
        "actor weights": 4 * PARAMETERS,
        "actor optimizer": 8 * PARAMETERS,
        "reference weights": 4 * PARAMETERS,
        "critic weights": 4 * critic,
        "critic optimizer": 8 * critic,
        "libraries": 700 << 20,
    }


def test_in_bfloat16_the_masters_are_kept_apart(arithmetic: Path, tmp_path: Path) -> None:
    found = estimate(arithmetic, tmp_path, model={"dtype": "bfloat16"}, run={"device": "cpu"})
    always = sizes(found.always)
    assert (always["actor weights"], always["actor optimizer"]) == (2 * PARAMETERS, 12 * PARAMETERS)
    assert sizes(found.phases["actor update"])["actor gradients"] == 4 * PARAMETERS


def test_the_phases(arithmetic: Path, tmp_path: Path) -> None:
    found = estimate(arithmetic, tmp_path, run={"device": "cpu"})
    rollout = sizes(found.phases["rollout"])
    # 16 sequences of one block of 16 tokens and a free one; keys and values of 2 layers x 2 heads of 32
    assert rollout["KV cache of 512 tokens"] == 512 * 2 * 2 * 2 * 32 * 4
    assert rollout["logits of one draw"] == 4 * 4 * 16 * 14
    update = sizes(found.phases["actor update"])
    assert update["actor gradients"] == 4 * PARAMETERS
    assert "activations of up to 160 tokens" in update
    assert found.least_bytes == 4 * PARAMETERS + 8 * PARAMETERS + 4 * PARAMETERS
    assert found.phase == "actor update"
    assert found.peak == sum(p.bytes for p in found.always) + sum(update.values())


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, total: int = 1 << 40) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr("headrace.flow.memory.resolve_device", lambda name: device)
    monkeypatch.setattr("headrace.flow.memory_terms.resolve_device", lambda name: device)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda of: (total, total))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda of: "a GPU")


def test_weights_that_take_turns(arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: each role's weights in its own phases, the rollout's being the actor's; on a CPU nothing changes."""
    sections: dict[str, Any] = {
        "algorithm": {"name": "ppo", "kl_coefficient": 0.1},
        "model": {"dtype": "float32"},
    }
    turns = {**sections, "train": {"offload_parameters": True}}
    on_cpu = {"run": {"device": "cpu"}}
    assert estimate(arithmetic, tmp_path, **turns, **on_cpu) == estimate(
        arithmetic, tmp_path, **sections, **on_cpu
    )
    on_a_gpu(monkeypatch)
    stay, found = (estimate(arithmetic, tmp_path, **s) for s in (sections, turns))
    critic = PARAMETERS - 14 * 128 + 128
    assert sizes(found.always) == {
        "actor optimizer": 8 * PARAMETERS,
        "critic optimizer": 8 * critic,
        "libraries": 600 << 20,
    }
    assert sizes(found.phases.pop("reference pass")) == {"reference weights": 4 * PARAMETERS}
    own = {"rollout": "actor", "actor update": "actor", "critic update": "critic"}
    assert found.phases.keys() == stay.phases.keys() == own.keys()
    for phase, parts in found.phases.items():
        weights = {f"{own[phase]} weights": 4 * (critic if own[phase] == "critic" else PARAMETERS)}
        assert sizes(parts) == sizes(stay.phases[phase]) | weights
    # at least: what is always there, and weights and gradients of the larger model
    assert found.least_bytes == 8 * (PARAMETERS + critic) + 8 * PARAMETERS
    assert stay.least_bytes == 12 * (PARAMETERS + critic) + 4 * PARAMETERS + 4 * PARAMETERS


def test_adapters_that_take_turns(arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A critic and a reference that share the actor's base need it in their own turn."""
    on_a_gpu(monkeypatch)
    found = estimate(
        arithmetic,
        tmp_path,
        algorithm={"name": "ppo", "kl_coefficient": 0.1},
        lora={"rank": 2},
        train={"offload_parameters": True},
    )
    assert not [part.what for part in found.always if part.what.endswith(("weights", "adapters"))]
    for phase in ("actor update", "reference pass", "critic update", "critic loading", "rollout"):
        assert "actor weights" in sizes(found.phases[phase])
    assert "critic adapters" in sizes(found.phases["critic update"])
    assert "critic adapters" not in sizes(found.phases["actor update"])


def test_a_given_cache_is_taken_as_it_is(arithmetic: Path, tmp_path: Path) -> None:
    found = estimate(arithmetic, tmp_path, rollout={"kv_cache_tokens": 4096}, run={"device": "cpu"})
    assert sizes(found.phases["rollout"])["KV cache of 4,096 tokens"] == 4096 * 2 * 2 * 2 * 32 * 4


def test_one_layer_by_hand() -> None:
    """hidden 8, 2 heads and 1 key head of 4, inner 16, float32."""
    shape = ModelShape(1, 0, 1, 8, 16, 2, 1, 4, 10, gated=True, query_key_norm=False)
    norms = 2 * 8 * (4 + 4 + 4)
    attention = 4 * (8 + 8 + 8 + 4 + 4) + 4 * 2  # query, output twice, key, value; a float32 a head
    assert layer_bytes(shape, 4) == norms + attention + 4 * 4 * 16


def test_checkpointing_keeps_one_layer(arithmetic: Path, tmp_path: Path) -> None:
    def activations(on: bool) -> int:
        found = estimate(arithmetic, tmp_path, model={"gradient_checkpointing": on}, run={"device": "cpu"})
        return sizes(found.phases["actor update"])["activations of up to 160 tokens"]

    shape = ModelShape(1, 0, 2, 128, 512, 4, 2, 32, 14, gated=True, query_key_norm=True)
    assert activations(False) - activations(True) == 160 * (layer_bytes(shape, 4) - 2 * 128 * 4)


@pytest.mark.parametrize(
    ("train", "tokens"),
    [
        ({}, 160),  # all 16 rows of 10
        ({"tokens_per_microbatch": 50}, 50),
        ({"tokens_per_microbatch": 4}, 10),  # a row is never cut
        ({"microbatches_per_update": 3}, 60),  # 6 rows at most
    ],
)
def test_tokens_at_once(arithmetic: Path, tmp_path: Path, train: dict[str, int], tokens: int) -> None:
    assert tokens_at_once(configuration(arithmetic, tmp_path, {"train": train}), LOAD) == tokens


def test_sft_has_no_rollout(arithmetic: Path, tmp_path: Path) -> None:
    config = configuration(arithmetic, tmp_path, {"run": {"device": "cpu"}})
    flow = sft_flow(config, Actor(config.model, "cpu")).compile()
    assert set(estimate_memory(flow, Load(10, 16, 0, 4)).phases) == {"actor update"}


def test_a_model_of_unknown_size_is_said(arithmetic: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = estimate(
        arithmetic, tmp_path, algorithm={"kl_coefficient": 0.1}, reference={"path": str(tmp_path / "empty")}
    )
    assert found.unknown == [f"reference ({tmp_path / 'empty'})"]


def give(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(total, free))


def test_a_run_that_cannot_fit_is_refused_before_weights_are_loaded(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, 16 * PARAMETERS - 1, 16 * PARAMETERS - 1)

    def load(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("headrace.roles.role.load_causal_lm", load)
    with pytest.raises(
        ConfigError, match=r"weights, gradients and optimizer alone take .* model\.path"
    ) as error:
        go(arithmetic, tmp_path, run={"device": "cpu"})
    assert error.value.exit_code == 2
    assert not (tmp_path / "r").exists()


def test_a_run_that_may_not_fit_is_warned_of(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    give(monkeypatch, 16 * PARAMETERS, 16 * PARAMETERS)
    with caplog.at_level(logging.WARNING, "headrace"):
        go(arithmetic, tmp_path, run={"device": "cpu"}, train={"steps": 1})
    assert "memory: this run may take up to" in caplog.text
