"""headrace: reinforcement-learning post-training of language models.

The names below are imported on first use, so that `import headrace` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "RLTrainer": "headrace.trainers.rl_trainer",
    "PPOTrainer": "headrace.trainers.rl_trainer",
    "get_hf_model": "headrace.trainers.rl_trainer",
    "HFDataset": "headrace.data.dataset",
    "Flow": "headrace.flow.flow",
    "Evaluation": "headrace.flow.run",
    "stage": "headrace.stages",
    "StageContext": "headrace.stages",
    "Batch": "headrace.data.batch",
    "Config": "headrace.config",
    "AlgorithmConfig": "headrace.config",
    "load_config": "headrace.config_load",
    "register_advantage": "headrace.algorithms.find",
    "register_loss": "headrace.algorithms.find",
    "Scored": "headrace.algorithms.find",
    "LossInputs": "headrace.algorithms.find",
    "LossTerms": "headrace.algorithms.find",
    "advantage_stage": "headrace.algorithms.stages",
    "grpo_advantages": "headrace.algorithms.stages",
    "gae_advantages": "headrace.algorithms.stages",
    "HeadraceError": "headrace.errors",
    "AgentError": "headrace.errors",
    "ConfigError": "headrace.errors",
    "RewardError": "headrace.errors",
    "RunError": "headrace.errors",
}

if TYPE_CHECKING:
    from headrace.algorithms.find import LossInputs, LossTerms, Scored, register_advantage, register_loss
    from headrace.algorithms.stages import advantage_stage, gae_advantages, grpo_advantages
    from headrace.config import AlgorithmConfig, Config
    from headrace.config_load import load_config
    from headrace.data.batch import Batch
    from headrace.data.dataset import HFDataset
    from headrace.errors import AgentError, ConfigError, HeadraceError, RewardError, RunError
    from headrace.flow.flow import Flow
    from headrace.flow.run import Evaluation
    from headrace.stages import StageContext, stage
    from headrace.trainers.rl_trainer import PPOTrainer, RLTrainer, get_hf_model

__all__ = [
    "AgentError",
    "AlgorithmConfig",
    "Batch",
    "Config",
    "ConfigError",
    "Evaluation",
    "Flow",
    "HFDataset",
    "HeadraceError",
    "LossInputs",
    "LossTerms",
    "PPOTrainer",
    "RLTrainer",
    "RewardError",
    "RunError",
    "Scored",
    "StageContext",
    "__version__",
    "advantage_stage",
    "gae_advantages",
    "get_hf_model",
    "grpo_advantages",
    "load_config",
    "register_advantage",
    "register_loss",
    "stage",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
