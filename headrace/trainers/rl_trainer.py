"""The trainers: `RLTrainer`, `PPOTrainer` and `get_hf_model`, thin faces over one flow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from headrace.agents.environment import MakeEnvironment, name_of
from headrace.config import Config, ModelConfig, setting_violations, violations
from headrace.config_aliases import apply_aliases
from headrace.config_load import from_mapping, set_values
from headrace.config_places import PLACE_NAMES, Place, cluster_settings, place_of, same_degrees
from headrace.errors import ConfigError
from headrace.flow.run import RunResult
from headrace.observe.console import set_up_logging
from headrace.roles.actor import Actor
from headrace.roles.critic import Critic
from headrace.roles.reference import Reference
from headrace.roles.reward_model import RewardModel
from headrace.roles.role import Role
from headrace.trainers.launch import dataset_of, held_out_of, train

_ROLES: dict[str, type[Actor] | type[Reference] | type[Critic] | type[RewardModel]] = {
    "actor": Actor,
    "reference": Reference,
    "critic": Critic,
    "reward_model": RewardModel,
}


@overload
def get_hf_model(path: str, role: Literal["actor"] = "actor", **keywords: Any) -> Actor: ...
@overload
def get_hf_model(path: str, role: Literal["reference"], **keywords: Any) -> Reference: ...
@overload
def get_hf_model(path: str, role: Literal["critic"], **keywords: Any) -> Critic: ...
@overload
def get_hf_model(path: str, role: Literal["reward_model"], **keywords: Any) -> RewardModel: ...
def get_hf_model(path: str, role: str = "actor", **keywords: Any) -> Role:
    """A model for a role of a flow, described now and loaded when the run starts.

    `path` is a Hugging Face folder, hub id, .gguf file or adapter folder. `keywords` are keys of the `model` section,
    and where it is to run: `parallel_config` (degrees), `gpu_group` (a name), `device_map` or `device` (one device or
    several, such as `cuda:0-3`). They count for what `cluster.layout` leaves open. Raises ConfigError for anything else.
    """
    if role not in _ROLES:
        raise ConfigError(f"get_hf_model: role '{role}' is none of {', '.join(_ROLES)}")
    if "device" in keywords:
        if "device_map" in keywords:
            raise ConfigError("device: is another name of device_map; give one of them")
        keywords["device_map"] = keywords.pop("device")
    model_keys = {k: v for k, v in keywords.items() if k in ModelConfig.model_fields}
    others = {k: v for k, v in keywords.items() if k not in model_keys and k not in PLACE_NAMES}
    problems: list[str] = []
    place, device, config = Place(), None, Config()
    try:
        place, device = place_of(keywords, role)
    except ConfigError as error:
        problems += error.violations
    try:
        config = from_mapping(_merge(apply_aliases(others), {"model": {"path": path, **model_keys}}))
    except ConfigError as error:
        problems += error.violations
    problems += setting_violations(config)
    if problems:
        raise ConfigError(problems)
    made = _ROLES[role](config.model, device or config.run.device)
    made.place = place
    return made


class RLTrainer:
    """Trains `actor` with a reward function by a named algorithm.

    Keywords are configuration keys, dotted or by the names tutorials use (see config_aliases.py), given here or to
    `train`; `cluster` is a layout (`cluster="cpu_2"`) or the section. `environment` (a class, see docs/agents.md) makes
    rollouts of several turns. Example:

        trainer = RLTrainer(actor=get_hf_model("Qwen/Qwen2.5-0.5B-Instruct"), reward_fn=score, algorithm="grpo")
        trainer.train(HFDataset("openai/gsm8k", split="train", subset="main"), rollout_batch_size=128)
    """

    algorithm = "grpo"

    def __init__(
        self,
        actor: Actor | str | None = None,
        reward_fn: str | Callable[..., Any] | None = None,
        algorithm: str | None = None,
        *,
        eval_dataset: Any = None,
        environment: MakeEnvironment | None = None,
        config: Config | Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        if isinstance(config, Config):
            config = set_values(config)
        base = dict(config or {})
        if (layout := cluster_settings(base.get("cluster"))) is not None:
            base["cluster"] = layout
        self._base: dict[str, Any] = _merge(base, apply_aliases(keywords))
        if algorithm is not None or "algorithm" not in self._base:
            self._base = _merge(self._base, {"algorithm": {"name": algorithm or self.algorithm}})
        self.actor = get_hf_model(actor) if isinstance(actor, str) else actor
        self.reward_fn = reward_fn
        self.eval_dataset = eval_dataset
        self.environment = environment

    def resolve(self, **keywords: Any) -> Config:
        """The whole configuration that `train(**keywords)` would run with. Raises ConfigError with all violations."""
        values = _merge(self._base, apply_aliases(keywords))
        if self.actor is not None:
            values = _merge(values, {"model": self.actor.model_config.model_dump(exclude_unset=True)})
            values = _merge({"run": {"device": self.actor.device_name}}, values)
            own, general = self.actor.place.parallelism, values.get("cluster", {}).get("parallelism")
            if own and general and not same_degrees(own, general):
                raise ConfigError(
                    f"parallel_config: the actor was described with {dict(own)}, and the trainer with {general}; give one"
                )
        if self.environment is not None:
            values = _merge(values, {"agent": {"environment": name_of(self.environment)}})
        return from_mapping(values)

    def train(self, dataset: Any = None, **keywords: Any) -> RunResult:
        """Trains on `dataset` (an HFDataset, a path, a list of rows or a callable).

        Raises ConfigError before anything is loaded when settings or data are wrong.
        """
        if not logging.getLogger("headrace").hasHandlers():
            set_up_logging()  # a script that has its own gets headrace's lines there
        config = self.resolve(**keywords)
        reward = self.reward_fn if self.reward_fn is not None else config.reward.function
        given = [k for k, v in (("data.path:", dataset), ("reward.function:", reward)) if v is not None]
        problems = [v for v in violations(config) if not v.startswith(tuple(given))]
        if problems:
            raise ConfigError(problems)
        actor = self.actor if self.actor is not None else Actor(config.model, config.run.device)
        actor.environment = self.environment or actor.environment
        source = dataset if dataset is not None else dataset_of(config)
        held_out = self.eval_dataset if self.eval_dataset is not None else held_out_of(config)
        return train(config, actor, reward, source, held_out)


class PPOTrainer(RLTrainer):
    """PPO with a critic: `PPOTrainer(model_name="...", num_gpus=1, batch_size=32, sequence_length=512)`."""

    algorithm = "ppo"

    def __init__(
        self,
        model_name: str | None = None,
        reward_fn: str | Callable[..., Any] | None = None,
        **keywords: Any,
    ) -> None:
        actor = keywords.pop("actor", None)
        super().__init__(actor if actor is not None else model_name, reward_fn, "ppo", **keywords)


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two section→key mappings; the second wins key by key."""
    out = {k: dict(v) if isinstance(v, Mapping) else v for k, v in first.items()}
    for section, values in second.items():
        if isinstance(values, Mapping) and isinstance(out.get(section), dict):
            out[section].update(values)
        else:
            out[section] = dict(values) if isinstance(values, Mapping) else values
    return out
