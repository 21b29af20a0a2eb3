"""The one training loop: every mode (grpo, ppo, sft, a user's own flow) is this loop over its stages."""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.algorithms.kl_controller import KLController, adapt_kl
from headrace.checkpoint.resume import Checkpoint
from headrace.checkpoint.rng import seed_all
from headrace.cluster.workers import refuse_in_worker
from headrace.config import Config
from headrace.config_load import config_to_yaml
from headrace.data.loader import Loader
from headrace.errors import ConfigError, HeadraceError, RunError, WorkerError
from headrace.flow.ahead import Ahead
from headrace.flow.cluster import open_runtime
from headrace.flow.collect import run_step
from headrace.flow.compile import CheckedFlow
from headrace.flow.evaluate import StepSamples, evaluate
from headrace.flow.interrupt import Interrupted, InterruptGuard
from headrace.flow.keep import Keeper, earlier_run
from headrace.flow.memory import refuse_what_cannot_fit
from headrace.flow.prepare import check_roles, prepare_both, refuse_own_inputs
from headrace.flow.runtime import Runtime
from headrace.flow.source import PreparedData, prepare_data
from headrace.flow.state import RunState
from headrace.observe.log import RunLogger
from headrace.observe.metrics import MetricSums
from headrace.observe.progress import Progress, make_progress
from headrace.observe.report import write_run_report
from headrace.observe.run_dir import RunDirectory
from headrace.roles.actor import Actor
from headrace.roles.reward_model import RewardModel
from headrace.stages import StageContext

logger = logging.getLogger(__name__)


@dataclass
class Evaluation:
    """A flow of rollout and reward over a held-out data set, run before, during and after training."""

    flow: CheckedFlow
    dataset: Any
    every_steps: int = 0


@dataclass
class RunResult:
    """What a run left behind. `evaluations` maps a step (0: before the first) to its metrics."""

    directory: Path
    steps: int
    metrics: dict[str, float]
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    interrupted: bool = False
    model: Path | None = None


def run_flow(flow: CheckedFlow, dataset: Any, steps: int | None, evaluation: Evaluation | None) -> RunResult:
    """Runs a checked flow; see CompiledFlow.run."""
    refuse_in_worker()
    config = flow.config
    r = config.run
    if steps is not None and steps < 1:
        raise ConfigError(f"steps: must be at least 1, got {steps}")
    with contextlib.ExitStack() as held:
        checkpoint = None
        if r.resume:
            directory, checkpoint = earlier_run(config, held)
        data, held_out = prepare_both(flow, dataset, evaluation)
        loader = Loader(
            data.dataset,
            data.rows_per_step,
            shuffle=config.data.shuffle,
            seed=config.run.seed,
            key=data.rows_key,
        )
        total = steps or config.train.steps or steps_of(config.train.epochs, loader.steps_per_epoch)
        flows = [flow] + ([evaluation.flow] if evaluation is not None else [])
        check_roles(flows)
        if checkpoint is None:
            RunDirectory.check(r.dir, r.name, overwrite=r.overwrite)
            refuse_own_inputs(config)
        refuse_what_cannot_fit(flow, data, held_out)
        runtime = open_runtime(flow.placement, config, directory if r.resume else None, held)
        ahead = Ahead(runtime, flow, loader) if flow.works_ahead else None
        state = RunState(flow, loader, total, runtime, ahead)
        if checkpoint is not None:
            state.check(checkpoint)
        seed_all(r.seed)
        runtime.prepare(flow, total)
        if evaluation is not None:
            runtime.prepare(evaluation.flow, total, skip=flow.roles)
        # only after the weights as the run starts are where they belong, such as in the reference
        state.roles_loaded()
        if checkpoint is not None:
            state.restore(checkpoint)
        else:
            # only now: a configuration that turns out wrong while models load leaves no directory behind
            directory = RunDirectory.create(r.dir, r.name, overwrite=r.overwrite, prefix=flow.name)
            held.enter_context(directory.locked())
            runtime.keep_logs(directory.logs)
        directory.write_config(config_to_yaml(config))
        try:
            return _Run(
                runtime, flow, loader, data, total, directory, evaluation, held_out, state, checkpoint
            ).go()
        finally:
            write_run_report(directory.path)


def steps_of(epochs: float, steps_per_epoch: int) -> int:
    """Steps that cover `epochs` passes; 1.1 x 10 is 11, whatever binary fractions make of it."""
    return max(1, math.ceil(round(epochs * steps_per_epoch, 6)))


