"""Every advantage and loss there is, by name: the built-in ones, and the user's own once they are registered."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from headrace.algorithms.advantages.batch_mean import batch_mean
from headrace.algorithms.advantages.gae import gae_advantage
from headrace.algorithms.advantages.grpo import grpo_advantage
from headrace.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from headrace.algorithms.advantages.remax import remax
from headrace.algorithms.advantages.rloo import rloo
from headrace.algorithms.losses.cispo import cispo
from headrace.algorithms.losses.gspo import gspo
from headrace.algorithms.losses.policy_gradient import policy_gradient
from headrace.algorithms.losses.ppo_clip import ppo_clip_loss
from headrace.algorithms.registry import (
    ADVANTAGES,
    LOSSES,
    Advantage,
    LossFunction,
    LossInputs,
    LossTerms,
    Scored,
    register_advantage,
    register_loss,
)
from headrace.config import AlgorithmConfig
from headrace.config_import import import_source
from headrace.errors import ConfigError

__all__ = [
    "LossInputs",
    "LossTerms",
    "Scored",
    "algorithm_problems",
    "find_advantage",
    "find_loss",
    "register_advantage",
    "register_loss",
]

# importing their files registered them
BUILT_IN = (
    batch_mean,
    gae_advantage,
    grpo_advantage,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    cispo,
    gspo,
    policy_gradient,
    ppo_clip_loss,
)


def find_advantage(name: str) -> Advantage:
    """The advantage `name`. Raises ConfigError with the nearest name there is."""
    if name not in ADVANTAGES:
        raise ConfigError(_unknown("advantage", name, ADVANTAGES))
    return ADVANTAGES[name]


def find_loss(name: str) -> LossFunction:
    """The loss `name`. Raises ConfigError with the nearest name there is."""
    if name not in LOSSES:
        raise ConfigError(_unknown("loss", name, LOSSES))
    return LOSSES[name]


def algorithm_problems(settings: AlgorithmConfig) -> list[str]:
    """What is wrong with `algorithm.plugin`, `advantage` and `loss`; imports the plugin, once."""
    if settings.plugin is not None:
        try:
            import_source(settings.plugin, "algorithm.plugin", prefix="headrace_plugin", once=True)
        except ConfigError as error:
            return (
                error.violations
            )  # names it should have registered would be unknown: one cause, one message
    out = []
    if settings.advantage not in ADVANTAGES:
        out.append(_unknown("advantage", settings.advantage, ADVANTAGES))
    if settings.loss not in LOSSES:
        out.append(_unknown("loss", settings.loss, LOSSES))
    return out


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(sorted(known))}"
    return (
        f"algorithm.{kind}: there is no {kind} '{name}'; {hint} (one of your own is registered with"
        f" @register_{kind} in the file that algorithm.plugin names)"
    )
