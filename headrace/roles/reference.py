"""The reference: a frozen policy that the actor is kept close to."""

from __future__ import annotations

from typing import Any

from headrace.config import Config, ModelConfig
from headrace.data.batch import Batch
from headrace.models.causal_lm import CausalLM
from headrace.models.hf import copy_causal_lm
from headrace.models.starting_policy import StartingPolicy
from headrace.roles.role import LanguageModelRole, ReaderRole, make_engine
from headrace.stages import StageContext, stage


class Reference(LanguageModelRole):
    """`start` makes it another role's policy as it is when the run starts: a copy, or with adapters the same weights."""

    name = "reference"
    key = "reference.path"

    def __init__(
        self,
        model: ModelConfig,
        device: str = "auto",
        loaded: CausalLM | None = None,
        start: LanguageModelRole | None = None,
    ) -> None:
        super().__init__(model, device, loaded)
        self.start = start

    def problems(self, reader: ReaderRole | None) -> list[str]:
        copied = self.start is not None or self.is_loaded
        return [] if copied else super().problems(reader)

    def prepare(self, config: Config, *, total_updates: int, trains: bool, supervised: bool = False) -> None:
        if self._model is None and self.start is not None:
            start = self.start.model
            self._model = copy_causal_lm(start) if start.adapters is None else StartingPolicy(start)
        self._engine = make_engine(
            self.model, config, prefix="reference", optimizer=None, supervised=supervised
        )

    @stage(reads=("input_ids", "response_mask"), writes=("reference_logprobs",))
    def logprobs(self, batch: Batch, context: StageContext) -> dict[str, Any]:
        """Log-probabilities of the response tokens under the frozen model, at the trained model's temperature."""
        return {"reference_logprobs": self.engine.outputs(batch).logprobs}
