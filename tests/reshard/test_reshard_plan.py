"""The planner against brute force over single elements, and on cases worked by hand."""

import collections
import time

import numpy as np
import pytest
import torch
from brute import elements, numbered, pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from headrace.errors import ConfigError
from headrace.reshard.box import Box
from headrace.reshard.layout import Layout, Mesh, Parameter, pieces_from
from headrace.reshard.plan import plan
from headrace.reshard.schedule import ALIGN, buckets


@settings(max_examples=400, deadline=None)
@given(pairs())
def test_every_missing_element_comes_once_from_a_rank_that_has_it(case):
    source, target, hosts = case
    ranks = range(source.world)
    complete = all(
        elements(target, n, r) <= set().union(*(elements(source, n, k) for k in ranks))
        for n in target.parameters
        for r in ranks
    )
    if not complete:
        with pytest.raises(ConfigError, match="no rank of the source holds"):
            plan(source, target, hosts)
        return
    made = plan(source, target, hosts)
    filled = {  # what each rank ends with, starting from nothing
        (n, r): np.full(numbered(p.shape, box).shape, -1)
        for n, p in target.parameters.items()
        for r in ranks
        if (box := target.box(n, r)) is not None
    }

    def put(name, rank, box):
        part = filled[name, rank][(*box.within(target.box(name, rank)), ...)]
        assert (part == -1).all(), "an element came twice"
        part[...] = numbered(target.parameters[name].shape, box)

    for rank in ranks:
        for alias in made.aliases(rank):
            assert source.box(alias.name, rank).contains(alias.box)
            put(alias.name, rank, alias.box)
    sent, received = np.zeros((2, source.world), dtype=int)
    for t in made.transfers():
        moved = set(numbered(target.parameters[t.name].shape, t.box).ravel().tolist())
        assert moved
        assert moved <= elements(source, t.name, t.sender), "the sender lacks it"
        assert not moved & elements(source, t.name, t.receiver), "the receiver has it"
        if hosts is not None and hosts[t.sender] != hosts[t.receiver]:
            near = [r for r in ranks if hosts[r] == hosts[t.receiver]]
            assert not any(moved <= elements(source, t.name, r) for r in near), "a nearer rank has it"
        put(t.name, t.receiver, t.box)
        sent[t.sender] += t.nbytes
        received[t.receiver] += t.nbytes
    for (name, rank), values in filled.items():
        assert (values == numbered(target.parameters[name].shape, target.box(name, rank))).all()
    least = sum(
        len(elements(target, n, r) - elements(source, n, r))
        * min(target.parameters[n].dtype.itemsize, source.parameters[n].dtype.itemsize)
        for n in target.parameters
        for r in ranks
    )
    assert made.bytes_moved == made.bytes_minimum == least
    assert made.sent_bytes.tolist() == sent.tolist()
    assert made.received_bytes.tolist() == received.tolist()


@settings(max_examples=200, deadline=None)
@given(pairs(), st.integers(1, 4000))
def test_buckets_hold_every_element_once_and_stay_within_their_bound(case, bucket_bytes):
    try:
        made = plan(*case)
        schedule = buckets(made, bucket_bytes)
    except ConfigError:
        return
    spans = {}
    for items in schedule:
        messages = collections.Counter()
        for item in items:
            entry = made.entries[item.entry]
            for t, elements_of in enumerate(entry.pairing.elements.tolist()):
                begin, end = item.span(elements_of)
                spans.setdefault((item.entry, t), []).append((begin, end))
                ends = int(entry.phase.sender[t]), int(entry.pairing.receiver[t])
                messages[ends] += (end - begin) * entry.wire_dtype.itemsize
        staged = np.zeros((2, made.world))
        for ends, nbytes in messages.items():
            for direction, rank in enumerate(ends):
                staged[direction, rank] += -(-nbytes // ALIGN) * ALIGN
        assert staged.max() <= bucket_bytes / 2
    for index, entry in enumerate(made.entries):
        for t, n in enumerate(entry.pairing.elements.tolist()):
            covered = sorted(span for span in spans[index, t] if span[0] < span[1])
            assert [b for b, _ in covered] == [0, *(e for _, e in covered[:-1])]
            assert covered[-1][1] == n


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.data())
def test_a_flat_range_is_that_range(shape, data):
    n = int(np.prod(shape))
    begin = data.draw(st.integers(0, n))
    end = data.draw(st.integers(begin, n))
    offset = data.draw(st.integers(0, 3))
    box = Box((offset,) * len(shape), tuple(offset + s for s in shape))
    whole = np.arange(n).reshape(shape)
    found = [whole[b.within(box)].ravel() for b in box.flat_range(begin, end)]
    assert len(found) <= 2 * len(shape) - 1
    assert np.concatenate([*found, np.zeros(0, int)]).tolist() == list(range(begin, end))


