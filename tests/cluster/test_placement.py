"""Placement: rank numbering, all the forms a layout comes in, and every violation at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.layouts import placement_of, resolve, template_for, templates
from headrace.cluster.placement import ModelSize, Parallelism, Placement, fit_violations
from headrace.config import ClusterConfig
from headrace.config_places import ROLES, placed
from headrace.errors import ConfigError

HOST = {"nodes": [{"name": "a", "count": 1, "gpus_per_node": 8}]}


def violations(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(*args, **kwargs)
    return caught.value.violations


def keys(sentences: list[str]) -> list[str]:
    return [s.split(":")[0] for s in sentences]


def where(placement: Placement, role: str) -> tuple[tuple[int, ...], str]:
    place = placement.roles[role]
    return placement.groups[place.group].devices, str(place.parallelism)


def test_ranks_are_numbered_as_in_a_mesh_of_pp_dp_tp() -> None:
    p = Parallelism(dp=2, tp=2, pp=2)
    assert [p.coordinates(r) for r in range(8)] == [
        (0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 1, 0),
    ]  # fmt: skip
    assert [p.owner(d) for d in range(2)] == [4, 6]  # last stage, first of its tp ranks


def test_sp_is_between_dp_and_tp() -> None:
    p = Parallelism(dp=2, tp=2, sp=2)
    assert [p.coordinates(r) for r in range(8)] == [
        (0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1), (0, 1, 0, 1), (1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 0, 1), (1, 1, 0, 1),
    ]  # fmt: skip
    assert ([p.owner(d) for d in range(2)], p.size, p.copies) == ([0, 4], 8, 4)
    assert str(Parallelism(dp=2, sp=4, tp=2, zero3=2)) == "dp2×sp4×tp2 zero3×2"


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_coordinates_and_rank_are_inverse(dp: int, tp: int, pp: int, sp: int) -> None:
    p = Parallelism(dp, tp, pp, sp=sp)
    assert [p.rank(*p.coordinates(r)) for r in range(p.size)] == list(range(p.size))


def test_the_compact_form_with_groups() -> None:
    p = resolve(
        {
            "actor": {"gpu_group": "group_0", "parallelism": {"tp": 2, "dp": 32}},
            "critic": {"gpu_group": "group_1", "parallelism": {"tp": 4, "pp": 2}},
            "reference": {"gpu_group": "group_0", "parallelism": {"dp": 64}},
        },
        roles=ROLES,
    )
    assert where(p, "actor") == (tuple(range(64)), "dp32×tp2")
    assert where(p, "critic") == (tuple(range(64, 72)), "tp4×pp2")
    assert where(p, "reference") == (tuple(range(64)), "dp64")
    assert where(p, "rollout") == where(p, "actor")  # what is left out goes with the actor
    assert p.apart("actor", "critic")
    assert not p.apart("actor", "reference")
    assert p.world == 72


def test_parallelism_alone() -> None:
    p = resolve(parallelism={"tp": 2, "pp": 2, "dp": 2})
    assert (p.world, p.roles["actor"].parallelism) == (8, Parallelism(2, 2, 2))
    assert resolve(parallelism={"zero3": 2}).roles["actor"].parallelism == Parallelism(dp=2, zero3=2)
    assert resolve(parallelism={"zero3": True, "dp": 4}).roles["actor"].parallelism == Parallelism(4, zero3=4)
    assert resolve("gpu_8", parallelism={"tp": 2}).roles["actor"].parallelism == Parallelism(4, 2)
    assert resolve("gpu_8", parallelism={"sp": 4}).roles["actor"].parallelism == Parallelism(2, sp=4)
    p = resolve(parallelism={"sp": 2, "zero3": 2, "tp": 2})
    assert (p.world, p.roles["actor"].parallelism) == (8, Parallelism(2, 2, zero3=2, sp=2))
    assert resolve().world == 1


def test_a_device_map() -> None:
    p = resolve({"actor": "cuda:0-3", "critic": "cuda:4,6-7", "reward_model": "cuda:0-3"})
    assert where(p, "actor") == where(p, "reward_model") == ((0, 1, 2, 3), "dp4")
    assert where(p, "critic") == ((4, 6, 7), "dp3")
    assert p.device == "cuda"
    assert resolve({"actor": "cpu:0-1"}).device == "cpu"


def test_a_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster_config.yaml"
    file.write_text(
        "nodes:\n"
        "  - {name: train, count: 2, gpus_per_node: 4, role: actor}\n"
        "  - {name: score, count: 1, gpus_per_node: 2, role: [critic, reference]}\n"
        "communication: {backend: nccl, rdma_enabled: false}\n"
        "logging: {level: INFO, save_dir: /var/log/run}\n"
    )
    p = resolve(str(file), roles=("actor", "critic", "reference", "rollout"))
    assert [(h.name, h.devices) for h in p.hosts] == [("train-0", 4), ("train-1", 4), ("score", 2)]
    assert where(p, "actor") == where(p, "rollout") == (tuple(range(8)), "dp8")
    assert where(p, "critic") == where(p, "reference") == ((8, 9), "dp2")
    assert (p.backend, p.communication.rdma_enabled) == ("nccl", False)
    assert (p.logging.level, p.logging.save_dir) == ("info", "/var/log/run")
    assert [(s.rank, s.host, s.local_index) for s in p.seats][3:9] == [
        (3, 0, 3), (4, 1, 0), (5, 1, 1), (6, 1, 2), (7, 1, 3), (8, 2, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name, world, groups",
    [
        ("cpu_1", 1, 1), ("cpu_2", 2, 1), ("cpu_4_split", 4, 4), ("gpu_1", 1, 1), ("gpu_8", 8, 1),
        ("gpu_8_split", 8, 3), ("gpu_128", 128, 3),
    ],
)  # fmt: skip
def test_templates(name: str, world: int, groups: int) -> None:
    p = resolve(name, roles=ROLES)
    assert (p.world, len(p.groups)) == (world, groups)
    assert (p.device, p.backend) == (("cpu", "gloo") if name.startswith("cpu") else ("cuda", "nccl"))
    assert set(p.roles) == set(ROLES)


def test_every_template_is_tested() -> None:
    assert len(templates()) == 7


@pytest.mark.parametrize(
    "gpus, name, devices", [(0, "cpu_1", 1), (1, "gpu_1", 1), (3, "gpu_8", 3), (16, "gpu_128", 8)]
)
def test_num_gpus_picks_a_template(gpus: int, name: str, devices: int) -> None:
    assert template_for(gpus) == name
    p = resolve(num_gpus=gpus, roles=ROLES)
    assert p.world == max(1, gpus)
    assert p.groups[p.roles["actor"].group].size == devices


def test_every_number_of_gpus_up_to_8_and_of_whole_hosts_works() -> None:
    for gpus in [*range(9), 16, 24, 32, 64, 96, 128]:
        assert resolve(num_gpus=gpus, roles=ROLES).world == max(1, gpus)


def test_num_gpus_replaces_the_nodes_of_a_layout() -> None:
    assert where(resolve("gpu_8_split", num_gpus=4, roles=ROLES), "reference") == ((3,), "dp1")


def test_a_run_without_critic_starts_no_group_for_it() -> None:
    p = resolve("cpu_4_split", roles=ROLES).limited(["actor", "rollout", "reference"])
    assert (list(p.groups), p.world, p.ranks("reference")) == (["actor", "reference"], 2, (1,))


def test_all_violations_at_once_by_key() -> None:
    layout = {
        "nodes": [{"name": "a", "gpus_per_node": 2, "colour": 1}, {"name": "a", "count": 0, "role": "juror"}],
        "groups": {"g": "0-3", "h": "3-4"},
        "roles": {
            "actor": {"gpu_group": "g", "parallelism": {"tp": 3, "ep": 2}},
            "critic": {"gpu_group": "k"},
            "refrence": {},
        },
        "communication": {"backend": "mpi"},
        "logging": {"level": "loud"},
    }
    found = violations(layout, num_gpus=None)
    assert sorted(set(keys(found))) == [
        "cluster.layout.communication.backend",
        "cluster.layout.groups",
        "cluster.layout.groups.h",
        "cluster.layout.logging.level",
        "cluster.layout.nodes",
        "cluster.layout.nodes[0].colour",
        "cluster.layout.nodes[1].count",
        "cluster.layout.nodes[1].role",
        "cluster.layout.roles.actor.parallelism",
        "cluster.layout.roles.actor.parallelism.ep",
        "cluster.layout.roles.critic.gpu_group",
        "cluster.layout.roles.refrence",
    ]
    text = "\n".join(found)
    for part in (
        "overlaps group 'g' on device 3",
        "did you mean reference?",
        "dp 1 x tp 3 x pp 1 = 3 ranks for the actor, but group 'g' has 4 devices",
        "the nodes have 3",
    ):
        assert part in text


@pytest.mark.parametrize(
    "layout, options, key, part",
    [
        ("gpu_9", {}, "cluster.layout", "did you mean gpu_8?"),
        ({"actor": "cuda:0-3", "critic": "cuda:3-5"}, {}, "cluster.layout.groups.critic", "on device 3"),
        ({"actor": "tpu:0"}, {}, "cluster.layout.roles.actor", "write them as cuda:0-3"),
        ({"actor": "cuda:3-0"}, {}, "cluster.layout.roles.actor", "no range"),
        ({"actor": "cuda:1,1"}, {}, "cluster.layout.groups.actor", "names device 1 twice"),
        ({"actor": "cpu:0", "critic": "cuda:1"}, {}, "cluster.layout", "one kind"),
        ({**HOST, "groups": {"g": "1/3"}}, {}, "cluster.layout.groups.g", "no whole number"),
        ({**HOST, "groups": {"g": 9}}, {}, "cluster.layout.groups", "need 9 devices, but the nodes have 8"),
        ({**HOST, "planets": 3}, {}, "cluster.layout.planets", "unknown part"),
        ({"nodes": 3}, {}, "cluster.layout.nodes", "expected a list"),
        (HOST, {"parallelism": {"tp": 3}}, "cluster.parallelism", "= 6 ranks for the actor, but group 'all' has 8"),
        (HOST, {"parallelism": {"sp": 3}}, "cluster.parallelism", "dp 2 x sp 3 x tp 1 x pp 1 = 6 ranks for the actor"),
        (HOST, {"parallelism": {"cp": 2}}, "cluster.parallelism.cp", "the degrees are dp, sp, tp, pp and zero3"),
        (HOST, {"parallelism": {"tp": 0}}, "cluster.parallelism.tp", "at least 1"),
        (HOST, {"parallelism": {"zero3": 3, "dp": 8}}, "cluster.parallelism", "zero3 3 does not divide dp 8"),
        (HOST, {"available": 4}, "cluster.layout", "needs 8 GPUs; there are 4"),
        (HOST, {"roles": ["juror"]}, "cluster.layout.roles.juror", "unknown role"),
        ("cpu_2", {"backend": "nccl"}, "cluster.communication_backend", "use gloo"),
        ("gpu_128", {"backend": "gloo"}, "cluster.communication_backend", "the layout says nccl"),
        (None, {"num_gpus": 12}, "cluster.num_gpus", "no whole hosts"),
        ({"device": ["cpu"]}, {}, "cluster.layout.device", "none of cpu, cuda"),
        ({"nodes": [{"name": "a", "role": 7}]}, {}, "cluster.layout.nodes[0].role", "unknown role 7"),
        ({"nodes": [{"name": ["a"]}]}, {}, "cluster.layout.nodes[0].name", "expected a name"),
        (
            {"nodes": [{"name": "a", "role": "actor"}, {"name": "b", "role": ["critic", "actor"]}]},
            {}, "cluster.layout.nodes[1].role", "the actor is on 'a' already",
        ),
        (
            {"nodes": [{"name": "a", "count": 2, "role": "actor"}, {"name": "a", "role": "critic"}]},
            {}, "cluster.layout.nodes", "the name 'a' is given 2 times",
        ),
        (
            {"nodes": [{"name": "a-0"}, {"name": "a", "count": 2}]},
            {}, "cluster.layout.nodes", "the name 'a-0' is given 2 times",
        ),
        (
            {"nodes": [{"name": "a", "count": 10**6, "gpus_per_node": 10**6}]},
            {}, "cluster.layout.nodes[0]", "at most 1000000",
        ),
        ({"actor": {"devices": []}}, {}, "cluster.layout.roles.actor.devices", "names no devices"),
        ({"groups": {"g": []}}, {}, "cluster.layout.groups.g", "names no devices"),
        ({"actor": {"gpu_group": ["a"]}}, {}, "cluster.layout.roles.actor.gpu_group", "expected a name"),
        ({"actor": {"gpu_group": "a", "group": "b"}}, {}, "cluster.layout.roles.actor", "give one of them"),
        ({"device": "cpu", "groups": {"g": "all"}}, {}, "cluster.layout.groups.g", "how many devices there are"),
        ({"logging": {"save_dir": [1]}}, {}, "cluster.layout.logging.save_dir", "expected a folder"),
        ("nowhere.yaml", {}, "cluster.layout", "nowhere.yaml: the configuration file does not exist"),
        *(
            ({"groups": {name: 2}}, {}, "cluster.layout.groups", f"{name!r} is no name for a group")
            for name in ("", "../a", "a/b", "..", " a", "a\nb", "x" * 65)
        ),
    ],
)  # fmt: skip
def test_one_violation(layout: Any, options: Any, key: str, part: str) -> None:
    (sentence,) = violations(layout, **options)
    assert sentence.startswith(f"{key}: ")
    assert part in sentence


def test_a_device_that_a_device_map_names_twice() -> None:
    layout = placed({"device_map": {"actor": [0, 0, 1]}})["cluster.layout"][1]
    assert violations(layout) == ["cluster.layout.groups.actor: names device 0 twice"]


def test_models_and_batches_that_do_not_fit() -> None:
    """tp has to divide attention heads, key/value heads and MLP columns: none are copied."""
    p = resolve(
        {
            "actor": {"gpu_group": "a", "parallelism": {"tp": 4, "pp": 3, "dp": 2}},
            "critic": {"gpu_group": "b", "parallelism": {"tp": 4}},
        },
        roles=("actor", "rollout", "critic"),
    )
    actor = ModelSize(14, 2, 24, 100)
    sizes = {"actor": actor, "rollout": actor, "critic": ModelSize(16, 4, 24, 18)}
    found = fit_violations(p, sizes, {"actor": ("train.samples_per_update", 7)})
    assert found == [
        "cluster.layout.roles.actor.parallelism: tp 4 does not divide the model's 14 attention heads; use tp 2",
        "cluster.layout.roles.actor.parallelism: tp 4 does not divide the model's 2 key/value heads; use tp 2",
        "train.samples_per_update: 7 rows cannot be shared evenly by the actor's 2 data-parallel ranks; use a"
        " multiple of 2",
        "cluster.layout.roles.critic.parallelism: tp 4 does not divide the model's 18 MLP columns; use tp 2",
    ]
    (layers,) = fit_violations(p, {"actor": ModelSize(16, 4, 25)}, {})
    assert "pp 3 does not divide the model's 25 layers; use pp 1" in layers


def test_sp_divides_the_attention_heads_of_a_tp_rank() -> None:
    """Key/value heads may be fewer: they are repeated. What tp does not divide is said of tp alone."""

    def told(degrees: dict[str, int], heads: int, kv_heads: int) -> list[str]:
        p = resolve(parallelism=degrees)
        return [s.partition(": ")[2] for s in fit_violations(p, {"actor": ModelSize(heads, kv_heads, 2)}, {})]

    assert told({"sp": 8, "dp": 2}, 16, 2) == told({"sp": 4, "tp": 2}, 16, 2) == []
    assert told({"sp": 6}, 14, 2) == ["sp 6 does not divide the model's 14 attention heads; use sp 2"]
    assert told({"sp": 4, "tp": 2}, 12, 2) == [
        "sp 4 does not divide the 6 attention heads of each tp rank; use sp 3"
    ]
    assert [s[:4] for s in told({"sp": 2, "tp": 4}, 6, 4)] == ["tp 4"]


def test_an_actor_under_sp_generates_in_whole_copies() -> None:
    """On the same ranks, each with rows of its own."""
    p = resolve(parallelism={"dp": 2, "sp": 2, "tp": 2}, roles=("actor", "rollout")).generating()
    assert where(p, "actor") == (tuple(range(8)), "dp2×sp2×tp2")
    assert where(p, "rollout") == (tuple(range(8)), "dp4×tp2")


def test_a_parallelism_of_all_roles_is_told_of_once() -> None:
    p = resolve(parallelism={"tp": 4, "zero3": 2}, roles=("actor", "rollout", "reference"))
    size = ModelSize(4, 2, 2, 8, tp_problems=("no plan",), zero3_problems=("no layers",))
    assert fit_violations(p, dict.fromkeys(p.roles, size), {}) == [
        "cluster.parallelism: tp 4 does not divide the model's 2 key/value heads; use tp 2",
        "cluster.parallelism: tp 4 cannot cut the model: no plan",
        "cluster.parallelism: zero3 2 cannot cut the model: no layers",
    ]


def test_the_section_of_a_configuration() -> None:
    four = placement_of(ClusterConfig(layout="cpu_4_split"), ["actor", "rollout", "reference"])
    assert (four.device, list(four.groups)) == ("cpu", ["actor", "reference"])
    two = placement_of(ClusterConfig(parallelism={"dp": 2}), ["actor"], device="cpu")
    assert (two.device, two.world) == ("cpu", 2)
    assert (
        placement_of(ClusterConfig(num_gpus=8, parallelism={"tp": 4}), ["actor"])
        .roles["actor"]
        .parallelism.dp
        == 2
    )
    assert placement_of(ClusterConfig(), ["actor"]).world == 1


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 0}, {"tp": "two"}])
def test_a_section_with_wrong_degrees(degrees: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown degree|at least 1"):
        ClusterConfig(parallelism=degrees)


def test_all_wrong_degrees_of_a_section_at_once() -> None:
    with pytest.raises(ValueError, match=r"dp is 0; .*; tp is 'two'; .*; unknown degree zz; "):
        ClusterConfig(parallelism={"dp": 0, "tp": "two", "zz": 2})
