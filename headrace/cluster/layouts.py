"""From the setting `cluster.layout` in any of its forms to a checked Placement, with every violation at once.

Forms: the name of a template (`gpu_8`), a .yaml file, or a mapping. A mapping has some of the keys `device`, `nodes`,
`groups`, `roles`, `communication` and `logging`, or is one of roles alone: `{"actor": {"gpu_group": "a", "parallelism":
{"tp": 2, "dp": 32}}}`, `{"actor": "cuda:0-3"}` or `{"actor": {"devices": "cuda:0-3", "parallelism": {"tp": 2}}}`.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from headrace.cluster.described import with_described
from headrace.cluster.layout_values import (
    MOST_DEVICES,
    device_numbers,
    group_name_violation,
    is_share,
    listed,
    ranks_of,
    read_degrees,
    unnamed_hosts,
)
from headrace.cluster.placement import (
    Communication,
    Group,
    Host,
    Logging,
    Parallelism,
    Placement,
    RolePlacement,
)
from headrace.config import ClusterConfig
from headrace.config_load import read_settings
from headrace.config_places import LAYOUT_PARTS, ROLES, Place
from headrace.errors import ConfigError

LABELS = ("head", "master", "worker", "compute", "gpu", "cpu", "train", "trainer")
"""What a node's `role` may also say: names of no effect that cluster files use."""
LEVELS = ("debug", "info", "warning", "error")
KEY = "cluster.layout"


def templates() -> list[str]:
    """The names of the layouts that come with headrace."""
    folder = resources.files("headrace.cluster") / "templates"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def template_for(num_gpus: int, *, separate: bool = False) -> str:
    """The template that suits a number of GPUs; `separate` asks for groups that work at the same time."""
    if num_gpus <= 1:
        return ("cpu_1", "gpu_1")[num_gpus]
    if num_gpus >= 16:
        return "gpu_128"
    return "gpu_8_split" if separate else "gpu_8"


def resolve(
    layout: str | Mapping[str, Any] | None = None,
    *,
    parallelism: Mapping[str, Any] | None = None,
    num_gpus: int | None = None,
    backend: str = "auto",
    roles: Iterable[str] = ("actor",),
    available: int | None = None,
    device: str = "auto",
    described: Mapping[str, Place] | None = None,
) -> Placement:
    """The placement that the settings of section `cluster` describe, for a run with `roles`.

    `parallelism` is that of every role that has none of its own. `num_gpus` replaces the layout's nodes, and picks a
    template where there is no layout. A role of the run that the layout leaves out goes with the actor.
    `available` is how many GPUs there are, where that is known. `device` is `run.device`, the kind where a layout names
    none. `described`: what the models themselves were described with. Raises ConfigError with all violations.
    """
    places = {role: place for role, place in (described or {}).items() if place.entry()}
    if places and layout is None:
        layout = {"roles": {}}  # not a template, whose groups they would contradict
    raw, problems = _read(layout, num_gpus, parallelism)
    if problems:
        raise ConfigError(problems)
    raw = with_described(raw, places, problems)
    draft = _Draft(
        raw, list(roles), read_degrees(parallelism, "cluster.parallelism", problems), problems, device=device
    )
    placement = draft.placement(num_gpus)
    if placement.device == "cuda" and (placement.world > 1 or raw.get("device") or num_gpus):
        if available is not None and placement.world > available:
            key = KEY if num_gpus is None else "cluster.num_gpus"
            stated = raw.get("device") or num_gpus or device == "cpu"
            other = "" if stated else "; run.device=cpu makes CPU processes instead"
            problems.append(f"{key}: needs {placement.world} GPUs; there are {available}{other}")
        if device == "cpu":
            problems.append(f"run.device: cpu, but {KEY} or cluster.num_gpus asks for GPUs; give one of them")
    if (
        placement.device == "cpu"
        and device.startswith("cuda")
        and (placement.world > 1 or layout is not None)
    ):
        problems.append(f"run.device: {device}, but {KEY} has CPUs; give one of them")
    asked = max([placement.world, *(role.parallelism.size for role in placement.roles.values())])
    if ":" in device and asked > 1:
        problems.append(f"run.device: {device} is one device, but {asked} are asked for; give one of them")
    if backend != "auto":
        stated = placement.communication.backend
        if stated not in ("auto", backend):
            problems.append(f"cluster.communication_backend: is {backend}, but the layout says {stated}")
        communication = replace(placement.communication, backend=backend)  # type: ignore[arg-type]
        placement = replace(placement, communication=communication)
    if placement.device == "cpu" and placement.backend == "nccl":
        problems.append("cluster.communication_backend: nccl needs GPUs, and the layout has CPUs; use gloo")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return placement


