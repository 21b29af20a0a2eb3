"""Which ranks share a host of a Ray cluster."""

from __future__ import annotations

import pytest

from headrace.cluster.bundles import bundle_of_ranks
from headrace.cluster.layouts import resolve
from headrace.errors import ConfigError


def test_hosts_that_nobody_named_are_those_that_are_there() -> None:
    split = {"actor": {"devices": "cpu:0-2"}, "critic": {"devices": "cpu:3"}}
    p = resolve(split, roles=("actor", "critic"))
    assert not p.hosts_named
    assert bundle_of_ranks(p, [1, 2, 1, 0], "CPU") == [0, 0, 1, 2]
    assert bundle_of_ranks(p, [4], "CPU") == [0, 0, 0, 0]
    crossed = resolve(
        {"actor": {"devices": "cpu:2-3"}, "critic": {"devices": "cpu:0-1"}}, roles=("actor", "critic")
    )
    assert bundle_of_ranks(crossed, [2, 2], "CPU") == [1, 1, 0, 0]  # by device, whose neighbours share a host


def test_hosts_that_were_named_must_be_there() -> None:
    p = resolve(
        {
            "nodes": [{"count": 2, "gpus_per_node": 8}],
            "groups": {"a": "0-7", "b": "8-11"},
            "roles": {"actor": {"gpu_group": "a"}, "critic": {"gpu_group": "b"}},
        },
        roles=("actor", "critic"),
    )
    assert p.hosts_named
    assert bundle_of_ranks(p, [8, 4], "GPU") == [0] * 8 + [1] * 4
    assert bundle_of_ranks(p, [16], "GPU") == [0] * 8 + [1] * 4
    with pytest.raises(
        ConfigError, match=r"hosts with 8, 4 GPUs are asked for; those of the Ray cluster have 6, 6"
    ):
        bundle_of_ranks(p, [6, 6], "GPU")
