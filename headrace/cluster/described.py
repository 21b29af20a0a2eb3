"""Placements that single models were described with, put into a layout; where both say something, they must agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config_places import Place, same_degrees

KEY = "cluster.layout"


def with_described(
    raw: Mapping[str, Any], described: Mapping[str, Place], problems: list[str]
) -> dict[str, Any]:
    """The parts of a layout with what it leaves open of the `described` roles; notes contradictions in `problems`."""
    roles = raw.get("roles") or {}
    if not isinstance(roles, Mapping):
        return dict(raw)  # noted where roles are read
    roles, groups = dict(roles), raw.get("groups") or {}
    for name, place in described.items():
        said, own = roles.get(name, {}), place.entry()
        if isinstance(said, str | int) and not isinstance(said, bool):
            said = {"devices": said}
        if not isinstance(said, Mapping) or not own:
            continue
        said = {"gpu_group" if part == "group" else part: value for part, value in said.items()}
        for part, value in own.items():
            stated = said.get(part) or value
            if not _same(part, stated, value):
                problems.append(
                    f"{KEY}.roles.{name}.{part}: {stated!r} in the layout, but the {name} was described with {value!r};"
                    " give one of them"
                )
        group = own.get("gpu_group")
        if group is not None and isinstance(groups, Mapping) and groups and group not in groups:
            problems.append(
                f"{KEY}.groups: there is no group '{group}', which the {name} was described with (gpu_group); there are"
                f" {', '.join(map(str, groups))}"
            )
            own.pop("gpu_group")
        roles[name] = {**own, **said}
    return {**raw, "roles": roles} if roles else dict(raw)


def _same(part: str, one: Any, other: Any) -> bool:
    if part == "parallelism" and isinstance(one, Mapping):
        return same_degrees(one, other)
    return str(one).replace(" ", "") == str(other)
