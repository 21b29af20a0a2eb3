"""The actor: the policy that generates and learns. Rollout and training hold the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.agents.environment import MakeEnvironment, load_environment
from headrace.agents.rollout import AgentRollout
from headrace.algorithms.find import find_advantage
from headrace.algorithms.gap import logprob_gap
from headrace.checkpoint.export import save_hf_folder
from headrace.config import Config
from headrace.data.batch import Batch
from headrace.data.prompts import group_numbers
from headrace.errors import ConfigError
from headrace.models.hf import resolve_dtype
from headrace.models.load_sharded import empty_on_mesh
from headrace.models.lora import require_peft
from headrace.roles.role import (
    LanguageModelRole,
    adapt,
    count_updates,
    loss_weights,
    make_engine,
    optimizer_counts,
    optimizer_settings,
    update_batches,
)
from headrace.rollout.engine import Completion, Request, SamplingParams, sample_seed
from headrace.rollout.native.engine import NativeEngine
from headrace.stages import StageContext, stage
from headrace.training.engine import TrainingState
from headrace.training.policy_loss import PolicyLoss, rollout_reference
from headrace.training.value_loss import SupervisedLoss

ROLLOUT_LOGPROBS = ("rollout_logprobs", "rollout_untruncated_logprobs")
EVALUATION_STEP = -1  # evaluation draws the same samples whenever it runs


class Actor(LanguageModelRole):
    name = "actor"
    supervised_prefix = "sft"  # of its metrics in a flow over given responses
    environment: MakeEnvironment | None = None  # instead of agent.environment, for callers in Python
    _rollout: NativeEngine | None = None
    _agent: AgentRollout | None = None
    _found_environment: tuple[Any, MakeEnvironment | None] = (None, None)

    def prepare(self, config: Config, *, total_updates: int, trains: bool, supervised: bool = False) -> None:
        settings = optimizer_settings(
            config, learning_rate=config.train.learning_rate, total_updates=total_updates
        )
        if trains:
            self._adapt(config)
        if self._engine is not None:
            self._engine.release()
        self._engine = make_engine(
            self.model,
            config,
            prefix=self.supervised_prefix if supervised else "actor",
            optimizer=settings if trains else None,
            supervised=supervised,
        )
        self._agent = None
        make, r = self.find_environment(config), config.rollout
        if make is not None:
            limits = (r.max_sequence_tokens, self.model.max_positions, 1 << 30)
            self._agent = AgentRollout(
                make,
                config,
                self.tokenizer,
                end_ids=self.model.eos_token_ids,
                max_sequence_tokens=min(n for n in limits if n is not None),
            )
        self._rollout = NativeEngine(
            self.model,
            max_concurrent_sequences=r.max_concurrent_sequences,
            kv_cache_tokens=r.kv_cache_tokens,
            replay_steps=r.replay_steps,
        )

    def make_empty(self) -> None:
        """Has a model without weights, which come from another actor (training/weight_sync.py)."""
        if self.mesh is None:
            raise RuntimeError("actor: a model without weights is for a mesh")
        c = self.model_config
        self._model = empty_on_mesh(
            str(c.path),
            self.mesh,
            key=self.key,
            tokenizer=self.tokenizer,
            dtype=resolve_dtype(c.dtype, self.mesh.device),
            trust_remote_code=c.trust_remote_code,
        )

    def set_weight_version(self, updates: int) -> None:
        """Notes how many updates the weights that generate have had."""
        if self._rollout is not None:
            self._rollout.weight_version = updates

    def plays(self, config: Config) -> bool:
        """True where a rollout is an episode of several turns."""
        return self.environment is not None or config.agent.environment is not None

    def find_environment(self, config: Config) -> MakeEnvironment | None:
        """What makes the environment of an episode, if there are episodes. Raises ConfigError."""
        spec = self.environment or config.agent.environment
        if spec is not None and self._found_environment[0] != spec:
            self._found_environment = (spec, load_environment(spec))
        return self._found_environment[1] if spec is not None else None

    def _adapt(self, config: Config) -> None:
        if config.lora.rank:
            require_peft("lora.rank")  # before the weights are read
            if self._engine is not None and self.model.adapters is None and self._engine.has_updated:
                raise ConfigError(
                    "lora.rank: this actor's weights were trained as a whole and are no longer those of"
                    f" '{self.model_config.path}'; save it and start from that folder"
                )
        adapt(self.model, config.lora, str(self.model_config.path))

    @stage(
        reads=("prompt_ids", "prompt_id"),
        optional=("group_id",),
        writes=(
            "input_ids",
            "response_mask",
            "rollout_logprobs",
            "group_id",
            "sample_index",
            "greedy_baseline",
            "completion",
            "completion_ids",
            "finish_reason",
            "num_tokens",
            "weight_version",
        ),
        sections=("rollout", "agent"),
        makes_rows=True,
    )
    def generate(self, batch: Batch, context: StageContext) -> Batch:
        """Prompts [P rows] → P x samples_per_prompt rows of prompt + response, with the sampled log-probabilities.

        With an environment the response is an episode of several turns, and there are more columns: agents/episode.py.
        """
        if self._rollout is None:
            raise RuntimeError("actor: prepare() has not been called")
        sampling, n = sampling_params(context.config, context.evaluation)
        step = EVALUATION_STEP if context.evaluation else context.step
        started = time.perf_counter()
        if self._agent is not None:
            seed_of = partial(sample_seed, context.config.run.seed, step)
            rows = self._agent.generate(self._rollout, batch, n, sampling, seed_of, context)
            _rollout_metrics(rows, batch["prompt_ids"], time.perf_counter() - started, context)
            return _versioned(rows, self._rollout)
        prompt_ids, identities = batch["prompt_ids"], batch["prompt_id"].tolist()
        requests = [
            Request(tuple(ids), tuple(sample_seed(context.config.run.seed, step, who, i) for i in range(n)))
            for ids, who in zip(prompt_ids, identities, strict=True)
        ]
        greedy = (
            not context.evaluation
            and find_advantage(context.config.algorithm.advantage).needs_greedy_baseline
        )
        total = len(requests) * (n + greedy)
        completions = self._rollout.generate(
            requests, sampling, lambda finished, tokens: context.on_progress(finished / total)
        )
        elapsed = time.perf_counter() - started
        rows = self._assemble(batch, completions, n, truncates=sampling.truncates)
        _rollout_metrics(rows, prompt_ids, elapsed, context)
        if not greedy:
            return _versioned(rows, self._rollout)

        def report(finished: int, tokens: int) -> None:
            context.on_progress((len(requests) * n + finished) / total)

        rows = Batch.concat([rows, self._greedy_rows(batch, self._rollout, sampling, report)])
        return _versioned(rows, self._rollout)

    def _greedy_rows(
        self,
        prompts: Batch,
        rollout: NativeEngine,
        sampling: SamplingParams,
        report: Callable[[int, int], None],
    ) -> Batch:
        """One greedy response per prompt, in its prompt's group: something to compare rewards with, not a sample.

        Its `response_mask` is false everywhere, so it is in no loss and no metric of sampled tokens.
        """
        greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        requests = [Request(tuple(ids), (0,)) for ids in prompts["prompt_ids"]]
        made = rollout.generate(requests, greedy, report)
        rows = self._assemble(prompts, made, 1, truncates=sampling.truncates)
        return rows.with_columns(
            {
                "response_mask": torch.zeros_like(rows["response_mask"]),
                "greedy_baseline": torch.ones(rows.num_rows, dtype=torch.bool),
                "sample_index": torch.full((rows.num_rows,), -1),
            }
        )

    def _assemble(
        self, prompts: Batch, completions: list[list[Completion]], n: int, truncates: bool
    ) -> Batch:
        owners = [p for p in range(prompts.num_rows) for _ in range(n)]
        flat = [c for group in completions for c in group]
        texts = self.tokenizer.batch_decode([c.token_ids for c in flat], skip_special_tokens=True)
        heads = [list(prompts["prompt_ids"][p]) for p in owners]
        columns = {
            "input_ids": [h + c.token_ids for h, c in zip(heads, flat, strict=True)],
            "response_mask": [
                [False] * len(h) + [True] * len(c.token_ids) for h, c in zip(heads, flat, strict=True)
            ],
            "rollout_logprobs": [[0.0] * len(h) + c.logprobs for h, c in zip(heads, flat, strict=True)],
        }
        if truncates:
            columns["rollout_untruncated_logprobs"] = [
                [0.0] * len(h) + c.untruncated_logprobs for h, c in zip(heads, flat, strict=True)
            ]
        dtypes = {"input_ids": torch.int64, "response_mask": torch.bool}
        dtypes |= {name: torch.float32 for name in columns if name.endswith("logprobs")}
        rows: dict[str, Any] = dict(prompts.without_columns(["prompt_ids"]).select(owners).rows)
        rows |= {
            "group_id": group_numbers(prompts)[owners],
            "sample_index": torch.arange(len(flat)) % n,
            "greedy_baseline": torch.zeros(len(flat), dtype=torch.bool),
            "completion": list(texts),
            "completion_ids": [c.token_ids for c in flat],
            "finish_reason": [c.finish_reason for c in flat],
            "num_tokens": torch.tensor([len(c.token_ids) for c in flat], dtype=torch.int64),
        }
        return Batch.from_rows(columns, rows, dtypes)

    @stage(reads=("input_ids", "response_mask"), writes=("logprobs",), optional=ROLLOUT_LOGPROBS)
    def logprobs(self, batch: Batch, context: StageContext) -> dict[str, Any]:
        """The trainer's own log-probabilities of the sampled tokens, before this step's updates.

        None on pipeline ranks without the last layers, here and in every stage that asks a model.
        """
        out = self.engine.outputs(batch)
        if out.logprobs is not None and "rollout_logprobs" in batch:
            context.metrics.merge(logprob_gap(out.logprobs, rollout_reference(batch), batch["response_mask"]))
        return {"logprobs": out.logprobs}

    @stage(
        reads=("input_ids", "response_mask", "rollout_logprobs", "advantages"),
        optional=(
            "loss_mask",
            "logprobs",
            "reference_logprobs",
            "values",
            "weight_version",
            *ROLLOUT_LOGPROBS[1:],
        ),
        sections=("train", "algorithm"),
        trains=True,
    )
    def update(self, batch: Batch, context: StageContext) -> None:
        """One or more optimizer updates on the step's samples (train.samples_per_update, train.passes_per_step)."""
        config = context.config
        before = optimizer_counts(self.engine)
        if "weight_version" in batch:
            lag = before[0] - batch["weight_version"]
            context.metrics.add("rollout/weight_lag_updates", lag.sum(), len(lag))
        if "values" in batch and context.step <= config.critic.warmup_steps:
            return  # the critic learns alone first
        batch = with_loss_mask(batch)
        updates = update_batches(batch, context)
        if len(updates) > 1 and "logprobs" not in batch:
            # several updates need the log-probabilities from before the first
            own = {
                name: column for name, column in self.logprobs(batch, context).items() if column is not None
            }
            batch = batch.with_columns(own)
            updates = update_batches(batch, context)
        measure_gap = "logprobs" not in batch
        loss = PolicyLoss(config.algorithm, measure_gap=measure_gap, kl_coefficient=context.kl_coefficient)
        for number, part in enumerate(updates):
            divisor = config.algorithm.divisor_tokens or config.rollout.max_new_tokens
            weighted = loss_weights(
                part, part["loss_mask"], config.algorithm.reduction, context.ranks, divisor
            )
            context.metrics.merge(self.engine.update(weighted, loss))
            context.on_progress((number + 1) / len(updates))
        self._count_updates(before, context)

    @stage(reads=("input_ids", "response_mask"), sections=("train",), trains=True, supervised=True)
    def supervised_update(self, batch: Batch, context: StageContext) -> None:
        """One supervised update: mean negative log-likelihood over all response tokens of the batch."""
        before = optimizer_counts(self.engine)
        weighted = loss_weights(batch, batch["response_mask"], "token_mean", context.ranks)
        context.metrics.merge(self.engine.update(weighted, SupervisedLoss()))
        context.metrics.add_total("sft/tokens", int(batch["response_mask"].sum()))
        self._count_updates(before, context)

    def load_state_dict(self, state: TrainingState) -> None:
        super().load_state_dict(state)
        if self._rollout is not None:
            self._rollout.weight_version = optimizer_counts(self.engine)[0]

    def _count_updates(self, before: tuple[int, int], context: StageContext) -> None:
        count_updates(self.engine, before, context)
        if self._rollout is not None:
            self._rollout.weight_version = optimizer_counts(self.engine)[0]

    def save(self, path: str | Path, *, writes: bool = True) -> Path:
        """Writes the model and tokenizer as a Hugging Face folder."""
        return save_hf_folder(self.model, Path(path), writes=writes)