class _Run:
    """The state of one run while it goes."""

    def __init__(
        self,
        runtime: Runtime,
        flow: CheckedFlow,
        loader: Loader,
        data: PreparedData,
        total_steps: int,
        directory: RunDirectory,
        evaluation: Evaluation | None,
        held_out: PreparedData | None,
        state: RunState,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.runtime = runtime
        self.flow, self.loader, self.data = flow, loader, data
        self.total_steps, self.directory = total_steps, directory
        self.evaluation, self.held_out = evaluation, held_out
        self.ahead, self.began = state.ahead, 0.0
        self.keeper = Keeper(flow.config, directory, state, total_steps, checkpoint)
        self.result = RunResult(directory.path, 0, {})
        self.kl = KLController(flow.config.algorithm.kl_coefficient, flow.config.algorithm.kl_target)
        state.register("kl", self.kl)

    @property
    def config(self) -> Config:
        return self.flow.config

    def go(self) -> RunResult:
        c = self.config.run
        sizes, logged = self.keeper.take_up(self.result)
        title = f"{self.flow.name}: {self.directory.path}"
        progress = make_progress(c.progress, self.total_steps, title, step=self.result.steps)
        log = RunLogger(
            self.directory,
            tensorboard=c.tensorboard,
            samples_per_step=c.samples_per_step,
            seed=c.seed,
            resume=sizes,
            step=logged,
        )
        with InterruptGuard() as guard, log, progress:
            try:
                self._begin(log, progress, guard)
                for step in range(self.result.steps + 1, self.total_steps + 1):
                    self._step(step, log, progress, guard)
                    self.keeper.write_if_due(self.result, log, progress)
            except Interrupted:
                self.result.interrupted = True
            except WorkerError:
                # the models went with the workers
                self.keeper.say_where_to_go_on()
                raise
            except HeadraceError:
                # nothing is half done when these are raised, so what was learned so far is worth keeping
                if self.result.steps > 0:
                    self._keep_what_there_is(log, progress)
                raise
            self._finish(log, progress)
        return self.result

    def _begin(self, log: RunLogger, progress: Progress, guard: InterruptGuard) -> None:
        """What comes before the next step: the first evaluation, or the one that the checkpoint was taken in."""
        result, pending = self.result, self.keeper.pending
        self.keeper.mark(result, log, pending)
        if pending is not None:
            self._conclude(result.steps, pending, log, progress, guard)
            self.keeper.write_if_due(result, log, progress)
        elif result.steps == 0 and self.evaluation is not None and 0 not in result.evaluations:
            metrics = self._run_evaluation(0, log, progress, guard)
            log.log(0, metrics)
            progress.update(0, metrics)
            self.keeper.mark(result, log)

    def _step(self, step: int, log: RunLogger, progress: Progress, guard: InterruptGuard) -> None:
        started, now = time.perf_counter(), time.time()
        context = StageContext(self.config, step, self.total_steps, MetricSums(), kl=self.kl)
        rows = run_step(self.runtime, self.flow, self.loader, context, progress, guard, self.ahead)
        adapt_kl(context)
        position = self.loader.state_dict()
        epochs = position["epoch"] + position["step"] / self.loader.steps_per_epoch
        m = context.metrics
        m.add("time/step_s", time.perf_counter() - started)
        m.add("train/step", step)
        m.add("data/epoch", epochs)
        m.add("data/prompts_dropped", self.data.dataset.dropped)
        m.add("data/prompts_truncated", self.data.dataset.truncated)
        if "sft/loss" in (so_far := m.means()):
            m.add("sft/perplexity", math.exp(min(so_far["sft/loss"], 700.0)))
        if self.keeper.written_s is not None:
            m.add("time/checkpoint_s", self.keeper.written_s)
            self.keeper.written_s = None
        _memory_metrics(m)
        if self.ahead is not None and self.began:
            log.log_times(step - 1, self.ahead.late, self.began)
        log.log_times(step, context.times, now)
        self.began = now
        if self.flow.generates:
            log.log_samples(step, StepSamples(self.runtime, rows))
        self._conclude(step, m.means(), log, progress, guard)
        self._watch_gap(step, self.result.metrics)

    def _conclude(
        self, step: int, metrics: dict[str, float], log: RunLogger, progress: Progress, guard: InterruptGuard
    ) -> None:
        """Evaluates where that is due and logs the step, which is done whatever ends its evaluation."""
        self.result.steps, self.result.metrics = step, metrics
        self.keeper.mark(self.result, log, pending=metrics)
        try:
            metrics = metrics | self._due_evaluation(step, log, progress, guard)
        finally:
            log.log(step, metrics)
            progress.update(step, metrics)
            self.result.metrics = metrics
        self.keeper.mark(self.result, log)

    def _watch_gap(self, step: int, metrics: dict[str, float]) -> None:
        gap, a = metrics.get("gap/abs_logprob_mean"), self.config.algorithm
        if gap is None:
            return
        if a.gap_stop is not None and not gap <= a.gap_stop:
            raise RunError(
                f"step {step}: rollout and trainer log-probabilities differ by {gap:.3g} nats on average, above"
                f" algorithm.gap_stop ({a.gap_stop}); the run is in {self.directory.path}"
            )
        if gap > a.gap_warn:
            logger.warning(
                "step %d: rollout and trainer log-probabilities differ by %.3g nats on average (algorithm.gap_warn %.3g)",
                step,
                gap,
                a.gap_warn,
            )

    def _due_evaluation(
        self, step: int, log: RunLogger, progress: Progress, guard: InterruptGuard
    ) -> dict[str, float]:
        e = self.evaluation
        if e is None:
            return {}
        due = step == self.total_steps or (e.every_steps > 0 and step % e.every_steps == 0)
        return self._run_evaluation(step, log, progress, guard) if due else {}

    def _run_evaluation(
        self, step: int, log: RunLogger, progress: Progress, guard: InterruptGuard
    ) -> dict[str, float]:
        if self.evaluation is None or self.held_out is None:
            return {}
        if self.ahead is not None:
            self.ahead.wait()
        metrics, samples = evaluate(self.runtime, self.evaluation.flow, self.held_out, step, progress, guard)
        log.log_evaluation_samples(step, samples)
        self.result.evaluations[step] = metrics
        return metrics

    def _finish(self, log: RunLogger, progress: Progress) -> None:
        """The last checkpoint and the model; where the first cannot be written the second may still fit."""
        failed: RunError | None = None
        try:
            self.keeper.write(self.result, log, progress)
        except RunError as error:
            failed = error
        self._save(progress)
        if failed is not None:
            raise failed

    def _keep_what_there_is(self, log: RunLogger, progress: Progress) -> None:
        """After an error, which is raised in any case."""
        try:
            if not self.keeper.state.can_be_saved:
                logger.warning("the error came within a step, so the newest checkpoint is an earlier one")
                self._save(progress)
            else:
                self._finish(log, progress)
        except RunError as error:
            logger.error("%s", error)
        if self.result.model is not None:
            logger.info("the model as after step %d is in %s", self.result.steps, self.result.model)

    def _save(self, progress: Progress) -> None:
        if not self.config.run.save_final:
            return
        for role in self.flow.roles:
            if isinstance(role, Actor | RewardModel) and self.flow.trains(role):
                progress.stage("save", None)
                self.result.model = self.runtime.save_model(role, self.directory.model)


def run_evaluation(
    flow: CheckedFlow, dataset: Any, key: str = "eval"
) -> tuple[RunDirectory, dict[str, float]]:
    """`headrace eval`: scores every row once; all samples go to samples.jsonl of a new directory.

    The directory is `<run.name>-eval-<date>-<time>`, so that scoring a run's model never touches the run.
    `key` is the section that errors about the data name. Raises KeyboardInterrupt after Ctrl-C.
    """
    refuse_in_worker()
    config, r = flow.config, flow.config.run
    data = prepare_data(flow, dataset, key=key)
    logger.info("scoring %d rows of %s", len(data.dataset), data.dataset.name)
    check_roles([flow])
    with contextlib.ExitStack() as held:
        runtime = open_runtime(flow.placement, config, None, held)
        runtime.prepare(flow, 1)
        directory = RunDirectory.create(r.dir, None, prefix=f"{r.name}-eval" if r.name else "eval")
        runtime.keep_logs(directory.logs)
        directory.write_config(config_to_yaml(config))
        progress = make_progress(r.progress, 1, f"eval: {directory.path}")
        log = RunLogger(directory, tensorboard=False, samples_per_step=sys.maxsize, seed=r.seed)
        with InterruptGuard() as guard, log, progress:
            try:
                metrics, samples = evaluate(runtime, flow, data, 0, progress, guard)
            except Interrupted:
                raise KeyboardInterrupt from None
            progress.update(1, metrics)
            log.log(0, metrics)
            log.log_samples(0, samples)
    write_run_report(directory.path)
    return directory, metrics


def _memory_metrics(metrics: MetricSums) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics.add("memory/peak_resident_bytes", peak * (1 if sys.platform == "darwin" else 1024))
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        metrics.add_max("memory/peak_device_bytes", max(map(torch.cuda.max_memory_allocated, devices)))
