"""Where models are to run, as said in passing: `parallel_config`, `device_map`, `gpu_group`, and a layout as `cluster`.

Only forms are read here; what a layout means, and whether it can be, is for cluster/layouts.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ConfigError

ROLES = ("actor", "critic", "reference", "reward_model", "rollout")
LAYOUT_PARTS = ("device", "nodes", "groups", "roles", "communication", "logging")
PLACE_NAMES = ("parallel_config", "device_map", "gpu_group")
DEGREES = ("dp", "sp", "tp", "pp", "zero3")

# A device without an index and one with; a list of indices is several devices.
_DEVICES = re.compile(r"auto|(?:cpu|cuda)(?::\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)?")


@dataclass(frozen=True)
class Place:
    """Where one model is to run, as far as it was said: the name of a group, degrees, devices such as `cuda:0-3`."""

    group: str | None = None
    parallelism: Mapping[str, int | bool] = field(default_factory=dict)
    devices: str | None = None

    def entry(self) -> dict[str, Any]:
        """The same as a role of a layout."""
        values = {"gpu_group": self.group, "parallelism": dict(self.parallelism), "devices": self.devices}
        return {name: value for name, value in values.items() if value}


def cluster_settings(value: Any) -> dict[str, Any] | None:
    """Keys of section `cluster` from a layout that stands in place of the section; None where it is the section."""
    if isinstance(value, str):
        return {"layout": value}
    if isinstance(value, Mapping) and value and value.keys() <= {*ROLES, *LAYOUT_PARTS}:
        return {"layout": dict(value)}
    return None


def place_of(keywords: Mapping[str, Any], role: str) -> tuple[Place, str | None]:
    """(where a role is to run, its `run.device`) from the PLACE_NAMES of `keywords`.

    Of mappings over roles its own entry counts. Raises ConfigError with everything that is wrong with them.
    """
    said = _Said(keywords)
    if said.problems:
        raise ConfigError(said.problems)
    devices = said.devices.get(role, said.devices.get(None))
    place = Place(
        said.groups.get(role, said.groups.get(None)),
        said.degrees.get(role, said.degrees.get(None, {})),
        devices if devices is not None and ":" in devices else None,
    )
    if devices is None or is_many(devices):
        return place, None if devices is None else devices.partition(":")[0]
    return place, devices


def placed(keywords: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Dotted setting → (keyword that sets it, value) from the PLACE_NAMES of `keywords`, for a whole run.

    One device for everything is `run.device`, degrees for everything are `cluster.parallelism`, all else a
    `cluster.layout`. Raises ConfigError with everything that is wrong with them.
    """
    said = _Said(keywords)
    if said.problems:
        raise ConfigError(said.problems)
    out: dict[str, tuple[str, Any]] = {}
    if None in said.degrees:
        out["cluster.parallelism"] = ("parallel_config", said.degrees[None])
    devices = said.devices
    one = set(devices.values())
    if len(one) == 1 and not is_many(*one):
        out["run.device"] = ("device_map", next(iter(one)))
        devices = {}
    roles: dict[str, dict[str, Any]] = {}
    for name, values in (
        ("gpu_group", said.groups),
        ("parallelism", {role: d for role, d in said.degrees.items() if role is not None}),
        ("devices", devices),
    ):
        for role, value in values.items():
            roles.setdefault(role or "actor", {})[name] = value
    if roles:
        # the order of the roles is that of the groups
        ordered = {role: roles[role] for role in ROLES if role in roles}
        keyword = next(name for name in ("device_map", "gpu_group", "parallel_config") if name in keywords)
        out["cluster.layout"] = (keyword, ordered)
    return out


def same_degrees(one: Mapping[str, int | bool], other: Mapping[str, int | bool]) -> bool:
    """Whether two parallelisms are the same; a degree of 1 is as good as none."""
    first, second = ({k: v for k, v in d.items() if v is True or v not in (0, 1)} for d in (one, other))
    return first == second


def is_many(devices: str) -> bool:
    """Whether a text such as `cuda:0-3` means several devices."""
    return "-" in devices or "," in devices


class _Said:
    """The three keywords by role (None: for all), each in one form; notes everything wrong in `problems`."""

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        self.problems: list[str] = []
        self.degrees: dict[str | None, dict[str, int | bool]] = {}
        self.devices: dict[str | None, str] = {}
        self.groups: dict[str | None, str] = {}
        if "parallel_config" in keywords:
            value = keywords["parallel_config"]
            by_role = isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values())
            for role, degrees in self._by_role("parallel_config", value) if by_role else [(None, value)]:
                self._read_degrees(role, degrees)
        if "device_map" in keywords:
            for role, devices in self._by_role("device_map", keywords["device_map"]):
                self._read_devices(role, devices)
        if "gpu_group" in keywords:
            for role, group in self._by_role("gpu_group", keywords["gpu_group"]):
                if isinstance(group, str) and group:
                    self.groups[role] = group
                else:
                    self.problems.append(
                        f"gpu_group: expected a name, or one for each model ({{actor: a, critic: b}}), got {group!r}"
                    )

    def _by_role(self, keyword: str, value: Any) -> list[tuple[str | None, Any]]:
        if not isinstance(value, Mapping):
            return [(None, value)]
        if not value:
            self.problems.append(f"{keyword}: empty; drop it, or say something of the actor")
        unknown = [str(name) for name in value if name not in ROLES]
        if unknown:
            self.problems.append(
                f"{keyword}: unknown model {', '.join(unknown)}; there are {', '.join(ROLES)}"
            )
        return [(str(role), v) for role, v in value.items() if role in ROLES]

    def _read_degrees(self, role: str | None, value: Any) -> None:
        of = f" of {role}" if role else ""
        if not isinstance(value, Mapping):
            self.problems.append(
                f"parallel_config: expected degrees{of} such as {{'tp': 1, 'dp': 1}}, got {value!r}"
            )
            return
        unknown = [str(k) for k in value if k not in DEGREES]
        if unknown:
            self.problems.append(
                f"parallel_config: unknown degree {', '.join(unknown)}{of}; the degrees are dp, sp, tp, pp and zero3"
            )
            return
        for name, degree in value.items():
            whole = isinstance(degree, int) and degree >= 1 and not isinstance(degree, bool)
            if not whole and not (name == "zero3" and isinstance(degree, bool)):
                self.problems.append(
                    f"parallel_config: {name}{of} is {degree!r}; expected a whole number of at least 1"
                )
                return
        self.degrees[role] = dict(value)

    def _read_devices(self, role: str | None, value: Any) -> None:
        parts = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        texts = [f"cuda:{p}" if isinstance(p, int) and not isinstance(p, bool) else p for p in parts]
        kinds = {str(t).partition(":")[0] for t in texts}
        whole = all(isinstance(t, str) and _DEVICES.fullmatch(t) for t in texts)
        if (
            not texts
            or not whole
            or (len(texts) > 1 and (len(kinds) > 1 or not all(":" in t for t in texts)))
        ):
            self.problems.append(
                f"device_map: {value!r}{f' of {role}' if role else ''} names no devices; write cpu, cuda, cuda:0,"
                " cuda:0-3 or cuda:0,2"
            )
            return
        numbers = ",".join(t.partition(":")[2] for t in texts)  # one given twice is refused with the layout
        self.devices[role] = f"{kinds.pop()}:{numbers}" if numbers else texts[0]
