"""Toy objects for workers: sums, echoes, collectives, and ways to go wrong."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from headrace.cluster.worker import Outcome, Site
from headrace.data.batch import Batch


class Toy:
    """What a role's object is: made from its site and plain arguments."""

    def __init__(self, site: Site, factor: int = 1, samples: int = 2) -> None:
        self.site, self.factor, self.samples = site, factor, samples

    def place(self) -> Any:
        s = self.site
        return [s.rank, s.world, s.group_rank, s.dp_rank, s.tp_rank, s.pp_rank, os.getpid()]

    def scaled(self, batch: Batch) -> Any:
        """A token column and a row column; also for no rows."""
        ids = batch["input_ids"].to(torch.float64)
        sums = torch.zeros(batch.num_rows, dtype=torch.float64).index_add(0, batch.row_ids(), ids)
        return {"scaled": ids * self.factor, "sum": sums}

    def devices(self, batch: Batch) -> Outcome:
        """Where the columns lie."""
        tensors = [*batch.tokens.values(), *(c for c in batch.rows.values() if isinstance(c, torch.Tensor))]
        return Outcome(value=sorted({str(tensor.device) for tensor in tensors}))

    def seen(self, batch: Batch) -> Outcome:
        """The rows this rank got, to the controller."""
        return Outcome(
            value={"row": batch["row"].tolist(), "tokens": batch.num_tokens, "rank": self.site.rank}
        )

    def repeat(self, prompts: Batch) -> Outcome:
        """`samples` rows of growing length for each prompt, as a rollout makes them."""
        parents = [r for r in range(prompts.num_rows) for _ in range(self.samples)]
        rows = prompts["row"].tolist()
        ids = [[10 * rows[p] + j for j in range(1 + (rows[p] + i) % 5)] for i, p in enumerate(parents)]
        made = Batch.from_rows(
            {"input_ids": ids},
            {
                "group": torch.tensor([rows[p] for p in parents], dtype=torch.int64),
                "text": [f"prompt {rows[p]} sample {i % self.samples}" for i, p in enumerate(parents)],
            },
            {"input_ids": torch.int64},
        )
        return Outcome(rows=made, parents=parents)

    def stay(self, batch: Batch) -> None:
        pass

    def text_length(self, batch: Batch) -> Any:
        return {"text_length": [len(t) for t in batch["text"]]}

    def group_mean(self, batch: Batch) -> Any:
        """Right only where all rows of a group are on one rank."""
        means = torch.zeros(batch.num_rows, dtype=torch.float64)
        for row, group in enumerate(batch["group"].tolist()):
            means[row] = batch["sum"][batch["group"] == group].mean()
        return {"group_mean": means}

    def total(self, batch: Batch) -> Outcome:
        """The sum of all ids over all ranks of the group, by a collective."""
        total = batch["input_ids"].sum().reshape(1)
        dist.all_reduce(total, group=self.site.process_group)
        return Outcome(value=int(total))

    def fail(self, rank: int, how: str) -> int:
        """One rank goes wrong while the others wait for it in a collective."""
        if self.site.rank == rank:
            if how == "raise":
                raise ValueError("the toy broke")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                time.sleep(600)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        total = torch.ones(1)
        dist.all_reduce(total, group=self.site.process_group)
        return int(total)

    def turns(self, batch: Batch, each: int, seconds: float, apart: bool) -> Outcome:
        """As a rollout: `each` turns a row, in which all ranks of the group need each other unless `apart`."""
        total = each * batch.num_rows
        for turn in range(total):
            time.sleep(seconds)
            if not apart:
                dist.all_reduce(torch.ones(1), group=self.site.process_group)
            self.site.pulse.point((turn + 1) / total)
        return Outcome(value=total)

    def wide(self) -> str:
        return "x" * 100_000

    def environment(self, names: list[str]) -> Any:
        return {name: os.environ.get(name) for name in names}
