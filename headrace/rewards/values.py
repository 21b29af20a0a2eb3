"""From what a reward function returned to numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

LARGEST = float(np.finfo(np.float32).max)  # advantages and returns are float32


class UnusableValueError(ValueError):
    """What a reward function returned is no reward; the message says why, without naming the function."""


@dataclass
class RewardResult:
    """Per row: the reward and named parts; None for a row that is excluded, or that has no such part."""

    rewards: list[float | None] = field(default_factory=list)
    parts: dict[str, list[float | None]] = field(default_factory=dict)

    def append(self, reward: float | None, parts: Mapping[str, float | None]) -> None:
        for name in parts.keys() - self.parts.keys():
            self.parts[name] = [None] * len(self.rewards)
        self.rewards.append(reward)
        for name, values in self.parts.items():
            values.append(parts.get(name))


def read_value(returned: Any) -> tuple[float | None, dict[str, float | None]]:
    """(reward, parts) of one row's return value.

    A number (bool, int, float, a numpy or torch scalar), None, or a dict with `reward` and further named numbers.
    Raises UnusableValueError saying what is wrong with it.
    """
    if not isinstance(returned, Mapping):
        return _number(returned, "it returned"), {}
    if "reward" not in returned:
        raise UnusableValueError(
            f"it returned a dict without 'reward': its keys are {sorted(map(str, returned))}"
        )
    numbers = {str(name): _number(value, f"its '{name}' is") for name, value in returned.items()}
    return numbers.pop("reward"), numbers


def read_list(returned: Any, rows: int) -> list[Any]:
    """The values of all rows from a batched function's return value. Raises UnusableValueError saying what is wrong."""
    if isinstance(returned, Tensor | np.ndarray):
        values = returned.tolist()
    elif isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping | Set):
        values = list(returned)
    else:
        values = None
    if not isinstance(values, list):
        raise UnusableValueError(f"it returned {type(returned).__name__}, not a list of {rows} values")
    if len(values) != rows:
        raise UnusableValueError(f"it returned {len(values)} values for {rows} completions")
    return values


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, Tensor | np.ndarray | np.generic):
        shape = tuple(value.shape)
        if math.prod(shape) != 1:
            raise UnusableValueError(f"{what} an array of shape {shape}, not one number")
        value = value.item()
    if not isinstance(value, Real | Decimal):
        raise UnusableValueError(
            f"{what} {_shown(value)}, a {type(value).__name__}; wanted a number, a dict or None"
        )
    try:
        number = float(value)
    except (OverflowError, ValueError) as error:
        raise UnusableValueError(f"{what} a number too large for a float") from error
    if not math.isfinite(number):
        raise UnusableValueError(f"{what} {number}; to leave a row out, return None")
    if abs(number) > LARGEST:
        raise UnusableValueError(f"{what} {number}, more than float32 holds; scale it down")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
