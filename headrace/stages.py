"""What a stage of a flow declares: the columns it reads and writes. A leaf, so that anything may declare a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.observe.times import StageTime

if TYPE_CHECKING:
    from headrace.algorithms.kl_controller import KLController
    from headrace.config import Config
    from headrace.observe.metrics import MetricSums

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class StageSpec:
    """The contract of a stage function `fn(batch, context) -> Batch | dict of columns | None`.

    `reads` must exist before the stage runs, `optional` are used when they exist, `writes` exist afterwards.
    `sections` are the configuration sections whose keys the stage accepts as keyword arguments of `add_stage`.
    A stage that `makes_rows` returns a new Batch (the rollout); every other stage adds columns to the same rows, and one
    that `drops_rows` may also return the batch with columns added and rows left out.
    One that `trains` updates the weights of its role; a `supervised` one learns given responses (sft).
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    makes_rows: bool = False
    trains: bool = False
    supervised: bool = False
    drops_rows: bool = False


class DataRanks:
    """The processes that each have a part of a step's rows; this one alone, unless told otherwise.

    All of them must ask the same things in the same order.
    """

    index = 0
    count = 1

    def total(self, values: Sequence[float]) -> list[float]:
        """Each value added up over all of them, the same everywhere."""
        return [float(value) for value in values]

    def gather(self, value: Any) -> list[Any]:
        """The plain (JSON) value of each, in the order of their indices, the same everywhere."""
        return [value]


ALONE = DataRanks()


@dataclass
class StageContext:
    """What a stage is told besides its batch.

    `metrics` are those of this process's rows; they are pooled over `ranks` by whoever asked. What is true of all rows
    at once (a learning rate, a deviation over the whole step) is added by the first rank alone: `add_once`.
    """

    config: Config
    step: int
    total_steps: int
    metrics: MetricSums
    evaluation: bool = False
    on_progress: Callable[[float], None] = field(default=lambda fraction: None)
    kl: KLController | None = None  # the run's; without one the coefficient is the configured one
    ranks: DataRanks = ALONE
    times: list[StageTime] = field(default_factory=list)

    def add_once(self, name: str, value: float) -> None:
        """Adds a mean's value that every rank has alike."""
        if self.ranks.index == 0:
            self.metrics.add(name, value, 1)

    @property
    def kl_coefficient(self) -> float:
        """The weight of the KL to the reference in this step."""
        return self.config.algorithm.kl_coefficient if self.kl is None else self.kl.coefficient


def stage(
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    sections: tuple[str, ...] = (),
    makes_rows: bool = False,
    trains: bool = False,
    supervised: bool = False,
) -> Callable[[F], F]:
    """Declares a function or method as a stage; the parameters are those of StageSpec."""
    spec = StageSpec(
        tuple(reads), tuple(writes), tuple(optional), tuple(sections), makes_rows, trains, supervised
    )

    def mark(function: F) -> F:
        function.__stage_spec__ = spec  # type: ignore[attr-defined]
        return function

    return mark


def spec_of(function: Callable[..., Any]) -> StageSpec | None:
    """The declaration of a stage function, or None for an ordinary function."""
    found = getattr(function, "__stage_spec__", None)
    return found if isinstance(found, StageSpec) else None


def column_stage(
    function: Callable[..., Any], reads: tuple[str, ...], writes: tuple[str, ...]
) -> Callable[[Any, StageContext], Mapping[str, Any]]:
    """Turns an ordinary function of columns, given by keyword, into a stage.

    With one written column the function returns its values; with several, a mapping of them; with none, nothing.
    """

    def run(batch: Any, context: StageContext) -> Mapping[str, Any]:
        result = function(**{name: batch[name] for name in reads})
        if isinstance(result, Mapping):
            return result
        return {writes[0]: result} if len(writes) == 1 else {}

    run.__stage_spec__ = StageSpec(reads=reads, writes=writes)  # type: ignore[attr-defined]
    run.__name__ = getattr(function, "__name__", "function")
    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run
