"""Batches of a data set, step by step: a new order every epoch, an exact position that can be saved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from headrace.data.batch import Batch
from headrace.errors import ConfigError, DataError


class Dataset(Protocol):
    """What a loader reads: PromptDataset and SFTDataset are such."""

    name: str

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch: ...


class Loader:
    """Endless batches of `rows_per_step` rows.

    An epoch has `steps_per_epoch` = rows // rows_per_step batches; the rows left over sit this epoch out (with
    `shuffle` they are others every epoch). The order depends on the seed and the epoch alone, never on the global
    random state.
    """

    def __init__(
        self,
        dataset: Dataset,
        rows_per_step: int,
        *,
        shuffle: bool,
        seed: int,
        key: str = "train.prompts_per_step",
    ) -> None:
        """`key` names the setting behind `rows_per_step`. Raises DataError when the data fill no single step."""
        if rows_per_step < 1:
            raise ConfigError(f"{key}: must be at least 1, got {rows_per_step}")
        if len(dataset) < rows_per_step:
            raise DataError(
                f"data.path: {dataset.name} has {len(dataset)} usable rows, fewer than the {rows_per_step} rows of one"
                f" step ({key}); lower it or add data"
            )
        self.dataset = dataset
        self.rows_per_step = rows_per_step
        self.shuffle = shuffle
        self.seed = seed
        self.key = key
        self._epoch = 0
        self._step = 0
        self._order = self._permutation(0)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.dataset) // self.rows_per_step

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self._epoch

    def next(self) -> Batch:
        """The next step's rows."""
        start = self._step * self.rows_per_step
        batch = self.dataset.batch(self._order[start : start + self.rows_per_step])
        self._step += 1
        if self._step == self.steps_per_epoch:
            self._epoch += 1
            self._step = 0
            self._order = self._permutation(self._epoch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values for JSON."""
        return {**self._identity(), "epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `state` was saved.

        Raises ConfigError naming each setting under which the saved position would mean other rows.
        """
        names = {
            "rows": "data.path (rows)",
            "seed": "run.seed",
            "rows_per_step": self.key,
            "shuffle": "data.shuffle",
        }
        missing = [name for name in (*names, "epoch", "step") if name not in state]
        if missing:
            raise ConfigError(
                f"the saved position in the data has no {', '.join(missing)}; it cannot be resumed"
            )
        changed = [
            f"{names[name]}: was {state[name]} when the position in the data was saved and is {value} now; resume with"
            f" {state[name]}, or start a new run"
            for name, value in self._identity().items()
            if state[name] != value
        ]
        if changed:
            raise ConfigError(changed)
        epoch, step = int(state["epoch"]), int(state["step"])
        if epoch < 0 or not 0 <= step < self.steps_per_epoch:
            raise ConfigError(f"the saved position in the data, epoch {epoch} step {step}, does not exist")
        self._epoch, self._step = epoch, step
        self._order = self._permutation(epoch)

    def move_near(self, state: Mapping[str, Any]) -> None:
        """Goes where about as much of the epoch has been read as in `state`, whose rows or order may be others."""
        read = int(state["step"]) * int(state["rows_per_step"]) * len(self.dataset) // int(state["rows"])
        self._epoch = int(state["epoch"])
        self._step = min(read // self.rows_per_step, self.steps_per_epoch - 1)
        self._order = self._permutation(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {
            "rows": len(self.dataset),
            "seed": self.seed,
            "rows_per_step": self.rows_per_step,
            "shuffle": self.shuffle,
        }

    def _permutation(self, epoch: int) -> list[int]:
        rows = len(self.dataset)
        if not self.shuffle:
            return list(range(rows))
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        order: list[int] = torch.randperm(rows, generator=generator).tolist()
        return order


def all_batches(dataset: Dataset, rows_per_batch: int) -> Iterator[Batch]:
    """Every row exactly once, in order; the last batch may be short. Raises ConfigError for rows_per_batch < 1."""
    if rows_per_batch < 1:
        raise ConfigError(f"rows_per_batch: must be at least 1, got {rows_per_batch}")
    for start in range(0, len(dataset), rows_per_batch):
        yield dataset.batch(range(start, min(start + rows_per_batch, len(dataset))))
