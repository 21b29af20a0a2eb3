"""Which ranks go to one host of a Ray cluster together: as the layout says, or, where it names no hosts, as they fit."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cluster.placement import Placement
from headrace.errors import ConfigError


def bundle_of_ranks(placement: Placement, capacities: Sequence[int], kind: str) -> list[int]:
    """For each global rank the number of its bundle, from 0; a bundle is on one host.

    `capacities`: devices of each host of the Ray cluster; `kind` is what they are called. Ranks fill hosts in their
    order, largest host first, so that neighbours stay neighbours. Raises ConfigError for hosts that are not there.
    """
    free = sorted((n for n in capacities if n > 0), reverse=True)
    if placement.hosts_named:
        numbers = {host: i for i, host in enumerate(sorted({seat.host for seat in placement.seats}))}
        out = [numbers[seat.host] for seat in placement.seats]
        needed = sorted((out.count(i) for i in range(len(numbers))), reverse=True)
        left = list(free)
        for size in needed:
            place = next((i for i, n in enumerate(left) if n >= size), None)
            if place is None:
                raise ConfigError(
                    f"cluster.layout.nodes: hosts with {', '.join(map(str, needed))} {kind}s are asked for; those of the"
                    f" Ray cluster have {', '.join(map(str, free)) or 'none'}"
                )
            left[place] -= size
        return out
    by_device = sorted(range(placement.world), key=lambda rank: placement.seats[rank].device)
    filled = [host for host, n in enumerate(free) for _ in range(n)]
    place_of = dict(zip(by_device, filled, strict=False))
    return [place_of[rank] for rank in range(placement.world)]
