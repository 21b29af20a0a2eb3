"""What the commands do: a configuration in, an exit code out. The trainers use the same functions."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import Any

from headrace.config import Config
from headrace.data.dataset import HFDataset
from headrace.errors import ConfigError
from headrace.flow.flow import CompiledFlow, Flow
from headrace.flow.prepare import role_problems
from headrace.flow.run import Evaluation, RunResult, run_evaluation
from headrace.flow.source import data_problems, source_problems
from headrace.observe.summary import format_metric
from headrace.roles.actor import Actor
from headrace.roles.reward_model import RewardModel
from headrace.trainers.recipes import Reward, evaluation_flow, policy_flow, sft_flow

logger = logging.getLogger(__name__)


def dataset_of(config: Config) -> HFDataset:
    d = config.data
    return HFDataset(str(d.path), split=d.split, subset=d.subset, limit_rows=d.limit_rows)


def held_out_of(config: Config) -> HFDataset | None:
    """The evaluation data set; columns, template and format are those of `data`."""
    e = config.eval
    if e.path is None:
        return None
    return HFDataset(e.path, split=e.split, subset=e.subset, limit_rows=e.limit_rows)


def train(config: Config, actor: Actor, reward: Reward, dataset: Any, held_out: Any = None) -> RunResult:
    """Builds the recipe's flow, checks it and runs it. Raises ConfigError with what is wrong with flow and data."""
    flow, evaluation = training_flow(config, actor, reward, dataset, held_out)
    return flow.run(dataset, evaluation=evaluation)


def training_flow(
    config: Config, actor: Actor, reward: Reward, dataset: Any, held_out: Any = None
) -> tuple[CompiledFlow, Evaluation | None]:
    """The recipe's checked flow and its evaluation. Raises ConfigError with what is wrong with flow and data."""
    flow = compiled(policy_flow(config, actor, reward), dataset, held_out)
    evaluation = None
    if held_out is not None:
        scorer = next((role for role in flow.roles if isinstance(role, RewardModel)), None)
        checked = evaluation_flow(config, actor, reward, scorer).compile()
        evaluation = Evaluation(checked, held_out, config.eval.every_steps)
    return flow, evaluation


def compiled(flow: Flow, dataset: Any, held_out: Any) -> CompiledFlow:
    """The checked flow. Raises ConfigError with what is wrong with it and with the data sets (None: no such one)."""
    try:
        return flow.compile()
    except ConfigError as error:
        problems = list(error.violations)
        try:
            alone: CompiledFlow | None = flow.without_cluster().compile()
        except ConfigError:
            alone = None
        for key, source in (("data", dataset), ("eval", held_out)):
            if source is None:
                continue
            problems += (
                source_problems(flow.config, source, key)
                if alone is None
                else data_problems(alone, source, key)
            )
        if alone is not None:
            problems += role_problems([alone])
        raise ConfigError(list(dict.fromkeys(problems))) from error


def run_train(config: Config) -> int:
    actor = Actor(config.model, config.run.device)
    result = train(config, actor, config.reward.function, dataset_of(config), held_out_of(config))
    return finish(result)


def run_sft(config: Config) -> int:
    actor, dataset = Actor(config.model, config.run.device), dataset_of(config)
    flow, evaluation = supervised_flow(config, actor, dataset, held_out_of(config))
    return finish(flow.run(dataset, evaluation=evaluation))


def supervised_flow(
    config: Config, actor: Actor, dataset: Any, held_out: Any = None
) -> tuple[CompiledFlow, Evaluation | None]:
    """As `training_flow`, for sft; held-out data are left alone where nothing scores responses."""
    if not (config.reward.function or config.reward.model or config.agent.environment):
        held_out = None
    flow = compiled(sft_flow(config, actor), dataset, held_out)
    evaluation = None
    if held_out is not None:
        checked = compiled(evaluation_flow(config, actor, config.reward.function), dataset, held_out)
        evaluation = Evaluation(checked, held_out, config.eval.every_steps)
    return flow, evaluation


def run_eval(config: Config) -> int:
    """Prints the metrics as one JSON object on stdout; samples go to the run directory."""
    actor = Actor(config.model, config.run.device)
    held_out = held_out_of(config)
    dataset = dataset_of(config) if held_out is None else None
    flow = compiled(evaluation_flow(config, actor, config.reward.function), dataset, held_out)
    with contextlib.redirect_stdout(sys.stderr):  # what a reward function prints must not get into the JSON
        if held_out is not None:
            directory, metrics = run_evaluation(flow, held_out)
        else:
            directory, metrics = run_evaluation(flow, dataset, key="data")
    logger.info("every sample is in %s", directory.samples)
    rounded = {
        k: int(v) if v.is_integer() and k == "eval/rows" else float(f"{v:.6g}") for k, v in metrics.items()
    }
    sys.stdout.write(json.dumps(rounded, indent=2) + "\n")
    return 0


def finish(result: RunResult) -> int:
    """Says what came out and where it is. Exit code 130 after Ctrl-C, as shells have it."""
    for metric, what in (("eval/accuracy", "accuracy"), ("eval/reward_mean", "reward")):
        measured = [(step, m[metric]) for step, m in sorted(result.evaluations.items()) if metric in m]
        if measured:
            after = [f"{format_metric(metric, v)} after step {step}" for step, v in measured[-1:] if step > 0]
            before = f"{format_metric(metric, measured[0][1])} before"
            logger.info("held-out %s: %s", what, ", ".join([before, *after]))
            break
    model = f"; the model is {result.model}" if result.model is not None else ""
    logger.info("everything is in %s%s", result.directory, model)
    if result.interrupted:
        logger.warning("stopped before the end, at the user's request, after step %d", result.steps)
        return 130
    return 0
