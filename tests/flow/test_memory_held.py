"""The memory estimate against the bytes that the models, gradients and optimizers of a run really hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import Sections, configuration, even, go

from headrace.errors import ConfigError
from headrace.flow.memory import estimate_memory, load_of
from headrace.flow.memory_terms import Estimate, Load
from headrace.flow.prepare import prepare_both
from headrace.models.shape import read_shape
from headrace.roles.actor import Actor
from headrace.trainers.launch import training_flow
from headrace.training.optimizer import MasterAdamW

LORA: dict[str, Any] = {"rank": 3, "alpha": 6}


class Held:
    """What a run of one step held, in bytes: `weights` of all roles, each storage once; the rest by role."""

    def __init__(self, config: Any, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gradients: dict[int, int] = {}
        step = MasterAdamW.step

        def note(optimizer: MasterAdamW) -> Any:
            found = sum(g.numel() * g.element_size() for g in optimizer._gradients())
            self.gradients[id(optimizer)] = max(found, self.gradients.get(id(optimizer), 0))
            return step(optimizer)

        monkeypatch.setattr(MasterAdamW, "step", note)
        flow, _ = training_flow(config, Actor(config.model, "cpu"), even, data)
        prepared, _ = prepare_both(flow, data, None)
        self.estimate: Estimate = estimate_memory(flow, load_of(flow, prepared))
        flow.run(data)
        storages: dict[int, int] = {}
        self.optimizer: dict[str, int] = {}
        self.gradient: dict[str, int] = {}
        for role in flow.roles:
            engine = role.engine
            kept = getattr(engine.model, "_start", {})
            for p in (*engine.model.hf.parameters(), *kept.values()):
                storages[p.data_ptr()] = p.numel() * p.element_size()
            if engine.optimizer is not None:
                state = engine.optimizer.state_dict()
                moments = [a[k] for a in state["adam"] for k in ("exp_avg", "exp_avg_sq")]
                tensors = [*moments, *(m for m in state["masters"] if m is not None)]
                self.optimizer[role.name] = sum(t.numel() * t.element_size() for t in tensors)
                self.gradient[role.name] = self.gradients[id(engine.optimizer)]
        self.weights = sum(storages.values())

    def check(self) -> None:
        always = {part.what: part.bytes for part in self.estimate.always}
        assert self.weights == sum(n for what, n in always.items() if what.endswith(("weights", "adapters")))
        assert self.optimizer == {
            what.split()[0]: n for what, n in always.items() if what.endswith("optimizer")
        }
        assert self.gradient == {
            what.split()[0]: part.bytes
            for parts in self.estimate.phases.values()
            for part in parts
            if (what := part.what).endswith("gradients")
        }


PPO: dict[str, Any] = {"name": "ppo", "kl_coefficient": 0.1}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algorithm": PPO},
        {"model": {"dtype": "bfloat16"}},
        {"lora": LORA},
        {"lora": {**LORA, "targets": ["q_proj", "layers.1.mlp.down_proj"]}, "algorithm": PPO},
        {"lora": LORA, "algorithm": PPO, "model": {"dtype": "bfloat16"}},
        {"lora": LORA, "algorithm": PPO, "critic": {"path": "{model}"}, "reference": {"path": "{model}"}},
    ],
    ids=["full", "ppo", "bfloat16", "lora", "lora targets ppo", "lora ppo bfloat16", "lora own paths"],
)
def test_it_is_what_is_held(
    arithmetic: Path, tmp_path: Path, sections: Sections, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(arithmetic / "model")
    given = {s: {k: model if v == "{model}" else v for k, v in vs.items()} for s, vs in sections.items()}
    more = {"run": {"device": "cpu", "save_final": False}, "train": {"steps": 1}, "checkpoint": {"keep": 0}}
    config = configuration(arithmetic, tmp_path, {**more, **given})
    Held(config, str(arithmetic / "train.jsonl"), monkeypatch).check()


def test_going_on_from_an_adapter(arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its base's size, and its own adapters; the reference keeps a copy of them as they start."""
    first, _, _ = go(arithmetic, tmp_path / "first", lora=LORA, run={"device": "cpu"}, train={"steps": 1})
    sections: Sections = {
        "model": {"path": str(first.model)},
        "algorithm": {"kl_coefficient": 0.1},
        "run": {"device": "cpu"},
        "train": {"steps": 1},
    }
    held = Held(configuration(arithmetic, tmp_path, sections), str(arithmetic / "train.jsonl"), monkeypatch)
    held.check()
    always = {part.what: part.bytes for part in held.estimate.always}
    assert always["reference adapters"] == always["actor adapters"] > 0
    assert read_shape(str(first.model), "model.path") == read_shape(str(arithmetic / "model"), "model.path")


def test_adapters_by_hand(arithmetic: Path, tmp_path: Path) -> None:
    """Rank 3 on q_proj, 128 → 4 x 32, in both layers; neither the head's gradient nor the base's is there."""
    sections: Sections = {"run": {"device": "cpu"}, "lora": {**LORA, "targets": ["q_proj"]}}
    config = configuration(arithmetic, tmp_path, sections)
    flow, _ = training_flow(config, Actor(config.model, "cpu"), even, str(arithmetic / "train.jsonl"))
    found = estimate_memory(flow, Load(longest=10, rows_per_update=16, rows_at_once=16, prompts_at_once=4))
    adapters = 2 * 3 * (128 + 128)
    always = {part.what: part.bytes for part in found.always}
    assert (always["actor adapters"], always["actor optimizer"]) == (4 * adapters, 8 * adapters)
    update = {part.what: part.bytes for part in found.phases["actor update"]}
    assert update["actor gradients"] == 4 * adapters
    assert "output head's gradient" not in update
    assert found.least_bytes == always["actor weights"] + (4 + 8 + 4) * adapters


def test_a_wrong_target_is_known_before_weights_are_loaded(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("headrace.roles.role.load_causal_lm", load)
    with pytest.raises(ConfigError, match=r"lora\.targets: no layer is named 'q_prj'"):
        go(arithmetic, tmp_path, lora={**LORA, "targets": ["q_prj"]}, run={"device": "cpu"})


def test_attention_over_shared_prompts(arithmetic: Path, tmp_path: Path) -> None:
    """4 samples of a prompt of 6 with 4 new tokens: 22 tokens computed, 40 in attention."""
    data = str(arithmetic / "train.jsonl")
    config = configuration(arithmetic, tmp_path, {"run": {"device": "cpu"}})
    flow, _ = training_flow(config, Actor(config.model, "cpu"), even, data)
    prepared, _ = prepare_both(flow, data, None)
    load = load_of(flow, prepared)
    assert load.shared == pytest.approx(4 * load.longest / (load.longest - 5 + 4 * 5))
    shared = Load(10, 1000, 16, 4, shared=40 / 22)
    update = {p.what: p.bytes for p in estimate_memory(flow, shared).phases["actor update"]}
    # as many tokens as a CPU takes at once, 4,096; queries and results of 4 heads, keys and values of 2, 32 wide
    assert update["attention over shared prompts"] == 2 * int(4096 * 40 / 22) * 4 * (2 * 4 + 2 * 2) * 32
    assert "activations of up to 4,096 tokens" in update
    small = {p.what for p in estimate_memory(flow, load).phases["actor update"]}
    assert "attention over shared prompts" not in small  # all rows fit, each with a prompt of its own
