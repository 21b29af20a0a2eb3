"""A role: one model of the dataflow (actor, critic, reference, reward model) with the stages it offers.

A role is described first and loaded later, so that a flow can be checked before any weights are read.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.config import Config, LoraConfig, ModelConfig
from headrace.data.batch import Batch
from headrace.data.prompt_builder import use_chat_template
from headrace.errors import ConfigError, RunError
from headrace.models.causal_lm import Backbone, CausalLM
from headrace.models.hf import load_causal_lm, load_tokenizer, resolve_device, resolve_dtype
from headrace.models.lora import add_adapters, check_same
from headrace.stages import StageContext
from headrace.training.engine import TrainingState
from headrace.training.optimizer import OptimizerSettings
from headrace.training.torch_engine import TorchEngine


class Role:
    """Base of all roles. `name` prefixes its metrics and its errors; `key` is the setting of its model."""

    name = "role"
    key = "model.path"
    start: LanguageModelRole | None = None  # the role whose weights, as the run starts, this one begins with

    def __init__(self, model: ModelConfig, device: str = "auto") -> None:
        self.model_config = model
        self.device_name = device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_config.path})"

    def problems(self, reader: ReaderRole | None) -> list[str]:
        """What is wrong with the model, as far as that shows without its weights.

        `reader` is the role that tokenizes the data: ids are never re-encoded, so vocabularies must be the same.
        """
        c = self.model_config
        try:
            tokenizer = load_tokenizer(c.tokenizer or str(c.path), c.trust_remote_code, self.key)
        except ConfigError as error:
            return error.violations
        if reader is None or tokenizer.get_vocab() == reader.tokenizer.get_vocab():
            return []
        return [
            f"{self.key}: the vocabulary of '{c.path}' is not that of '{reader.model_config.path}', so it would read"
            " other text than was sampled; use a model with the same tokenizer"
        ]

    def prepare(self, config: Config, *, total_updates: int, trains: bool, supervised: bool = False) -> None:
        """Loads the model and, when the flow `trains` this role, makes its optimizer. Called once before a run."""
        raise NotImplementedError

    @property
    def engine(self) -> TorchEngine:
        """What runs the model. Raises RuntimeError before `prepare`."""
        raise NotImplementedError

    def state_dict(self) -> TrainingState:
        """What a checkpoint keeps of a trained role."""
        return self.engine.state_dict()

    def load_state_dict(self, state: TrainingState) -> None:
        """Continues training where `state` was taken. Raises ConfigError when it is another model's."""
        self.engine.load_state_dict(state)


class ReaderRole(Role):
    """A role that can read the data: it has a tokenizer before it has weights."""

    _tokenizer: Any = None
    _engine: TorchEngine | None = None

    @property
    def loaded(self) -> Backbone | None:
        """The model, once it is in memory."""
        raise NotImplementedError

    @property
    def is_loaded(self) -> bool:
        return self.loaded is not None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer alone, without the weights; with `model.chat_template` applied."""
        if self._tokenizer is None:
            c = self.model_config
            key = self.key if c.tokenizer is None else "model.tokenizer"
            self._tokenizer = load_tokenizer(c.tokenizer or str(c.path), c.trust_remote_code, key)
            if c.chat_template is not None:
                use_chat_template(self._tokenizer, c.chat_template)
        return self._tokenizer

    @property
    def engine(self) -> TorchEngine:
        if self._engine is None:
            raise RuntimeError(f"{self.name}: prepare() has not been called")
        return self._engine


class LanguageModelRole(ReaderRole):
    """A role with a language-model head: actor and reference."""

    def __init__(self, model: ModelConfig, device: str = "auto", loaded: CausalLM | None = None) -> None:
        super().__init__(model, device)
        self._model = loaded
        self._tokenizer = loaded.tokenizer if loaded is not None else None

    @property
    def loaded(self) -> CausalLM | None:
        return self._model

    @property
    def model(self) -> CausalLM:
        """The loaded model (loading it on first use)."""
        if self._model is None:
            c = self.model_config
            device = resolve_device(self.device_name)
            self._model = load_causal_lm(
                str(c.path),
                key=self.key,
                tokenizer=self.tokenizer,
                device=device,
                dtype=resolve_dtype(c.dtype, device),
                trust_remote_code=c.trust_remote_code,
                gradient_checkpointing=c.gradient_checkpointing,
            )
        return self._model


def adapt(model: Backbone, lora: LoraConfig, path: str) -> None:
    """Gives a model that is to be trained its adapters (`lora.rank`), or checks those that it came with."""
    if model.adapters is not None:
        check_same(model.adapters, lora, path)
    elif lora.rank:
        model.adapters = add_adapters(model.hf, lora, path)


def make_engine(
    model: Any,
    config: Config,
    *,
    prefix: str,
    optimizer: OptimizerSettings | None,
    supervised: bool = False,
    scores_rows: bool = False,
) -> TorchEngine:
    """`supervised`: given responses are judged by the model's own distribution, whatever the sampling temperature."""
    return TorchEngine(
        model,
        prefix=prefix,
        temperature=1.0 if supervised else config.rollout.temperature,
        scores_rows=scores_rows,
        tokens_per_microbatch=config.train.tokens_per_microbatch,
        microbatches_per_update=config.train.microbatches_per_update,
        max_skipped_updates=config.train.max_skipped_updates,
        optimizer=optimizer,
    )


def optimizer_settings(config: Config, *, learning_rate: float, total_updates: int) -> OptimizerSettings:
    t = config.train
    return OptimizerSettings(
        learning_rate=learning_rate,
        schedule=t.schedule,
        min_learning_rate_fraction=t.min_learning_rate_fraction,
        warmup_updates=t.warmup_updates,
        total_updates=total_updates,
        weight_decay=t.weight_decay,
        adam_beta1=t.adam_beta1,
        adam_beta2=t.adam_beta2,
        adam_epsilon=t.adam_epsilon,
        max_grad_norm=t.max_grad_norm,
        offload=t.offload_optimizer,
    )


def optimizer_counts(engine: TorchEngine) -> tuple[int, int]:
    """(updates, skipped updates) of the engine so far. Raises RunError for a frozen model."""
    if engine.optimizer is None:
        raise RunError(f"{engine.prefix}: this model is frozen and cannot be updated")
    return engine.optimizer.updates, engine.optimizer.skipped


def count_updates(engine: TorchEngine, before: tuple[int, int], context: StageContext) -> None:
    """Adds the step's updates and skipped updates: those since `before`."""
    after = optimizer_counts(engine)
    context.metrics.add_total(f"{engine.prefix}/updates", after[0] - before[0])
    context.metrics.add_total(f"{engine.prefix}/skipped_updates", after[1] - before[1])


def update_batches(batch: Batch, context: StageContext) -> list[Batch]:
    """The step's rows cut into one batch per optimizer update: every pass in its own seeded order.

    A step of a single update keeps the rows' order.
    """
    config = context.config
    per_update = config.train.samples_per_update or batch.num_rows
    parts = max(1, round(batch.num_rows / per_update))
    out: list[Batch] = []
    for pass_number in range(config.train.passes_per_step):
        if parts == 1:
            out.append(batch)
            continue
        generator = torch.Generator().manual_seed(
            (config.run.seed * 1_000_003 + context.step) * 101 + pass_number
        )
        out += batch.select(torch.randperm(batch.num_rows, generator=generator)).split(parts)
    return out
