"""Drawing tokens from logits: temperature, top-k, top-p, min-p, then inverse CDF of a counter-based uniform.

The uniform of a token is a hash of (seed of its sample, its number in the response), computed on the CPU in
integers: the same on every device, and independent of which other samples share the batch.

Shapes: B rows, V vocabulary, C candidates left by a filter, in falling order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import RunError
from headrace.rollout.engine import SamplingParams

# A set "reaches" top_p, and a token min_p, also when float32 rounding leaves it this far short.
ROUNDING = 1e-6
CDF_BLOCK = 256  # entries summed in float64 before the search goes inside the block
AHEAD = 32  # tokens whose uniform numbers are worked out at once, a power of two
BELOW_ONE = 1 - 2.0**-53
FIRST_RANKS = 256  # ranks looked at first for top-p; grows eightfold until they reach top_p


@dataclass(frozen=True)
class Draws:
    """One token per row. Log-probabilities in natural log, float64, as `Completion` defines them."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    untruncated_logprobs: NDArray[np.float64]

    @staticmethod
    def join(parts: Sequence[Draws]) -> Draws:
        """The rows of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        tokens, logprobs, untruncated = zip(
            *((p.token_ids, p.logprobs, p.untruncated_logprobs) for p in parts), strict=True
        )
        return Draws(np.concatenate(tokens), np.concatenate(logprobs), np.concatenate(untruncated))


def check_sampling(params: SamplingParams) -> list[str]:
    """The violations in `params`, one sentence each, naming the key."""
    problems = []
    if not (params.temperature >= 0 and math.isfinite(params.temperature)):
        problems.append(f"rollout.temperature: {params.temperature} must be 0 (greedy) or more")
    if params.top_k < 0:
        problems.append(f"rollout.top_k: {params.top_k} must be 0 (off) or more")
    if not 0 < params.top_p <= 1:
        problems.append(f"rollout.top_p: {params.top_p} must be above 0 and at most 1 (off)")
    if not 0 <= params.min_p <= 1:
        problems.append(f"rollout.min_p: {params.min_p} must be between 0 (off) and 1")
    if params.max_new_tokens < 1:
        problems.append(f"rollout.max_new_tokens: {params.max_new_tokens} must be at least 1")
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        problems.append(
            f"rollout.min_new_tokens: {params.min_new_tokens} must be between 0 and rollout.max_new_tokens"
            f" ({params.max_new_tokens})"
        )
    if any(not text for text in params.stop):
        problems.append("rollout.stop: a stop string is empty; remove it")
    return problems


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one per (seed, position), both [B] or broadcast.

    The finaliser is splitmix64's (Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators",
    2014, section 5, Stafford's variant 13). The seed is mixed before the position is added, so that
    neighbouring seeds do not share a stream.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seeds + golden) + (positions.astype(np.uint64) + np.uint64(1)) * golden
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Uniforms:
    """`uniforms` of samples that draw one token after the other, worked out AHEAD tokens at a time."""

    def __init__(self, seeds: NDArray[np.uint64]) -> None:
        self._seeds = seeds
        self._ahead = np.empty((len(seeds), AHEAD))

    def of(self, who: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """One number for each (sample, position), both [B]; a sample's positions have come one by one from 0 on."""
        place = positions & (AHEAD - 1)
        if 0 in place.tolist():
            begin = place == 0
            fresh = who[begin]
            later = positions[begin, None] + np.arange(AHEAD)
            self._ahead[fresh] = uniforms(self._seeds[fresh, None], later)
        return self._ahead[who, place]


def sample(
    logits: Tensor,
    params: SamplingParams,
    uniform: NDArray[np.float64],
    forbidden: tuple[Tensor, Tensor] | None = None,
) -> Draws:
    """One token per row of logits [B, V] (float32), with `uniform` [B] in [0, 1).

    `forbidden` (rows [B] bool, ids [F]): ids that may not be drawn in the rows that are true. Raises RunError
    when the logits of a row are not finite numbers.
    """
    greedy = params.temperature == 0
    filtered = 0 < params.top_k < logits.shape[1] or params.top_p < 1 or params.min_p > 0
    scaled = logits if greedy or params.temperature == 1 else logits / params.temperature
    allowed = scaled
    if forbidden is not None:
        rows, ids = forbidden
        mask = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device).index_fill_(0, ids, True)
        allowed = scaled.masked_fill(rows[:, None] & mask, -torch.inf)
    peak, weights = _weights(allowed)
    if greedy:
        tokens, kept = allowed.argmax(-1, keepdim=True), _total(weights)
    else:
        u = torch.from_numpy(uniform[:, None]).to(logits.device)
        if filtered:
            weights, ids_of = _filter(allowed, peak, weights, params)
        tokens, kept = inverse_cdf(weights, u)
        if filtered and ids_of is not None:
            tokens = ids_of.gather(1, tokens)
    columns = [tokens, scaled.gather(1, tokens), peak, kept]
    if forbidden is not None or (filtered and not greedy):
        peak, weights = _weights(scaled)
        columns += [peak, _total(weights)]
    token, value, peaks, totals, *free = _on_host(columns)
    drawn = value - (peaks + np.log(totals))
    untruncated = value - (free[0] + np.log(free[1])) if free else drawn
    # a sum is finite only if every number is
    if not math.isfinite(np.add.reduce(drawn) + np.add.reduce(untruncated)):
        raise RunError("rollout: the model gave logits that are not finite; its weights hold NaN or infinity")
    return Draws(token.astype(np.int64, copy=False), drawn, untruncated)


