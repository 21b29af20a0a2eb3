import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe import metrics
from headrace.observe.metrics import METRICS, MetricSums, check_names, describe, register

CLIP = "actor/clip_fraction"


def test_means_are_pooled_over_counts():
    """3 of 12 on one worker and 3 of 4 on another are 6 of 16."""
    one, other = MetricSums(), MetricSums()
    one.add(CLIP, 3, 12)
    other.add(CLIP, torch.tensor(3.0), 4)
    one.merge(other)
    assert one.means() == {CLIP: 0.375}


def test_a_count_of_zero_leaves_the_metric_out():
    sums = MetricSums()
    sums.add(CLIP, torch.tensor(0.0), 0)
    sums.add("actor/kl", 0.0, torch.tensor(0))
    sums.add("actor/entropy", 2.0, 1)
    assert sums.means() == {"actor/entropy": 2.0}


def test_a_total_may_come_apart_from_its_count():
    """Two updates of two micro-batches each: losses 0.5 + 1.0 and 2.0 + 0.5, mean 2.0 per update."""
    sums = MetricSums()
    for micro_losses in ((0.5, 1.0), (2.0, 0.5)):
        for loss in micro_losses:
            sums.add("actor/loss", torch.tensor(loss), 0)
        sums.add("actor/loss", 0.0, 1)
    assert sums.means() == {"actor/loss": 2.0}


def test_totals_are_not_divided_and_extremes_are_kept():
    one, other = MetricSums(), MetricSums()
    one.add_total("rollout/tokens", 5)
    other.add_total("rollout/tokens", torch.tensor(7))
    one.add_max("reward/max", -2.0)
    other.add_max("reward/max", torch.tensor(-3.0))
    one.add_min("reward/min", torch.tensor(-2.0))
    other.add_min("reward/min", -3.0)
    other.add_min("reward/min", 5.0)
    one.merge(other)
    assert one.means() == {"rollout/tokens": 12.0, "reward/max": -2.0, "reward/min": -3.0}


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0), (torch.tensor(math.nan), 1.0)])
def test_an_extreme_does_not_hide_nan(values):
    sums = MetricSums()
    for value in values:
        sums.add_max("reward/max", value)
        sums.add_min("reward/min", value)
    assert math.isnan(sums.means()["reward/max"])
    assert math.isnan(sums.means()["reward/min"])


def test_nan_that_was_measured_is_reported():
    sums = MetricSums()
    sums.add("actor/loss", torch.tensor(math.nan), 1)
    assert math.isnan(sums.means()["actor/loss"])


def test_adding_never_reads_a_tensor(monkeypatch):
    """No wait for the device per micro-batch: any read of a tensor's value while adding is an error here."""

    def refuse(*_args):
        pytest.fail("a tensor was read before means()")

    sums = MetricSums()
    with monkeypatch.context() as patch:
        for read in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
            patch.setattr(torch.Tensor, read, refuse)
        for _ in range(2):
            sums.add(CLIP, torch.ones(()), torch.tensor(2))
            sums.add_max("reward/max", torch.ones(()))
            sums.add_total("rollout/tokens", torch.ones(()))
        other = MetricSums()
        other.merge(sums)
    assert other.means() == {CLIP: 0.5, "reward/max": 1.0, "rollout/tokens": 2.0}


def test_autograd_graphs_are_not_kept():
    weight = torch.ones((), requires_grad=True)
    sums = MetricSums()
    sums.add("actor/loss", weight * 2)
    sums.add_max("reward/max", weight * 2)
    assert all(not v.requires_grad for v in sums._values.values() if isinstance(v, torch.Tensor))


def test_bfloat16_totals_do_not_lose_small_terms():
    """256 + 1 is 256 in bfloat16; summed 64 times it would stay there."""
    sums = MetricSums()
    sums.add("actor/loss", torch.tensor(256.0, dtype=torch.bfloat16))
    for _ in range(64):
        sums.add("actor/loss", torch.tensor(1.0, dtype=torch.bfloat16), 0)
    assert sums.means() == {"actor/loss": 320.0}


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_any_split_pools_to_the_same_mean(parts, cut):
    halves = MetricSums(), MetricSums()
    for index, (total, count, as_tensor) in enumerate(parts):
        halves[index < cut].add(CLIP, torch.tensor(total) if as_tensor else total, count)
    halves[0].merge(halves[1])
    tokens = sum(count for _, count, _ in parts)
    expected = {CLIP: float(Fraction(sum(t for t, _, _ in parts), tokens))} if tokens else {}
    assert halves[0].means() == pytest.approx(expected)


@pytest.mark.parametrize("method", ["add", "add_max", "add_total"])
def test_undocumented_names_and_vectors_are_refused(method):
    sums = MetricSums()
    with pytest.raises(ValueError, match="actor/klll"):
        getattr(sums, method)("actor/klll", 1.0)
    with pytest.raises(ValueError, match=r"actor/kl.*\(2,\)"):
        getattr(sums, method)("actor/kl", torch.ones(2))


def test_negative_counts_and_mixed_kinds_are_refused():
    sums = MetricSums()
    with pytest.raises(ValueError, match="negative"):
        sums.add(CLIP, 1.0, -1)
    sums.add(CLIP, 1.0, 1)
    with pytest.raises(ValueError, match="is a mean; it cannot be a maximum"):
        sums.add_max(CLIP, 1.0)


def test_parts_of_names_stand_for_any_name_and_exact_names_come_first():
    assert describe("reward/part/format_ok").name == "reward/part/<name>"
    assert describe("time/my-stage_s").name == "time/<stage>_s"
    assert describe("time/eval_s").name == "time/eval_s"
    for wrong in ("reward/part/", "reward/part/a/b", "reward/part/a b", "time/rollout", "reward"):
        with pytest.raises(ValueError, match="not documented"):
            check_names([wrong])


def test_user_metrics_are_registered_once(monkeypatch):
    monkeypatch.setattr(metrics, "METRICS", dict(METRICS))
    with pytest.raises(ValueError, match="not documented"):
        describe("tools/search/calls")
    register("tools/<tool>/calls", "calls", "Calls of one tool.")
    assert describe("tools/search/calls").unit == "calls"
    register("tools/<tool>/calls", "calls", "Calls of one tool.")
    with pytest.raises(ValueError, match="already registered"):
        register("tools/<tool>/calls", "s", "Something else.")
    with pytest.raises(ValueError, match="area/name"):
        register("calls", "calls", "No area.")
    assert "tools/" not in metrics.markdown()
    describe.cache_clear()


def test_every_metric_has_a_unit_that_fits_its_name():
    """Times end in _s, bytes in _bytes, ratios of a whole in _fraction."""
    for metric in METRICS.values():
        assert metric.unit, metric
        assert metric.meaning.endswith("."), metric
        assert (metric.unit == "s") == (metric.name.endswith("_s") and not metric.name.endswith("per_s")), (
            metric
        )
        assert (metric.unit == "bytes") == metric.name.endswith("_bytes"), metric
        if metric.name.endswith("_fraction"):
            assert metric.unit == "fraction", metric
