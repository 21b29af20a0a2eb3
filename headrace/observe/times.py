"""When the stages of a step were carried out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageTime:
    """Seconds since 1970, by which group of devices."""

    stage: str
    group: str
    began: float
    ended: float
