"""Count, mean, deviation and extremes of numbers that lie on several ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from headrace.stages import ALONE, DataRanks


@dataclass(frozen=True)
class Moments:
    """Of all ranks together; mean, low and high are 0 where there are no numbers."""

    count: int
    mean: float
    squares: float  # sum of squared differences from the mean
    low: float
    high: float

    def std(self, correction: int = 0) -> float:
        """The standard deviation, with `count - correction` in its denominator; 0 where that is not above 0."""
        left = self.count - correction
        return math.sqrt(self.squares / left) if left > 0 else 0.0


def moments(values: Tensor, ranks: DataRanks = ALONE) -> Moments:
    """values [n], any n on each rank, not NaN. Two passes in float64, so that a large mean loses no digits."""
    own = values.double()
    total, count = ranks.total([float(own.sum()), len(own)])
    if count == 0:
        return Moments(0, 0.0, 0.0, 0.0, 0.0)
    mean = total / count
    (squares,) = ranks.total([float((own - mean).square().sum())])
    ends = ranks.gather([float(own.min()), float(own.max())] if len(own) else None)
    lows, highs = zip(*[pair for pair in ends if pair is not None], strict=True)
    return Moments(int(count), mean, squares, min(lows), max(highs))
