"""From token losses to one loss: a weight for every token, known before the batch is cut into micro-batches.

The loss of an update is `sum(weight * token_loss)` over its *whole* batch. The weights are computed once; a
micro-batch adds its own terms of that sum, so its size, packing and rank cannot change the gradient.

Shapes: R rows, N tokens of all rows together; row r owns tokens `offsets[r]:offsets[r + 1]`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headrace.algorithms.ragged import check_mask, masked_per_row, row_ids

Reduction = Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"]


def reduction_counts(mask: Tensor, offsets: Tensor) -> tuple[int, int]:
    """(masked tokens, rows with at least one): what data-parallel ranks add up to get the totals below."""
    check_mask(mask, offsets)
    per_row = masked_per_row(mask, offsets)
    return int(per_row.sum()), int((per_row > 0).sum())


def token_weights(
    mask: Tensor,
    offsets: Tensor,
    reduction: Reduction,
    *,
    divisor_tokens: int | None = None,
    total_tokens: int | None = None,
    total_rows: int | None = None,
) -> Tensor:
    """The weight [N] float32 of every token, 0 outside the mask.

    With n_r the masked tokens of row r, n = sum_r n_r and R the rows with n_r > 0 (a row without a masked
    token does not count as a row), a masked token of row r weighs

    - `token_mean`: 1 / n. Every token counts the same (DAPO, arXiv 2503.14476, section 3.3).
    - `sequence_mean`: 1 / (R n_r). Mean over rows of the mean over tokens (GRPO, arXiv 2402.03300, eq. 3).
    - `sequence_mean_token_sum`: 1 / R. Mean over rows of the sum over tokens: the policy gradient of whole
      responses (Dr. GRPO, arXiv 2503.20783, before its constant).
    - `constant`: 1 / (R L) with L = `divisor_tokens`, the same for every row (Dr. GRPO, arXiv 2503.20783,
      usually the longest response allowed).

    mask [N] bool; offsets [R + 1] int64 on the CPU. `total_tokens` and `total_rows` replace n and R where
    this batch is one data-parallel rank's part of the update. With nothing masked in, all weights are 0.

    Raises ValueError for an unknown reduction, `constant` without a positive `divisor_tokens`, and totals
    smaller than this batch's own counts.
    """
    own_tokens, own_rows = reduction_counts(mask, offsets)
    tokens = _total("total_tokens", total_tokens, own_tokens)
    rows = _total("total_rows", total_rows, own_rows)
    if reduction == "constant" and not (divisor_tokens is not None and divisor_tokens > 0):
        raise ValueError(f"the reduction 'constant' needs divisor_tokens above 0, not {divisor_tokens}")
    if own_tokens == 0:
        return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)

    per_token: Tensor | float
    if reduction == "token_mean":
        per_token = 1.0 / tokens
    elif reduction == "sequence_mean":
        of_row = masked_per_row(mask, offsets).to(torch.float64)[row_ids(offsets).to(mask.device)]
        per_token = 1.0 / (rows * of_row.clamp(min=1))  # the clamp only touches rows without a masked token
    elif reduction == "sequence_mean_token_sum":
        per_token = 1.0 / rows
    elif reduction == "constant":
        per_token = 1.0 / (rows * (divisor_tokens or 1))
    else:
        raise ValueError(f"unknown reduction '{reduction}'")
    weights = mask.to(torch.float64) * per_token
    return weights.to(torch.float32)


def _total(name: str, given: int | None, own: int) -> int:
    if given is None:
        return own
    if given < own:
        raise ValueError(f"{name} is {given}, but this batch alone has {own}; give the count of all ranks")
    return given
