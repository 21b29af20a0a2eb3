"""The one training loop: every mode (grpo, ppo, sft, a user's own flow) is this loop over its stages."""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.config import Config
from headrace.config_load import config_to_yaml
from headrace.data.loader import Loader
from headrace.errors import ConfigError, DataError, HeadraceError, RunError
from headrace.flow.compile import CheckedFlow
from headrace.flow.evaluate import evaluate, sample_records
from headrace.flow.execute import execute
from headrace.flow.interrupt import Interrupted, InterruptGuard
from headrace.flow.source import PreparedData, prepare_data
from headrace.observe.log import RunLogger
from headrace.observe.metrics import MetricSums
from headrace.observe.progress import Progress, make_progress
from headrace.observe.run_dir import RunDirectory
from headrace.roles.actor import Actor
from headrace.roles.critic import Critic
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
    config = flow.config
    if steps is not None and steps < 1:
        raise ConfigError(f"steps: must be at least 1, got {steps}")
    data, held_out = prepare_both(flow, dataset, evaluation)
    loader = Loader(
        data.dataset,
        data.rows_per_step,
        shuffle=config.data.shuffle,
        seed=config.run.seed,
        key=data.rows_key,
    )
    total = steps or config.train.steps or steps_of(config.train.epochs, loader.steps_per_epoch)
    check_roles([flow] + ([evaluation.flow] if evaluation is not None else []))
    r = config.run
    RunDirectory.check(r.dir, r.name, overwrite=r.overwrite)
    _refuse_own_inputs(config)
    torch.manual_seed(r.seed)
    prepare_roles(flow, total)
    if evaluation is not None:
        prepare_roles(evaluation.flow, total, skip=flow.roles)
    # only now: a configuration that turns out wrong while models load leaves no directory behind
    directory = RunDirectory.create(r.dir, r.name, overwrite=r.overwrite, prefix=flow.name)
    directory.write_config(config_to_yaml(config))
    return _Run(flow, loader, data, total, directory, evaluation, held_out).go()


def steps_of(epochs: float, steps_per_epoch: int) -> int:
    """Steps that cover `epochs` passes; 1.1 x 10 is 11, whatever binary fractions make of it."""
    return max(1, math.ceil(round(epochs * steps_per_epoch, 6)))


def _refuse_own_inputs(config: Config) -> None:
    """run.overwrite must not delete what the run reads. Raises ConfigError naming the key."""
    if not config.run.overwrite or config.run.name is None:
        return
    own = (Path(config.run.dir) / config.run.name).resolve()
    given = {
        "model.path": config.model.path,
        "critic.path": config.critic.path,
        "reference.path": config.reference.path,
        "reward.model": config.reward.model,
        "data.path": config.data.path,
        "eval.path": config.eval.path,
    }
    problems = [
        f"{key}: '{path}' lies in {own}, which run.overwrite would delete; choose another run.name"
        for key, path in given.items()
        if path is not None and Path(path).exists() and Path(path).resolve().is_relative_to(own)
    ]
    if problems:
        raise ConfigError(problems)


def prepare_both(
    flow: CheckedFlow, dataset: Any, evaluation: Evaluation | None
) -> tuple[PreparedData, PreparedData | None]:
    """Training and held-out data. Raises ConfigError with what is wrong with either."""
    held_out, problems = None, []
    if evaluation is not None:
        try:
            held_out = prepare_data(evaluation.flow, evaluation.dataset, key="eval")
        except ConfigError as error:
            problems = error.violations
    try:
        data = prepare_data(flow, dataset)
    except ConfigError as error:
        problems = list(dict.fromkeys([*error.violations, *problems]))
    if problems:
        raise DataError(problems)
    return data, held_out


def check_roles(flows: Sequence[CheckedFlow]) -> None:
    """What can be known about every model without its weights. Raises ConfigError with all violations."""
    roles = list(dict.fromkeys(role for flow in flows for role in flow.roles))
    reader = flows[0].reader
    problems = [p for role in roles if role is not reader for p in role.problems(reader)]
    if problems:
        raise ConfigError(problems)


def prepare_roles(flow: CheckedFlow, total_steps: int, skip: Iterable[Any] = ()) -> None:
    """Loads every role of the flow; the one that generates comes first, since others may copy it."""
    passed = list(skip)
    critics = any(isinstance(role, Critic) for role in flow.roles)
    for role in sorted(flow.roles, key=lambda r: not isinstance(r, Actor)):
        if role not in passed:
            # while the critic warms up the actor rests, which must not shift its schedule
            resting = flow.config.critic.warmup_steps if critics and isinstance(role, Actor) else 0
            steps = max(1, total_steps - resting)
            updates = steps * (flow.config.updates_per_step if flow.generates else 1)
            role.prepare(
                flow.config, total_updates=updates, trains=flow.trains(role), supervised=flow.supervised
            )


