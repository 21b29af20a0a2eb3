"""The reward model: a frozen model with one scalar output, read at the last token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.config import Config, ModelConfig
from headrace.data.batch import Batch
from headrace.errors import ConfigError
from headrace.models.causal_lm import ScalarModel
from headrace.models.heads import load_scalar_model
from headrace.models.hf import resolve_device, resolve_dtype
from headrace.roles.role import Role, make_engine
from headrace.stages import StageContext, stage
from headrace.training.torch_engine import TorchEngine


class RewardModel(Role):
    """Scores prompt + response. Its tokenizer must share the actor's vocabulary: ids are never re-encoded."""

    name = "reward_model"

    def __init__(
        self, model: ModelConfig, device: str = "auto", actor_tokenizer: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(model, device)
        self.actor_tokenizer = actor_tokenizer
        self._model: ScalarModel | None = None
        self._engine: TorchEngine | None = None

    def prepare(self, config: Config, *, total_updates: int, trains: bool, supervised: bool = False) -> None:
        if self._model is None:
            c = self.model_config
            device = resolve_device(self.device_name)
            self._model = load_scalar_model(
                str(c.path),
                key="reward.model",
                device=device,
                dtype=resolve_dtype(c.dtype, device),
                trust_remote_code=c.trust_remote_code,
            )
            actor = self.actor_tokenizer() if self.actor_tokenizer is not None else None
            if actor is not None and actor.get_vocab() != self._model.tokenizer.get_vocab():
                raise ConfigError(
                    f"reward.model: the vocabulary of '{c.path}' is not the actor's, so its scores would be of other"
                    " text; use a reward model trained on the same tokenizer, or wrap it in a reward.function"
                )
        self._engine = make_engine(self._model, config, prefix="reward_model", optimizer=None)

    @stage(reads=("input_ids",), writes=("reward_model_score",))
    def score(self, batch: Batch, context: StageContext) -> dict[str, Any]:
        """float32 [R], from the hidden state at each row's last token."""
        if self._engine is None:
            raise RuntimeError("reward_model: prepare() has not been called")
        scores: torch.Tensor = self._engine.last_scalars(batch)
        return {"reward_model_score": scores}
