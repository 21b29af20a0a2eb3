"""The values of a layout as they are written: device numbers, degrees, shares of the devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from headrace.cluster.placement import Host
from headrace.config_places import DEGREES

GPUS_A_HOST = 8
"""Of hosts that nobody described."""
MOST_DEVICES = 10**6
"""Of one entry of a layout."""
_DEVICES = re.compile(r"(?:(cuda|cpu|gpu)(?::|$))?(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)?")


def device_numbers(value: Any, key: str, problems: list[str]) -> list[int]:
    """The device numbers that `cuda:0-3`, `0,2-3`, 2 or a list of such mean."""
    if isinstance(value, list) and value:
        return [n for v in value for n in device_numbers(v, key, problems)]
    match = _DEVICES.fullmatch(str(value).replace(" ", ""))
    if match is None or isinstance(value, bool | float):
        problems.append(f"{key}: {value!r} names no devices; write them as cuda:0-3")
        return []
    out: list[int] = []
    for part in (match[2] or "0").split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first) or int(last or first) > MOST_DEVICES:
            problems.append(f"{key}: {value!r} is no range; write it as cuda:0-3")
            return []
        out += range(int(first), int(last or first) + 1)
    return out


def read_degrees(raw: Any, key: str, problems: list[str]) -> dict[str, int]:
    """The degrees as written; zero3 is 0 for `true`, which is as many as dp."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        problems.append(f"{key}: expected degrees such as {{tp: 2, dp: 4}}, got {raw!r}")
        return {}
    out: dict[str, int] = {}
    for name, value in raw.items():
        if name not in DEGREES:
            problems.append(f"{key}.{name}: unknown degree; the degrees are dp, sp, tp, pp and zero3")
        elif name == "zero3" and isinstance(value, bool):
            out["zero3"] = 0 if value else 1
        elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_DEVICES:
            problems.append(f"{key}.{name}: expected a whole number of at least 1, got {value!r}")
        else:
            out[str(name)] = value
    if out.get("zero3", 0) > 1 and "dp" not in out:
        out["dp"] = out["zero3"]
    return out


def ranks_of(degrees: Mapping[str, int]) -> int | None:
    """Ranks that the degrees need, or None where nothing was said."""
    if not degrees:
        return None
    return math.prod(degrees.get(name, 1) for name in ("dp", "sp", "tp", "pp"))


def group_name_violation(name: str) -> str | None:
    """What is wrong with the name of a group; files are named after it."""
    if (
        name
        and len(name) <= 64
        and name == name.strip()
        and re.fullmatch(r"[^./\\][^/\\]*", name)
        and name.isprintable()
    ):
        return None
    return f"cluster.layout.groups: {name!r} is no name for a group, since log files are named after it; use a plain one"


def unnamed_hosts(devices: int, kind: str) -> list[Host]:
    """The hosts of a layout that names none: this one, or as many as hold the GPUs."""
    if kind == "cpu" or devices <= GPUS_A_HOST:
        return [Host("localhost", devices)]
    sizes = [min(GPUS_A_HOST, devices - start) for start in range(0, devices, GPUS_A_HOST)]
    return [Host(f"host-{n}", size) for n, size in enumerate(sizes)]


def is_share(value: str) -> bool:
    return value == "all" or re.fullmatch(r"[1-9]\d{0,5}/[1-9]\d{0,5}", value) is not None


def listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
