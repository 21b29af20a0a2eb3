"""Training on one device: packed sequences, token-budget accumulation, float32 master weights.

Shapes: N tokens of a micro-batch, M of them response tokens.
"""

from __future__ import annotations

import logging

import torch

from headrace.data.batch import Batch
from headrace.errors import RunError
from headrace.models.attention import PackedAttention
from headrace.models.causal_lm import CausalLM, ScalarModel
from headrace.models.logprobs import token_logprobs
from headrace.observe.metrics import MetricSums
from headrace.training.engine import Loss, TokenOutputs, TrainingEngine
from headrace.training.optimizer import MasterAdamW, OptimizerSettings

logger = logging.getLogger(__name__)

# logits alive at a time: small enough for a CPU's cache traffic, large enough to keep a GPU busy
LOGIT_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}


class TorchEngine(TrainingEngine):
    """One model with, once it is to be trained, its optimizer.

    `prefix` names its metrics ("actor", "critic", "sft"). A model with a scalar head gives a value for every response
    token (a critic), or with `scores_rows` one score a row, at its last token (a reward model).
    """

    def __init__(
        self,
        model: CausalLM | ScalarModel,
        *,
        prefix: str,
        temperature: float = 1.0,
        tokens_per_microbatch: int = 16384,
        microbatches_per_update: int | None = None,
        max_skipped_updates: int = 10,
        optimizer: OptimizerSettings | None = None,
        scores_rows: bool = False,
    ) -> None:
        self.model = model
        self.scores_rows = scores_rows
        self.prefix = prefix
        self.temperature = temperature
        self.tokens_per_microbatch = tokens_per_microbatch
        self.microbatches_per_update = microbatches_per_update
        self.max_skipped_updates = max_skipped_updates
        # a model that an earlier engine froze can be trained by this one
        model.requires_grad_(optimizer is not None)
        self.optimizer = MasterAdamW(model.parameters(), optimizer) if optimizer else None
        self._skipped_in_a_row = 0

    def release(self) -> None:
        """Ends this engine's hold on the model, so that another engine can train it."""
        if self.optimizer is not None:
            self.optimizer.release()

    def _forward(self, batch: Batch, with_entropy: bool) -> TokenOutputs:
        device = self.model.device
        input_ids = batch["input_ids"].to(device)
        attention = PackedAttention(batch.lengths.tolist(), device)
        hidden = self.model.hidden_states(input_ids, batch.position_ids().to(device), attention)
        if isinstance(self.model, ScalarModel) and self.scores_rows:
            return TokenOutputs(scores=self.model.scalars(hidden[(batch.offsets[1:] - 1).to(device)]))
        # position t - 1 predicts token t; position 0 of a row is never a response token
        index = batch["response_mask"].nonzero().flatten().to(device)
        before = hidden[index - 1]
        blank = torch.zeros(batch.num_tokens, dtype=torch.float32, device=device)
        if isinstance(self.model, ScalarModel):
            return TokenOutputs(values=blank.index_put((index,), self.model.scalars(before)))
        logprobs, entropy = token_logprobs(
            before,
            self.model.head(),
            input_ids[index],
            self.temperature,
            chunk_bytes=LOGIT_CHUNK_BYTES[device.type],
            with_entropy=with_entropy,
        )
        return TokenOutputs(
            logprobs=blank.index_put((index,), logprobs),
            entropy=None if entropy is None else blank.index_put((index,), entropy),
        )

    @torch.no_grad()
    def outputs(self, batch: Batch, *, with_entropy: bool = False) -> TokenOutputs:
        """Outputs for all rows, on the CPU, in row order, without gradients."""
        batch = batch.with_columns({"row_number": torch.arange(batch.num_rows)})
        parts, order = [], []
        for micro in batch.pack(self.tokens_per_microbatch):
            out = self._forward(micro, with_entropy)
            columns = {k: v.cpu() for k, v in vars(out).items() if v is not None}
            rows = {"scores": columns.pop("scores")} if "scores" in columns else {}
            parts.append(Batch(micro.lengths, columns, rows))
            order.extend(micro["row_number"].tolist())
        joined = Batch.concat(parts).select(torch.argsort(torch.tensor(order)))
        return TokenOutputs(**joined.tokens, **{k: torch.as_tensor(v) for k, v in joined.rows.items()})

    def microbatches(self, batch: Batch) -> list[Batch]:
        """How an update is cut: by number when asked for, else by token budget."""
        if self.microbatches_per_update is None:
            return batch.pack(self.tokens_per_microbatch)
        return batch.balance(self.microbatches_per_update)

    def update(self, batch: Batch, loss: Loss) -> MetricSums:
        """One optimizer update. Rows that weigh 0, with all their tokens, are left out of the work.

        Raises RunError after `max_skipped_updates` non-finite updates in a row.
        """
        if self.optimizer is None:
            raise RunError(f"{self.prefix}: this model is frozen and cannot be updated")
        sums = MetricSums()
        weighed = (batch["loss_weight"] != 0).float()
        if "loss_weight" in batch.tokens:
            weighed = torch.zeros(batch.num_rows).index_add_(0, batch.row_ids(), weighed)
        batch = batch.select(weighed > 0)
        if batch.num_rows == 0:
            logger.warning(
                "%s: no token of this update counts in the loss; the weights stay as they are", self.prefix
            )
            for name in loss.per_update:
                sums.add(name, 0.0, 1)
            return sums
        for micro in self.microbatches(batch):
            micro = micro.to(self.model.device)
            value, metrics = loss(self._forward(micro, with_entropy=loss.needs_entropy), micro)
            value.backward()
            sums.merge(metrics)
        for name in loss.per_update:
            sums.add(name, 0.0, 1)
        result = self.optimizer.step()
        sums.add(f"{self.prefix}/grad_norm", result.grad_norm, 1)
        sums.add(f"{self.prefix}/learning_rate", result.learning_rate, 1)
        self._skipped_in_a_row = 0 if result.applied else self._skipped_in_a_row + 1
        if not result.applied:
            logger.warning(
                "%s: gradient norm is %s; update skipped (%d in a row)",
                self.prefix,
                result.grad_norm,
                self._skipped_in_a_row,
            )
        if self._skipped_in_a_row >= self.max_skipped_updates:
            raise RunError(
                f"{self.prefix}: {self._skipped_in_a_row} updates in a row had non-finite gradients; the weights are as"
                " before them. Lower train.learning_rate, check the rewards for huge values, or use model.dtype=float32"
            )
        return sums
