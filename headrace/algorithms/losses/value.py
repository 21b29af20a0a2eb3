"""The critic's squared error, with the optional clip of PPO's reference implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """(loss [N], clipped [N] bool) per token.

    Without `clip`: loss = 0.5 (values - returns)^2. With it, v' = old_values + clamp(values - old_values,
    ±clip) and loss = 0.5 max((values - returns)^2, (v' - returns)^2): the value clip of OpenAI's PPO code
    (not in the paper; described by Engstrom et al. 2020, arXiv 2005.12729). `clipped` marks tokens
    where v' decides; their gradient is 0. Elsewhere it is values - returns.

    All tensors [N] float; only values receives a gradient. Raises ValueError when clip is not above 0.
    """
    returns = returns.detach()
    loss = 0.5 * (values - returns).square()
    if clip is None:
        return loss, torch.zeros(loss.shape, dtype=torch.bool, device=loss.device)
    if not clip > 0:
        raise ValueError(f"the value clip must be above 0, not {clip}")
    old_values = old_values.detach()
    moved = old_values + (values.detach() - old_values).clamp(-clip, clip)
    bounded = 0.5 * (moved - returns).square()
    outside = (values.detach() - old_values).abs() > clip  # inside, v' is values up to rounding
    clipped = outside & (bounded > loss.detach())
    return torch.where(clipped, bounded, loss), clipped
