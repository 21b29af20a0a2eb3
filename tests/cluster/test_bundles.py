"""What of a Ray cluster a placement asks for, and which rank gets which of it."""

from __future__ import annotations

from headrace.cluster.bundles import by_node, nodes_violations, shares_of_hosts
from headrace.cluster.layouts import resolve


def test_hosts_that_nobody_named_are_those_that_are_there() -> None:
    """Single devices, as they fit; neighbours go to the same node, the node with most of them first."""
    split = {"actor": {"devices": "cpu:0-2"}, "critic": {"devices": "cpu:3"}}
    p = resolve(split, roles=("actor", "critic"))
    assert shares_of_hosts(p) == [1, 1, 1, 1]
    assert by_node(p, {0: "x", 1: "y", 2: "x", 3: "z"}) == [0, 2, 1, 3]
    crossed = resolve(
        {"actor": {"devices": "cpu:2-3"}, "critic": {"devices": "cpu:0-1"}}, roles=("actor", "critic")
    )
    # the actor has ranks 0 and 1, and devices 2 and 3
    assert by_node(crossed, {0: "x", 1: "y", 2: "x", 3: "y"}) == [1, 3, 0, 2]
    assert nodes_violations(p, "CPU", [1, 1, 1, 1], joined=True) == []
    assert nodes_violations(p, "CPU", [2, 1], joined=True) == [
        "cluster.layout: needs 4 CPUs; the Ray cluster has 3 on 2 node(s)"
    ]


def test_hosts_that_were_named_must_be_there() -> None:
    p = resolve(
        {
            "nodes": [{"count": 2, "gpus_per_node": 8}],
            "groups": {"a": "0-7", "b": "8-11"},
            "roles": {"actor": {"gpu_group": "a"}, "critic": {"gpu_group": "b"}},
        },
        roles=("actor", "critic"),
    )
    assert shares_of_hosts(p) == [8, 4]
    assert by_node(p, {0: "x", 1: "y"}) == [0] * 8 + [1] * 4
    for nodes in ([4, 8], [8, 8, 2]):
        assert nodes_violations(p, "GPU", nodes, joined=True) == []
    # one node for both is right only for a private cluster, which has no other
    assert nodes_violations(p, "GPU", [16], joined=False) == []
    for nodes, listed in (([16], "16"), ([6, 6], "6, 6"), ([8, 3, 3], "8, 3, 3")):
        assert nodes_violations(p, "GPU", nodes, joined=True) == [
            "cluster.layout.nodes: describe hosts of which 8, 4 GPUs are used, each to be a node; the Ray cluster's nodes"
            f" have {listed}"
        ]


def test_templates_of_cpus_fit_any_nodes() -> None:
    for name in ("cpu_2", "cpu_4_split"):
        assert not resolve(name).hosts_named
