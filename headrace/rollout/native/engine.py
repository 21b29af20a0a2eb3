"""The native rollout engine: continuous batching over a paged KV cache, with the trainer's own weights.

Each turn of the loop is one forward pass that prefills newly admitted prompts and extends every running sample
by one token. Who runs is the scheduler's decision; what is drawn is the sampler's; this file moves the numbers.

Shapes: B samples that get a token in a step, U distinct hidden states they come from, M max_new_tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ConfigError, RunError
from headrace.models.attention import AttentionContext
from headrace.models.causal_lm import CausalLM
from headrace.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from headrace.rollout.native.attention import MixedAttention, PagedDecodeAttention, PrefillAttention
from headrace.rollout.native.graphs import DecodeGraphs, graphs_possible
from headrace.rollout.native.kv_cache import (
    BLOCK_TOKENS,
    FREE_MEMORY_SHARE,
    PagedKVCache,
    block_bytes,
    free_memory_bytes,
)
from headrace.rollout.native.record import Record
from headrace.rollout.native.sampler import Draws, Uniforms, check_sampling, sample
from headrace.rollout.native.scheduler import Prefill, Sample, Scheduler, Step
from headrace.rollout.native.stopping import StopText
from headrace.rollout.native.tapes import DecodeTapes, tapes_possible

logger = logging.getLogger(__name__)

LOGITS_AT_ONCE = 1 << 26  # float32 logits held at a time (256 MiB)


@dataclass
class RolloutStats:
    """What one `generate` did. Blocks are KV cache blocks of `block_tokens` tokens; replayed steps were recordings."""

    num_blocks: int = 0
    peak_blocks: int = 0
    leaked_blocks: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    replayed_steps: int = 0


class NativeEngine(RolloutEngine):
    """Generates with `model` itself: a weight update needs no copy, and no cache outlives a `generate`.

    `weight_version` is set by the owner after each update and copied into every token sampled from then on.
    `replay_steps` False runs the modules' own code in every step, instead of a recording of it: a CUDA graph
    (rollout/native/graphs.py), on a CPU a tape of operators (rollout/native/tape.py).
    `kv_cache_tokens` None sizes the cache for the worst case of the samples that can run at once, capped at a
    quarter of the free memory. Raises ConfigError naming the key for sizes below 1.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_concurrent_sequences: int = 256,
        block_tokens: int = BLOCK_TOKENS,
        kv_cache_tokens: int | None = None,
        max_prefill_tokens: int = 8192,
        replay_steps: bool = True,
    ) -> None:
        sizes = {
            "max_concurrent_sequences": max_concurrent_sequences,
            "block_tokens": block_tokens,
            "kv_cache_tokens": kv_cache_tokens,
            "max_prefill_tokens": max_prefill_tokens,
        }
        low = [
            f"rollout.{key}: {n} must be at least 1" for key, n in sizes.items() if n is not None and n < 1
        ]
        if low:
            raise ConfigError(low)
        self.model = model
        self.max_concurrent_sequences = max_concurrent_sequences
        self.block_tokens = block_tokens
        self.kv_cache_tokens = kv_cache_tokens
        self.max_prefill_tokens = max_prefill_tokens
        self.replay_steps = replay_steps
        self.tapes: DecodeTapes | None = None
        self.weight_version = 0
        self.stats = RolloutStats()

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Completions per request, one per seed, as `RolloutEngine` says; `stats` then describes the call.

        `on_progress(finished_samples, generated_tokens)` is called after each step.
        Raises ConfigError (all violations at once) for an empty prompt, an unknown id, a prompt too long for
        the model's positions, sampling values out of range, or a cache too small for one request.
        """
        self._check(requests, sampling)
        if not self.replay_steps or not tapes_possible(self.model):
            self.tapes = None
        else:
            tapes, rows = self.tapes, self.max_concurrent_sequences
            if tapes is None or tapes.model is not self.model or tapes.rows != rows:
                tapes = self.tapes = DecodeTapes(self.model, rows)
            tapes.refresh()
        with torch.inference_mode(), _evaluation_mode(self.model):
            return _Rollout(self, requests, sampling).run(on_progress)

    def _check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        problems = check_sampling(sampling)
        known = int(self.model.hf.get_input_embeddings().num_embeddings)
        limit = self.model.max_positions
        for i, request in enumerate(requests):
            ids = request.prompt_ids
            if not ids:
                problems.append(f"request {i}: the prompt is empty; give it at least one token")
            elif min(ids) < 0 or max(ids) >= known:
                problems.append(f"request {i}: a prompt id is outside the model's vocabulary of {known}")
            if request.limit(sampling) < 1:
                problems.append(f"request {i}: max_new_tokens must be at least 1")
            if limit is not None and len(ids) + request.limit(sampling) > limit:
                problems.append(
                    f"request {i}: a prompt of {len(ids)} tokens and rollout.max_new_tokens"
                    f" {request.limit(sampling)} exceed the model's {limit} positions; lower"
                    " data.max_prompt_tokens or rollout.max_new_tokens"
                )
        if sampling.stop and self.model.tokenizer is None:
            problems.append("rollout.stop: stop strings need a tokenizer and the model has none")
        ends = {
            t for t in (*self.model.eos_token_ids, *sampling.stop_token_ids) if 0 <= t < self.model.vocab_size
        }
        if sampling.min_new_tokens and len(ends) == self.model.vocab_size:
            problems.append(
                "rollout.min_new_tokens: every id of the vocabulary is an end id; nothing may be drawn"
            )
        if problems:
            raise ConfigError(problems)


class _Rollout:
    """The state of one `generate`: arrays over all samples, and the block table of those that run."""

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self.engine = engine
        self.model = engine.model
        self.device = engine.model.device
        self.sampling = sampling
        self.num_seeds = [len(r.seeds) for r in requests]
        self.prompts = [np.array(r.prompt_ids, dtype=np.int64) for r in requests]
        # requests without seeds take no part; `request` of a sample counts the others
        self.prompts = [p for p, n in zip(self.prompts, self.num_seeds, strict=True) if n]
        sizes = [(len(r.prompt_ids), len(r.seeds)) for r in requests if r.seeds]
        limits = [r.limit(sampling) for r in requests if r.seeds]
        num_blocks = self._num_blocks(sizes, limits)
        self.scheduler = Scheduler(
            sizes,
            max_new_tokens=limits,
            num_blocks=num_blocks,
            block_size=engine.block_tokens,
            max_concurrent=engine.max_concurrent_sequences,
            max_prefill_tokens=engine.max_prefill_tokens,
        )
        graphs = engine.replay_steps and graphs_possible(self.model)
        self.cache = PagedKVCache(self.model.num_layers, num_blocks, engine.block_tokens, spare=graphs)
        total = sum(self.num_seeds)
        seeds = [seed & 0xFFFFFFFFFFFFFFFF for request in requests for seed in request.seeds]
        self.uniforms = Uniforms(np.array(seeds, dtype=np.uint64))
        self.prompt_tokens = np.repeat([n for n, _ in sizes], [n for _, n in sizes]).astype(np.int64)
        self.limits = np.repeat(limits, [n for _, n in sizes]).astype(np.int64)
        self.record = Record(total, max(limits, default=0))
        self.tokens = self.record.tokens
        self.counts = np.zeros(total, dtype=np.int64)
        self.rows = np.empty(total, dtype=np.int64)  # of the samples that run: their place in the block table
        longest = max((size[0] + limit for size, limit in zip(sizes, limits, strict=True)), default=0)
        rows = min(engine.max_concurrent_sequences, max(total, 1))
        self.table = np.zeros((rows, self.scheduler.blocks_for(longest)), dtype=np.int64)
        self.graphs = DecodeGraphs(self.model, self.cache, *self.table.shape) if graphs else None
        self.order: NDArray[np.int64] | None = None  # of those that run on after a step of decoding alone
        ends = {*self.model.eos_token_ids, *sampling.stop_token_ids}
        self.ends = np.zeros(self.model.vocab_size, dtype=bool)
        self.ends[[t for t in ends if 0 <= t < self.model.vocab_size]] = True
        self.end_ids_on_device = torch.from_numpy(self.ends.nonzero()[0]).to(self.device)
        self.stop_texts = [
            StopText(self.model.tokenizer, sampling.stop) for _ in range(total if sampling.stop else 0)
        ]
        self.held_hidden: Tensor | None = None  # [1, H] of the prompt whose siblings still wait
        self.vocab_size = self.model.vocab_size
        self.head = self.model.head()
        self.stats = RolloutStats(num_blocks=num_blocks)

    def run(self, on_progress: Callable[[int, int], None] | None) -> list[list[Completion]]:
        scheduler, stats = self.scheduler, self.stats
        finished_samples = 0
        try:
            while scheduler.unfinished:
                step = scheduler.schedule()
                hidden, source, who = self._forward(step)
                finished = [scheduler.samples[i] for i in self._draw(hidden, source, who).tolist()]
                scheduler.complete(step, finished)
                stats.steps += 1
                stats.generated_tokens += len(who)
                finished_samples += len(finished)
                if on_progress is not None:
                    on_progress(finished_samples, stats.generated_tokens)
        finally:
            if self.graphs is not None:
                self.graphs.release()
            self.cache.release()
            stats.peak_blocks = scheduler.blocks.peak_used
            stats.leaked_blocks = scheduler.blocks.num_used
            stats.preemptions = scheduler.preemptions
            self.engine.stats = stats
        logger.debug("rollout: %s", stats)
        return self._completions()

    def _num_blocks(self, sizes: Sequence[tuple[int, int]], limits: Sequence[int]) -> int:
        engine, model = self.engine, self.model
        if engine.kv_cache_tokens is not None:
            return engine.kv_cache_tokens // engine.block_tokens
        per_sample = sorted(
            (-(-(p + limit) // engine.block_tokens), n) for (p, n), limit in zip(sizes, limits, strict=True)
        )
        places, worst = engine.max_concurrent_sequences, 0
        while places and per_sample:
            blocks, count = per_sample.pop()
            taken = min(places, count)
            worst += taken * (blocks + 1)  # the scheduler keeps one free block for each
            places -= taken
        each = block_bytes(
            model.num_layers, engine.block_tokens, model.num_kv_heads, model.head_dim, model.dtype
        )
        return min(worst, int(free_memory_bytes(self.device) * FREE_MEMORY_SHARE) // each)

    def _forward(self, step: Step) -> tuple[Tensor, NDArray[np.int64] | None, NDArray[np.int64]]:
        """Runs the model: hidden states [U, H], each sample's row in them (None: in order), the samples' numbers."""
        self.cache.copy_blocks(step.copies)
        for sample_ in step.grown:
            self.table[sample_.row, len(sample_.blocks) - 1] = sample_.blocks[-1]
        decodes = self._by_length(step.decodes)
        if step.decodes and not step.prefills and not step.forks:
            return self._decode(decodes), None, decodes
        samples: list[int] = []
        source: list[int] = []
        held_before = self.held_hidden
        hidden: list[Tensor] = []
        if step.prefills or step.decodes:
            for prefill in step.prefills:
                self._place(prefill.samples)
            out = self._run_model(step.prefills, decodes)
            for i, prefill in enumerate(step.prefills):
                samples += [s.id for s in prefill.samples]
                source += [i] * len(prefill.samples)
                if prefill.keep:
                    self.held_hidden = out[i : i + 1].clone()
            samples += decodes.tolist()
            source += range(len(step.prefills), len(out))
            hidden.append(out)
        if step.forks:
            self._place(step.forks)
            # a prompt that starts to be held in this step has no forks yet: these come from the one before
            if held_before is None:
                raise RunError("rollout: a sample was forked from a prompt that is not held")
            samples += [s.id for s in step.forks]
            source += [sum(len(h) for h in hidden)] * len(step.forks)
            hidden.append(held_before)
        merged = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        return merged, np.array(source, dtype=np.int64), np.array(samples, dtype=np.int64)

    def _place(self, samples: Sequence[Sample]) -> None:
        """Enters samples that start to run into the block table."""
        for sample_ in samples:
            self.rows[sample_.id] = sample_.row
            self.table[sample_.row, : len(sample_.blocks)] = sample_.blocks

    def _by_length(self, samples: list[Sample]) -> NDArray[np.int64]:
        """The samples' numbers, longest first."""
        # all have grown by one token: only one that was preempted since changes anything
        if self.order is not None and len(self.order) == len(samples):
            return self.order
        who = np.array([s.id for s in samples], dtype=np.int64)
        return who[np.argsort(-(self.prompt_tokens[who] + self.counts[who]), kind="stable")]

    def _decode(self, who: NDArray[np.int64]) -> Tensor:
        """Hidden states [B, H] of samples that decode, longest first."""
        count, size = self.counts[who], self.cache.block_size
        ids, position = self.tokens[who, count - 1], self.prompt_tokens[who] + count - 1
        table = self.table[self.rows[who], : int(position[0] // size + 1)]
        hidden = None
        if self.graphs is not None:
            hidden = self.graphs.hidden_states(ids, position, table)
        elif self.engine.tapes is not None and not self.engine.tapes.failed:
            attention = PagedDecodeAttention(self.cache, table, position + 1, self.device)
            hidden = self.engine.tapes.hidden_states(ids, position, attention)
        if hidden is not None:
            self.stats.replayed_steps += 1
            return hidden
        return self._run_model([], who)

    def _run_model(self, prefills: Sequence[Prefill], who: NDArray[np.int64]) -> Tensor:
        """Hidden states [U, H]: the last one of each prefill, then one for each sample in `who`, which decode."""
        size, device = self.cache.block_size, self.device
        ids, positions, slots = [], [], []
        for prefill in prefills:
            first = prefill.samples[0]
            where = np.arange(prefill.tokens)
            blocks = np.array(prefill.blocks, dtype=np.int64)
            ids += [self.prompts[first.request], self.tokens[first.id, : first.generated]]
            positions.append(where)
            slots.append(blocks[where // size] * size + where % size)
        lengths = [prefill.tokens for prefill in prefills]
        fresh = sum(lengths)
        self.stats.prefill_tokens += fresh
        attention: AttentionContext
        if prefills:
            attention = start = PrefillAttention(self.cache, lengths, np.concatenate(slots), device)
        if len(who):
            count = self.counts[who]
            total = self.prompt_tokens[who] + count
            ids.append(self.tokens[who, count - 1])
            positions.append(total - 1)
            table = self.table[self.rows[who], : int((total[0] - 1) // size + 1)]
            attention = PagedDecodeAttention(self.cache, table, total, device)
            if prefills:
                attention = MixedAttention(start, fresh, attention)
        hidden = self.model.hidden_states(
            torch.from_numpy(np.concatenate(ids)).to(device),
            torch.from_numpy(np.concatenate(positions)).to(device),
            attention,
        )
        if not prefills:
            return hidden
        wanted = np.concatenate([np.cumsum(lengths) - 1, fresh + np.arange(len(who))])
        return hidden[torch.from_numpy(wanted).to(device)]

    def _draw(
        self, hidden: Tensor, source: NDArray[np.int64] | None, who: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Draws one token for each sample in `who` and records it; returns those that ended with it."""
        count = self.counts[who]
        draws = self._sample(hidden, source, self.uniforms.of(who, count), count)
        token = draws.token_ids
        self.record.add(who, count, draws, self.engine.weight_version)
        count += 1
        self.counts[who] = count
        stopped = self.ends[token]
        if self.stop_texts:
            look = (count >= self.sampling.min_new_tokens).tolist()
            for i, (sample_id, t) in enumerate(zip(who.tolist(), token.tolist(), strict=True)):
                if self.stop_texts[sample_id].push(t, look[i]):
                    stopped[i] = True
        ended = stopped | (count >= self.limits[who])
        gone = who[ended]
        self.record.stopped[gone] = stopped[ended]
        self.order = (who[~ended] if len(gone) else who) if source is None else None
        return gone

    def _sample(
        self,
        hidden: Tensor,
        source: NDArray[np.int64] | None,
        uniform: NDArray[np.float64],
        count: NDArray[np.int64],
    ) -> Draws:
        """Tokens [B] from `hidden` [U, H], as many at once as there is room for their logits."""
        head = self.head
        early = count < self.sampling.min_new_tokens if self.sampling.min_new_tokens else None
        rows_at_once = max(1, LOGITS_AT_ONCE // self.vocab_size)
        parts: list[Draws] = []
        for start in range(0, len(count), rows_at_once):
            part = slice(start, start + rows_at_once)
            if source is None:
                logits = head.logits(hidden[part])
            else:
                distinct, back = np.unique(source[part], return_inverse=True)
                logits = head.logits(hidden[torch.from_numpy(distinct).to(self.device)])
                logits = logits[torch.from_numpy(back).to(self.device)]
            forbidden = None
            if early is not None and early[part].any() and len(self.end_ids_on_device):
                forbidden = (torch.from_numpy(early[part]).to(self.device), self.end_ids_on_device)
            parts.append(sample(logits, self.sampling, uniform[part], forbidden))
        return Draws.join(parts)

    def _completions(self) -> list[list[Completion]]:
        done = iter(self.record.completions(self.counts))
        return [[next(done) for _ in range(n)] for n in self.num_seeds]


@contextmanager
def _evaluation_mode(model: CausalLM) -> Iterator[None]:
    """Takes every module out of training mode (where gradient checkpointing leaves its wrappers) and back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
