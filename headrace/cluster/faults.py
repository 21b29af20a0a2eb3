"""What a worker says when it fails, and which of several failures was the cause of the others."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config_import import described
from headrace.errors import HeadraceError


@dataclass(frozen=True)
class Failure:
    """One rank's failure. `secondary`: it failed because another rank did, as far as it can tell itself."""

    rank: int
    cause: str
    time: float
    secondary: bool = False
    exit_code: int = 1


def failure_report(error: BaseException) -> dict[str, Any]:
    """An exception as plain values, with the time it was caught."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return {
        "cause": described(error) + notes,
        "time": time.time(),
        "secondary": _is_secondary(error),
        "exit_code": error.exit_code if isinstance(error, HeadraceError) else 1,
        "traceback": "".join(traceback.format_exception(error)),
    }


def _is_secondary(error: BaseException) -> bool:
    """Errors of collectives and of asking a dead worker: somebody else is to blame."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__module__.startswith(("torch.distributed", "torch._C._distributed", "ray.")):
            return True
        text = str(seen)
        if type(seen) is RuntimeError and any(
            w in text for w in ("gloo", "NCCL", "Connection ", "recvValue", "TCPStore")
        ):
            return True
        seen = seen.__cause__
    return False


def root_cause(failures: Mapping[int, Failure]) -> Failure:
    """The failure that explains the others: the first that nobody else caused, or else the first of all."""
    return min(failures.values(), key=lambda f: (f.secondary, f.time))


def position(thread: int | None, doing: str | None) -> dict[str, Any]:
    """What a thread of this process is at: `doing`, the line of its own code it is in, whether it waits for others."""
    frames = traceback.extract_stack(sys._current_frames()[thread]) if thread in sys._current_frames() else []
    inner = [f for f in frames if not f.filename.startswith("<")]
    waiting = any(f.filename.replace("\\", "/").find("torch/distributed/") >= 0 for f in inner)
    waiting = waiting or any(f.name == "ask" and "headrace/cluster" in f.filename for f in inner)
    own = [f for f in inner if "torch/" not in f.filename]
    line = f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}" if own else "nowhere"
    return {"doing": doing, "line": line, "waiting": waiting}
