"""Whitening of advantages over the tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x [N] shifted and scaled to mean 0 and sample standard deviation (n - 1) 1 over mask [N] bool.

    0 outside the mask, whatever x holds there. All zeros with fewer than two masked values, or when they
    differ by no more than the rounding of x's dtype. Computed in float64, returned in x's dtype, detached.
    """
    out = torch.zeros_like(x)
    picked = x[mask].double()
    if len(picked) < 2:
        return out
    spread = picked.max() - picked.min()
    if spread <= 4 * torch.finfo(x.dtype).eps * picked.abs().max():
        return out
    out[mask] = ((picked - picked.mean()) / picked.std()).to(x.dtype)
    return out
