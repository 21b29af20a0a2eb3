"""Training of one model: packed sequences, token-budget accumulation, float32 master weights.

On one device, or with others over the mesh that the model was laid onto (models/sharding.py).

Shapes: N tokens of a micro-batch, M of them response tokens.
"""

from __future__ import annotations

import logging

import torch

from headrace.data.batch import Batch
from headrace.data.prefixes import pack_shared
from headrace.errors import ConfigError, RunError
from headrace.models.causal_lm import CausalLM, ScalarModel
from headrace.models.logprobs import token_logprobs
from headrace.models.sharding import settle
from headrace.models.shards import local
from headrace.models.tensor_parallel import sum_over
from headrace.observe.metrics import MetricSums
from headrace.training.engine import Loss, TokenOutputs, TrainingEngine, TrainingState
from headrace.training.gathered import GatheredTensors
from headrace.training.optimizer import MasterAdamW, OptimizerSettings
from headrace.training.passes import Pass
from headrace.training.pipeline import run_passes
from headrace.training.slices import own_part, shape_of

logger = logging.getLogger(__name__)

# more in one pass and elementwise work waits for memory instead of the caches; the result is the same
CPU_TOKENS = 4096
# logits alive at a time: small enough for a CPU's cache traffic, large enough to keep a GPU busy
LOGIT_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}


