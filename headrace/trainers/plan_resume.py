"""What `headrace plan` says of a run that continues an earlier one: the checks of run.resume that need no weights."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.checkpoint.fingerprint import change
from headrace.checkpoint.resume import Checkpoint, find_checkpoint
from headrace.checkpoint.save import CheckpointStore
from headrace.config import Config
from headrace.data.loader import Loader
from headrace.errors import ConfigError
from headrace.flow.compile import CheckedFlow
from headrace.flow.keep import refuse_overwriting
from headrace.flow.runtime import LocalRuntime
from headrace.flow.state import RunState
from headrace.models.hf import resolve_device, resolve_dtype
from headrace.observe.run_dir import RunDirectory

UNKNOWN = "whether frozen weights are the same shows only when the run loads them"


@dataclass(frozen=True)
class Continuation:
    """The checkpoint a run would go on from; `total` steps are those of the whole run."""

    checkpoint: Checkpoint
    total: int

    @property
    def steps_left(self) -> int:
        return max(0, self.total - self.checkpoint.step)

    @property
    def text(self) -> str:
        done, left = self.checkpoint.step, self.steps_left
        rest = f"{left:,} are left" if left else "nothing is left to do; raise train.steps to go on"
        return f"from {self.checkpoint.path}, after step {done:,} of {self.total:,}: {rest}"


def planned_checkpoint(config: Config) -> Checkpoint | None:
    """The checkpoint that run.resume would take; None for a new run.

    Writes nothing. Raises ConfigError where there is none, or where another process writes to the run.
    """
    if not config.run.resume:
        return None
    refuse_overwriting(config)
    directory = RunDirectory.open(config.run.dir, config.run.name)
    with directory.locked():
        return find_checkpoint(CheckpointStore(directory.checkpoints, config.checkpoint.keep))


def check_continuation(
    checkpoint: Checkpoint, flow: CheckedFlow, loader: Loader, total_steps: int
) -> Continuation:
    """Raises ConfigError with each change that would make another run of this one."""
    config = flow.config
    RunState(flow, loader, total_steps, LocalRuntime()).check(checkpoint)
    now = str(resolve_dtype(config.model.dtype, resolve_device(config.run.device)))
    before = checkpoint.state["dtypes"].get("actor", now)
    if before != now and "model.dtype" not in config.checkpoint.allow_changed:
        raise ConfigError(change("model.dtype", before, now, quoted=False))
    if not config.checkpoint.allow_changed:  # where something was allowed, the run goes on near its position
        loader.load_state_dict(checkpoint.state["loader"])
    return Continuation(checkpoint, total_steps)
