"""The rollout contract: requests in, completions out. Engines: `rollout/native`; others register the same shape."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. The defaults are neutral; a model folder's generation_config is never read for them.

    temperature 0 is greedy (argmax). top_k 0, top_p 1 and min_p 0 are off. Filters act on the distribution after
    temperature, in the order top-k, top-p, min-p; each keeps at least the most likely token. `min_new_tokens`
    forbids end and stop ids before that many tokens; stop strings are not looked for before it either.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """True when the distribution sampled from is not the full softmax of logits / temperature."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.min_new_tokens > 0


@dataclass(frozen=True)
class Request:
    """One prompt and the seeds of its samples: `len(seeds)` completions share the prompt's KV.

    `max_new_tokens` is a tighter limit than that of the sampling parameters, for this request alone.
    """

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int | None = None

    def limit(self, sampling: SamplingParams) -> int:
        """Tokens a completion of this request may have."""
        if self.max_new_tokens is None:
            return sampling.max_new_tokens
        return min(self.max_new_tokens, sampling.max_new_tokens)


@dataclass
class Completion:
    """One sampled response.

    `token_ids` are the ids as sampled, the end-of-sequence or stop id included. `logprobs[i]` is the natural-log
    probability of `token_ids[i]` under the distribution it was drawn from (after temperature and filters);
    `untruncated_logprobs[i]` the same after temperature only, which is what a trainer recomputes. Greedy
    decoding reports both at temperature 1. `finish_reason` is "stop" for an end id, a stop id or a stop string
    (also when it falls exactly on the limit), else "length". `weight_versions[i]` is the version of the weights
    that sampled token i.
    """

    token_ids: list[int]
    logprobs: list[float]
    untruncated_logprobs: list[float]
    finish_reason: FinishReason
    weight_versions: list[int]


class RolloutEngine(Protocol):
    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Completions per request, in request order, one per seed in seed order.

        `on_progress(finished_samples, generated_tokens)` is called now and then, under tensor parallelism after the same
        steps on every rank. What it raises ends the rollout and passes through.
        """
        ...


def sample_seed(run_seed: int, step: int, prompt_id: int, sample_index: int, turn: int = 0) -> int:
    """The 64-bit seed of one sample: a hash of who it is, never of where or with whom it is generated.

    `turn` counts the responses of an episode from 0.
    """
    text = (f"{run_seed}/{step}/{prompt_id}/{sample_index}" + (f"/{turn}" if turn else "")).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
