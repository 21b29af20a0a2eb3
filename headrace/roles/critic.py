"""The critic: estimates, before each response token, the return that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headrace.algorithms.moments import moments
from headrace.checkpoint.export import save_hf_folder
from headrace.config import Config, ModelConfig
from headrace.data.batch import Batch
from headrace.models.causal_lm import ScalarModel
from headrace.models.heads import critic_from
from headrace.models.hf import resolve_device, resolve_dtype
from headrace.roles.role import (
    LanguageModelRole,
    ReaderRole,
    Role,
    adapt,
    count_updates,
    load_scalar,
    loss_weights,
    make_engine,
    not_here,
    optimizer_counts,
    optimizer_settings,
    update_batches,
)
from headrace.stages import StageContext, stage
from headrace.training.torch_engine import TorchEngine
from headrace.training.value_loss import ValueLoss


class Critic(Role):
    """Starts from `model.path`, or, with `start`, from a copy of that role's transformer; values start at 0."""

    name = "critic"
    key = "critic.path"

    def __init__(
        self, model: ModelConfig, device: str = "auto", start: LanguageModelRole | None = None
    ) -> None:
        super().__init__(model, device)
        self.start = start
        self._model: ScalarModel | None = None
        self._engine: TorchEngine | None = None

    def problems(self, reader: ReaderRole | None) -> list[str]:
        copied = self.start is not None or self._model is not None
        return [] if copied else super().problems(reader)

    def prepare(self, config: Config, *, total_updates: int, trains: bool, supervised: bool = False) -> None:
        if self._model is None:
            c, path = self.model_config, self.source
            if self.start is not None:
                self._model = critic_from(self.start.model, c.gradient_checkpointing)
            else:
                device = resolve_device(self.device_name)
                self._model = load_scalar(
                    path,
                    self.mesh,
                    device,
                    key=self.key,
                    dtype=resolve_dtype(c.dtype, device),
                    trust_remote_code=c.trust_remote_code,
                    gradient_checkpointing=c.gradient_checkpointing,
                    needs_head=False,
                )
        if trains:
            adapt(self._model, config.lora, str(self.model_config.path))
        settings = optimizer_settings(
            config, learning_rate=config.critic.learning_rate, total_updates=total_updates
        )
        if self._engine is not None:
            self._engine.release()
        self._engine = make_engine(
            self._model, config, prefix="critic", optimizer=settings if trains else None
        )

    @property
    def engine(self) -> TorchEngine:
        if self._engine is None:
            raise not_here(self)
        return self._engine

    @stage(reads=("input_ids", "response_mask"), writes=("values",))
    def values(self, batch: Batch, context: StageContext) -> dict[str, Any]:
        """values[t]: the expected return before token t is seen."""
        values = self.engine.outputs(batch).values
        if values is not None:
            mask = batch["response_mask"]
            context.metrics.add("critic/value_mean", float(values[mask].sum()), int(mask.sum()))
        return {"values": values}

    @stage(
        reads=("input_ids", "response_mask", "values", "returns", "loss_mask"),
        sections=("critic", "train"),
        trains=True,
    )
    def update(self, batch: Batch, context: StageContext) -> None:
        """Value updates on the step's samples; token mean over the whole update."""
        mask, returns, values = batch["loss_mask"], batch["returns"], batch["values"]
        _explained_variance(context, returns[mask], values[mask])
        loss = ValueLoss(context.config.critic.value_clip)
        before = optimizer_counts(self.engine)
        updates = update_batches(batch, context)
        for number, part in enumerate(updates):
            weighted = loss_weights(part, part["loss_mask"], "token_mean", context.ranks)
            context.metrics.merge(self.engine.update(weighted, loss))
            context.on_progress((number + 1) / len(updates))
        count_updates(self.engine, before, context)

    def save(self, path: str | Path, *, writes: bool = True) -> None:
        """Writes the critic as a Hugging Face sequence-classification folder."""
        save_hf_folder(self.engine.model, Path(path), writes=writes)


def _explained_variance(context: StageContext, returns: torch.Tensor, values: torch.Tensor) -> None:
    """1 - Var(return - value) / Var(return) over the step; left out where the returns do not vary."""
    spread = moments(returns, context.ranks)
    missed = moments(returns.double() - values.double(), context.ranks)
    if spread.count > 1 and spread.high > spread.low:
        context.add_once("critic/explained_variance", 1 - missed.squares / spread.squares)
