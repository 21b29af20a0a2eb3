"""The description of a flow: named stages and the edges between them. Describing one starts nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from headrace.config import ClusterConfig, Config
from headrace.rewards.stage import RewardStage
from headrace.roles.actor import Actor
from headrace.roles.role import Role
from headrace.stages import StageSpec, column_stage, spec_of


@dataclass(frozen=True)
class Stage:
    """One node. `settings` are the keyword arguments given for its configuration sections."""

    name: str
    function: Callable[..., Any]
    spec: StageSpec
    depends_on: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> Role | None:
        """The role whose method this stage is, if it is one."""
        owner = getattr(self.function, "__self__", None)
        return owner if isinstance(owner, Role) else None


class Graph:
    """Stages and the edges between them, with the settings they bring along."""

    def __init__(self, name: str, config: Config | None = None, *, data_columns: Sequence[str] = ()) -> None:
        """`data_columns`: columns of the data set that stages with `reads` use (reward functions need none named)."""
        self.name = name
        self.data_columns = tuple(data_columns)
        self.config = config.model_copy(deep=True) if config is not None else Config()
        self.stages: list[Stage] = []
        self.notes: list[str] = []  # violations noticed while describing; reported by compile()

    def add_stage(
        self,
        name: str,
        function: Callable[..., Any],
        depends_on: Stage | str | Sequence[Stage | str] | None = None,
        *,
        reads: Sequence[str] | None = None,
        writes: Sequence[str] | None = None,
        **settings: Any,
    ) -> Stage:
        """Adds a stage and returns it, to be named in `depends_on` of later ones.

        `function` is a role's method (`actor.generate`), a function declared with `@stage`, a function of columns
        (give `reads` and `writes`), or any other callable, which is taken as a reward function: its first argument
        is the completion, further ones name columns. `settings` are keys of the stage's configuration sections.
        """
        depends = [depends_on] if isinstance(depends_on, Stage | str) else list(depends_on or [])
        names = tuple(d.name if isinstance(d, Stage) else d for d in depends)
        spec = spec_of(function)
        if spec is None and (reads is not None or writes is not None):
            function = column_stage(function, tuple(reads or ()), tuple(writes or ()))
        elif spec is None:
            function = RewardStage(function, settings=self.config.reward)
        elif reads is not None or writes is not None:
            self.notes.append(
                f"stage '{name}': reads and writes are already declared by the function; leave them out"
            )
        if isinstance(function, RewardStage):
            self.notes += function.problems
            given = function.function is not None or function.add_model_score or self._has_environment()
            if not given and not function.problems:
                self.notes.append(f"stage '{name}': no function is given, so it would give every response 0")
        declared = spec_of(function)
        if declared is None:
            raise TypeError(f"stage '{name}': {function!r} cannot be used as a stage")
        added = Stage(name, function, declared, names, dict(settings))
        self.stages.append(added)
        return added

    def without_cluster(self) -> Self:
        """The same flow on one device, for what is wrong with it apart from its cluster."""
        alone = copy.copy(self)
        alone.config = self.config.model_copy(update={"cluster": ClusterConfig()})
        return alone

    def _has_environment(self) -> bool:
        """True where an environment gives rewards of its own."""
        return any(
            isinstance(s.role, Actor) and (s.role.plays(self.config) or "environment" in s.settings)
            for s in self.stages
        )
