"""pass@k by hand, by enumeration, and as an unbiased estimate."""

from __future__ import annotations

import itertools
from math import comb

import pytest

from headrace.algorithms.pass_at_k import pass_at_k


def test_by_hand() -> None:
    """4 samples, 1 correct: one draw hits it in 1 of 4 cases, two draws in 3 of 6 pairs."""
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(3, 2, 2) == 1.0  # fewer wrong ones than draws


@pytest.mark.parametrize("n", range(1, 8))
def test_is_the_share_of_subsets_with_a_correct_one(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(range(n), k))
            hits = sum(min(subset) < c for subset in subsets)  # the first c are correct
            assert pass_at_k(n, c, k) == pytest.approx(hits / len(subsets), abs=1e-15)


def test_is_unbiased() -> None:
    """Its mean over binomial c is 1 - (1 - p)^k; the naive 1 - (1 - c/n)^k would be too low."""
    n, p = 10, 0.15
    for k in (1, 2, 4, 8):
        mean = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, rel=1e-12)


def test_large_numbers_are_exact() -> None:
    assert pass_at_k(10_000, 1, 5_000) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_nonsense_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(n, c, k)
