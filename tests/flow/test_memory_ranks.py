"""The memory of each rank of a cluster, by hand, for several layouts; and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_run import configuration, even

from headrace.errors import ConfigError
from headrace.flow import memory, memory_ranks
from headrace.flow.flow import Flow
from headrace.flow.memory_ranks import ClusterMemory, estimate_cluster
from headrace.flow.memory_terms import Load, Part, layer_bytes
from headrace.models.shape import ModelShape
from headrace.observe.machine import Memory
from headrace.roles.actor import Actor
from headrace.trainers.recipes import policy_flow, sft_flow

# the demo's model: 14 tokens of vocabulary, hidden 128, inner 512, 2 layers, 4 and 2 heads of 32, head not tied
Q, KV, MLP = 128 * 128, 128 * 64, 128 * 512  # q or o; k or v; one matrix of the MLP
NORMS = 2 * 128 + 2 * 32  # of a layer: two, and one for each of queries and keys
LAYER = 2 * Q + 2 * KV + 3 * MLP + NORMS
VOCABULARY = 14 * 128
MODEL = 2 * VOCABULARY + 2 * LAYER + 128
HALF = VOCABULARY + 2 * (LAYER - NORMS) // 2 + 2 * NORMS + 128  # under tp 2 the norms are on both ranks
CPU: dict[str, Any] = {"device": "cpu"}


def loads(rows: int) -> Any:
    """`rows` of 10 tokens in all, shared out evenly."""
    return lambda dp: Load(10, rows // dp, rows // dp, rows // 4 // dp)


def compiled(folder: Path, tmp_path: Path, supervised: bool = False, **sections: dict[str, Any]) -> Flow:
    config = configuration(folder, tmp_path, {"run": CPU, **sections})
    actor = Actor(config.model, config.run.device)
    return (sft_flow(config, actor) if supervised else policy_flow(config, actor, even)).compile()


def estimated(folder: Path, tmp_path: Path, supervised: bool = False, **sections: Any) -> ClusterMemory:
    return estimate_cluster(compiled(folder, tmp_path, supervised, **sections), loads(16))


def sizes(parts: list[Part]) -> dict[str, int]:
    return {part.what: part.bytes for part in parts}


def test_tp2(arithmetic: Path, tmp_path: Path) -> None:
    """Heads, MLP columns and vocabulary are halved; norms, and hidden states, are whole on both ranks."""
    found = estimated(arithmetic, tmp_path, cluster={"parallelism": {"tp": 2}})
    (group,) = found.groups
    assert sizes(group.largest.always) == {
        "actor weights": 4 * HALF,
        "actor optimizer": 8 * HALF,
        "libraries": 700 << 20,
    }
    assert group.least == [16 * HALF] * 2
    update = sizes(group.largest.phases["actor update"])
    own = ModelShape(1, 0, 2, 128, 256, 2, 1, 32, 7, gated=True, query_key_norm=True)
    ends, passing = 128 * (4 + 5 * 4), 4 * (3 * 256 + 4 * 128)
    assert update == {
        "actor gradients": 4 * HALF,
        "activations of up to 160 tokens": 160 * (2 * layer_bytes(own, 4) + ends + passing),
        "logits": 3 * 4 * 7 * 160,
        "output head's gradient": 4 * 7 * 128,
    }
    rollout = sizes(group.largest.phases["rollout"])
    # keys and values of 2 layers x 1 head of 32; a draw is made from the whole vocabulary
    assert rollout["KV cache of 512 tokens"] == 512 * 2 * 2 * 1 * 32 * 4
    assert rollout["logits of one draw"] == 4 * 4 * 16 * 14


def test_zero3_over_two_ranks(arithmetic: Path, tmp_path: Path) -> None:
    """Every matrix and norm by rows, all even here; a pass gathers two layers and what is outside of them."""
    found = estimated(arithmetic, tmp_path, True, cluster={"parallelism": {"zero3": 2}})
    (group,) = found.groups
    assert sizes(group.largest.always) == {
        "actor weights": 4 * MODEL // 2,
        "actor optimizer": 8 * MODEL // 2,
        "libraries": 700 << 20,
    }
    update = sizes(group.largest.phases["actor update"])
    assert update["actor gradients"] == 4 * MODEL // 2
    assert update["layers gathered from zero3"] == 4 * (2 * LAYER + 2 * VOCABULARY + 128)
    assert update["gradients being summed"] == 8 * LAYER
    assert "activations of up to 80 tokens" in update  # half of the rows
    assert group.least == [16 * MODEL // 2] * 2


def test_zero3_in_bfloat16_keeps_float32_shards(arithmetic: Path, tmp_path: Path) -> None:
    """Weights of 4 bytes that are their own masters, gathered in 2."""
    sections: dict[str, Any] = {"cluster": {"parallelism": {"zero3": 2}}, "model": {"dtype": "bfloat16"}}
    (group,) = estimated(arithmetic, tmp_path, True, **sections).groups
    always = sizes(group.largest.always)
    assert (always["actor weights"], always["actor optimizer"]) == (2 * MODEL, 4 * MODEL)
    update = sizes(group.largest.phases["actor update"])
    assert update["layers gathered from zero3"] == 2 * (2 * LAYER + 2 * VOCABULARY + 128)
    assert update["gradients being summed"] == (2 + 4) * LAYER


def test_sp_divides_the_tokens_of_a_pass(arithmetic: Path, tmp_path: Path) -> None:
    """Weights are whole on each rank; of two key/value heads each of four ranks has one in attention, four in all."""
    found = estimated(arithmetic, tmp_path, cluster={"parallelism": {"sp": 4}})
    (group,) = found.groups
    assert group.least == [16 * MODEL] * 4
    update = sizes(group.largest.phases["actor update"])
    own = ModelShape(1, 0, 2, 128, 512, 4, 4, 32, 14, gated=True, query_key_norm=True)
    ends, passing = 128 * (4 + 5 * 4), 4 * (3 * 512 + 4 * 128)
    assert update == {
        "actor gradients": 4 * MODEL,
        "activations of up to 40 tokens": 40 * (2 * layer_bytes(own, 4) + ends + passing),
        "logits": 3 * 4 * 14 * 40,
        "output head's gradient": 4 * 14 * 128,
    }
    rollout = sizes(group.largest.phases["rollout"])
    # each generates for a quarter of the prompts, with the actor's weights as they lie
    assert rollout["KV cache of 128 tokens"] == 128 * 2 * 2 * 2 * 32 * 4
    assert rollout["rollout weights"] == 0


def test_dp_has_the_whole_model_and_half_of_the_rows(arithmetic: Path, tmp_path: Path) -> None:
    (group,) = estimated(arithmetic, tmp_path, cluster={"layout": "cpu_2"}).groups
    assert group.least == [16 * MODEL] * 2
    assert "activations of up to 80 tokens" in sizes(group.largest.phases["actor update"])
    assert "KV cache of 256 tokens" in sizes(group.largest.phases["rollout"])


PPO: dict[str, Any] = {"name": "ppo", "kl_coefficient": 0.1}


def test_four_groups_have_a_model_each(arithmetic: Path, tmp_path: Path) -> None:
    found = estimated(arithmetic, tmp_path, algorithm=PPO, cluster={"layout": "cpu_4_split"})
    critic = MODEL - VOCABULARY + 128
    assert {g.group: g.least for g in found.groups} == {
        "actor": [16 * MODEL],
        "critic": [16 * critic],
        "reference": [4 * MODEL],
    }
    phases = {g.group: set(g.largest.phases) for g in found.groups}
    assert phases == {"actor": {"actor update", "rollout"}, "critic": {"critic update"}, "reference": set()}


def test_roles_of_one_group_add_up_each_by_its_own_parallelism(arithmetic: Path, tmp_path: Path) -> None:
    """Colocated: the actor under dp2, the reference under tp2. Workers load each model, so none is shared."""
    layout = {
        "device": "cpu",
        "groups": {"a": 2},
        "roles": {
            "actor": {"gpu_group": "a", "parallelism": {"dp": 2}},
            "reference": {"gpu_group": "a", "parallelism": {"tp": 2}},
        },
    }
    sections: dict[str, Any] = {"algorithm": {"kl_coefficient": 0.1}, "cluster": {"layout": layout}}
    (group,) = estimated(arithmetic, tmp_path, **sections).groups
    always = sizes(group.largest.always)
    assert always["actor weights"] == 4 * MODEL
    assert always["reference weights"] == 4 * HALF


def test_a_rollout_that_lies_otherwise_has_weights_while_it_generates(
    arithmetic: Path, tmp_path: Path
) -> None:
    """Beside zero3 all of them; beside a pipeline those of the other stage; on other devices all the time."""
    (group,) = estimated(arithmetic, tmp_path, cluster={"parallelism": {"zero3": 2}}).groups
    assert sizes(group.largest.phases["rollout"])["rollout weights"] == 4 * MODEL
    (group,) = estimated(arithmetic, tmp_path, cluster={"parallelism": {"pp": 2}}).groups
    assert sizes(group.largest.always)["actor weights"] == 4 * (LAYER + VOCABULARY + 128)  # the last stage
    assert sizes(group.largest.phases["rollout"])["rollout weights"] == 4 * (LAYER + VOCABULARY)
    assert "logits" in sizes(group.largest.phases["actor update"])
    apart = {"device": "cpu", "roles": {"actor": {"gpu_group": "a"}, "rollout": {"gpu_group": "b"}}}
    train, generate = estimated(arithmetic, tmp_path, cluster={"layout": apart}).groups
    assert set(train.largest.phases) == {"actor update"}
    assert sizes(generate.largest.always) == {"rollout weights": 4 * MODEL, "libraries": 700 << 20}
    assert (train.least, generate.least) == ([16 * MODEL], [4 * MODEL])


def give(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    for module in (memory, memory_ranks):
        monkeypatch.setattr(module, "host_memory", lambda: Memory(total, free))


def test_processes_share_the_memory_of_the_machine(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks of tp 2 take 32 bytes times what each holds: compile refuses less, and lets as much pass."""
    cluster = {"parallelism": {"tp": 2}}
    give(monkeypatch, 32 * HALF - 1, 32 * HALF - 1)
    with pytest.raises(ConfigError, match=r"memory: .* alone take .* in the processes together") as error:
        compiled(arithmetic, tmp_path, cluster=cluster)
    assert error.value.exit_code == 2
    give(monkeypatch, 32 * HALF, 32 * HALF)
    flow = compiled(arithmetic, tmp_path, cluster=cluster)
    found = estimate_cluster(flow, loads(16))
    assert found.refusals() == []
    assert "the processes may take up to" in (found.warning() or "")
    with caplog.at_level(logging.WARNING, "headrace"):
        from headrace.flow.prepare import prepare_both

        data, _ = prepare_both(flow, str(arithmetic / "train.jsonl"), None)
        memory.refuse_what_cannot_fit(flow, data)
    assert "memory: the processes may take up to" in caplog.text


