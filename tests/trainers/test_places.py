"""Where models were described to run reaches the checked flow, by every door; nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace import cli
from headrace.cluster.placement import Parallelism, Placement
from headrace.config import Config
from headrace.errors import ConfigError, RunError
from headrace.flow.flow import Flow
from headrace.roles.actor import Actor
from headrace.trainers.launch import training_flow


def score(completion: str) -> float:
    return float(len(completion))


@pytest.fixture(autouse=True)
def many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as anybody asks for: a placement is checked against what is there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 128)
    # the models here are only described, so nothing is known of their sizes
    for reader in (
        "cluster.read_shape",
        "cluster.read_inventory",
        "memory_terms.read_shape",
        "memory_ranks.read_inventory",
    ):
        monkeypatch.setattr(f"headrace.flow.{reader}", lambda *_, **__: None)


def by_trainer(actor: dict[str, Any] | None = None, **keywords: Any) -> Placement:
    """The placement that a PPO trainer with a reference would run with; `actor`: keywords of get_hf_model."""
    model = headrace.get_hf_model("some/model", **(actor or {}))
    trainer = headrace.RLTrainer(model, score, "ppo", algorithm__kl_coefficient=0.1, **keywords)
    return training_flow(trainer.resolve(), model, score, [{"prompt": "1"}])[0].placement


def where(placement: Placement, role: str) -> tuple[str, tuple[int, ...], str]:
    found = placement.roles[role]
    return found.group, placement.groups[found.group].devices, str(found.parallelism)


FOUR = (0, 1, 2, 3)


def test_a_model_carries_its_place() -> None:
    p = by_trainer({"parallel_config": {"tp": 2, "dp": 2}, "gpu_group": "group_0", "device_map": "cuda:0-3"})
    for role in ("actor", "rollout", "critic", "reference"):  # what is described nowhere goes with the actor
        assert where(p, role) == ("group_0", FOUR, "dp2×tp2")
    assert (p.device, p.world) == ("cuda", 4)
    assert by_trainer({"parallel_config": {"dp": 4}}).roles["actor"].parallelism == Parallelism(dp=4)
    assert by_trainer({"gpu_group": "group_0"}, num_gpus=4).groups["group_0"].size == 4


def test_one_device_needs_no_cluster() -> None:
    for keywords in (
        {"parallel_config": {"tp": 1, "dp": 1}, "gpu_group": "a"},
        {"device_map": "cuda:1"},
        {"gpu_group": "a"},
        {},
    ):
        assert by_trainer(keywords).world == 1
    assert by_trainer(parallel_config={"dp": 1}, gpu_group="a").world == 1
    model = headrace.get_hf_model("some/model", device_map={"actor": "cuda:3", "critic": "cpu"})
    assert model.device_name == "cuda:3"


def test_the_trainers_own_keywords() -> None:
    p = by_trainer(device_map={"actor": "cuda:0-3", "critic": "cuda:4-5"}, parallel_config={"tp": 2})
    assert where(p, "actor") == ("actor", FOUR, "dp2×tp2")
    assert where(p, "critic") == ("critic", (4, 5), "tp2")
    assert p.apart("actor", "critic")
    p = by_trainer(parallel_config={"tp": 2, "dp": 2}, run={"device": "cpu"})
    assert (p.device, p.world) == ("cpu", 4)
    assert by_trainer({"device": "cpu"}, cluster="cpu_4_split").world == 3  # no reward model, no group for it
    two = {"dp": 2}
    roles = {
        "actor": {"gpu_group": "a", "parallelism": two},
        "critic": {"gpu_group": "b", "parallelism": two},
    }
    assert by_trainer(cluster=roles).world == 4
    assert by_trainer(cluster={"layout": roles}, config={"cluster": "gpu_8"}).world == 4
    p = by_trainer(num_gpus=4)
    assert where(p, "critic") == where(p, "actor") == ("all", FOUR, "dp4")


def test_the_compact_form_of_many_hosts() -> None:
    p = by_trainer(
        cluster={
            "actor": {"gpu_group": "group_0", "parallelism": {"tp": 2, "dp": 32}},
            "critic": {"gpu_group": "group_1", "parallelism": {"tp": 2, "dp": 4}},
        }
    )
    assert (p.world, where(p, "reference")) == (72, ("group_0", tuple(range(64)), "dp32×tp2"))
    assert [h.devices for h in p.hosts] == [8] * 9  # hosts that nobody described


def test_a_layout_is_completed_by_what_models_say() -> None:
    p = by_trainer({"parallel_config": {"tp": 2}}, cluster="gpu_8_split")
    assert where(p, "actor") == ("actor", FOUR, "dp2×tp2")
    assert where(p, "critic")[2] == "dp2"


@pytest.mark.parametrize(
    "actor, keywords, parts",
    [
        ({"parallel_config": {"tp": 2}}, {"parallel_config": {"dp": 4}}, ["{'tp': 2}", "{'dp': 4}"]),
        (
            {"parallel_config": {"tp": 2}},
            {"cluster": {"actor": {"parallelism": {"dp": 2}}}},
            ["cluster.layout.roles.actor.parallelism", "{'dp': 2}", "{'tp': 2}"],
        ),
        (
            {"device_map": "cuda:0-3"},
            {"cluster": {"actor": "cuda:0-1"}},
            ["cluster.layout.roles.actor.devices", "cuda:0-1", "cuda:0-3"],
        ),
        ({"gpu_group": "mine"}, {"cluster": "gpu_8_split"}, ["gpu_group", "'mine'", "'actor'"]),
        ({"device_map": "cuda:0-3"}, {"cluster": "gpu_8"}, ["cuda:0-3", "'all'"]),
        ({"device": "cuda:1"}, {"parallel_config": {"dp": 2}}, ["run.device: cuda:1", "2"]),
        ({"device": "cpu"}, {"num_gpus": 4}, ["run.device: cpu", "cluster.num_gpus"]),
        ({"device": "cuda"}, {"cluster": "cpu_2"}, ["run.device: cuda", "CPUs"]),
        ({"parallel_config": {"tp": 2}}, {"num_gpus": 200}, ["cluster.num_gpus", "200 GPUs", "128"]),
        ({"device_map": "cuda:0-3", "parallel_config": {"tp": 8}}, {}, ["tp 8", "4 devices"]),
    ],
)
def test_contradictions_name_both(actor: dict[str, Any], keywords: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        by_trainer(actor, **keywords)
    for part in parts:
        assert part in str(caught.value)


def test_a_flow_of_four_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def flow(**critic: Any) -> Flow:
        actor = headrace.get_hf_model("m", gpu_group="a", parallel_config={"tp": 2})
        judge = headrace.get_hf_model("r", "reward_model", device_map="cuda:6")
        values = headrace.get_hf_model(
            "m", "critic", **{"gpu_group": "b", "parallel_config": {"dp": 2}, **critic}
        )
        made = Flow("four")
        rollout = made.add_stage("rollout", actor.generate)
        scored = made.add_stage("judge", judge.score, depends_on=rollout)
        made.add_stage("values", values.values, depends_on=scored)
        return made

    p = flow().compile().placement
    assert where(p, "reward_model") == ("reward_model", (6,), "dp1")
    assert (where(p, "rollout"), where(p, "critic")) == (("a", (0, 1), "tp2"), ("b", (2, 3), "dp2"))
    assert (
        flow(gpu_group="a", parallel_config={"tp": 2})
        .compile({"nodes": [{"gpus_per_node": 8}]})
        .placement.world
        == 3
    )
    with pytest.raises(ConfigError, match="one kind of device"):
        flow(device="cpu").compile()
    with pytest.raises(ConfigError, match=r"nodes have 4"):
        flow().compile({"nodes": [{"gpus_per_node": 4}]})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"needs 5 GPUs; there are 0; run\.device=cpu"):
        flow().compile()


def test_flags_are_the_same_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "config",
        "--parallel-config",
        "{tp: 2, dp: 2}",
        "--device-map",
        "{actor: cuda:0-3, critic: cuda:4-7}",
    ]
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    assert "tp: 2" in shown
    assert "devices: cuda:4-7" in shown
    (tmp_path / "c.yaml").write_text("cluster: {actor: {gpu_group: a, parallelism: {tp: 2}}}\n")
    assert cli.main(["config", str(tmp_path / "c.yaml")]) == 0
    assert "gpu_group: a" in capsys.readouterr().out
    assert cli.main(["config", "cluster=cpu_2", "--device-map", "cuda:0-1"]) == 2
    assert "cluster.layout: set to 'cpu_2' and by a flag" in capsys.readouterr().err


# ---- functions that workers import


class Judge:
    def score(self, completion: str) -> float:
        return 1.0

    def __call__(self, completion: str) -> float:
        return 1.0


def refused(reward: Any) -> str:
    model = headrace.get_hf_model("some/model", device="cpu", parallel_config={"dp": 2})
    config = Config()
    config.run.device = "cpu"
    with pytest.raises(ConfigError) as caught:
        training_flow(config, model, reward, [{"prompt": "1"}])
    return str(caught.value)


def test_functions_that_no_other_process_has() -> None:
    def closure(completion: str) -> float:
        return 1.0

    assert "reward.function: a lambda cannot be imported by workers" in refused(lambda completion: 1.0)
    assert "'closure', which is defined inside a function" in refused(closure)
    assert "the method 'Judge.score' of an object" in refused(Judge().score)
    assert "an object of type Judge" in refused(Judge())


# ---- an actor that was trained elsewhere


def test_an_actor_trained_by_workers_is_the_model_they_left(arithmetic: Path, tmp_path: Path) -> None:
    actor = headrace.get_hf_model(str(arithmetic / "model"), device="cpu")
    assert actor.source == str(arithmetic / "model")
    actor.trained_away()
    with pytest.raises(RunError, match="trained in worker processes, and that run left no model"):
        actor.save(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(RunError, match="trained in worker processes"):
        _ = actor.engine
    # the folder that such a run leaves: the model with other weights
    other = Actor(actor.model_config, "cpu")
    with torch.no_grad():
        for weight in other.model.hf.parameters():
            weight.mul_(0.5)
    actor.trained_at = other.save(tmp_path / "left")
    actor.save(tmp_path / "kept")
    assert json.loads((tmp_path / "kept/config.json").read_text())["model_type"]
    for saved, left in zip(actor.model.hf.parameters(), other.model.hf.parameters(), strict=True):
        assert torch.equal(saved, left)
