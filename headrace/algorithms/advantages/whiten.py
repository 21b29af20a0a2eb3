"""Whitening of advantages over the tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.moments import moments
from headrace.stages import ALONE, DataRanks


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, ranks: DataRanks = ALONE) -> Tensor:
    """x [N] shifted and scaled to mean 0 and sample standard deviation (n - 1) 1 over mask [N] bool, of all `ranks`.

    0 outside the mask, whatever x holds there. All zeros with fewer than two masked values, or when they
    differ by no more than the rounding of x's dtype. Computed in float64, returned in x's dtype, detached.
    """
    out = torch.zeros_like(x)
    picked = x[mask].double()
    found = moments(picked, ranks)
    if found.count < 2 or found.high - found.low <= 4 * torch.finfo(x.dtype).eps * max(
        abs(found.low), abs(found.high)
    ):
        return out
    out[mask] = ((picked - found.mean) / found.std(correction=1)).to(x.dtype)
    return out