class TorchEngine(TrainingEngine):
    """One model with, once it is to be trained, its optimizer.

    `prefix` names its metrics ("actor", "critic", "sft"). A model with a scalar head gives a value for every response
    token (a critic), or with `scores_rows` one score a row, at its last token (a reward model).

    On a mesh every process of it calls the same methods at the same time, each data-parallel rank with its own rows
    (any number, also none), pp, sp and tp ranks with the same ones. `loss_weight` is that of the whole update, so the
    loss is the sum over data-parallel ranks. Metrics are those of the rank's own rows; what is one number for all rows
    (the gradient norm) is in those of the first data-parallel rank alone, so that whoever merges them counts it once.
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
        model.set_trainable(optimizer is not None)
        self.shards = model.shards
        self.optimizer: MasterAdamW | None = None
        if optimizer is not None:
            self.optimizer = MasterAdamW(model.trained_parameters(), optimizer, self.shards)
        self._skipped_in_a_row = 0

    @property
    def _budget(self) -> int:
        on_cpu = self.model.device.type == "cpu"
        return min(self.tokens_per_microbatch, CPU_TOKENS) if on_cpu else self.tokens_per_microbatch

    @property
    def has_updated(self) -> bool:
        """True once an update has changed the weights."""
        return self.optimizer is not None and self.optimizer.updates > 0

    def release(self) -> None:
        """Ends this engine's hold on the model, so that another engine can train it."""
        if self.optimizer is not None:
            self.optimizer.release()

    def _pass(self, micro: Batch) -> Pass:
        if self.scores_rows:
            return Pass(self.model, micro, micro.offsets[1:] - 1)
        # position t - 1 predicts token t; position 0 of a row is never a response token
        return Pass(self.model, micro, micro["response_mask"].nonzero().flatten() - 1)

    def _head(self, done: Pass, hidden: torch.Tensor, with_entropy: bool) -> TokenOutputs:
        """What the head says of a pass's last hidden states [1, P, H]."""
        device, batch, wanted = self.model.device, done.batch, done.wanted(hidden)
        if isinstance(self.model, ScalarModel) and self.scores_rows:
            return TokenOutputs(scores=self._among(batch.num_rows, done.own, self.model.scalars(wanted)))
        response = batch["response_mask"].nonzero().flatten()[done.own]
        if isinstance(self.model, ScalarModel):
            return TokenOutputs(values=self._among(batch.num_tokens, response, self.model.scalars(wanted)))
        logprobs, entropy = token_logprobs(
            wanted,
            self.model.head(),
            batch["input_ids"][response].to(device),
            self.temperature,
            chunk_bytes=LOGIT_CHUNK_BYTES[device.type],
            with_entropy=with_entropy,
        )
        return TokenOutputs(
            logprobs=self._among(batch.num_tokens, response, logprobs),
            entropy=None if entropy is None else self._among(batch.num_tokens, response, entropy),
        )

    def _among(self, length: int, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[length] zeros but for `values` at `places`; along sp each rank gives its own places, and has those of all."""
        device, group = self.model.device, self.shards.mesh.group("sp")
        precision = torch.promote_types(torch.float32, self.model.dtype)
        out = torch.zeros(length, dtype=precision, device=device).index_put((places.to(device),), values)
        return out if group is None else sum_over(out, group)

    @property
    def _reports(self) -> bool:
        return self.shards.mesh.data_rank == 0

    def _empty_passes(self, own: int) -> list[Pass]:
        """What a rank with `own` micro-batches passes beside them, where ranks with other rows wait for each of them: of
        one row without any response token."""
        if self.shards.mesh.size("zero3") == 1:
            return []
        nothing = Batch(
            [1], {"input_ids": torch.zeros(1, dtype=torch.int64), "response_mask": torch.tensor([False])}
        )
        empty = Pass(self.model, nothing, torch.zeros(0, dtype=torch.int64))
        return [empty] * (self.shards.mesh.most(own) - own)

    @torch.no_grad()
    def outputs(self, batch: Batch, *, with_entropy: bool = False) -> TokenOutputs:
        """Outputs for all rows, on the CPU, in row order, without gradients. Without any column on ranks along pp before
        the last, which alone has them."""
        batch = batch.with_columns({"row_number": torch.arange(batch.num_rows)})
        parts, order = [], []
        micros = pack_shared(batch, self._budget) if batch.num_rows else []
        empties = self._empty_passes(len(micros))
        passes = [*empties, *map(self._pass, micros)]

        def keep(number: int, hidden: torch.Tensor) -> None:
            out = self._head(passes[number], hidden, with_entropy)
            if number < len(empties):
                return
            micro = passes[number].batch
            columns = {k: v.cpu() for k, v in vars(out).items() if v is not None}
            rows = {"scores": columns.pop("scores")} if "scores" in columns else {}
            parts.append(Batch(micro.lengths, columns, rows))
            order.extend(micro["row_number"].tolist())

        run_passes(self.model, passes, keep, trains=False)
        settle(self.model)
        if not self.shards.mesh.is_last:
            return TokenOutputs()
        if not parts:
            return self._no_outputs(with_entropy)
        joined = Batch.concat(parts).select(torch.argsort(torch.tensor(order)))
        return TokenOutputs(**joined.tokens, **{k: torch.as_tensor(v) for k, v in joined.rows.items()})

    def _no_outputs(self, with_entropy: bool) -> TokenOutputs:
        """Those of no rows."""
        blank = torch.zeros(0)
        if isinstance(self.model, ScalarModel):
            return TokenOutputs(scores=blank) if self.scores_rows else TokenOutputs(values=blank)
        return TokenOutputs(logprobs=blank, entropy=blank if with_entropy else None)

    def microbatches(self, batch: Batch) -> list[Batch]:
        """How an update is cut: by number when asked for, else by token budget."""
        if batch.num_rows == 0:
            return []
        if self.microbatches_per_update is None:
            return pack_shared(batch, self._budget)
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
        micros = self.microbatches(batch)
        if self.shards.mesh.most(len(micros)) == 0:
            logger.warning(
                "%s: no token of this update counts in the loss; the weights stay as they are", self.prefix
            )
            if self._reports:
                for name in loss.per_update:
                    sums.add(name, 0.0, 1)
            return sums
        empties = self._empty_passes(len(micros))
        passes = [*empties, *map(self._pass, micros)]

        def weigh(number: int, hidden: torch.Tensor) -> torch.Tensor:
            outputs = self._head(passes[number], hidden, with_entropy=loss.needs_entropy)
            if number < len(empties):
                return torch.stack([x.sum() for x in vars(outputs).values() if x is not None]).sum() * 0.0
            value, metrics = loss(outputs, passes[number].batch.to(self.model.device))
            sums.merge(metrics)
            return value

        run_passes(self.model, passes, weigh, trains=True)
        settle(self.model)
        result = self.optimizer.step()
        if self._reports:
            for name in loss.per_update:
                sums.add(name, 0.0, 1)
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

    def state_dict(self) -> TrainingState:
        """See TrainingEngine. Weights are stored once: a float32 parameter is its own master.

        On a mesh each tensor is whole, and put together when it is asked for: every process has to ask for the same ones,
        in their order. What a process writes of them (checkpoint/files.py) needs no other.
        """
        if self.optimizer is None:
            raise RunError(f"{self.prefix}: this model is frozen and has no training state")
        state = self.optimizer.state_dict()
        tensors: dict[str, torch.Tensor] = {}
        rows = zip(self.model.trained_parameters().items(), state["masters"], state["adam"], strict=True)
        for (name, parameter), master, adam in rows:
            tensors[f"weight/{name}"] = local(parameter.detach()) if master is None else master
            tensors |= {f"{key}/{name}": value for key, value in adam.items()}
        numbers = {name: state[name] for name in ("updates", "skipped")}
        numbers["skipped_in_a_row"] = self._skipped_in_a_row
        return TrainingState(GatheredTensors(tensors, self.shards), numbers)

    @torch.no_grad()
    def load_state_dict(self, state: TrainingState) -> None:
        if self.optimizer is None:
            raise RunError(f"{self.prefix}: this model is frozen and has no training state")
        parameters, saved = self.model.trained_parameters(), state.tensors
        names = {key.partition("/")[2] for key in saved if key.startswith("weight/")}
        odd = sorted(names ^ (self.shards.stages or parameters).keys())
        odd += [
            n
            for n in parameters
            if n in names and shape_of(saved, f"weight/{n}") != self.shards.shape(n, parameters[n])
        ]
        if odd:
            raise ConfigError(
                f"{self.prefix}: the checkpoint is of another model ({odd[0]} differs, {len(odd)} in all); resume with"
                " the model that the run started with"
            )
        masters: list[torch.Tensor | None] = []
        adam: list[dict[str, torch.Tensor]] = []
        for name, parameter in parameters.items():
            weight = own_part(saved, f"weight/{name}", self.shards)
            masters.append(None if parameter.dtype == torch.float32 else weight)
            if masters[-1] is None:
                local(parameter).copy_(weight)
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in saved]
            adam.append({key: own_part(saved, f"{key}/{name}", self.shards).clone() for key in keys})
        self.optimizer.load_state_dict({**state.numbers, "masters": masters, "adam": adam})
        self._skipped_in_a_row = int(state.numbers["skipped_in_a_row"])
