"""Learning from preference pairs: the flows of `headrace reward-model` and `headrace dpo`, and the commands."""

from __future__ import annotations

from typing import Literal

from headrace.config import Config
from headrace.data.dataset import HFDataset
from headrace.flow.flow import CompiledFlow, Flow
from headrace.flow.run import Evaluation
from headrace.roles.preference_actor import PreferenceActor
from headrace.roles.reference import Reference
from headrace.roles.reward_model import RewardModel
from headrace.trainers.launch import compiled, dataset_of, finish, held_out_of

PreferenceCommand = Literal["reward-model", "dpo"]


def reward_model_flow(config: Config, model: RewardModel, evaluation: bool = False) -> Flow:
    """A reward model from pairs (Ouyang et al. 2022, eq. 1), or its measure on held-out ones."""
    flow = Flow("reward_model", config)
    if evaluation:
        flow.add_stage("score", model.preference_evaluation)
    else:
        flow.add_stage("update", model.preference_update)
    return flow


def dpo_flow(config: Config, actor: PreferenceActor, reference: Reference, evaluation: bool = False) -> Flow:
    """DPO (Rafailov et al. 2023): reference → update, or the measure on held-out pairs."""
    flow = Flow("dpo", config)
    before = flow.add_stage("reference", reference.logprobs)
    if evaluation:
        flow.add_stage("score", actor.preference_evaluation, depends_on=before)
    else:
        flow.add_stage("update", actor.preference_update, depends_on=before)
    return flow


def dpo_reference(config: Config, actor: PreferenceActor) -> Reference:
    """The frozen policy that DPO measures against: reference.path, or the actor as it starts."""
    model = config.model.model_copy(update={"path": config.reference.path or config.model.path})
    return Reference(model, config.run.device, start=actor if config.reference.path is None else None)


def run_reward_model(config: Config) -> int:
    return _run(config, "reward-model")


def run_dpo(config: Config) -> int:
    return _run(config, "dpo")


def _run(config: Config, command: PreferenceCommand) -> int:
    flow, evaluation = preference_flow(config, command, held_out_of(config))
    return finish(flow.run(dataset_of(config), evaluation=evaluation))


def preference_flow(
    config: Config, command: PreferenceCommand, held_out: HFDataset | None
) -> tuple[CompiledFlow, Evaluation | None]:
    """The checked flow of a command and its evaluation. Raises ConfigError with what is wrong with flow and data."""
    if command == "dpo":
        actor = PreferenceActor(config.model, config.run.device)
        reference = dpo_reference(config, actor)
        training, measure = (dpo_flow(config, actor, reference, evaluation=e) for e in (False, True))
    else:
        model = RewardModel(config.model, config.run.device, key="model.path")
        training, measure = (reward_model_flow(config, model, evaluation=e) for e in (False, True))
    flow, evaluation = compiled(training, dataset_of(config), held_out), None
    if held_out is not None:
        evaluation = Evaluation(measure.compile(), held_out, config.eval.every_steps)
    return flow, evaluation
