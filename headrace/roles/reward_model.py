"""The reward model: a model with one scalar output, read at the last token. Frozen, or learned from pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.checkpoint.export import save_hf_folder
from headrace.config import Config, ModelConfig
from headrace.data.batch import Batch
from headrace.models.causal_lm import ScalarModel
from headrace.models.heads import critic_from
from headrace.models.hf import load_causal_lm, resolve_device, resolve_dtype
from headrace.roles.role import (
    ReaderRole,
    adapt,
    count_updates,
    load_scalar,
    make_engine,
    optimizer_counts,
    optimizer_settings,
)
from headrace.stages import StageContext, stage
from headrace.training.preference_loss import PreferenceLoss, pair_weights

PAIR_COLUMNS = ("input_ids", "response_mask", "pair_id", "is_chosen")


class RewardModel(ReaderRole):
    """Scores prompt + response. Beside an actor, its tokenizer must share the actor's vocabulary: ids are never
    re-encoded. One that is trained may start from a language model; its head then starts at 0.
    """

    name = "reward_model"

    def __init__(self, model: ModelConfig, device: str = "auto", key: str = "reward.model") -> None:
        """`key` is the setting that errors about the model name."""
        super().__init__(model, device)
        self.key = key
        self._model: ScalarModel | None = None

    @property
    def loaded(self) -> ScalarModel | None:
        return self._model

    def prepare(self, config: Config, *, total_updates: int, trains: bool, supervised: bool = False) -> None:
        if self._model is None:
            # a frozen model without a trained head would score noise
            self._model = self._load(needs_head=not trains)
            if trains:
                drop_ambiguous_padding(self._model)
        if trains:
            adapt(self._model, config.lora, str(self.model_config.path))
        settings = optimizer_settings(
            config, learning_rate=config.train.learning_rate, total_updates=total_updates
        )
        if self._engine is not None:
            self._engine.release()
        self._engine = make_engine(
            self._model,
            config,
            prefix="reward_model",
            optimizer=settings if trains else None,
            scores_rows=True,
        )

    def _load(self, needs_head: bool) -> ScalarModel:
        c, device = self.model_config, resolve_device(self.device_name)
        dtype, path = resolve_dtype(c.dtype, device), self.source
        if (
            path.endswith(".gguf") and not needs_head and self.mesh is None
        ):  # transformers reads these files as language models only
            language_model = load_causal_lm(
                path, key=self.key, tokenizer=self.tokenizer, device=device, dtype=dtype
            )
            return critic_from(language_model, c.gradient_checkpointing, self.key)
        return load_scalar(
            path,
            self.mesh,
            device,
            key=self.key,
            dtype=dtype,
            trust_remote_code=c.trust_remote_code,
            gradient_checkpointing=c.gradient_checkpointing and not needs_head,
            needs_head=needs_head,
            tokenizer=self.tokenizer,
        )

    @stage(reads=("input_ids", "response_mask"), writes=("reward_model_score",))
    def score(self, batch: Batch, context: StageContext) -> dict[str, Any]:
        """float32 [R], from the hidden state at each row's last token; equal rows are scored once.

        So equal responses have equal scores to the last bit, whatever they are packed with, and none of them looks better
        than its like to an algorithm that divides by the spread.
        """
        first, same_as = equal_rows(batch)
        if not context.evaluation:
            context.metrics.add("reward/repeated_fraction", batch.num_rows - len(first), batch.num_rows)
        once = batch if len(first) == batch.num_rows else batch.select(first)
        scores = self.engine.outputs(once).scores  # None where another stage of a pipeline has them
        return {"reward_model_score": None if scores is None else scores[same_as]}

    @stage(
        reads=PAIR_COLUMNS,
        sections=("train",),
        trains=True,
        supervised=True,
    )
    def preference_update(self, batch: Batch, context: StageContext) -> None:
        """One update on pairs: mean over all pairs of the batch of -log sigmoid(chosen - rejected)."""
        before = optimizer_counts(self.engine)
        weighted = batch.with_columns({"loss_weight": pair_weights(batch, context.ranks)})
        context.metrics.merge(self.engine.update(weighted, PreferenceLoss("reward_model")))
        count_updates(self.engine, before, context)

    @stage(reads=PAIR_COLUMNS)
    def preference_evaluation(self, batch: Batch, context: StageContext) -> None:
        """Loss, accuracy and margin on held-out pairs."""
        context.metrics.merge(PreferenceLoss("eval").measure(self.engine.outputs(batch), batch))
        context.metrics.add_total("eval/rows", batch.num_rows // 2)

    def save(self, path: str | Path, *, writes: bool = True) -> Path:
        """Writes the model and tokenizer as a Hugging Face sequence-classification folder."""
        return save_hf_folder(self.engine.model, Path(path), writes=writes)


def equal_rows(batch: Batch) -> tuple[list[int], list[int]]:
    """(the rows that are the first with their tokens, for every row the place of its like among those)."""
    places: dict[bytes, int] = {}
    first: list[int] = []
    same_as: list[int] = []
    for row in range(batch.num_rows):
        tokens = batch.row_values("input_ids", row).cpu().numpy().tobytes()
        if tokens not in places:
            places[tokens] = len(first)
            first.append(row)
        same_as.append(places[tokens])
    return first, same_as


def drop_ambiguous_padding(model: ScalarModel) -> None:
    """Forgets a padding id that also ends responses.

    transformers reads the score at the last token that is not padding, so it would read responses that end with that
    id one token too early. Without a padding id it takes one sequence at a time, and says so.
    """
    config, tokenizer = model.text_config, model.tokenizer
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.pad_token_id in [*ends, tokenizer.eos_token_id]:
        config.pad_token_id = None
