from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.rollout.native.scheduler import Sample, Scheduler, Step


class Model:
    """Stands for the engine: keeps what a KV cache would hold as text, and checks every step against it.

    Slot contents are (request, position, sample or None); a sample must find exactly its own history.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.memory: dict[tuple[int, int], object] = {}
        self.held: int | None = None

    def expected(self, sample: Sample, position: int) -> object:
        shared = position < sample.prompt_tokens
        return (sample.request, position, None if shared else sample.id)

    def run(self, step: Step) -> list[Sample]:
        size = self.scheduler.block_size
        read = [{i: self.memory.get((a, i)) for i in range(size)} for a, _ in step.copies]
        for (_, b), content in zip(step.copies, read, strict=True):
            for i in range(size):
                self.memory[b, i] = content[i]
        before = self.held
        for prefill in step.prefills:
            first = prefill.samples[0]
            assert prefill.tokens == first.tokens
            assert len(prefill.samples) == 1 or all(s.generated == 0 for s in prefill.samples)
            for position in range(prefill.tokens):
                block = prefill.blocks[position // size]
                self.memory[block, position % size] = self.expected(first, position)
            if prefill.keep:
                self.held = first.request
        for sample in step.forks:
            assert sample.request == before
            assert sample.generated == 0
        for sample in step.decodes:
            last = sample.tokens - 1
            block = sample.blocks[last // size]
            assert not self.scheduler.blocks.is_shared(block)
            self.memory[block, last % size] = self.expected(sample, last)
            for position in range(sample.tokens):
                found = self.memory[sample.blocks[position // size], position % size]
                assert found == self.expected(sample, position)
        return [*step.decodes, *step.forks, *(s for p in step.prefills for s in p.samples)]


@st.composite
def situations(draw: st.DrawFn) -> dict:
    block = draw(st.integers(1, 5))
    max_new = draw(st.integers(1, 12))
    requests = draw(st.lists(st.tuples(st.integers(1, 14), st.integers(0, 5)), min_size=1, max_size=6))
    least = max(-(-(p + max_new - 1) // block) for p, _ in requests)
    total = sum(n for _, n in requests)
    return {
        "requests": requests,
        "max_new": max_new,
        "num_blocks": least + draw(st.sampled_from([0, 0, 1, 2, 5, 30])),
        "block": block,
        "concurrent": draw(st.integers(1, 8)),
        "prefill": draw(st.sampled_from([1, 8, 1000])),
        "lengths": draw(st.lists(st.integers(1, max_new), min_size=total, max_size=total)),
    }


@settings(max_examples=300, deadline=None)
@given(situations())
def test_every_sample_finishes_with_its_own_history_and_no_block_leaks(s: dict) -> None:
    scheduler = Scheduler(
        s["requests"],
        max_new_tokens=s["max_new"],
        num_blocks=s["num_blocks"],
        block_size=s["block"],
        max_concurrent=s["concurrent"],
        max_prefill_tokens=s["prefill"],
    )
    model = Model(scheduler)
    made: Counter[int] = Counter()
    steps = 0
    while scheduler.unfinished:
        lowest = min(x.id for x in scheduler.samples if made[x.id] < s["lengths"][x.id])
        step = scheduler.schedule()
        assert len(scheduler.running) <= s["concurrent"]
        assert len({x.row for x in scheduler.running}) == len(scheduler.running)
        assert all(0 <= x.row < s["concurrent"] for x in scheduler.running)
        assert scheduler.blocks.num_used <= s["num_blocks"]
        fresh = sum(p.tokens for p in step.prefills)
        assert fresh <= s["prefill"] or len(step.prefills) == 1
        got = model.run(step)
        assert len({x.id for x in got}) == len(got) > 0
        # no starvation: the lowest unfinished sample gets a token in every step
        assert lowest in {x.id for x in got}
        made.update(x.id for x in got)
        scheduler.complete(step, [x for x in got if made[x.id] == s["lengths"][x.id]])
        steps += 1
    assert [made[x.id] for x in scheduler.samples] == s["lengths"]
    assert steps <= sum(s["lengths"])
    assert scheduler.blocks.num_used == 0


def make(requests: list[tuple[int, int]], **changes: int) -> Scheduler:
    values = {
        "max_new_tokens": 8,
        "num_blocks": 64,
        "block_size": 4,
        "max_concurrent": 16,
        "max_prefill_tokens": 64,
    }
    return Scheduler(requests, **{**values, **changes})


def test_siblings_share_the_prompt_and_copy_only_its_partial_block() -> None:
    scheduler = make([(10, 4)])
    step = scheduler.schedule()
    assert [(len(p.samples), p.tokens) for p in step.prefills] == [(4, 10)]
    assert scheduler.blocks.num_used == 3  # 10 tokens in blocks of 4, once for all
    scheduler.complete(step, [])
    step = scheduler.schedule()
    # two full blocks shared; the third is copied three times, the last sample keeps the original
    assert (len(step.copies), scheduler.blocks.num_used) == (3, 2 + 4)
    assert len({s.blocks[2] for s in step.decodes}) == 4
    assert len({tuple(s.blocks[:2]) for s in step.decodes}) == 1


def test_late_siblings_are_forked_without_a_second_prefill() -> None:
    scheduler = make([(10, 5)], max_concurrent=2)
    prefilled = forked = 0
    while scheduler.unfinished:
        step = scheduler.schedule()
        prefilled += len(step.prefills)
        forked += len(step.forks)
        got = [*step.decodes, *step.forks, *(s for p in step.prefills for s in p.samples)]
        scheduler.complete(step, [s for s in got if s.generated + 1 == s.id + 1])
    assert (prefilled, forked) == (1, 3)
    assert scheduler.blocks.num_used == 0


def test_the_youngest_is_preempted_and_recomputed_with_what_it_had() -> None:
    # each needs 2 + 2 blocks in the end; the cache has 5
    scheduler = make([(8, 1), (8, 1)], num_blocks=5)
    tokens_of_prefills = []
    while scheduler.unfinished:
        step = scheduler.schedule()
        tokens_of_prefills += [(p.samples[0].id, p.tokens) for p in step.prefills]
        got = [*step.decodes, *(s for p in step.prefills for s in p.samples)]
        scheduler.complete(step, [s for s in got if s.generated == 7])
    # with one block kept free for each, the second one waits; nothing is computed twice
    assert tokens_of_prefills == [(0, 8), (1, 8)]
    scheduler = make([(5, 1), (5, 1)], num_blocks=6, max_new_tokens=16)
    recomputed = []
    while scheduler.unfinished:
        step = scheduler.schedule()
        recomputed += [(p.samples[0].id, p.tokens) for p in step.prefills if p.samples[0].generated]
        got = [*step.decodes, *(s for p in step.prefills for s in p.samples)]
        scheduler.complete(step, [s for s in got if s.generated == 15])
    # sample 1 loses its blocks when both are 12 tokens long (3 blocks each) and want a fourth
    assert scheduler.preemptions == 1
    assert recomputed == [(1, 13)]


def test_a_request_that_can_never_fit_is_refused_by_name() -> None:
    make([(5, 1)], num_blocks=3)  # 5 + 8 - 1 = 12 tokens, exactly 3 blocks
    with pytest.raises(
        ConfigError, match=r"rollout\.kv_cache_tokens: request 1 may need 13 tokens \(4 blocks of 4\)"
    ):
        make([(5, 1), (6, 1)], num_blocks=3)
