"""The weight of the KL penalty, fixed or adapted to a target (Ziegler et al. 2019, arXiv 1909.08593)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.errors import ConfigError
from headrace.stages import StageContext

ERROR_LIMIT = 0.2
GAIN = 0.1


class KLController:
    """Holds `coefficient`, which lives as long as the run.

    With a target, after every step:
        error = clip((KL - target) / target, -0.2, 0.2);   coefficient <- coefficient * (1 + 0.1 * error)
    so it moves by at most 2 % a step. KL and target are in nats *per sampled token* (metric `actor/kl`); the paper's
    are per response. Without a target the coefficient stays as it is.
    """

    def __init__(self, coefficient: float, target: float | None = None) -> None:
        self.coefficient = coefficient
        self.target = target

    def update(self, kl: float) -> None:
        """Takes in the mean KL of a step. One that is not finite changes nothing."""
        if self.target is None or not math.isfinite(kl):
            return
        error = min(max((kl - self.target) / self.target, -ERROR_LIMIT), ERROR_LIMIT)
        self.coefficient *= 1.0 + GAIN * error

    def state_dict(self) -> dict[str, float]:
        """Plain values for JSON."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues where `state` was saved: with a target, that takes its coefficient; without, there is nothing to
        continue. Raises ConfigError when there is no usable coefficient in it.
        """
        coefficient = state.get("coefficient")
        if not isinstance(coefficient, int | float) or not math.isfinite(coefficient) or coefficient < 0:
            raise ConfigError(f"the saved KL coefficient is {coefficient!r}; it cannot be resumed")
        if self.target is not None:
            self.coefficient = float(coefficient)


def adapt_kl(context: StageContext) -> None:
    """After the actor's updates of a step: logs the coefficient they used and takes in the KL they measured."""
    controller = context.kl
    if controller is None or controller.target is None:
        return
    context.metrics.add("actor/kl_coefficient", controller.coefficient, 1)
    measured = context.metrics.means().get("actor/kl")
    if measured is not None:
        controller.update(measured)
