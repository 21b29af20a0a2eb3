"""What this machine is: processors, memory, disk and installed versions. Imports no heavy library."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = "environment.json"
"""The file of a run's directory that says where the run ran."""

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def cpu_cores() -> int:
    """Cores this process may use: its affinity, and below that the container's quota, rounded up."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _cpu_quota()
    return cores if quota is None else max(1, min(cores, quota))


def _cpu_quota() -> int | None:
    text = _read(CGROUP / "cpu.max")  # cgroup 2: "200000 100000" or "max 100000"
    if text is not None:
        limit, _, period = text.partition(" ")
    else:
        limit = _read(CGROUP / "cpu/cpu.cfs_quota_us") or "max"
        period = _read(CGROUP / "cpu/cpu.cfs_period_us") or "100000"
    if not limit.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return -(-int(limit) // int(period))


@dataclass(frozen=True)
class Memory:
    """Bytes this process may have in all, and bytes that are free now; the smaller of the machine and its container."""

    total: int
    free: int


def host_memory() -> Memory:
    """RAM, with the limits of a container respected (cgroup 1 and 2). Page cache counts as free."""
    total, free = _machine_memory()
    limit, used = _container_memory()
    if limit is not None and limit < total:
        total, free = limit, min(free, max(0, limit - used))
    return Memory(total, free)


def _machine_memory() -> tuple[int, int]:
    found = {name: int(kib) << 10 for name, kib in re.findall(r"(\w+): +(\d+) kB", _read(MEMINFO) or "")}
    if "MemTotal" in found:
        return found["MemTotal"], found.get("MemAvailable", found["MemTotal"])
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    return total, os.sysconf("SC_AVPHYS_PAGES") * page if "SC_AVPHYS_PAGES" in os.sysconf_names else total


def _container_memory() -> tuple[int | None, int]:
    """(limit or None, bytes used that cannot be given back) of the container."""
    for limit_file, used_file, stat_file in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        limit, used = _read(CGROUP / limit_file), _read(CGROUP / used_file)
        if limit is not None and limit.isdigit():
            cache = re.search(
                r"^(?:total_)?inactive_file (\d+)", _read(CGROUP / stat_file) or "", re.MULTILINE
            )
            held = int(used) if used is not None and used.isdigit() else 0
            return int(limit), max(0, held - (int(cache[1]) if cache else 0))
    return None, 0


def free_disk(path: Path) -> int:
    """Free bytes of the disk that `path`, or the nearest folder above it that exists, is on."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free


def processor() -> str:
    """The name of the CPU, as far as the system tells."""
    match = re.search(r"^model name\s*: (.+)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Requirement:
    """One line of the package's own requirements; `extra` is "" for what is always installed."""

    name: str
    specifier: str
    extra: str

    @property
    def installed(self) -> str | None:
        return installed_version(self.name)

    def allows(self, version: str) -> bool:
        """True where every bound holds. Bounds of the forms >=, >, <=, <, ==, != are understood."""
        return all(
            _holds(version, *bound) for bound in re.findall(r"(>=|<=|==|!=|>|<)\s*([\w.]+)", self.specifier)
        )


def requirements() -> list[Requirement]:
    """headrace's dependencies as its installed metadata states them; [] where it is not installed."""
    try:
        lines = importlib.metadata.requires("headrace") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    out = []
    for line in lines:
        text, _, marker = line.partition(";")
        match = re.match(r"\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)\)?", text)
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        if match is not None:
            out.append(Requirement(match[1], match[2].strip(), extra[1] if extra else ""))
    return out


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _holds(version: str, relation: str, bound: str) -> bool:
    a, b = _numbers(version), _numbers(bound)
    size = max(len(a), len(b))
    a, b = a + (0,) * (size - len(a)), b + (0,) * (size - len(b))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, ">": a > b, "<": a < b}[relation]


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: 2.13.0+cpu is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


def environment() -> dict[str, Any]:
    """Where a run runs, for its directory: versions, processor, memory and, once torch is loaded, GPUs."""
    torch = sys.modules.get("torch")
    found = torch is not None and torch.cuda.is_available()
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch and found else []
    )
    return {
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("headrace", "torch", "transformers")},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cpu_cores": cpu_cores(),
        "memory_bytes": host_memory().total,
        "gpus": gpus,
    }


def write_environment(folder: Path) -> None:
    """Writes `environment` to the directory of a run. Raises OSError."""
    text = json.dumps(environment(), indent=2, ensure_ascii=False) + "\n"
    (folder / ENVIRONMENT).write_text(text, encoding="utf-8")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