class _Run:
    """The state of one run while it goes."""

    def __init__(
        self,
        flow: CheckedFlow,
        loader: Loader,
        data: PreparedData,
        total_steps: int,
        directory: RunDirectory,
        evaluation: Evaluation | None,
        held_out: PreparedData | None,
    ) -> None:
        self.flow, self.loader, self.data = flow, loader, data
        self.total_steps, self.directory = total_steps, directory
        self.evaluation, self.held_out = evaluation, held_out
        self.result = RunResult(directory.path, 0, {})

    @property
    def config(self) -> Config:
        return self.flow.config

    def go(self) -> RunResult:
        c = self.config.run
        progress = make_progress(c.progress, self.total_steps, f"{self.flow.name}: {self.directory.path}")
        log = RunLogger(
            self.directory, tensorboard=c.tensorboard, samples_per_step=c.samples_per_step, seed=c.seed
        )
        with InterruptGuard() as guard, log, progress:
            try:
                self._evaluate(0, log, progress, guard)
                for step in range(1, self.total_steps + 1):
                    self._step(step, log, progress, guard)
            except Interrupted:
                self.result.interrupted = True
            except HeadraceError:
                # nothing is half done when these are raised, so what was learned so far is worth keeping
                if self.result.steps > 0:
                    self._save(progress)
                    logger.info("the model as after step %d is in %s", self.result.steps, self.result.model)
                raise
            self._save(progress)
        return self.result

    def _step(self, step: int, log: RunLogger, progress: Progress, guard: InterruptGuard) -> None:
        started = time.perf_counter()
        context = StageContext(self.config, step, self.total_steps, MetricSums())
        prompts = self.loader.next()
        position = self.loader.state_dict()
        epochs = position["epoch"] + position["step"] / self.loader.steps_per_epoch
        batch = execute(self.flow, prompts, context, progress, guard)
        m = context.metrics
        m.add("time/step_s", time.perf_counter() - started)
        m.add("train/step", step)
        m.add("data/epoch", epochs)
        m.add("data/prompts_dropped", self.data.dataset.dropped)
        m.add("data/prompts_truncated", self.data.dataset.truncated)
        if "sft/loss" in (so_far := m.means()):
            m.add("sft/perplexity", math.exp(min(so_far["sft/loss"], 700.0)))
        _memory_metrics(m)
        metrics = m.means()
        try:
            metrics |= self._due_evaluation(step, progress, guard)
        finally:
            # the step itself is done, whatever ends its evaluation
            log.log(step, metrics)
            if self.flow.generates:
                log.log_samples(step, sample_records(batch))
            progress.update(step, metrics)
            self.result.steps, self.result.metrics = step, metrics
        self._watch_gap(step, metrics)

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

    def _due_evaluation(self, step: int, progress: Progress, guard: InterruptGuard) -> dict[str, float]:
        e = self.evaluation
        if e is None:
            return {}
        due = step == self.total_steps or (e.every_steps > 0 and step % e.every_steps == 0)
        return self._run_evaluation(step, progress, guard) if due else {}

    def _evaluate(self, step: int, log: RunLogger, progress: Progress, guard: InterruptGuard) -> None:
        if self.evaluation is not None:
            metrics = self._run_evaluation(step, progress, guard)
            log.log(step, metrics)
            progress.update(step, metrics)

    def _run_evaluation(self, step: int, progress: Progress, guard: InterruptGuard) -> dict[str, float]:
        if self.evaluation is None or self.held_out is None:
            return {}
        metrics, _ = evaluate(self.evaluation.flow, self.held_out, step, progress, guard)
        self.result.evaluations[step] = metrics
        return metrics

    def _save(self, progress: Progress) -> None:
        if not self.config.run.save_final:
            return
        for role in self.flow.roles:
            if isinstance(role, Actor | RewardModel) and self.flow.trains(role):
                progress.stage("save", None)
                self.result.model = role.save(self.directory.model)


def run_evaluation(
    flow: CheckedFlow, dataset: Any, key: str = "eval"
) -> tuple[RunDirectory, dict[str, float]]:
    """`headrace eval`: scores every row once; all samples go to samples.jsonl of a new directory.

    The directory is `<run.name>-eval-<date>-<time>`, so that scoring a run's model never touches the run.
    `key` is the section that errors about the data name. Raises KeyboardInterrupt after Ctrl-C.
    """
    config, r = flow.config, flow.config.run
    data = prepare_data(flow, dataset, key=key)
    logger.info("scoring %d rows of %s", len(data.dataset), data.dataset.name)
    check_roles([flow])
    prepare_roles(flow, 1)
    directory = RunDirectory.create(r.dir, None, prefix=f"{r.name}-eval" if r.name else "eval")
    directory.write_config(config_to_yaml(config))
    progress = make_progress(r.progress, 1, f"eval: {directory.path}")
    log = RunLogger(directory, tensorboard=False, samples_per_step=sys.maxsize, seed=r.seed)
    with InterruptGuard() as guard, log, progress:
        try:
            metrics, samples = evaluate(flow, data, 0, progress, guard)
        except Interrupted:
            raise KeyboardInterrupt from None
        progress.update(1, metrics)
        log.log(0, metrics)
        log.log_samples(0, samples)
    return directory, metrics


def _memory_metrics(metrics: MetricSums) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics.add("memory/peak_resident_bytes", peak * (1 if sys.platform == "darwin" else 1024))
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        metrics.add_max("memory/peak_device_bytes", max(map(torch.cuda.max_memory_allocated, devices)))