GPUS = {"device": "cuda", "nodes": [{"name": "a", "gpus_per_node": 2}], "roles": {"actor": {}}}


def test_elsewhere_memory_is_unknown_and_dtypes_are_those_of_gpus(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that is joined: bfloat16, and nothing is refused or warned of."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = estimated(arithmetic, tmp_path, run={"device": "auto"}, cluster={"layout": GPUS})
    assert (found.total, found.refusals(), found.warning()) == (None, [], None)
    assert "unknown" in found.capacity
    always = sizes(found.groups[0].largest.always)
    assert (always["actor weights"], always["actor optimizer"]) == (2 * MODEL, 12 * MODEL)


def test_each_gpu_has_memory_of_its_own(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 bytes a parameter with float32; the layout is compiled with GPUs of more."""
    flow = None
    for total in (16 * MODEL, 16 * MODEL - 1):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda i, total=total: (total - i, total))
        sections: dict[str, Any] = {"model": {"dtype": "float32"}, "cluster": {"layout": GPUS}}
        if flow is None:
            flow = compiled(arithmetic, tmp_path, run={"device": "auto"}, **sections)
    assert flow is not None
    found = estimate_cluster(flow, loads(16))
    assert (found.total, found.free) == (16 * MODEL - 1, 16 * MODEL - 2)
    (refusal,) = found.refusals()
    assert refusal.startswith(
        "memory: on each GPU of group 'all' weights, gradients and optimizer alone take"
    )
    assert "actor weights 1.89 MiB (use a smaller model.path)" in refusal


def test_weights_that_take_turns(arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of roles of one group, on GPUs; a rollout's in a group of its own are there all the time."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    apart = {"reference": {"gpu_group": "b"}, "rollout": {"gpu_group": "b"}, "actor": {"gpu_group": "a"}}
    layout = {
        "device": "cuda",
        "nodes": [{"name": "a", "gpus_per_node": 2}],
        "groups": {"a": 1, "b": 1},
        "roles": apart,
    }
    sections: dict[str, Any] = {
        "run": {"device": "auto"},
        "algorithm": {"kl_coefficient": 0.1},
        "train": {"offload_parameters": True},
    }
    found = estimated(arithmetic, tmp_path, cluster={"layout": layout}, **sections)
    a, b = (g.largest for g in found.groups)
    assert "actor weights" not in sizes(a.always)
    assert sizes(a.phases["actor update"])["actor weights"] == 2 * MODEL
    assert sizes(b.always)["rollout weights"] == 2 * MODEL
    assert sizes(b.phases["reference pass"]) == {"reference weights": 2 * MODEL}
    assert "reference weights" not in sizes(b.phases["rollout"])
    found = estimated(arithmetic, tmp_path, cluster={"layout": {**GPUS, "roles": {"actor": {}}}}, **sections)
    (both,) = (g.largest for g in found.groups)
    assert "reference weights" not in {p.what for p in both.always}
    assert sizes(both.phases["rollout"])["actor weights"] == 2 * MODEL


def test_a_model_of_unknown_size_is_said(arithmetic: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    sections: dict[str, Any] = {
        "algorithm": {"kl_coefficient": 0.1},
        "reference": {"path": str(tmp_path / "empty")},
        "cluster": {"layout": "cpu_2"},
    }
    assert estimated(arithmetic, tmp_path, **sections).unknown == [f"reference ({tmp_path / 'empty'})"]
