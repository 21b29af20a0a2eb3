"""The reward model: a frozen model with one scalar output, read at the last token."""

from __future__ import annotations

from typing import Any

import torch

from headrace.config import Config, ModelConfig
from headrace.data.batch import Batch
from headrace.models.causal_lm import ScalarModel
from headrace.models.heads import load_scalar_model
from headrace.models.hf import resolve_device, resolve_dtype
from headrace.roles.role import Role, make_engine
from headrace.stages import StageContext, stage
from headrace.training.torch_engine import TorchEngine


class RewardModel(Role):
    """Scores prompt + response. Its tokenizer must share the actor's vocabulary: ids are never re-encoded."""

    name = "reward_model"
    key = "reward.model"

    def __init__(self, model: ModelConfig, device: str = "auto") -> None:
        super().__init__(model, device)
        self._model: ScalarModel | None = None
        self._engine: TorchEngine | None = None

    def prepare(self, config: Config, *, total_updates: int, trains: bool, supervised: bool = False) -> None:
        if self._model is None:
            c = self.model_config
            device = resolve_device(self.device_name)
            self._model = load_scalar_model(
                str(c.path),
                key=self.key,
                device=device,
                dtype=resolve_dtype(c.dtype, device),
                trust_remote_code=c.trust_remote_code,
            )
        self._engine = make_engine(self._model, config, prefix="reward_model", optimizer=None)

    @property
    def engine(self) -> TorchEngine:
        if self._engine is None:
            raise RuntimeError("reward_model: prepare() has not been called")
        return self._engine

    @stage(reads=("input_ids", "response_mask"), writes=("reward_model_score",))
    def score(self, batch: Batch, context: StageContext) -> dict[str, Any]:
        """float32 [R], from the hidden state at each row's last token."""
        scores: torch.Tensor = self.engine.last_scalars(batch)
        return {"reward_model_score": scores}
