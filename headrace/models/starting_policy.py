"""A policy as it is now, kept while its adapters go on learning: the frozen reference of a LoRA run."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.attention import AttentionContext
from headrace.models.causal_lm import CausalLM
from headrace.models.lora import adapters_holding, adapters_off


class StartingPolicy(CausalLM):
    """`model` as at this moment, through its own weights: there is no second copy of the base.

    A pass switches adapters that add nothing yet (every B is 0) off; of others, as of a run that continues one, it
    keeps a copy and puts that in for the pass. It never changes what of the model trains.
    """

    def __init__(self, model: CausalLM) -> None:
        if model.adapters is None:
            raise ConfigError("a model without adapters changes as a whole; copy it instead")
        super().__init__(model.hf, model.tokenizer, model.eos_token_ids, model.adapters)
        now = {n: p.detach().clone() for n, p in model.trained_parameters().items()}
        adds = any(bool(value.any()) for name, value in now.items() if ".lora_B." in name)
        self._start: dict[str, Tensor] = now if adds else {}

    def run_layers(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionContext,
        chunk: int = 0,
        incoming: Tensor | None = None,
    ) -> Tensor:
        with self._as_it_started():
            return super().run_layers(input_ids, position_ids, attention, chunk, incoming)

    def _as_it_started(self) -> AbstractContextManager[None]:
        return adapters_holding(self.hf, self._start) if self._start else adapters_off(self.hf)

    def set_trainable(self, trains: bool) -> None:
        """Nothing: the weights belong to the model that is training, which says what of it does."""
