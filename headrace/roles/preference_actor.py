"""The actor that learns from preference pairs instead of its own samples (DPO)."""

from __future__ import annotations

from headrace.data.batch import Batch
from headrace.roles.actor import Actor
from headrace.roles.role import count_updates, optimizer_counts
from headrace.stages import StageContext, stage
from headrace.training.preference_loss import DPOLoss, pair_weights

PAIR_COLUMNS = ("input_ids", "response_mask", "pair_id", "is_chosen", "reference_logprobs")


class PreferenceActor(Actor):
    """Rafailov et al. 2023, https://arxiv.org/abs/2305.18290."""

    supervised_prefix = "dpo"

    @stage(reads=PAIR_COLUMNS, sections=("train", "preference"), trains=True, supervised=True)
    def preference_update(self, batch: Batch, context: StageContext) -> None:
        """One update on pairs: mean over all pairs of the batch of the DPO loss."""
        before = optimizer_counts(self.engine)
        weighted = batch.with_columns({"loss_weight": pair_weights(batch, context.ranks)})
        loss = DPOLoss("dpo", context.config.preference.beta)
        context.metrics.merge(self.engine.update(weighted, loss))
        count_updates(self.engine, before, context)

    @stage(reads=PAIR_COLUMNS, sections=("preference",))
    def preference_evaluation(self, batch: Batch, context: StageContext) -> None:
        """Loss, accuracy and margin on held-out pairs."""
        loss = DPOLoss("eval", context.config.preference.beta)
        context.metrics.merge(loss.measure(self.engine.outputs(batch), batch))
        context.metrics.add_total("eval/rows", batch.num_rows // 2)
