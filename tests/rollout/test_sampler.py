import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headrace.errors import RunError
from headrace.rollout.engine import SamplingParams
from headrace.rollout.native.sampler import (
    AHEAD,
    Draws,
    Uniforms,
    check_sampling,
    inverse_cdf,
    ranked,
    sample,
    uniforms,
)


def dense(row: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The distribution SamplingParams documents, in float64: one row, no tensors, filters one after the other."""
    x = row.astype(np.float64) / p.temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    order = sorted(range(len(x)), key=lambda i: (-row[i], i))
    if p.top_k:
        for i in order[p.top_k :]:
            probs[i] = 0
        probs /= probs.sum()
    if p.top_p < 1:
        mass, kept = 0.0, []
        for i in order:
            kept.append(i)
            mass += probs[i]
            if mass >= p.top_p:
                break
        probs = np.where(np.isin(np.arange(len(x)), kept), probs, 0)
        probs /= probs.sum()
    if p.min_p > 0:
        probs[probs < p.min_p * probs.max()] = 0
        probs /= probs.sum()
    return probs


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.6, top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=3.0, top_p=0.97),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_k=10_000),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [40, 2500])
def test_logprobs_and_kept_sets_equal_a_dense_float64_computation(params: SamplingParams, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (2, vocab)).astype(np.float32)
    logits[1] = rng.normal(0, 0.01, vocab)  # nearly flat: top-p has to look at almost every token
    grid = (np.arange(700) + 0.5) / 700
    for row in logits:
        want = dense(row, params)
        plain = dense(row, SamplingParams(temperature=params.temperature))
        got = sample(torch.from_numpy(np.tile(row, (len(grid), 1))), params, grid)
        assert (want[got.token_ids] > 0).all()
        np.testing.assert_allclose(got.logprobs, np.log(want[got.token_ids]), atol=2e-6)
        np.testing.assert_allclose(got.untruncated_logprobs, np.log(plain[got.token_ids]), atol=2e-6)
        # an even grid of uniforms meets every kept token in proportion, to within one grid step at each end
        counts = np.bincount(got.token_ids, minlength=vocab)
        assert np.abs(counts - want * len(grid)).max() <= 2


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).repeat(100, 1)
    grid = (np.arange(100) + 0.5) / 100
    # 0.5 + 0.3 reaches 0.8 exactly, though not quite in float32; 0.81 needs the third
    for top_p, kept in [(0.8, {1, 2}), (0.5, {1}), (0.51, {1, 2}), (0.81, {0, 1, 2})]:
        assert set(sample(logits, SamplingParams(top_p=top_p), grid).token_ids.tolist()) == kept
    assert set(sample(logits, SamplingParams(min_p=0.6), grid).token_ids.tolist()) == {1, 2}
    assert set(sample(logits, SamplingParams(min_p=0.61), grid).token_ids.tolist()) == {1}


def test_among_equal_logits_exactly_k_are_kept_and_they_are_the_lowest_ids() -> None:
    logits = torch.zeros(200, 3000)
    logits[:, 700] = 1
    grid = (np.arange(200) + 0.5) / 200
    got = sample(logits, SamplingParams(top_k=4), grid)
    assert sorted(set(got.token_ids.tolist())) == [0, 1, 2, 700]
    assert got.logprobs[got.token_ids == 1][0] == pytest.approx(math.log(1 / (3 + math.e)))
    values, ids = ranked(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0]]), 4)
    assert (ids.tolist(), values.tolist()) == ([[1, 2, 4, 3]], [[3, 3, 3, 2]])


def test_greedy_reports_temperature_one_and_ignores_filters() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 0.0]])
    got = sample(logits, SamplingParams(temperature=0, top_k=1, top_p=0.1), np.array([0.9, 0.9]))
    assert got.token_ids.tolist() == [1, 0]
    want = [2 - math.log(math.e + math.e**2 + math.e**0.5), -math.log(2 + math.exp(-1))]
    np.testing.assert_allclose(got.logprobs, want, atol=1e-6)
    np.testing.assert_allclose(got.untruncated_logprobs, want, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_forbidden_ids_are_renormalised_away_only_in_their_rows(temperature: float) -> None:
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1]])).repeat(2, 1)
    forbidden = (torch.tensor([True, False]), torch.tensor([0]))
    got = sample(logits, SamplingParams(temperature=temperature), np.array([0.0, 0.0]), forbidden)
    assert got.token_ids.tolist() == [1, 0]
    p = np.array([0.6, 0.3, 0.1]) ** (1 / (temperature or 1))
    np.testing.assert_allclose(np.exp(got.logprobs), [p[1] / (p[1] + p[2]), p[0] / p.sum()], rtol=1e-6)
    np.testing.assert_allclose(np.exp(got.untruncated_logprobs), [p[1] / p.sum(), p[0] / p.sum()], rtol=1e-6)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.85), SamplingParams(top_k=6)],
    ids=str,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    row = np.random.default_rng(5).normal(0, 1.2, 12).astype(np.float32)
    n = 20_000
    seeds = np.arange(n, dtype=np.uint64)  # neighbouring seeds, the least favourable case
    uniform = uniforms(seeds, np.full(n, 3))
    got = sample(torch.from_numpy(np.tile(row, (n, 1))), params, uniform)
    want = dense(row, params)
    kept = want > 0
    counts = np.bincount(got.token_ids, minlength=len(row))
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], want[kept] * n).pvalue > 1e-3


def test_uniforms_are_uniform_and_independent_of_the_batch() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(200)
    positions = np.tile(np.arange(200), 200)
    u = uniforms(seeds, positions)
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert (u >= 0).all()
    assert (u < 1).all()
    assert len(np.unique(u)) == len(u)
    grid = u.reshape(200, 200)
    for a, b in [(grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])]:  # next seed, next position
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / math.sqrt(a.size)
    some = np.array([7, 39_999, 123])
    np.testing.assert_array_equal(uniforms(seeds[some], positions[some]), u[some])


def test_uniforms_by_hand() -> None:
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    # splitmix64's published first output for seed 0
    assert mix(golden) == 0xE220A8397B1DCDAF
    for seed, position in [(0, 0), (2**64 - 1, 5), (12345, 2**20)]:
        want = (mix((mix((seed + golden) % 2**64) + (position + 1) * golden) % 2**64) >> 11) / 2**53
        assert uniforms(np.array([seed], dtype=np.uint64), np.array([position]))[0] == want


def test_numbers_worked_out_ahead_are_those_of_their_samples_and_positions() -> None:
    """Samples that start late, pause and end, in any order."""
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**63, 7).astype(np.uint64)
    ahead, count = Uniforms(seeds), np.zeros(7, dtype=np.int64)
    while count.min() < 2 * AHEAD + 3:
        who = rng.permutation(7)[: rng.integers(1, 8)]
        np.testing.assert_array_equal(ahead.of(who, count[who]), uniforms(seeds[who], count[who]))
        count[who] += 1


def test_parts_of_a_step_are_joined_in_order() -> None:
    parts = [Draws(np.array([i]), np.array([-1.0 - i]), np.array([-2.0 - i])) for i in range(3)]
    joined = Draws.join(parts)
    assert joined.token_ids.tolist() == [0, 1, 2]
    assert joined.logprobs.tolist() == [-1, -2, -3]
    assert joined.untruncated_logprobs.tolist() == [-2, -3, -4]


def test_two_level_inverse_cdf_equals_a_flat_float64_one() -> None:
    rng = np.random.default_rng(1)
    vocab, rows = 50_257, 64
    weights = np.exp(rng.normal(0, 2, (rows, vocab))).astype(np.float32)
    weights[:, rng.integers(0, vocab, 30_000)] = 0
    u = rng.random(rows)
    u[:4] = [0.0, 1 - 2**-53, 2**-53, 0.5]
    index, total = (x[:, 0] for x in inverse_cdf(torch.from_numpy(weights), torch.from_numpy(u[:, None])))
    running = np.cumsum(weights.astype(np.float64), 1)
    np.testing.assert_allclose(total.numpy(), running[:, -1], rtol=1e-6)
    want = np.array([np.searchsorted(running[r] / running[r, -1], u[r], side="right") for r in range(rows)])
    want = np.minimum(want, [np.nonzero(w)[0].max() for w in weights])
    # sums of blocks and a running sum round differently: a token off only where u sits on a boundary
    near = np.abs(running[np.arange(rows), np.minimum(index.numpy(), want)] / running[:, -1] - u)
    assert ((index.numpy() == want) | (near < 1e-12)).all()
    assert (weights[np.arange(rows), index.numpy()] > 0).all()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 1e-30, 1e-7, 3.0]), min_size=1, max_size=40).filter(any),
    st.sampled_from([1, 30, 100]),
    st.one_of(st.sampled_from([0.0, 1 - 2**-53, 0.5, 2**-53]), st.floats(0, 1, exclude_max=True)),
)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], repeat: int, u: float) -> None:
    row = np.repeat(np.array(weights, dtype=np.float32), repeat)  # up to 4000 entries: both code paths
    index, _ = inverse_cdf(torch.from_numpy(row)[None], torch.tensor([[u]], dtype=torch.float64))
    assert row[int(index)] > 0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 1, (9, 3000)).astype(np.float32))
    logits[0] *= 20  # peaked: alone, its top-p set is found among the first ranks
    u = rng.random(9)
    for params in (SamplingParams(), SamplingParams(top_p=0.95), SamplingParams(top_k=50, min_p=0.01)):
        together = sample(logits, params, u)
        for r in range(9):
            alone = sample(logits[r : r + 1], params, u[r : r + 1])
            assert alone.token_ids[0] == together.token_ids[r]
            assert alone.logprobs[0] == pytest.approx(together.logprobs[r], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.9)], ids=str
)
def test_broken_logits_are_reported(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(2, 600)
    logits[1, 5] = bad
    with pytest.raises(RunError, match="not finite"):
        sample(logits, params, np.array([0.3, 0.3]))


def test_every_wrong_setting_is_named() -> None:
    wrong = SamplingParams(
        temperature=-1, top_k=-1, top_p=0, min_p=2, max_new_tokens=0, min_new_tokens=3, stop=("a", "")
    )
    keys = [p.split(":")[0] for p in check_sampling(wrong)]
    names = ["temperature", "top_k", "top_p", "min_p", "max_new_tokens", "min_new_tokens", "stop"]
    assert keys == [f"rollout.{n}" for n in names]
    assert check_sampling(SamplingParams()) == []
