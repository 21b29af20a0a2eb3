"""Runs micro-batches through the layers of a model, over the ranks of the `pp` axis where there are several.

torch.distributed.pipelining is not used. Its stages exchange tensors of one shape, fixed before a pass, and hold
buffers for all micro-batches of it; its 1F1B wants at least as many micro-batches as ranks; its zero-bubble schedules
write the weights' gradients without running gradient hooks, on which FSDP and the bfloat16 masters depend, and run a
checkpointed forward once for every group of weights. Micro-batches here are packs of unlike length and any number. Each
rank has the whole rows of its data-parallel rank, so both sides of a message know its shape, and the timetable says who
sends what and when: nothing is negotiated, padded or rescaled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from headrace.errors import RunError
from headrace.models.causal_lm import Backbone
from headrace.training.passes import Pass
from headrace.training.timetable import Action, Tick, timetable, user

Finish = Callable[[int, Tensor], Tensor | None]
"""(number of the pass, last hidden states [1, P, H]) → its loss, where gradients are wanted."""


@dataclass
class _Arrival:
    """A tensor on its way, and what has to be waited for before it is read or let go."""

    tensor: Tensor
    works: list[dist.Work] = field(default_factory=list)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.tensor


def run_passes(model: Backbone, passes: Sequence[Pass], finish: Finish, *, trains: bool) -> None:
    """Every pass forward, and `trains`: its loss backward, whose gradients add up in the parameters.

    `finish` is called where the head is (mesh.is_last), in the order of the passes. All ranks along pp call with passes
    over the same rows.
    """
    p = model.shards.mesh.parallelism
    _Run(model, passes, finish, timetable(p.pp, p.pp_chunks, len(passes), trains)).run()


class _Run:
    def __init__(
        self, model: Backbone, passes: Sequence[Pass], finish: Finish, ticks: tuple[Tick, ...]
    ) -> None:
        self.model, self.passes, self.finish, self.ticks = model, passes, finish, ticks
        mesh = model.shards.mesh
        self.ranks, self.rank, self.group = mesh.size("pp"), mesh.rank("pp"), mesh.group("pp")
        self.last = self.ranks * mesh.parallelism.pp_chunks - 1
        self._arrivals: dict[Action, _Arrival] = {}  # by what takes them up
        self._held: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = {}  # until the backward pass
        self._sent: deque[tuple[int, list[_Arrival]]] = deque()

    def run(self) -> None:
        for number, tick in enumerate(self.ticks):
            action = tick[self.rank]
            made = None
            if action is not None:
                made = self._forward(action) if action.kind == "forward" else self._backward(action)
            if self.group is not None:
                self._exchange(number, tick, made)
        while self._sent:
            self._let_go()

    def _forward(self, action: Action) -> Tensor | None:
        """What the action's user needs."""
        incoming = self._arrivals.pop(action).wait() if action.stage > 0 else None
        if incoming is not None and torch.is_grad_enabled():
            incoming.requires_grad_()
        hidden = self.passes[action.micro].run(action.stage // self.ranks, incoming)
        out = self.finish(action.micro, hidden) if action.stage == self.last else hidden
        if torch.is_grad_enabled():
            self._held[action.stage, action.micro] = incoming, out
        return None if action.stage == self.last else hidden.detach()

    def _backward(self, action: Action) -> Tensor | None:
        incoming, out = self._held.pop((action.stage, action.micro))
        gradient = self._arrivals.pop(action).wait() if action.stage < self.last else None
        if isinstance(self.model, FSDPModule):
            # FSDP keeps its notes on forward passes until none is open
            self.model.set_is_last_backward(not self._held)
        if out is None:
            raise RunError("a pass that trains gave no loss")
        torch.autograd.backward(out, gradient)
        if incoming is None:
            return None
        return torch.zeros_like(incoming) if incoming.grad is None else incoming.grad

    def _exchange(self, number: int, tick: Tick, made: Tensor | None) -> None:
        """Starts the messages of a tick, of both directions at once: what a rank waits for was started in an earlier tick
        on both sides, so that no order of messages can lock."""
        works: list[dist.P2POp] = []
        moving: list[tuple[Action | None, _Arrival]] = []
        for source, action in enumerate(tick):
            taker = None if action is None else user(action, self.last)
            if taker is None:
                continue
            target = taker.stage % self.ranks
            if source == self.rank and made is not None:
                arrival, peer = _Arrival(made.contiguous()), target
            elif target == self.rank:
                empty = torch.empty(
                    self.passes[taker.micro].shape, dtype=self.model.dtype, device=self.model.device
                )
                arrival, peer = _Arrival(empty), source
            else:
                continue
            op = dist.isend if peer == target else dist.irecv
            works.append(dist.P2POp(op, arrival.tensor, group=self.group, group_peer=peer))
            moving.append((taker if target == self.rank else None, arrival))
        if not works:
            return
        started = dist.batch_isend_irecv(works)
        for i, (taker, arrival) in enumerate(moving):
            # NCCL answers for all of a batch at once
            arrival.works = [started[i]] if len(started) == len(works) else started
            if taker is not None:
                self._arrivals[taker] = arrival
        self._sent.append((number, [arrival for taker, arrival in moving if taker is None]))
        # a rank that is ahead waits, so that what it sends does not pile up
        while self._sent and self._sent[0][0] < number - 2 * self.ranks:
            self._let_go()

    def _let_go(self) -> None:
        for arrival in self._sent.popleft()[1]:
            arrival.wait()
