"""Reward functions: any Python callable, from a row's completion and columns to a number."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.config_import import described, shortened
from headrace.errors import ConfigError, RewardError
from headrace.rewards.convention import Convention, read_convention, unknown_columns
from headrace.rewards.event_loop import EventLoopThread
from headrace.rewards.loading import KEY, load_function
from headrace.rewards.values import RewardResult, UnusableValueError, read_list, read_value

Rows = Mapping[str, Sequence[Any]]

FAILURES = (Exception, SystemExit)  # a reward that calls sys.exit must not end the run as if all were well


class RewardFunction:
    """A callable together with the calling convention read from its signature.

    - The completion's parameter is the one named `completion(s)` or `response(s)`, else the first. Named
      `completions`, `responses` or (as the first) `texts`, it gets the list of all completions and the function
      returns one value per completion; under any other name it gets one string and the function one value.
    - Every further parameter without a default names a row column (`prompt`, a column of the data,
      `completion_ids`, `finish_reason`, `num_tokens`, `messages`): its value for that row, or the list of all when
      batched. Batched, a plural (`answers`) also finds the column `answer`. A parameter with a default is filled
      where there is a column of its name. `**kwargs` receives all other columns.
    - A value is a number, a dict of `reward` and further named numbers, or None: the row is left out.
    - `async def` functions (and objects with an async `__call__`) run concurrently; all others one by one, in order.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, convention: Convention, max_concurrency: int = 32
    ) -> None:
        self.function = function
        self.name = name
        self.convention = convention
        self.max_concurrency = max_concurrency
        self._loop = EventLoopThread()

    @classmethod
    def resolve(cls, spec: str | Callable[..., Any], *, max_concurrency: int = 32) -> RewardFunction:
        """From "path/to/file.py:function", "package.module:function", a short name (`exact_match`,
        `numeric_match`) or any callable. `max_concurrency`: async calls in flight at a time.

        Raises ConfigError naming `reward.function` when there is no such function, its module fails to import,
        or it cannot take a completion.
        """
        if isinstance(spec, str):
            function, name = load_function(spec), spec
        elif callable(spec):
            function, name = spec, _name_of(spec)
        else:
            raise ConfigError(
                f"{KEY}: {spec!r} has type {type(spec).__name__}; wanted a function or the name of one"
            )
        return cls(function, name, read_convention(function, name), max_concurrency)

    @property
    def batched(self) -> bool:
        """True when one call scores all rows."""
        return self.convention.batched

    @property
    def required_columns(self) -> tuple[str, ...]:
        """The names of the parameters that columns must fill, in order, the completion aside."""
        return self.convention.required

    def columns_of(self, available: Iterable[str]) -> list[str]:
        """Those of the available columns that parameters name, each once."""
        found = self.convention.columns(set(available))
        named = (*self.convention.required, *self.convention.optional)
        return list(dict.fromkeys(found[p] for p in named if p in found))

    def check(self, available: set[str], source: str = "") -> list[str]:
        """Violations: required parameters that none of the `available` columns fills, with the nearest name.

        `source` is whose columns those are, for the sentence.
        """
        return unknown_columns(self.convention, self.name, available, source)

    def score(self, rows: Rows, n: int) -> RewardResult:
        """Scores n rows. `rows` holds lists of n values; `completion` (strings) among them.

        Raises RewardError, showing the sample, when the function raises or returns something that is no reward;
        ValueError when a column does not hold n values.
        """
        for column, values in rows.items():
            if len(values) != n:
                raise ValueError(f"reward column '{column}' holds {len(values)} values for {n} rows")
        missing = (
            self.check(set(rows)) if "completion" in rows else [f"{KEY}: there is no column 'completion'"]
        )
        if missing:
            raise RewardError("\n".join(missing))
        if n == 0:
            return RewardResult()
        returned = self._call_batched(rows, n) if self.batched else self._call_each(rows, n)
        result = RewardResult()
        for row, value in enumerate(returned):
            try:
                reward, parts = read_value(value)
            except UnusableValueError as error:
                raise RewardError(self._at_sample(str(error), rows, row)) from error
            result.append(reward, parts)
        return result

    def _call_batched(self, rows: Rows, n: int) -> list[Any]:
        columns = self.convention.columns(set(rows))
        positional, by_name = self.convention.arguments(
            list(rows["completion"]), columns, lambda column: copied(rows[column])
        )
        try:
            returned = self.function(*positional, **by_name)
            if inspect.isawaitable(returned):
                returned = self._loop.run(_result_of(returned))
            return read_list(returned, n)  # may run the user's code: a generator
        except UnusableValueError as error:
            raise RewardError(self._at_sample(str(error), rows, 0, of=n)) from error
        except FAILURES as error:
            raise RewardError(self._at_sample(f"it raised {described(error)}", rows, 0, of=n)) from error

    def _call_each(self, rows: Rows, n: int) -> list[Any]:
        columns = self.convention.columns(set(rows))

        def call(row: int) -> Any:
            positional, by_name = self.convention.arguments(
                rows["completion"][row], columns, lambda column: copied(rows[column][row])
            )
            return self.function(*positional, **by_name)

        if _is_async(self.function):
            return self._loop.run(self._call_concurrently(call, rows, range(n)))
        returned: list[Any] = []
        for row in range(n):
            try:
                value = call(row)
            except FAILURES as error:
                raise RewardError(self._at_sample(f"it raised {described(error)}", rows, row)) from error
            if inspect.isawaitable(value):  # a plain function around an async one: found out at the first row
                later = self._call_concurrently(call, rows, range(row + 1, n), value)
                return returned + self._loop.run(later)
            returned.append(value)
        return returned

    async def _call_concurrently(
        self, call: Callable[[int], Any], rows: Rows, which: range, begun: Awaitable[Any] | None = None
    ) -> list[Any]:
        """The values of rows `which`, after that of the row before them whose call has `begun` already."""
        free = asyncio.Semaphore(self.max_concurrency)

        async def one(row: int) -> Any:
            async with free:
                try:
                    value = begun if row < which.start else call(row)
                    return await value if inspect.isawaitable(value) else value
                except FAILURES as error:
                    raise RewardError(self._at_sample(f"it raised {described(error)}", rows, row)) from error

        first = which.start - (begun is not None)
        tasks = [asyncio.ensure_future(one(row)) for row in range(first, which.stop)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _at_sample(self, what: str, rows: Rows, row: int, of: int = 1) -> str:
        which = f"sample {row + 1}" if of == 1 else f"samples {row + 1} to {row + of}; the first of them"
        if "prompt_id" in rows:
            which += f", from row {rows['prompt_id'][row] + 1} of the data"
        lines = [f"reward function '{self.name}': {what}", f"  at {which}"]
        if "prompt" in rows:
            lines.append(f"  prompt:     {shortened(repr(rows['prompt'][row]))}")
        lines.append(f"  completion: {shortened(repr(rows['completion'][row]))}")
        return "\n".join(lines)


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except SystemExit as error:  # it would end the event loop, and nobody would get an answer
        raise RuntimeError(f"SystemExit: {error}") from error


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def copied(value: Any) -> Any:
    """Containers anew: a function that sorts or pops must not change the data that other samples are scored by."""
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or inspect.isclass(function):
        return str(function.__qualname__).rpartition("<locals>.")[2]
    return type(function).__qualname__