def sampling_params(config: Config, evaluation: bool) -> tuple[SamplingParams, int]:
    """Sampling settings and samples per prompt, of training or of evaluation."""
    r = config.rollout
    plain = SamplingParams(
        max_new_tokens=r.max_new_tokens,
        min_new_tokens=r.min_new_tokens,
        stop=tuple(r.stop),
        stop_token_ids=tuple(r.stop_token_ids),
    )
    if evaluation:
        return replace(plain, temperature=config.eval.temperature), config.eval.samples_per_prompt
    sampled = replace(plain, temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p)
    return sampled, r.samples_per_prompt


def _versioned(rows: Batch, rollout: NativeEngine) -> Batch:
    """With the number of updates that the weights had, the same for all tokens of a row."""
    return rows.with_columns({"weight_version": torch.full((rows.num_rows,), rollout.weight_version)})


def with_loss_mask(batch: Batch) -> Batch:
    """Advantages as a token column and a loss mask, for flows whose advantage stage gives one value a row."""
    columns: dict[str, Any] = {}
    if "advantages" in batch.rows:
        per_row = torch.as_tensor(batch["advantages"], dtype=torch.float32)
        columns["advantages"] = per_row[batch.row_ids()]
        batch = batch.without_columns(["advantages"])
    if "loss_mask" not in batch:
        columns["loss_mask"] = batch["response_mask"]
    return batch.with_columns(columns) if columns else batch


def _rollout_metrics(
    rows: Batch, prompt_ids: list[tuple[int, ...]], elapsed_s: float, context: StageContext
) -> None:
    m, total, lengths = context.metrics, rows.num_rows, rows["num_tokens"]
    tokens = int(lengths.sum())
    truncated = sum(reason == "length" for reason in rows["finish_reason"])
    if context.evaluation:
        m.add("eval/response_tokens_mean", tokens, total)
        m.add("eval/truncated_fraction", truncated, total)
        return
    m.add("rollout/response_tokens_mean", tokens, total)
    m.add_max("rollout/response_tokens_max", int(lengths.max()) if total else 0)
    m.add("rollout/prompt_tokens_mean", sum(len(p) for p in prompt_ids), len(prompt_ids))
    m.add("rollout/truncated_fraction", truncated, total)
    # ranks generate at the same time: their tokens add up, their seconds do not
    m.add("rollout/tokens_per_s", tokens, max(elapsed_s, 1e-9) / context.ranks.count)
    m.add_total("rollout/samples", total)
    m.add_total("rollout/tokens", tokens)
