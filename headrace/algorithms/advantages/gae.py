"""Generalised advantage estimation over sampled tokens (Schulman et al. 2016, arXiv 1506.02438)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.advantages.whiten import whiten
from headrace.algorithms.ragged import check_mask, masked_per_row
from headrace.algorithms.registry import Scored, register_advantage
from headrace.config import AlgorithmConfig


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantages [N], returns [N]) per sampled token; exactly 0 at every other token (eq. 16).

    `values[t]` is the critic's value of the state in which token t is *chosen*: its estimate from the tokens
    before t, not having seen t. (A critic that reads hidden states puts its output at position t - 1 here.)
    `rewards[t]` is what choosing token t earned.

    Per row, over the masked tokens t_1 < … < t_n alone:
        delta_k = rewards[t_k] + gamma * values[t_(k+1)] - values[t_k],   with values[t_(n+1)] = 0
        advantage_k = delta_k + gamma * lam * advantage_(k+1)
        return_k = advantage_k + values[t_k]
    Text between two sampled tokens (a tool's answer) takes no step of time: the next value is that of the
    next *masked* token, and rewards and values at unmasked tokens, NaN included, are never read. The row ends
    after its last masked token: nothing is bootstrapped there.

    rewards, values [N] float; mask [N] bool; offsets [R + 1] int64 on the CPU. Rows do not affect one
    another. Results have the wider of the two dtypes, are computed in float64 and carry no gradient.
    Raises ValueError when shapes do not fit.
    """
    check_mask(mask, offsets)
    if rewards.shape != mask.shape or values.shape != mask.shape:
        shapes = f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)}, mask {tuple(mask.shape)}"
        raise ValueError(f"gae wants tensors of one length [N]; got {shapes}")
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    device = values.device

    # a loop of tiny steps over few numbers: quicker on the CPU than as thousands of kernel launches
    mask = mask.cpu()
    sampled = mask.nonzero().flatten()
    value = values.cpu()[sampled].double()
    counts = masked_per_row(mask, offsets)
    ends = counts.cumsum(0)
    next_value = torch.cat([value[1:], value.new_zeros(min(1, len(value)))])
    next_value[ends[counts > 0] - 1] = 0.0
    advantage = rewards.cpu()[sampled].double() + gamma * next_value - value

    # longest rows first, so that the rows that still have a token k + 1 are always a prefix
    counts_sorted, order = counts.sort(descending=True)
    starts = (ends - counts)[order]
    longest = int(counts_sorted[0]) if len(counts) else 0
    rows_longer_than = (len(counts) - torch.bincount(counts, minlength=longest + 1).cumsum(0)).tolist()
    for k in range(longest - 2, -1, -1):
        index = starts[: rows_longer_than[k + 1]] + k
        advantage[index] += gamma * lam * advantage[index + 1]

    advantages = torch.zeros(mask.shape, dtype=dtype)
    returns = torch.zeros(mask.shape, dtype=dtype)
    advantages[sampled] = advantage.to(dtype)
    returns[sampled] = (advantage + value).to(dtype)
    return advantages.to(device), returns.to(device)


@register_advantage("gae", needs_critic=True)
@torch.no_grad()
def gae_advantage(scored: Scored, settings: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """(advantages [N], returns [N]) float32 by `gae`; with `algorithm.whiten_advantages` the advantages, not the
    returns, are shifted and scaled to mean 0 and deviation 1 over the masked tokens of the step.

    Raises ValueError without values.
    """
    if scored.values is None:
        raise ValueError("gae needs the critic's values")
    rewards, values = scored.token_rewards.float(), scored.values
    advantages, returns = gae(
        rewards, values, scored.mask, scored.offsets, settings.gamma, settings.gae_lambda
    )
    if settings.whiten_advantages:
        advantages = whiten(advantages, scored.mask, scored.ranks)
    return advantages, returns
