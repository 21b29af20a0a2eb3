"""Reading checkpoints: which one to resume from, and whether it is whole."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.checkpoint.files import CHECKPOINT, TensorFile
from headrace.checkpoint.parts import TensorParts, part_names
from headrace.checkpoint.save import FORMAT, FORMATS, STATE, CheckpointStore
from headrace.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; `state` is its state.json."""

    path: Path
    step: int
    state: dict[str, Any]

    def files(self, role: str) -> list[Path]:
        """The files that have the tensors of a trained role. Raises ConfigError where there are none."""
        names = part_names(self.state["sizes"]).get(role)
        if names is None:
            raise ConfigError(f"{self.path}: the checkpoint is damaged (no file of the {role} is in it)")
        return [self.path / name for name in names]

    def tensors(self, role: str) -> TensorParts:
        """The tensors of a trained role, to be used in a `with`."""
        return TensorParts(self.files(role))


def find_checkpoint(store: CheckpointStore) -> Checkpoint:
    """The checkpoint that `latest` names, or, where that is damaged, the newest whole one, with a warning.

    Raises ConfigError, with what is wrong with each, when there is none.
    """
    latest = store.pointer("latest")
    names = list(reversed(store.steps()))
    if latest is not None:
        names = [latest, *(name for name in names if name != latest)]
    problems: list[str] = []
    for name in names:
        try:
            found = read_checkpoint(store.folder / name)
        except ConfigError as error:
            problems += error.violations
            continue
        for problem in problems:
            logger.warning("%s; resuming from %s instead", problem, name)
        return found
    raise ConfigError(
        [
            *problems,
            f"run.resume: there is no checkpoint to resume from in {store.folder}; start the run anew, under another"
            " run.name or with run.overwrite=true",
        ]
    )


MEMBERS = (
    "metrics", "evaluations", "files", "things", "loader", "rng", "roles", "dtypes", "frozen", "fingerprint",
)  # fmt: skip


def require_members(checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a state.json that lacks a part, as one that was edited."""
    for name in MEMBERS:
        if not isinstance(checkpoint.state.get(name), dict):
            raise ConfigError(f"{checkpoint.path}: the checkpoint is damaged ({STATE} has no '{name}')")


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises ConfigError saying what is wrong with the checkpoint."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        written = state["format"]
        if written not in FORMATS:
            raise ConfigError(
                f"{path}: the checkpoint is of format {written}; this version of headrace reads formats up to {FORMAT}"
            )
        for name, size in state["sizes"].items():
            if not (path / name).is_file():
                raise ConfigError(f"{path}: the checkpoint is damaged ({name} is missing)")
            if (path / name).stat().st_size != size:
                raise ConfigError(f"{path}: the checkpoint is damaged ({name} is not {size} bytes long)")
        for names in part_names(state["sizes"]).values():
            with TensorParts([path / name for name in names]):
                pass
        own = f"step_{state['step']}"
        for name in state["sizes"]:
            with TensorFile(path / name) as file:
                written = file.metadata.get(CHECKPOINT, own)
            if written != own:
                raise ConfigError(f"{path}: the checkpoint is damaged ({name} is of {written})")
        return Checkpoint(path, int(state["step"]), state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: the checkpoint is damaged ({what})") from error
