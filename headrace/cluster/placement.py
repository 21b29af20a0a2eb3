"""Where everything runs: hosts, their devices, groups of devices, and the role and parallelism of each group.

Pure values. Reading them from a configuration, with every check: layouts.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Parallelism:
    """How one model lies on the devices of its group.

    `dp` ranks each work on rows of their own; `tp` ranks share every matrix, `pp` ranks have consecutive layers. With
    `zero3` above 1, that many neighbours of the `dp` ranks keep one copy of the weights between them (equal to `dp`:
    one copy in all; between: hybrid shard).

    Ranks are numbered as in a device mesh with axes (pp, dp, sp, tp), tp running fastest, so that the ranks that talk
    most are neighbours. `sp` ranks have the same rows, and each of their sequences' tokens a slice.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero3: int = 1
    sp: int = 1

    @property
    def size(self) -> int:
        return self.dp * self.copies

    @property
    def copies(self) -> int:
        """Ranks that have the same rows."""
        return self.sp * self.tp * self.pp

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(dp, tp, pp, sp) index of a rank of the group."""
        above = rank // (self.tp * self.sp)
        return above % self.dp, rank % self.tp, above // self.dp, rank // self.tp % self.sp

    def rank(self, dp: int, tp: int, pp: int, sp: int = 0) -> int:
        """The rank of the group at these indices."""
        return ((pp * self.dp + dp) * self.sp + sp) * self.tp + tp

    def owner(self, dp: int) -> int:
        """The rank whose output counts for a data-parallel index: the first of its sp and tp ranks in the last stage."""
        return self.rank(dp, 0, self.pp - 1)

    def __str__(self) -> str:
        degrees = {"dp": self.dp, "sp": self.sp, "tp": self.tp, "pp": self.pp}
        parts = [f"{name}{n}" for name, n in degrees.items() if n > 1]
        return "×".join(parts or ["dp1"]) + (f" zero3×{self.zero3}" if self.zero3 > 1 else "")


@dataclass(frozen=True)
class Host:
    """One machine of the cluster."""

    name: str
    devices: int


@dataclass(frozen=True)
class Group:
    """Devices that work together, each with one process; a device belongs to one group."""

    name: str
    devices: tuple[int, ...]
    """Numbers that count the devices of all hosts, in the order of the hosts."""

    @property
    def size(self) -> int:
        return len(self.devices)


@dataclass(frozen=True)
class RolePlacement:
    """Roles in the same group are colocated: they share its processes and take turns."""

    group: str
    parallelism: Parallelism
    key: str = field(default="cluster.layout", compare=False)
    """The setting that gave the parallelism, for errors."""


@dataclass(frozen=True)
class Communication:
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    rdma_enabled: bool = True


@dataclass(frozen=True)
class Logging:
    level: str = "info"
    save_dir: str | None = None
    """Folder for the logs of the ranks; None: `logs` of the run directory."""


@dataclass(frozen=True)
class Seat:
    """Where one worker process sits: its global rank, and its place in its group."""

    rank: int
    group: str
    group_rank: int
    device: int
    host: int
    local_index: int
    """Index of the device on its host."""


@dataclass(frozen=True)
class Placement:
    """A checked description of a cluster; `layouts.resolve` makes one."""

    device: Literal["cpu", "cuda"]
    hosts: tuple[Host, ...]
    groups: Mapping[str, Group]
    roles: Mapping[str, RolePlacement]
    communication: Communication = field(default_factory=Communication)
    logging: Logging = field(default_factory=Logging)
    hosts_named: bool = True
    """Whether the hosts were described; else they are what there is where the run starts."""

    @property
    def world(self) -> int:
        """Worker processes in all: one for each device of a group."""
        return sum(g.size for g in self.groups.values())

    @property
    def backend(self) -> str:
        """The torch.distributed backend."""
        automatic = "nccl" if self.device == "cuda" else "gloo"
        return automatic if self.communication.backend == "auto" else self.communication.backend

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """Every worker, by global rank: the groups one after the other, each in the order of its devices."""
        first = [0]
        for host in self.hosts:
            first.append(first[-1] + host.devices)
        out: list[Seat] = []
        for group in self.groups.values():
            for group_rank, device in enumerate(group.devices):
                number = next(h for h in range(len(self.hosts)) if device < first[h + 1])
                out.append(Seat(len(out), group.name, group_rank, device, number, device - first[number]))
        return tuple(out)

    def ranks(self, group: str) -> tuple[int, ...]:
        """Global ranks of a group, in its order."""
        return tuple(seat.rank for seat in self.seats if seat.group == group)

    def limited(self, roles: Iterable[str]) -> Placement:
        """The same without the roles that a run does not have, and without groups that then do nothing."""
        kept = {name: role for name, role in self.roles.items() if name in set(roles)}
        busy = {role.group for role in kept.values()}
        return replace(self, roles=kept, groups={n: g for n, g in self.groups.items() if n in busy})

    def generating(self) -> Placement:
        """The same with a rollout of whole copies, cut by tp alone, where its group trains with zero3, sp or pp."""
        role = self.roles.get("rollout")
        if role is None or max(role.parallelism.zero3, role.parallelism.sp, role.parallelism.pp) == 1:
            return self
        p = role.parallelism
        plain = RolePlacement(role.group, Parallelism(dp=p.dp * p.sp * p.pp, tp=p.tp), role.key)
        return replace(self, roles={**self.roles, "rollout": plain})

    def apart(self, first: str, second: str) -> bool:
        """Whether two roles have no device in common, so that they can work at the same time."""
        return self.roles[first].group != self.roles[second].group


@dataclass(frozen=True)
class ModelSize:
    """What of a model must be divisible, and what else stands against cutting it over tp or zero3."""

    heads: int
    kv_heads: int
    layers: int
    mlp_columns: int = 0
    tp_problems: tuple[str, ...] = ()
    zero3_problems: tuple[str, ...] = ()


def fit_violations(
    placement: Placement, sizes: Mapping[str, ModelSize], rows: Mapping[str, tuple[str, int]]
) -> list[str]:
    """Heads and MLP columns that tp or sp does not divide, layers that pp does not, batches that dp does not, and
    models that cannot be cut at all.

    `sizes` by role; `rows` by role: (the setting that says how many rows the role gets at once, that number).
    One sentence for each violation, beginning with the key; the same one of several roles once.
    """
    out: list[str] = []
    for name, role in placement.roles.items():
        p, key = role.parallelism, role.key
        if name in sizes:
            size = sizes[name]
            counts = {
                "attention heads": size.heads,
                "key/value heads": size.kv_heads,
                "MLP columns": size.mlp_columns,
            }
            best = [t for t in range(1, p.tp) if not any(count % t for count in counts.values())]
            for what, count in counts.items():
                if count % p.tp:
                    out.append(
                        f"{key}: tp {p.tp} does not divide the model's {count} {what}; use tp {best[-1]}"
                    )
            own = size.heads // p.tp
            if size.heads % p.tp == 0 and own % p.sp:
                fits = [n for n in range(1, p.sp) if own % n == 0]
                of = (
                    f"model's {own} attention heads"
                    if p.tp == 1
                    else f"{own} attention heads of each tp rank"
                )
                out.append(f"{key}: sp {p.sp} does not divide the {of}; use sp {fits[-1]}")
            if size.layers % p.pp:
                fits = [n for n in range(1, p.pp) if size.layers % n == 0]
                out.append(
                    f"{key}: pp {p.pp} does not divide the model's {size.layers} layers; use pp {fits[-1]}"
                )
            if p.tp > 1:
                out += [f"{key}: tp {p.tp} cannot cut the model: {problem}" for problem in size.tp_problems]
            if p.zero3 > 1:
                out += [
                    f"{key}: zero3 {p.zero3} cannot cut the model: {problem}"
                    for problem in size.zero3_problems
                ]
        if name in rows and rows[name][1] % p.dp:
            setting, count = rows[name]
            out.append(
                f"{setting}: {count} rows cannot be shared evenly by the {name}'s {p.dp} data-parallel ranks; use a"
                f" multiple of {p.dp}"
            )
    return list(dict.fromkeys(out))
