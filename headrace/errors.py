"""Every error headrace raises on purpose, with the exit code the command line returns for it."""

from __future__ import annotations

from collections.abc import Sequence


class HeadraceError(Exception):
    """Base of all deliberate errors; `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(HeadraceError):
    """The configuration, the data or an argument is wrong; nothing was started (exit code 2).

    Holds *all* violations found, one sentence each, naming the key, file or row and what to do.
    """

    exit_code = 2

    def __init__(self, violations: str | Sequence[str]) -> None:
        self.violations: list[str] = [violations] if isinstance(violations, str) else list(violations)
        super().__init__("\n".join(self.violations))


class DataError(ConfigError):
    """A data set cannot be used: missing, empty, a missing column, a null or an empty prompt (exit code 2)."""


class MissingExtraError(ConfigError):
    """An optional dependency is not installed (exit code 2)."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the package `{package}`: pip install 'headrace[{extra}]'"
            f" (in a checkout: pip install -e '.[{extra}]')"
        )


class RunError(HeadraceError):
    """A run that had started failed (exit code 1)."""


class RewardError(RunError):
    """A reward function raised or returned something unusable; the message shows the sample."""


class AgentError(RunError):
    """An environment raised or returned something unusable; the message shows the episode."""


class WorkerError(RunError):
    """A worker process died, hung or raised; the message names its rank, host, the method and the cause."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
