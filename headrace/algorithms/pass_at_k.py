"""pass@k: the probability that at least one of k samples is correct (Chen et al. 2021, arXiv:2107.03374)."""

from __future__ import annotations

from math import comb


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) for one problem with `correct` c of `samples` n (equation 1).

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} cannot be estimated from {correct} correct of {samples} samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
