"""Sums over the rows of flat token tensors.

Shapes: R rows, N tokens of all rows together; row r owns tokens `offsets[r]:offsets[r + 1]`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_mask(mask: Tensor, offsets: Tensor) -> None:
    """Raises ValueError unless mask is bool [N] and offsets [R + 1] run from 0 to N."""
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise ValueError(f"the mask must be bool [N], not {mask.dtype} {tuple(mask.shape)}")
    if offsets.dim() != 1 or len(offsets) == 0 or int(offsets[0]) != 0 or int(offsets[-1]) != len(mask):
        raise ValueError(f"offsets must be [R + 1] and run from 0 to the {len(mask)} tokens of the mask")


def row_ids(offsets: Tensor) -> Tensor:
    """[N] int64 on offsets' device: the row each token belongs to."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())


def masked_per_row(mask: Tensor, offsets: Tensor) -> Tensor:
    """[R] int64 on the mask's device: how many tokens of each row are masked in."""
    counts = torch.zeros(len(offsets) - 1, dtype=torch.int64, device=mask.device)
    return counts.index_add_(0, row_ids(offsets).to(mask.device), mask.to(torch.int64))
