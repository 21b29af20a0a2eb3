"""Who runs in the next step: a state machine over numbers, with no tensors in it.

Samples are numbered in the order of the requests, and every decision follows that number: the lowest waiting
sample is admitted first, and when blocks run out the highest running one is preempted. So the running
samples always come before the waiting ones, the lowest unfinished sample is never interrupted, and all finish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.errors import ConfigError, RunError
from headrace.rollout.native.kv_cache import BlockAllocator


@dataclass(slots=True)
class Sample:
    """One response in the making. `row` is its place in the block table while it runs, else -1."""

    id: int
    request: int
    prompt_tokens: int
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0  # tokens it may store before it has to ask for a block
    row: int = -1

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated


@dataclass(slots=True)
class Prefill:
    """A sequence to be computed from scratch; its last hidden state gives the next token of all `samples`.

    More than one sample means siblings that have generated nothing yet and share the prompt's blocks. `keep`
    asks for the last hidden state to be kept: more siblings are waiting and will be forked from it.
    """

    samples: list[Sample]
    tokens: int
    blocks: list[int]
    keep: bool


@dataclass(slots=True)
class Step:
    """What one forward pass does. The samples of all three lists get one token each."""

    decodes: list[Sample] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    forks: list[Sample] = field(default_factory=list)  # start from the kept hidden state of their prompt
    copies: list[tuple[int, int]] = field(
        default_factory=list
    )  # blocks (from, to) to copy before the forward pass
    grown: list[Sample] = field(default_factory=list)  # decodes whose last block is new


class Scheduler:
    """Decides step by step; `schedule` and `complete` alternate until `unfinished` is 0."""

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        *,
        max_new_tokens: int | Sequence[int],
        num_blocks: int,
        block_size: int,
        max_concurrent: int,
        max_prefill_tokens: int,
    ) -> None:
        """`requests`: (prompt tokens, samples) of each; `max_new_tokens` of all, or of each. `max_prefill_tokens`
        bounds the prefills of one step, though a single longer one still runs alone.

        Raises ConfigError naming rollout.kv_cache_tokens when a request could never fit.
        """
        self.block_size = block_size
        self.max_concurrent = max_concurrent
        self.max_prefill_tokens = max_prefill_tokens
        self.blocks = BlockAllocator(num_blocks)
        self.running: list[Sample] = []
        self.preemptions = 0
        self.samples: list[Sample] = []
        limits = [max_new_tokens] * len(requests) if isinstance(max_new_tokens, int) else max_new_tokens
        for request, ((prompt_tokens, count), limit) in enumerate(zip(requests, limits, strict=True)):
            # the last token sampled is never stored
            longest = prompt_tokens + limit - 1
            if self.blocks_for(longest) > num_blocks:
                raise ConfigError(
                    f"rollout.kv_cache_tokens: request {request} may need {longest} tokens"
                    f" ({self.blocks_for(longest)} blocks of {block_size}) and the cache holds"
                    f" {num_blocks * block_size}; raise it or lower rollout.max_new_tokens"
                )
            for _ in range(count):
                self.samples.append(Sample(len(self.samples), request, prompt_tokens))
        self.waiting: deque[Sample] = deque(self.samples)
        self.unfinished = len(self.samples)
        self._rows = list(range(max_concurrent - 1, -1, -1))
        self._room_for = 0  # steps for which every running sample has room: nobody needs a look in them
        self._held_request = -1  # the prompt whose blocks are kept for siblings still waiting
        self._held_blocks: list[int] = []

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def schedule(self) -> Step:
        """The next step: first room for every running sample's token, then as many waiting ones as fit."""
        step = Step()
        preempted = self._reserve(step)
        step.decodes = list(self.running)
        if not preempted:
            self._admit(step)
        return step

    def complete(self, step: Step, finished: Iterable[Sample]) -> None:
        """Every sample of `step` got its token; the `finished` ones leave and free their blocks."""
        for sample in step.decodes:
            sample.generated += 1
        for sample in step.forks:
            sample.generated += 1
        for prefill in step.prefills:
            for sample in prefill.samples:
                sample.generated += 1
        gone = {sample.id for sample in finished}
        if gone:
            for sample in self.running:
                if sample.id in gone:
                    self._vacate(sample)
            self.running = [sample for sample in self.running if sample.id not in gone]
            self.unfinished -= len(gone)

    def _reserve(self, step: Step) -> bool:
        """A slot for the newest token of every running sample; True when samples were preempted for it."""
        if self._room_for > 0:
            self._room_for -= 1
            return False
        before, least, i = self.preemptions, self.block_size, 0
        while i < len(self.running):
            sample = self.running[i]
            room = sample.capacity - sample.prompt_tokens - sample.generated
            if room < 0:
                if not self._grow(sample, step):
                    self._make_room()
                    continue  # the sample itself may be the one that had to go
                room = sample.capacity - sample.tokens
            if room < least:
                least = room
            i += 1
        self._room_for = least
        return self.preemptions > before

    def _grow(self, sample: Sample, step: Step) -> bool:
        """One more block for `sample`, or its own copy of a shared last block; False when none is free."""
        inside_last = sample.tokens <= len(sample.blocks) * self.block_size
        if inside_last and not self.blocks.is_shared(sample.blocks[-1]):
            sample.capacity = len(sample.blocks) * self.block_size
            return True
        if self.blocks.num_free == 0:
            return False
        block = self.blocks.allocate(1)[0]
        if inside_last:
            shared = sample.blocks.pop()
            step.copies.append((shared, block))
            self.blocks.release([shared])
        sample.blocks.append(block)
        sample.capacity = len(sample.blocks) * self.block_size
        step.grown.append(sample)
        return True

    def _make_room(self) -> None:
        if self._held_blocks:
            self._drop_held()
            return
        if len(self.running) < 2:
            raise RunError("a single sample does not fit into the KV cache it was checked against")
        youngest = self.running.pop()
        self._vacate(youngest)
        self.waiting.appendleft(youngest)
        self.preemptions += 1

    def _admit(self, step: Step) -> None:
        budget = self.max_prefill_tokens
        while self.waiting and len(self.running) < self.max_concurrent:
            head = self.waiting[0]
            if head.generated == 0 and head.request == self._held_request:
                if self._room(0) < 1:
                    return
                self.blocks.share(self._held_blocks)
                self._start(list(self._held_blocks))
                step.forks.append(head)
                if not self._sibling_waits(head):
                    self._drop_held()
                continue
            if step.prefills and head.tokens > budget:
                return
            needed = self.blocks_for(head.tokens)
            room = self._room(needed)
            if room < 1:
                if self.running or not self._held_blocks:
                    return
                self._drop_held()  # nothing runs: only the blocks kept for siblings are in the way
                continue
            blocks = self.blocks.allocate(needed)
            budget -= head.tokens
            siblings = [self._start(blocks)]
            while head.generated == 0 and len(siblings) < room and self._sibling_waits(head):
                self.blocks.share(blocks)
                siblings.append(self._start(list(blocks)))
            keep = head.generated == 0 and self._sibling_waits(head)
            if keep:
                self._drop_held()
                self.blocks.share(blocks)
                self._held_request, self._held_blocks = head.request, list(blocks)
            step.prefills.append(Prefill(siblings, head.tokens, list(blocks), keep))

    def _room(self, needed: int) -> int:
        """How many samples may start on `needed` fresh blocks, with one block left free for each running one."""
        free = self.blocks.num_free - needed
        count = min(free - len(self.running), self.max_concurrent - len(self.running))
        if not self.running and free >= 0:
            return max(count, 1)
        return count

    def _start(self, blocks: list[int]) -> Sample:
        """The first waiting sample starts to run on `blocks`."""
        sample = self.waiting.popleft()
        sample.blocks = blocks
        sample.capacity = sample.tokens  # the last block may be shared: ask before the first write
        sample.row = self._rows.pop()
        self._room_for = 0
        self.running.append(sample)
        return sample

    def _sibling_waits(self, sample: Sample) -> bool:
        return (
            bool(self.waiting)
            and self.waiting[0].request == sample.request
            and self.waiting[0].generated == 0
        )

    def _vacate(self, sample: Sample) -> None:
        self.blocks.release(sample.blocks)
        self._rows.append(sample.row)
        sample.blocks, sample.capacity, sample.row = [], 0, -1

    def _drop_held(self) -> None:
        self.blocks.release(self._held_blocks)
        self._held_request, self._held_blocks = -1, []
