"""A role: one model of the dataflow (actor, critic, reference, reward model) with the stages it offers.

A role is described first and loaded later, so that a flow can be checked before any weights are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.reduction import Reduction, reduction_counts, token_weights
from headrace.checkpoint.fingerprint import weights_hash
from headrace.config import Config, LoraConfig, ModelConfig
from headrace.config_places import Place
from headrace.data.batch import Batch
from headrace.data.prompt_builder import use_chat_template
from headrace.errors import ConfigError, RunError
from headrace.models.causal_lm import Backbone, CausalLM, ScalarModel
from headrace.models.heads import load_scalar_model
from headrace.models.hf import load_causal_lm, load_tokenizer, resolve_device, resolve_dtype
from headrace.models.load_sharded import load_policy_onto_mesh, load_scalar_onto_mesh
from headrace.models.lora import add_adapters, check_same
from headrace.models.mesh import Mesh
from headrace.models.shards import local
from headrace.stages import DataRanks, StageContext
from headrace.training.engine import TrainingState
from headrace.training.gathered import GatheredTensors
from headrace.training.optimizer import OptimizerSettings
from headrace.training.torch_engine import TorchEngine


class Role:
    """Base of all roles. `name` prefixes its metrics and its errors; `key` is the setting of its model."""

    name = "role"
    key = "model.path"
    start: LanguageModelRole | None = None  # the role whose weights, as the run starts, this one begins with
    mesh: Mesh | None = None  # the processes that hold the model together; None: this one alone
    place = Place()  # where it was described to be, as far as that was said
    trained_at: Path | None = None  # the model that a run in other processes made of this one
    is_away = False  # trained in other processes; this one never had those weights

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

    @property
    def source(self) -> str:
        """The path of the weights that it starts from: after a run in other processes, those of its model.

        Raises RunError where such a run left no model.
        """
        if self.is_away and self.trained_at is None:
            raise RunError(
                f"{self.name}: it was trained in worker processes, and that run left no model; continue from a checkpoint"
                " (run.resume=true) or keep run.save_final"
            )
        return str(self.trained_at or self.model_config.path)

    def trained_away(self) -> None:
        """Its weights change in other processes: what is here, or was saved before, is no longer the model."""
        self.is_away, self.trained_at = True, None

    def trained_here(self) -> None:
        self.is_away, self.trained_at = False, None

    def state_dict(self) -> TrainingState:
        """What a checkpoint keeps of a trained role."""
        return self.engine.state_dict()

    def load_state_dict(self, state: TrainingState) -> None:
        """Continues training where `state` was taken. Raises ConfigError when it is another model's."""
        self.engine.load_state_dict(state)


def not_here(role: Role) -> Exception:
    """Why a role has no engine."""
    if role.is_away:
        where = f"in {role.trained_at}" if role.trained_at is not None else "in the checkpoints of that run"
        return RunError(f"{role.name}: it was trained in worker processes; its weights are {where}")
    return RuntimeError(f"{role.name}: prepare() has not been called")


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
            raise not_here(self)
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
            path = self.source
            options: dict[str, Any] = {
                "key": self.key,
                "tokenizer": self.tokenizer,
                "dtype": resolve_dtype(c.dtype, device),
                "trust_remote_code": c.trust_remote_code,
                "gradient_checkpointing": c.gradient_checkpointing,
            }
            if self.mesh is not None and self.mesh.parallelism.size > 1:
                self._model = load_policy_onto_mesh(path, self.mesh, **options)
            else:
                self._model = load_causal_lm(path, device=device, **options)
        return self._model


def load_scalar(path: str, mesh: Mesh | None, device: torch.device, **options: Any) -> ScalarModel:
    """A model with a scalar head, on `device` or laid onto a mesh of several processes."""
    if mesh is not None and mesh.parallelism.size > 1:
        return load_scalar_onto_mesh(path, mesh, **options)
    return load_scalar_model(path, device=device, **options)