def placement_of(
    cluster: ClusterConfig,
    roles: Iterable[str],
    device: str = "auto",
    available: int | None = None,
    described: Mapping[str, Place] | None = None,
) -> Placement:
    """The placement that the section `cluster` describes for a run with `roles`, without groups it does not need.

    The other parameters are those of `resolve`. Raises ConfigError with all violations.
    """
    wanted = list(roles)
    return resolve(
        cluster.layout,
        parallelism=cluster.parallelism,
        num_gpus=cluster.num_gpus,
        backend=cluster.communication_backend,
        roles=wanted,
        available=available,
        device=device,
        described=described,
    ).limited(wanted)


def _read(
    layout: str | Mapping[str, Any] | None, num_gpus: int | None, parallelism: Mapping[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """The layout as a mapping of its parts, and what is wrong with it."""
    if layout is None and num_gpus is None:
        # the parallelism alone says how many devices there are
        return ({"roles": {"actor": {}}} if parallelism else {"device": "cpu"}), []
    if layout is None:
        layout = template_for(num_gpus or 0)
    if isinstance(layout, str):
        if layout in templates():
            file = resources.files("headrace.cluster") / "templates" / f"{layout}.yaml"
            with resources.as_file(file) as path:
                return read_settings(path), []
        if not layout.endswith((".yaml", ".yml")):
            close = difflib.get_close_matches(layout, templates(), 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(templates())}"
            return {}, [f"{KEY}: '{layout}' is no template and no .yaml file; {hint}"]
        try:
            layout = read_settings(Path(layout))
        except ConfigError as error:
            return {}, [f"{KEY}: {violation}" for violation in error.violations]
    raw = dict(layout)
    if "cluster" in raw and len(raw) == 1 and isinstance(raw["cluster"], Mapping):
        raw = dict(raw["cluster"])
    if raw and not raw.keys() & set(LAYOUT_PARTS):
        raw = {"roles": raw}
    problems = []
    for key in raw.keys() - set(LAYOUT_PARTS):
        problems.append(f"{KEY}.{key}: unknown part; there are {', '.join(LAYOUT_PARTS)}")
    return raw, problems


@dataclass
class _Draft:
    """A layout on its way to a Placement; notes everything wrong in `problems`."""

    raw: Mapping[str, Any]
    used: list[str]
    default: Mapping[str, int]
    problems: list[str]
    hosts: list[Host] = field(default_factory=list)
    wanted: dict[str, Any] = field(default_factory=dict)
    """Group → how many devices or which, as written."""
    asked: dict[str, tuple[str, Mapping[str, int]]] = field(default_factory=dict)
    """Role → (group, degrees as written)."""
    device: str = "auto"
    """`run.device`."""

    def placement(self, num_gpus: int | None) -> Placement:
        groups = self.part("groups", Mapping)
        self.wanted = {str(name): value for name, value in groups.items()}
        self.read_nodes(num_gpus)
        self.read_roles()
        self.problems += filter(None, map(group_name_violation, self.wanted))
        device = self.read_device(num_gpus)
        made = self.make_groups(device)
        roles = {
            name: RolePlacement(group, self.fitted(name, degrees, made[group]), self.key_of(name, degrees))
            for name, (group, degrees) in self.asked.items()
        }
        return Placement(
            device,
            tuple(self.hosts),
            made,
            roles,
            self.read_communication(),
            self.read_logging(),
            hosts_named=bool(self.raw.get("nodes")) and num_gpus is None,
        )

    def part(self, name: str, kind: type) -> Any:
        value = self.raw.get(name)
        if value is None:
            return kind() if kind is not Mapping else {}
        if not isinstance(value, kind):
            noun = "a list" if kind is list else "a mapping"
            self.problems.append(f"{KEY}.{name}: expected {noun}, got {value!r}")
            return kind() if kind is not Mapping else {}
        return value

    def read_nodes(self, num_gpus: int | None) -> None:
        written: list[str] = []
        for i, node in enumerate(self.part("nodes", list)):
            key = f"{KEY}.nodes[{i}]"
            if not isinstance(node, Mapping):
                self.problems.append(f"{key}: expected name, count and gpus_per_node, got {node!r}")
                continue
            allowed = ("name", "count", "gpus_per_node", "devices_per_node", "role")
            for name in node.keys() - set(allowed):
                self.problems.append(f"{key}.{name}: unknown; a node has {', '.join(allowed)}")
            count = self.whole(node.get("count", 1), f"{key}.count")
            per = "devices_per_node" if "devices_per_node" in node else "gpus_per_node"
            devices = self.whole(node.get(per, 1), f"{key}.{per}")
            if count * devices > MOST_DEVICES:
                self.problems.append(
                    f"{key}: {count} x {devices} devices; at most {MOST_DEVICES} can be described"
                )
                count = devices = 1
            name = self.name(node.get("name", f"node-{i}"), f"{key}.name")
            written.append(name)
            start = sum(h.devices for h in self.hosts)
            self.hosts += [Host(name if count == 1 else f"{name}-{n}", devices) for n in range(count)]
            for role in self.node_roles(node.get("role"), f"{key}.role"):
                # a node that names a role is that role's group
                self.wanted.setdefault(name, f"{start}-{start + count * devices - 1}")
                if self.asked.setdefault(role, (name, {}))[0] != name:
                    self.problems.append(
                        f"{key}.role: the {role} is on '{self.asked[role][0]}' already; for both, use {KEY}.groups"
                    )
        # a node's own name too: it is that of a group, which two nodes would share
        twice = Counter(written) - Counter(set(written)) or Counter(h.name for h in self.hosts)
        for name, more in twice.items():
            times = max(written.count(name), more)
            if times > 1:
                self.problems.append(f"{KEY}.nodes: the name '{name}' is given {times} times")
        if num_gpus is not None and num_gpus > 0:
            if num_gpus > 8 and num_gpus % 8:
                self.problems.append(
                    f"cluster.num_gpus: {num_gpus} GPUs are no whole hosts of 8; describe the hosts in {KEY}.nodes"
                )
            many = max(1, num_gpus // 8)
            self.hosts = [Host(f"host-{n}" if many > 1 else "host", num_gpus // many) for n in range(many)]

    def node_roles(self, value: Any, key: str) -> list[str]:
        names = value if isinstance(value, list) else [] if value is None else [value]
        for name in names:
            if name not in ROLES and name not in LABELS:
                self.problems.append(f"{key}: unknown role {name!r}; the roles are {', '.join(ROLES)}")
        return [name for name in names if name in ROLES]

    def read_roles(self) -> None:
        shared = next(iter(self.wanted), "all")
        for name, value in self.part("roles", Mapping).items():
            key = f"{KEY}.roles.{name}"
            if name not in ROLES:
                close = difflib.get_close_matches(str(name), ROLES, 1)
                hint = f"did you mean {close[0]}?" if close else f"the roles are {', '.join(ROLES)}"
                self.problems.append(f"{key}: unknown role; {hint}")
                continue
            if isinstance(value, str | int) and not isinstance(value, bool):
                self.asked[name] = (self.group_of_devices(name, value, key), {})
                continue
            if not isinstance(value, Mapping):
                self.problems.append(f"{key}: expected gpu_group and parallelism, or devices, got {value!r}")
                continue
            for other in value.keys() - {"gpu_group", "group", "parallelism", "devices"}:
                self.problems.append(f"{key}.{other}: unknown; a role has gpu_group, parallelism and devices")
            group = self.group_of_role(str(name), value, key, shared)
            if self.part("groups", Mapping) and group not in self.wanted:
                self.problems.append(
                    f"{key}.gpu_group: there is no group '{group}'; there are {', '.join(self.wanted)}"
                )
            self.wanted.setdefault(group, None)
            degrees = read_degrees(value.get("parallelism"), f"{key}.parallelism", self.problems)
            self.asked[str(name)] = (group, degrees)
        if "actor" not in self.asked:
            self.wanted.setdefault(shared, None)
            self.asked["actor"] = (next(iter(self.asked.values()))[0] if self.asked else shared, {})
        for name in self.used:
            if name not in ROLES:
                self.problems.append(f"{KEY}.roles.{name}: unknown role; the roles are {', '.join(ROLES)}")
            else:
                self.asked.setdefault(name, self.asked["actor"])

    def group_of_role(self, role: str, value: Mapping[str, Any], key: str, shared: str) -> str:
        named, devices = value.get("gpu_group", value.get("group")), value.get("devices")
        if value.get("group", named) != named:
            self.problems.append(f"{key}: gpu_group {named!r} and group {value['group']!r}; give one of them")
        if named is not None:
            named = self.name(named, f"{key}.gpu_group")
        if devices is None:
            return str(named or (self.asked[role][0] if role in self.asked else shared))
        if named is None:
            return self.group_of_devices(role, devices, f"{key}.devices")
        numbers, before = self.numbers(devices, f"{key}.devices"), self.wanted.get(str(named))
        stated = before if before is None or isinstance(before, list) else str(before)
        if isinstance(stated, str) and not is_share(stated) and not isinstance(before, int):
            stated = self.numbers(stated, f"{KEY}.groups.{named}")
        if stated not in (None, numbers):
            self.problems.append(
                f"{key}.devices: {devices!r}, but group '{named}' has {before!r}; give one of them"
            )
        self.wanted[str(named)] = numbers
        return str(named)

    def group_of_devices(self, role: str, value: str | int, key: str) -> str:
        """The group that has just these devices; roles with the same ones share it."""
        numbers = self.numbers(value, key)
        for name, other in self.wanted.items():
            if isinstance(other, list) and other == numbers:
                return name
        self.wanted[role] = numbers
        return role

    def read_device(self, num_gpus: int | None) -> Literal["cpu", "cuda"]:
        stated = self.raw.get("device")
        if stated not in (None, "cpu", "cuda"):
            self.problems.append(f"{KEY}.device: {stated!r} is none of cpu, cuda")
            return "cuda" if self.device.startswith("cuda") else "cpu"
        written = [
            v.get("devices") if isinstance(v, Mapping) else v for v in self.part("roles", Mapping).values()
        ]
        named: set[Any] = {
            "cpu" if "cpu" in v else "cuda"
            for v in written
            if isinstance(v, str) and re.match("cpu|cuda|gpu", v)
        }
        if len(named | ({stated} if stated else set())) > 1:
            self.problems.append(f"{KEY}: some devices are CPUs and some GPUs; use one kind")
        if num_gpus is not None:
            return "cpu" if num_gpus == 0 else "cuda"
        if not named and stated is None:
            return "cpu" if self.device == "cpu" else "cuda"
        return "cpu" if "cpu" in (named or {stated}) else "cuda"

    def make_groups(self, device: str) -> dict[str, Group]:
        """Groups that say which devices first, then those that say how many, in order, from those left."""
        total = sum(h.devices for h in self.hosts)
        taken: dict[int, str] = {}
        given: dict[str, list[int]] = {}
        for name, value in self.wanted.items():
            if isinstance(value, list) or (isinstance(value, str) and not is_share(value)):
                noted = value == [] and name not in self.part("groups", Mapping)  # where its role was read
                given[name] = [] if noted else self.numbers(value, f"{KEY}.groups.{name}")
                both: dict[str, list[int]] = {}
                for number in given[name]:
                    if number in taken:
                        both.setdefault(taken[number], []).append(number)
                    taken.setdefault(number, name)
                for other, numbers in both.items():
                    self.problems.append(
                        f"{KEY}.groups.{name}: overlaps group '{other}' on device {listed(numbers)}"
                        if other != name
                        else f"{KEY}.groups.{name}: names device {listed(numbers)} twice"
                    )
        sizes = {name: self.size(name, total) for name in self.wanted if name not in given}
        highest = max([*taken, -1]) + 1
        needed = max(highest, len(taken) + sum(sizes.values()))
        if not self.hosts:
            self.hosts = unnamed_hosts(needed, device)
        elif needed > total:
            parts = [f"{name}: {n}" for name, n in sizes.items()]
            parts += [f"{name}: {listed(numbers)}" for name, numbers in given.items()]
            self.problems.append(
                f"{KEY}.groups: need {needed} devices, but the nodes have {total} ({'; '.join(parts)})"
            )
        free = iter(n for n in range(needed + len(taken)) if n not in taken)
        for name, size in sizes.items():
            given[name] = [next(free) for _ in range(size)]
        out = {name: Group(name, tuple(dict.fromkeys(given[name]))) for name in self.wanted}
        # hosts that are too few were noted above; seats need one for every device
        short = max([n for numbers in given.values() for n in numbers], default=0) + 1
        if self.hosts and short > sum(h.devices for h in self.hosts):
            self.hosts[-1] = replace(self.hosts[-1], devices=self.hosts[-1].devices + short)
        return out

    def size(self, name: str, total: int) -> int:
        """How many devices a group is to have."""
        value, key = self.wanted[name], f"{KEY}.groups.{name}"
        if value is None:
            products = {
                role: ranks_of(degrees or self.default)
                for role, (group, degrees) in self.asked.items()
                if group == name
            }
            explicit = [n for n in products.values() if n is not None]
            alone = total > 0 and len(self.wanted) == 1
            if alone and not any("dp" in (d or self.default) for _, d in self.asked.values()):
                return total
            return explicit[0] if explicit else 1
        if isinstance(value, str):
            share = Fraction(1) if value == "all" else Fraction(value)
            if not total:
                self.problems.append(f"{key}: {value} of what? {KEY}.nodes says how many devices there are")
            elif (share * total).denominator != 1 or share * total < 1:
                self.problems.append(f"{key}: {value} of {total} devices is no whole number of them")
            return max(1, int(share * total))
        return self.whole(value, key)

    def fitted(self, role: str, written: Mapping[str, int], group: Group) -> Parallelism:
        """The degrees of a role, with dp filled up to the size of its group where it was left out."""
        key = self.key_of(role, written)
        degrees = dict(written or self.default)
        tp, pp, zero3 = degrees.get("tp", 1), degrees.get("pp", 1), degrees.get("zero3", 1)
        sp = degrees.get("sp", 1)
        dp = degrees.get("dp") or max(1, group.size // (sp * tp * pp))
        if dp * sp * tp * pp != group.size and group.devices:
            of = f"dp {dp} x sp {sp}" if sp > 1 else f"dp {dp}"
            self.problems.append(
                f"{key}: {of} x tp {tp} x pp {pp} = {dp * sp * tp * pp} ranks for the {role}, but group '{group.name}'"
                f" has {group.size} device{'s' * (group.size != 1)}"
            )
        zero3 = zero3 or dp
        if dp % zero3:
            self.problems.append(f"{key}: zero3 {zero3} does not divide dp {dp}")
        return Parallelism(dp, tp, pp, zero3, sp)

    def key_of(self, role: str, written: Mapping[str, int]) -> str:
        """The setting that gives a role its degrees; a role that the layout leaves out has the actor's."""
        if written:
            named = role if role in self.part("roles", Mapping) else "actor"
            return f"{KEY}.roles.{named}.parallelism"
        return "cluster.parallelism" if self.default else KEY

    def numbers(self, value: Any, key: str) -> list[int]:
        return device_numbers(value, key, self.problems)

    def name(self, value: Any, key: str) -> str:
        if not isinstance(value, str | int):
            self.problems.append(f"{key}: expected a name, got {value!r}")
        return str(value)

    def whole(self, value: Any, key: str) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_DEVICES:
            return value
        self.problems.append(f"{key}: expected a whole number of at least 1, got {value!r}")
        return 1

    def read_communication(self) -> Communication:
        raw, key = self.part("communication", Mapping), f"{KEY}.communication"
        for name in raw.keys() - {"backend", "rdma_enabled"}:
            self.problems.append(f"{key}.{name}: unknown; there are backend and rdma_enabled")
        backend, rdma = raw.get("backend", "auto"), raw.get("rdma_enabled", True)
        if backend not in ("auto", "nccl", "gloo"):
            self.problems.append(f"{key}.backend: {backend!r} is none of auto, nccl, gloo")
            backend = "auto"
        if not isinstance(rdma, bool):
            self.problems.append(f"{key}.rdma_enabled: expected true or false, got {rdma!r}")
        return Communication(backend, rdma is True)

    def read_logging(self) -> Logging:
        raw, key = self.part("logging", Mapping), f"{KEY}.logging"
        for name in raw.keys() - {"level", "save_dir"}:
            self.problems.append(f"{key}.{name}: unknown; there are level and save_dir")
        level, folder = str(raw.get("level", "info")).lower(), raw.get("save_dir")
        if level not in LEVELS:
            self.problems.append(f"{key}.level: {level!r} is none of {', '.join(LEVELS)}")
        if not isinstance(folder, str | None):
            self.problems.append(f"{key}.save_dir: expected a folder, got {folder!r}")
        return Logging(level, None if folder is None else str(folder))
