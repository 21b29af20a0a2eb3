"""What an advantage and a token loss are, and the names they go by.

Shapes: R rows (responses), N tokens of all rows together (prompts included), M tokens that count in the loss of
one micro-batch. The built-in ones and the look-up by name: find.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace.algorithms.ragged import row_ids
from headrace.config import AlgorithmConfig
from headrace.errors import ConfigError
from headrace.stages import ALONE, DataRanks

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Scored:
    """The step's responses with their rewards: what an advantage function is given. All on the CPU.

    Rewards are what is to be maximised: the reward function's value, less the length penalty
    (`algorithm.overlong_fraction`) and, with `algorithm.kl_placement` "reward", the KL to the reference. Where
    `valid` is false the reward may be NaN, and the row must enter no baseline; its advantage is never used.
    """

    rewards: Tensor  # [R] float64: the sum of the row's token_rewards
    token_rewards: (
        Tensor  # [N] float64: the KL penalty at each masked token, the rest at the row's last one; else 0
    )
    group_ids: Tensor  # [R] int64: rows of one prompt share a number
    valid: Tensor  # [R] bool: has a reward, and was not cut off where `algorithm.mask_truncated` leaves those out
    mask: Tensor  # [N] bool: sampled tokens of valid rows
    offsets: Tensor  # [R + 1] int64: row r owns tokens offsets[r]:offsets[r + 1]
    values: Tensor | None = None  # [N] float32: the critic's, where the advantage `needs_critic`
    greedy_rewards: Tensor | None = None  # [R] float64: of the prompt's greedy response, where it needs that
    ranks: DataRanks = (
        ALONE  # data-parallel ranks with other rows of the step; a prompt's rows are on one of them
    )

    def row_ids(self) -> Tensor:
        """[N] int64: the row each token belongs to."""
        return row_ids(self.offsets)


@dataclass(frozen=True)
class LossInputs:
    """The tokens of a micro-batch that count in the loss. It holds whole rows, so a loss may look at one."""

    logprobs: Tensor  # [M] float32, natural log, with gradient
    old_logprobs: Tensor  # [M]: the trainer's own before the step's first update
    advantages: Tensor  # [M]
    rows: Tensor  # [M] int64: the row of each token, 0 … num_rows - 1
    num_rows: int

    def row_mean(self, values: Tensor) -> Tensor:
        """[num_rows]: the mean of values [M] over each row's tokens; 0 for a row without any."""
        zeros = values.new_zeros(self.num_rows)
        count = zeros.index_add(0, self.rows, torch.ones_like(values.detach()))
        return zeros.index_add(0, self.rows, values) / count.clamp(min=1)


@dataclass(frozen=True)
class LossTerms:
    """A loss per token. `extra` are further metrics by documented name, one value [M] a token, logged as means."""

    loss: Tensor  # [M], differentiable in logprobs; to be minimised
    ratio: Tensor  # [M], detached: new to old probability
    clipped: Tensor  # [M] bool: a clip bound took effect
    extra: Mapping[str, Tensor] = field(default_factory=dict)


AdvantageFunction = Callable[[Scored, AlgorithmConfig], Any]
LossFunction = Callable[[LossInputs, AlgorithmConfig], LossTerms]


@dataclass(frozen=True)
class Advantage:
    """A registered advantage function and what it declares."""

    name: str
    function: AdvantageFunction
    grouped: bool = False
    needs_critic: bool = False
    needs_greedy_baseline: bool = False


ADVANTAGES: dict[str, Advantage] = {}
LOSSES: dict[str, LossFunction] = {}


def register_advantage(
    name: str, *, grouped: bool = False, needs_critic: bool = False, needs_greedy_baseline: bool = False
) -> Callable[[F], F]:
    """Decorator: makes `fn(scored: Scored, settings: AlgorithmConfig) -> Tensor` the advantage `name`.

    The result is [R], the same for every token of a response, or [N]; values of rows that are not valid are
    ignored. `grouped`: it compares the samples of a prompt and needs at least 2. `needs_critic`: the flow has a
    critic, `scored.values` is given, and the result is (advantages [N], returns [N]). `needs_greedy_baseline`: the
    actor makes one more, greedy, response per prompt, whose reward is `scored.greedy_rewards`.
    Raises ConfigError when another function has the name already.
    """

    def mark(function: F) -> F:
        taken = ADVANTAGES.get(name)
        _check_name("advantage", name, function, taken.function if taken is not None else None)
        ADVANTAGES[name] = Advantage(name, function, grouped, needs_critic, needs_greedy_baseline)
        return function

    return mark


def register_loss(name: str) -> Callable[[F], F]:
    """Decorator: makes `fn(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms` the loss `name`.

    Raises ConfigError when another function has the name already.
    """

    def mark(function: F) -> F:
        _check_name("loss", name, function, LOSSES.get(name))
        LOSSES[name] = function
        return function

    return mark


def _check_name(kind: str, name: str, function: Callable[..., Any], taken: Callable[..., Any] | None) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"@register_{kind}: give it a name, such as @register_{kind}('mine'); got {name!r}")
    if taken is not None and not _same(taken, function):
        raise ConfigError(
            f"@register_{kind}('{name}'): the {kind} '{name}' is already registered, by {_place(taken)};"
            " choose another name"
        )


def _same(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    """The same function, also when its file or notebook cell was run again."""
    if a is b:
        return True
    names = [getattr(f, "__qualname__", None) for f in (a, b)]
    codes = [getattr(f, "__code__", None) for f in (a, b)]
    if codes[0] is None or codes[1] is None or names[0] != names[1]:
        return False
    return a.__module__ == b.__module__ or codes[0].co_filename == codes[1].co_filename


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
    return (
        f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}{where}"
    )