def adapt(model: Backbone, lora: LoraConfig, path: str) -> None:
    """Gives a model that is to be trained its adapters (`lora.rank`), or checks those that it came with."""
    if model.adapters is not None:
        check_same(model.adapters, lora, path)
    elif lora.rank:
        model.adapters = add_adapters(model.hf, lora, path)


def weights_of(role: Role) -> dict[str, Any]:
    """The dtype a role computes in and a hash of its frozen weights (None: all are trained), whatever its layout.

    Every process of its mesh has to call: parts are put together, one parameter after the other.
    """
    model = role.engine.model
    own = {f"hf/{n}": local(p) for n, p in model.hf.named_parameters() if not p.requires_grad}
    frozen = GatheredTensors(own, model.shards)
    digest = weights_hash((key.replace("/", ".", 1), whole.to(model.dtype)) for key, whole in frozen.items())
    return {"dtype": str(model.dtype), "frozen": digest}


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
    """Adds the step's updates and skipped updates: those since `before`, which are the same on all ranks."""
    if context.ranks.index == 0:
        after = optimizer_counts(engine)
        context.metrics.add_total(f"{engine.prefix}/updates", after[0] - before[0])
        context.metrics.add_total(f"{engine.prefix}/skipped_updates", after[1] - before[1])


def loss_weights(
    batch: Batch, mask: Tensor, reduction: Reduction, ranks: DataRanks, divisor_tokens: int | None = None
) -> Batch:
    """`batch`, one rank's rows of an update, with `loss_weight` from the counts of all ranks."""
    tokens, rows = ranks.total(reduction_counts(mask, batch.offsets))
    weights = token_weights(
        mask,
        batch.offsets,
        reduction,
        divisor_tokens=divisor_tokens,
        total_tokens=int(tokens),
        total_rows=int(rows),
    )
    return batch.with_columns({"loss_weight": weights})


def update_batches(batch: Batch, context: StageContext) -> list[Batch]:
    """The step's rows cut into one batch per optimizer update: every pass in its own seeded order.

    Which update a row belongs to does not depend on the rank it lies on, so every rank has a part, maybe an empty one,
    of each. A step of a single update keeps the rows' order.
    """
    config = context.config
    (total,) = context.ranks.total([batch.num_rows])
    parts = max(1, round(total / (config.train.samples_per_update or total or 1)))
    if parts == 1:
        return [batch] * config.train.passes_per_step
    places = row_places(batch, context.ranks)
    out: list[Batch] = []
    for pass_number in range(config.train.passes_per_step):
        generator = torch.Generator().manual_seed(
            (config.run.seed * 1_000_003 + context.step) * 101 + pass_number
        )
        order = torch.randperm(int(total), generator=generator)
        bounds = [int(total) * i // parts for i in range(parts + 1)]
        here = torch.full((int(total),), -1)
        here[places] = torch.arange(batch.num_rows)
        for i in range(parts):
            own = here[order[bounds[i] : bounds[i + 1]]]
            out.append(batch.select(own[own >= 0]))
    return out


def row_places(batch: Batch, ranks: DataRanks) -> Tensor:
    """[R] int64: where each row stands among those of all ranks, by prompt and sample; alone, in the order they have."""
    if ranks.count == 1:
        return torch.arange(batch.num_rows)
    if "group_id" not in batch or "sample_index" not in batch:
        raise RunError(
            "several optimizer updates a step on several data-parallel ranks need the columns group_id and sample_index,"
            " which the rollout writes"
        )
    own = [
        list(pair) for pair in zip(batch["group_id"].tolist(), batch["sample_index"].tolist(), strict=True)
    ]
    every = sorted(pair for part in ranks.gather(own) for pair in part)
    place = {tuple(pair): i for i, pair in enumerate(every)}
    if len(place) != len(every):
        raise RunError("two rows of a step have the same group_id and sample_index")
    return torch.tensor([place[tuple(pair)] for pair in own], dtype=torch.int64)