def _weights(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """(peak [B, 1], exp(scaled - peak) [B, V] float32)."""
    peak = scaled.amax(-1, keepdim=True)
    return peak, (scaled - peak).exp_()


def _total(weights: Tensor) -> Tensor:
    """[B, 1] float64."""
    return weights.sum(-1, keepdim=True, dtype=torch.float64)


def _on_host(columns: list[Tensor]) -> list[NDArray[Any]]:
    """Columns [B, 1] as arrays [B], from a GPU in one transfer."""
    if columns[0].device.type == "cpu":
        return [column.numpy()[:, 0] for column in columns]
    return list(torch.cat([column.double() for column in columns], 1).cpu().numpy().T)


def _filter(
    scaled: Tensor, peak: Tensor, weights: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor | None]:
    """Weights of what the filters leave: [B, V] (ids None) or [B, C] with the ids [B, C] they belong to."""
    vocab = scaled.shape[1]
    top_k = params.top_k if params.top_k < vocab else 0
    if not top_k and params.top_p >= 1:
        return torch.where(weights >= params.min_p * (1 - ROUNDING), weights, 0), None
    total = _total(weights)
    count = top_k or (FIRST_RANKS if vocab > 8 * FIRST_RANKS else vocab)
    while True:
        values, ids = ranked(scaled, count)
        kept = (values - peak).double().exp()
        mass = kept.cumsum(-1)
        goal = (params.top_p - ROUNDING) * (mass[:, -1:] if top_k else total)
        if top_k or count == vocab or bool((mass[:, -1:] >= goal).all()):
            break
        count = min(vocab, count * 8)
    if params.top_p < 1:
        reached = (mass - kept) >= goal  # the tokens before this one already reach top_p
        reached[:, 0] = False
        kept = kept.masked_fill(reached, 0)
    if params.min_p > 0:  # the ratio to the likeliest token is the same before and after renormalising
        kept = torch.where(kept >= params.min_p * (1 - ROUNDING), kept, 0)
    return kept, ids


def ranked(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row [B, V] and their ids, falling; among equals the lower id is first."""
    if count >= scaled.shape[1]:
        return scaled.sort(stable=True, dim=-1, descending=True)
    values, ids = scaled.topk(count)
    # topk picks freely among equals at its edge: those rows are sorted in full
    torn = ((scaled >= values[:, -1:]).sum(-1) > count).nonzero()[:, 0]
    if len(torn):
        ids[torn] = scaled[torn].sort(stable=True, dim=-1, descending=True)[1][:, :count]
    ids = ids.sort(-1)[0]
    values, order = scaled.gather(1, ids).sort(stable=True, dim=-1, descending=True)
    return values, ids.gather(1, order)


def inverse_cdf(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The index [B, 1] where the running sum of weights [B, N] first exceeds u [B, 1] times their sum; and the sum.

    An entry of weight zero is never returned, for no u in [0, 1). Sums are float64 on two levels, so a long
    row loses no accuracy.
    """
    n = weights.shape[1]
    if n <= 2 * CDF_BLOCK:
        return _search(weights.cumsum(-1, dtype=torch.float64), u)
    whole = n // CDF_BLOCK * CDF_BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, CDF_BLOCK)).sum(-1, dtype=torch.float64)
    if whole < n:
        sums = torch.cat([sums, _total(weights[:, whole:])], 1)
    running = sums.cumsum(-1)
    block, total = _search(running, u)
    own = sums.gather(1, block)
    before = running.gather(1, block) - own
    inside = block * CDF_BLOCK + torch.arange(CDF_BLOCK, device=weights.device)
    part = weights.gather(1, inside.clamp_max(n - 1)).double().masked_fill_(inside >= n, 0)
    index, _ = _search(part.cumsum(-1), ((u * total - before) / own).clamp_(0, BELOW_ONE))
    return (block * CDF_BLOCK + index).clamp_max_(n - 1), total  # as in `_search`


def _search(running: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose running sum exceeds u * total, and the total; both [B, 1]."""
    total = running[:, -1:]
    # below the total, as some running sum has to exceed it: u is at most BELOW_ONE, and total * BELOW_ONE is half a
    # unit in the last place of total below it or more, which never rounds up to it
    index = torch.searchsorted(running, u * total, right=True)
    return index.clamp_max_(running.shape[1] - 1), total  # out of range only for NaN, which `sample` reports