def layout(
    axes, placements, shape=(8, 4), names=("w",), dtype=torch.float32, world=None, ranks=None, tied=None
):
    described = dict.fromkeys(names, (shape, dtype))
    return Layout.on_mesh(described, Mesh(axes, ranks), placements, world=world, tied=tied)


def moves(made):
    return sorted((t.name, t.sender, t.receiver, t.box.start, t.box.stop) for t in made.transfers())


def test_equal_layouts_move_nothing_and_are_views():
    same = layout({"dp": 2, "tp": 2}, {"tp": Shard(0)})
    made = plan(same, layout({"dp": 2, "tp": 2}, {"tp": Shard(0)}))
    assert (made.bytes_moved, made.new_bytes.tolist(), moves(made)) == (0, [0] * 4, [])
    assert [(a.box, a.view) for a in made.aliases(3)] == [(Box((4, 0), (8, 4)), True)]


def test_less_tensor_parallelism_within_micro_groups():
    """HybridFlow's grouping, tp 4 → tp 2 on 8 ranks: each rank keeps its quarter and gets the other one of its half.

    32 elements of 4 bytes; a quarter is 32 bytes. In the rollout ranks 0 and 1 hold rows 0-4, ranks 2 and 3 rows 4-8.
    """
    train = layout({"dp": 2, "tp": 4}, {"tp": Shard(0)})
    rollout = layout({"dp": 2, "tp": 2, "micro": 2}, {"tp": Shard(0)})
    made = plan(train, rollout)
    assert made.bytes_moved == made.bytes_minimum == 8 * 32
    assert made.sent_bytes.tolist() == made.received_bytes.tolist() == [32] * 8
    assert moves(made) == sorted(
        ("w", sender, receiver, (2 * (sender % 4), 0), (2 * (sender % 4) + 2, 4))
        for a, b in [(0, 1), (2, 3), (4, 5), (6, 7)]
        for sender, receiver in [(a, b), (b, a)]
    )


def test_uneven_zero3_to_whole():
    """5 rows over 4 ranks: 2, 2, 1 and none; each rank gets the rows of the others."""
    train = layout({"dp": 4}, {"dp": Shard(0)}, shape=(5, 2))
    assert [train.box("w", r).shape for r in range(4)] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    made = plan(train, layout({"dp": 4}, {}, shape=(5, 2)))
    assert made.received_bytes.tolist() == [3 * 8, 3 * 8, 4 * 8, 5 * 8]
    assert made.sent_bytes.tolist() == [2 * 8 * 3, 2 * 8 * 3, 8 * 3, 0]


def test_a_rank_with_all_of_it_needs_nothing():
    made = plan(layout({"dp": 4}, {}), layout({"tp": 4}, {"tp": Shard(1)}))
    assert made.bytes_moved == 0
    assert made.new_bytes.tolist() == [0] * 4  # columns of what is there: views


def test_casting_down_is_done_by_the_sender_and_up_by_the_receiver():
    """3 of 4 quarters of 32 elements to each of 4 ranks, in bfloat16 both ways; casts of held parts are no views."""
    for here, there in [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]:
        made = plan(layout({"dp": 4}, {"dp": Shard(0)}, dtype=here), layout({"dp": 4}, {}, dtype=there))
        assert made.bytes_moved == made.bytes_minimum == 4 * 24 * 2
        assert made.new_bytes.tolist() == [32 * there.itemsize] * 4
        assert not made.aliases(0)[0].view


def test_holders_take_turns():
    """4 ranks hold everything, rank 4 needs it: each sends two of the eight parameters."""
    names = tuple(f"p{i}" for i in range(8))
    made = plan(
        layout({"dp": 4}, {}, names=names, world=5), layout({"tp": 1}, {}, names=names, world=5, ranks=[4])
    )
    assert made.sent_bytes.tolist() == [2 * 128] * 4 + [0]


