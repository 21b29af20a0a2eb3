"""What a user writes for multi-turn rollouts: an `Environment` that answers the model turn by turn."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ConfigError
from headrace.rewards.loading import load_callable

KEY = "agent.environment"

Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Step:
    """What one response led to.

    `text` is what the model reads next: one message, or several (with a chat template each becomes a message of the
    environment's `role`; without one they follow each other as they are). It is not used when `done`.
    `reward` is what this response earned; the episode's reward is the sum over its turns. None leaves the episode out
    of the loss and of its group's baseline, like a reward function's None.
    `metrics` are named numbers, summed over the episode and logged as means over episodes: `agent/part/<name>`.
    """

    text: str | Sequence[str] = ""
    reward: float | None = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """The other side of one episode. A new instance serves each sample; `close` is called at its end, come what may.

    Each method may be `def` or `async def`. Plain ones run one after the other, in one thread, so state shared
    between instances needs no locks; async ones run concurrently (reward.max_concurrency). A call that takes longer
    than agent.timeout_s ends its episode, which is left out of the loss; an exception stops the run.
    """

    role = "user"
    """The role of the environment's messages in the chat template, such as "user" or "tool"."""

    def reset(self, row: Mapping[str, Any]) -> Prompt | Awaitable[Prompt | None] | None:
        """Begins the episode. `row` holds the columns of the data, `prompt`, `prompt_id` and `sample_index`.

        Returns None to use the data's own prompt, or the prompt to use instead: a text, or chat messages.
        """
        return None

    def step(self, response: str) -> Step | Awaitable[Step]:
        """Answers one response of the model (its text without special tokens)."""
        raise NotImplementedError(f"{type(self).__name__} must define step(response)")

    def close(self) -> Awaitable[None] | None:
        """Frees what the episode held."""
        return None


MakeEnvironment = Callable[[], Environment]


def load_environment(spec: str | Callable[[], Any]) -> MakeEnvironment:
    """A subclass of Environment, or a function without arguments that returns one, from itself or from its name
    ("path/to/file.py:Class" or "package.module:Class").

    Raises ConfigError naming `agent.environment` when there is no such thing or it cannot be one.
    """
    made = load_callable(spec, KEY, "class") if isinstance(spec, str) else spec
    name = name_of(spec)
    if inspect.isclass(made):
        if not issubclass(made, Environment):
            raise ConfigError(
                f"{KEY}: the class '{name}' must be a subclass of headrace.agents.Environment"
                f" (class {made.__name__}(Environment): …)"
            )
        if made.step is Environment.step:
            raise ConfigError(f"{KEY}: the class '{name}' must define step(self, response)")
    needed = _required_parameters(made)
    if needed:
        raise ConfigError(
            f"{KEY}: '{name}' needs the argument '{needed[0]}', but it is called without any, once an episode; give it a"
            " default, or name a function that makes the environment"
        )
    result: MakeEnvironment = made
    return result


def name_of(spec: str | Callable[[], Any]) -> str:
    """How errors and the resolved configuration name an environment given in Python."""
    if isinstance(spec, str):
        return spec
    owner = spec if hasattr(spec, "__qualname__") else type(spec)
    return f"{owner.__module__}:{owner.__qualname__}"


def role_of(make: MakeEnvironment) -> str:
    """The role of the environments that `make` makes, as far as it is known beforehand."""
    return make.role if inspect.isclass(make) and issubclass(make, Environment) else Environment.role


def _required_parameters(made: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(made).parameters.values()
    except (ValueError, TypeError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
