"""When a run's checkpoints are written, and how a run takes up an earlier one."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from headrace.checkpoint.resume import Checkpoint, find_checkpoint
from headrace.checkpoint.save import CheckpointStore
from headrace.config import Config
from headrace.errors import ConfigError, RunError, WorkerError
from headrace.flow.evaluate import best_step
from headrace.flow.state import RunState
from headrace.observe.log import RunLogger
from headrace.observe.progress import Progress
from headrace.observe.run_dir import RunDirectory

if TYPE_CHECKING:
    from headrace.flow.run import RunResult

logger = logging.getLogger(__name__)


def earlier_run(config: Config, held: ExitStack) -> tuple[RunDirectory, Checkpoint]:
    """The run to continue, locked as long as `held`, and its checkpoint. Raises ConfigError where there is none."""
    refuse_overwriting(config)
    directory = RunDirectory.open(config.run.dir, config.run.name)
    held.enter_context(directory.locked())
    directory.clean()
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep)
    store.clean()
    return directory, find_checkpoint(store)


def refuse_overwriting(config: Config) -> None:
    """Raises ConfigError where run.overwrite would delete what run.resume continues."""
    if config.run.overwrite:
        raise ConfigError("run.resume: run.overwrite would delete the run that is to be continued; drop one")


class Keeper:
    """The checkpoints of one run while it goes. `checkpoint` is the one it continues, if any.

    `pending` are the metrics of a step whose evaluation was interrupted and is still to be made.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        state: RunState,
        total_steps: int,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.settings = config.checkpoint
        self.state, self.checkpoint, self.total_steps = state, checkpoint, total_steps
        resumed = checkpoint.path.name if checkpoint is not None else None
        self.store = CheckpointStore(directory.checkpoints, config.checkpoint.keep, resumed)
        self.pending: dict[str, float] | None = None
        self.written_s: float | None = None  # the time the last one took, until it is logged

    def take_up(self, result: RunResult) -> tuple[dict[str, int] | None, int]:
        """Fills `result` from the checkpoint. Returns what the log continues from: the sizes of its files and the
        last step in them (None and 0 for a new run)."""
        if self.checkpoint is None:
            return None, 0
        path, step, saved = self.checkpoint.path, self.checkpoint.step, self.checkpoint.state
        result.steps, result.metrics, self.pending = step, saved["metrics"], saved["pending"]
        if self.state.same_evaluation(self.checkpoint):
            result.evaluations = {int(step): metrics for step, metrics in saved["evaluations"].items()}
        else:
            logger.info(
                "the evaluation is another one now; earlier ones do not count for the best checkpoint"
            )
        if step < self.total_steps or self.pending is not None:
            logger.info("resuming after step %d of %d from %s", step, self.total_steps, path)
        else:
            logger.warning("%s has done %d steps; nothing is left to do", path.parents[1], step)
            logger.warning("train.steps is %d; raise it to go on", self.total_steps)
        return saved["files"], step if self.pending is None else step - 1

    def mark(self, result: RunResult, log: RunLogger, pending: dict[str, float] | None = None) -> None:
        """Notes the state after a step, for the next checkpoint."""
        best = best_step(result.evaluations)
        self.pending = pending
        self.state.mark(
            result.steps,
            metrics=result.metrics,
            pending=pending,
            evaluations={str(step): dict(metrics) for step, metrics in result.evaluations.items()},
            best=None if best is None else {"step": best, **result.evaluations[best]},
            files=log.sizes(),
        )

    def write_if_due(self, result: RunResult, log: RunLogger, progress: Progress) -> None:
        """A failure is reported and the run goes on: stopping would lose what the disk has no room for."""
        step, every = result.steps, self.settings.every_steps
        due = (every > 0 and step % every == 0) or best_step(result.evaluations) == step
        if not due or step >= self.total_steps:  # the end writes its own
            return
        try:
            self.write(result, log, progress)
        except WorkerError:
            raise
        except RunError as error:
            logger.error("%s; the run goes on without it", error)

    def say_where_to_go_on(self) -> None:
        """After an error that nothing can be saved after."""
        latest = self.store.pointer("latest")
        if latest is None:
            logger.warning(
                "there is no checkpoint yet to continue from; checkpoint.every_steps makes them earlier"
            )
        else:
            logger.warning(
                "the newest checkpoint is %s; the same command with run.resume=true continues from it",
                self.store.folder / latest,
            )

    def write(self, result: RunResult, log: RunLogger, progress: Progress) -> None:
        """Raises RunError when the checkpoint cannot be written."""
        if self.settings.keep == 0:
            return
        started = time.perf_counter()
        progress.stage("checkpoint", None)
        log.sync()
        self.state.save(self.store, best_step(result.evaluations))
        self.written_s = time.perf_counter() - started
