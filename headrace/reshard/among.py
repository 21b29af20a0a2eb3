"""Some ranks of a process group that agree and tell each other plain values by messages alone.

A group of their own would have to be made by ranks that have made equally many groups before
(`use_local_synchronization`), which those of two worker groups have not, or by all ranks of the world at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import ConfigError, RunError
from headrace.reshard.live import wire_device


class Among:
    """Every method is to be called by all of `ranks` (global ones; default: all of `group`) in the same order.

    Under NCCL the first call of a group must be one that all its ranks make: where `ranks` are only some of them, a
    collective of the whole group has to come before. RunError when a rank ended, failed or did not come within the
    group's timeout.
    """

    def __init__(self, ranks: Sequence[int] | None = None, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        started = dist.is_initialized()
        everyone = dist.get_process_group_ranks(group or dist.group.WORLD) if started else [0]
        self.ranks = sorted(everyone if ranks is None else set(ranks))
        self.rank = dist.get_rank() if started else 0
        unknown = [rank for rank in self.ranks if rank not in everyone]
        if unknown or self.rank not in self.ranks:
            raise ConfigError(
                f"ranks {self.ranks} cannot talk: rank {self.rank} called, and the process group has {everyone}"
            )
        self._place = self.ranks.index(self.rank)

    def largest(self, values: Sequence[int]) -> list[int]:
        """Of each of the values, the largest that any rank has.

        By dissemination (Hensgen, Finkel & Manber 1988): in round k each rank tells the one 2^k places further.
        """
        n, step = len(self.ranks), 1
        known = torch.tensor(values, dtype=torch.int64)
        while step < n:
            known = known.to(wire_device(self.group))
            heard = torch.empty_like(known)
            self._exchange({self._at(step): known}, {self._at(-step): heard})
            known = torch.maximum(known, heard)
            step *= 2
        return [int(value) for value in known.tolist()]

    def tell(self, value: Any, sender: int) -> Any:
        """The plain value of global rank `sender`, on all ranks. Sent as JSON, which cannot run code when it is read.

        Along a binomial tree: a rank that knows it tells those 1, 2, 4, … places further that do not.
        """
        n = len(self.ranks)
        if n == 1:
            return value
        device = wire_device(self.group)
        place = (self._place - self.ranks.index(sender)) % n
        if place == 0:
            data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
            size = torch.tensor([len(data)], device=device)
        else:
            size = torch.zeros(1, dtype=torch.int64, device=device)
            teller = self._at(-(1 << (place.bit_length() - 1)))
            self._exchange({}, {teller: size})
            data = torch.empty(int(size), dtype=torch.uint8, device=device)
            self._exchange({}, {teller: data})
        step = 1 << place.bit_length()
        while place + step < n:
            self._exchange({self._at(step): size}, {})
            self._exchange({self._at(step): data}, {})
            step *= 2
        return value if place == 0 else json.loads(data.cpu().numpy().tobytes())

    def _at(self, further: int) -> int:
        return self.ranks[(self._place + further) % len(self.ranks)]

    def _exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        operations = [dist.P2POp(dist.irecv, tensor, peer, self.group) for peer, tensor in received.items()]
        operations += [dist.P2POp(dist.isend, tensor, peer, self.group) for peer, tensor in sent.items()]
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        except RuntimeError as error:
            raise RunError(
                f"rank {self.rank} waited for ranks {sorted({*sent, *received})}: a rank ended, failed or did not come"
                f" within the group's timeout: {str(error).splitlines()[0]}"
            ) from error