def test_holders_share_one_parameter():
    """4 ranks hold everything, ranks 4-7 need a quarter each: every holder sends one."""
    made = plan(layout({"dp": 4}, {}, world=8), layout({"tp": 4}, {"tp": Shard(0)}, ranks=[4, 5, 6, 7]))
    assert made.sent_bytes.tolist() == [32] * 4 + [0] * 4


def test_a_holder_on_the_same_host_sends():
    """Whole copies on ranks 0 (host a) and 3 (host b); 1, 2 are on a and 4, 5 on b."""
    source = layout({"dp": 2}, {}, ranks=[0, 3], world=6)
    made = plan(source, layout({"dp": 4}, {}, ranks=[1, 2, 4, 5], world=6), hosts=list("aaabbb"))
    assert [(s, r) for _, s, r, *_ in moves(made)] == [(0, 1), (0, 2), (3, 4), (3, 5)]


def test_a_tied_storage_moves_once():
    """Embedding on stage 0, its other name on stage 1, both with all of the weight: to rank 2, once."""
    described = {"embed": ((8, 4), torch.float32), "head": ((8, 4), torch.float32)}
    stages = {"embed": [0], "head": [1]}.__getitem__
    tied = {"head": "embed"}
    source = Layout.on_mesh(described, Mesh({"pp": 2}), {}, stages=stages, tied=tied, world=3)
    assert [source.box("head", r) is None for r in range(3)] == [False, False, True]
    target = Layout.on_mesh(described, Mesh({"dp": 1}, [2]), {}, tied=tied, world=3)
    made = plan(source, target)
    assert made.bytes_moved == made.bytes_minimum == 128
    assert made.entries[0].target_names == ("embed", "head")
    untied = Layout.on_mesh(described, Mesh({"dp": 1}, [2]), {}, world=3)
    assert plan(source, untied).bytes_moved == 256  # two storages


def test_everything_wrong_is_said_at_once():
    shape = {"a": (4, 4), "b": (4, 4), "c": (2,), "h": (2,)}
    source = Layout(
        2,
        {
            n: Parameter(s, torch.float32, pieces_from({0: Box((0,) * len(s), s)}, s, 2))
            for n, s in shape.items()
        },
    )
    other = {**shape, "b": (4, 5), "d": (3,)}
    target = Layout.on_mesh(
        {n: (s, torch.float32) for n, s in other.items() if n != "h"}, Mesh({"dp": 2}), {}, tied={"h": "c"}
    )
    with pytest.raises(ConfigError) as caught:
        plan(source, target)
    assert len(caught.value.violations) == 3
    for part in ("parameter d: the target layout has it", "parameter b: of shape", "parameters h and c"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="the target layout 3"):
        plan(source, layout({"dp": 3}, {}))
    with pytest.raises(ConfigError, match="hosts: 1 for 2"):
        plan(source, source, hosts=["a"])


def test_a_bucket_that_is_too_small_is_refused_with_the_size_that_is_not():
    made = plan(layout({"dp": 4}, {"dp": Shard(0)}), layout({"dp": 4}, {}))
    with pytest.raises(ConfigError, match="at least") as caught:
        buckets(made, 64)
    assert buckets(made, int(str(caught.value).split()[-1]))


def test_a_plan_for_a_thousand_ranks_takes_seconds():
    """1,024 ranks, 500 parameters; 5 seconds of CPU are several times what it takes."""
    names = {f"layers.{i}.{kind}": kind for i in range(250) for kind in ("column", "row")}
    described = dict.fromkeys(names, ((4096, 1024), torch.bfloat16))
    table = {"*.column": 0, "*.row": 1}
    started = time.process_time()
    source = Layout.parallel(described, Mesh({"dp": 128, "tp": 8}), tp=table, zero3="dp")
    made = plan(
        source,
        Layout.parallel(described, Mesh({"dp": 128, "tp": 8}), tp=table),
        [r // 8 for r in range(1024)],
    )
    schedule = buckets(made, 1 << 30)
    assert time.process_time() - started < 5
    # each rank needs an eighth of every parameter and has a 1,024th
    each = 500 * 4096 * 1024 * 2 * (1 / 8 - 1 / 1024)
    assert made.received_bytes.tolist() == made.sent_bytes.tolist() == [each] * 1024
    assert made.bytes_moved == made.bytes_minimum
    assert len(schedule) == -(-each // (1 << 29))


def test_replicate_is_the_default():
    assert layout({"dp": 2}, {"dp": Replicate()}).fingerprint == layout({"dp": 2}, {}).fingerprint
