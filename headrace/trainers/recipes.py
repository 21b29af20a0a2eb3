"""The recipes: reinforcement learning by any algorithm, fine-tuning, evaluation; each a flow that fits on one screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.algorithms.find import algorithm_problems
from headrace.algorithms.registry import ADVANTAGES
from headrace.algorithms.stages import advantage_stage
from headrace.config import Config
from headrace.flow.flow import Flow
from headrace.flow.graph import Stage
from headrace.rewards.stage import RewardStage
from headrace.roles.actor import Actor
from headrace.roles.critic import Critic
from headrace.roles.reference import Reference
from headrace.roles.reward_model import RewardModel

Reward = str | Callable[..., Any] | None


def policy_flow(config: Config, actor: Actor, reward: Reward) -> Flow:
    """Every algorithm: rollout → reward (∥ reference, log-probabilities, values) → advantage → update.

    Which advantage and loss is `algorithm.advantage` and `algorithm.loss`; a critic is there where the advantage needs
    one, the reference where there is a KL, and the log-probabilities where the KL is taken off the reward.
    """
    settings = config.algorithm
    flow = Flow(settings.name, config)
    flow.notes += algorithm_problems(settings)  # imports the plugin first
    # an unknown advantage is one of these problems; the rest of the flow is checked all the same
    advantage = advantage_stage(settings.advantage if settings.advantage in ADVANTAGES else "grpo")
    critic = make_critic(config, actor) if advantage.advantage.needs_critic else None
    rollout = flow.add_stage("rollout", actor.generate)
    needed = add_reference(flow, config, actor, rollout)
    if critic is not None:
        needed.append(flow.add_stage("values", critic.values, depends_on=rollout))
    if settings.kl_coefficient > 0 and settings.kl_placement == "reward":
        needed.append(flow.add_stage("logprobs", actor.logprobs, depends_on=rollout))
    # after the others, which are under way while the reward waits for the reward model
    needed.append(add_reward(flow, config, reward, rollout))
    scored = flow.add_stage("advantage", advantage, depends_on=needed)
    if critic is not None:
        flow.add_stage("critic", critic.update, depends_on=scored)
    flow.add_stage("update", actor.update, depends_on=scored)
    return flow


def sft_flow(config: Config, actor: Actor) -> Flow:
    """Supervised fine-tuning: the same engine and data, one stage."""
    flow = Flow("sft", config)
    flow.add_stage("update", actor.supervised_update)
    return flow


def evaluation_flow(config: Config, actor: Actor, reward: Reward, scorer: RewardModel | None = None) -> Flow:
    """Rollout and reward on held-out prompts; `scorer` is the reward model of a training flow, used here too."""
    flow = Flow("eval", config)
    rollout = flow.add_stage("rollout", actor.generate)
    add_reward(flow, config, reward, rollout, scorer)
    return flow


def add_reward(
    flow: Flow, config: Config, reward: Reward, rollout: Stage, scorer: RewardModel | None = None
) -> Stage:
    """The reward stage, and before it the reward model's where one is configured."""
    if config.reward.model is None:
        return flow.add_stage("reward", RewardStage(reward, settings=config.reward), depends_on=rollout)
    model = config.model.model_copy(update={"path": config.reward.model, "tokenizer": None})
    scorer = scorer or RewardModel(model, config.run.device)
    score = flow.add_stage("reward_model", scorer.score, depends_on=rollout)
    combined = RewardStage(reward, settings=config.reward, add_model_score=True)
    return flow.add_stage("reward", combined, depends_on=score)


def add_reference(flow: Flow, config: Config, actor: Actor, rollout: Stage) -> list[Stage]:
    """The reference stage, only where a KL needs it."""
    if config.algorithm.kl_coefficient == 0:
        return []
    model = config.model.model_copy(update={"path": config.reference.path or config.model.path})
    start = actor if config.reference.path is None else None
    reference = Reference(model, config.run.device, start=start)
    return [flow.add_stage("reference", reference.logprobs, depends_on=rollout)]


def make_critic(config: Config, actor: Actor) -> Critic:
    model = config.model.model_copy(update={"path": config.critic.path or config.model.path})
    return Critic(model, config.run.device, start=actor if config.critic.path is None else None)
