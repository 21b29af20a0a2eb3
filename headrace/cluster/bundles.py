"""What of a Ray cluster a placement asks for: the devices of a described host together, of others one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.cluster.placement import Placement


def shares_of_hosts(placement: Placement) -> list[int]:
    """Devices of each bundle that Ray is to keep together on a node: a host's, or one where no hosts were described."""
    if not placement.hosts_named:
        return [1] * placement.world
    hosts = [seat.host for seat in placement.seats]
    return [hosts.count(host) for host in sorted(set(hosts))]


def by_node(placement: Placement, nodes: Mapping[int, str]) -> list[int]:
    """For each rank its bundle. `nodes`: bundle → id of the node where it landed.

    Without described hosts, devices with numbers beside each other, which talk most, get bundles of the same node.
    """
    if placement.hosts_named:
        used = sorted({seat.host for seat in placement.seats})
        return [used.index(seat.host) for seat in placement.seats]
    count = Counter(nodes[i] for i in range(placement.world))
    bundles = sorted(range(placement.world), key=lambda i: (-count[nodes[i]], nodes[i], i))
    ranks = sorted(range(placement.world), key=lambda rank: placement.seats[rank].device)
    bundle_of = dict(zip(ranks, bundles, strict=True))
    return [bundle_of[rank] for rank in range(placement.world)]


def nodes_violations(placement: Placement, resource: str, nodes: Sequence[int], joined: bool) -> list[str]:
    """What a cluster is short of. `nodes`: how many of the resource each node has, used or not."""
    have = f"the Ray cluster has {sum(nodes)} on {len(nodes)} node(s)"
    if sum(nodes) < placement.world:
        return [f"cluster.layout: needs {placement.world} {resource}s; {have}"]
    if not joined or not placement.hosts_named:
        return []
    wanted = sorted(shares_of_hosts(placement), reverse=True)
    largest = sorted(nodes, reverse=True)[: len(wanted)]
    if len(largest) == len(wanted) and all(n <= m for n, m in zip(wanted, largest, strict=True)):
        return []
    return [
        f"cluster.layout.nodes: describe hosts of which {', '.join(map(str, wanted))} {resource}s are used, each to be a"
        f" node; the Ray cluster's nodes have {', '.join(map(str, sorted(nodes, reverse=True)))}"
    ]
