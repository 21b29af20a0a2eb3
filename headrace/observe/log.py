"""What a run leaves on disk while it goes: metrics.jsonl, (eval_)samples.jsonl and TensorBoard events."""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.errors import RunError
from headrace.observe.metrics import check_names
from headrace.observe.run_dir import RunDirectory
from headrace.observe.times import StageTime

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


logger = logging.getLogger(__name__)

EVALUATION_SAMPLES = 8  # at least so many rows are kept of each evaluation, unless no samples are wanted


class JsonLines:
    """A file of one JSON object a line, each appended whole or not at all and visible to readers at once."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        """`size` cuts the file to its first so many bytes: what a resumed run had written by its checkpoint."""
        self.path = path
        self._file = path.open("ab", buffering=0)
        if size is not None and path.stat().st_size < size:
            logger.warning(
                "%s: has fewer lines than when the checkpoint was written; they are lost to this file", path
            )
        elif size is not None:
            self._file.truncate(size)
        self._drop_unfinished_line()

    def _drop_unfinished_line(self) -> None:
        """A run killed inside a write leaves half a line; a new one must not be glued to it."""
        whole = self.path.read_bytes().rfind(b"\n") + 1
        if whole < self.path.stat().st_size:
            self._file.truncate(whole)

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises RunError when the disk is full (the file keeps its whole lines)."""
        text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)
        # a lone surrogate from broken decoding has no UTF-8; its backslash escape is what JSON would write
        line = text.encode("utf-8", errors="backslashreplace") + b"\n"
        size = self.path.stat().st_size
        try:
            written = self._file.write(line)
        except OSError as error:
            self._file.truncate(size)
            raise RunError(f"{self.path}: cannot write ({error.strerror})") from error
        if written != len(line):
            self._file.truncate(size)
            raise RunError(f"{self.path}: cannot write (the disk is full)")

    def size(self) -> int:
        return self.path.stat().st_size

    def sync(self) -> None:
        """Waits until every line is on the disk. Raises RunError where that fails."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError(f"{self.path}: cannot write ({error.strerror})") from error

    def close(self) -> None:
        self._file.close()


class RunLogger:
    """Appends each step's metrics and some of its samples to the run directory; a context manager."""

    def __init__(
        self,
        run_dir: RunDirectory,
        *,
        tensorboard: bool = True,
        samples_per_step: int = 4,
        seed: int = 0,
        resume: Mapping[str, int] | None = None,
        step: int = 0,
    ) -> None:
        """`samples_per_step` samples of each step are kept, drawn from (seed, step).

        `resume`, the `sizes()` at the end of step `step`, drops all that was written after it.
        """
        self.run_dir = run_dir
        self._samples_per_step = samples_per_step
        self._seed = seed
        self._cut = resume
        self._files = {
            path: self._open(path) for path in (run_dir.metrics, run_dir.samples, run_dir.timeline)
        }
        if run_dir.eval_samples.is_file():
            self._files[run_dir.eval_samples] = self._open(run_dir.eval_samples)
        self._tensorboard: SummaryWriter | None = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resume is None else step + 1
            self._tensorboard = SummaryWriter(str(run_dir.tensorboard), purge_step=purge)

    def _open(self, path: Path) -> JsonLines:
        return JsonLines(path, None if self._cut is None else self._cut.get(path.name, 0))

    def sizes(self) -> dict[str, int]:
        """Name → bytes of each file of lines so far: what `resume` takes."""
        return {path.name: file.size() for path, file in self._files.items()}

    def sync(self) -> None:
        """Waits until every line is on the disk. Raises RunError where that fails."""
        for file in self._files.values():
            file.sync()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line `{"step", "time", metric: value, ...}`; a value that is not finite becomes null.

        Raises ValueError for an undocumented metric name (nothing is written), RunError on a full disk.
        """
        check_names(metrics)
        values = {name: float(value) for name, value in metrics.items()}
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._files[self.run_dir.metrics].append({"step": step, "time": now, **values})
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def log_times(self, step: int, times: Sequence[StageTime], start: float) -> None:
        """One line a stage: when it began and ended, in seconds since the step's `start`, and on which group."""
        for t in times:
            line = {"step": step, "stage": t.stage, "group": t.group}
            line |= {"begin_s": round(t.began - start, 6), "end_s": round(t.ended - start, 6)}
            self._files[self.run_dir.timeline].append(line)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes `samples_per_step` of the samples (values must be what JSON can hold), in their order."""
        kept = min(self._samples_per_step, len(samples))
        chosen = random.Random(f"{self._seed}/{step}").sample(range(len(samples)), kept)
        for index in sorted(chosen):
            self._files[self.run_dir.samples].append({"step": step, **samples[index]})

    def log_evaluation_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes the first rows of an evaluation, the same ones every time, to eval_samples.jsonl.

        `samples_per_step` rows, at least 8 of them unless that is 0, each with its first sample.
        """
        rows = max(self._samples_per_step, EVALUATION_SAMPLES) if self._samples_per_step else 0
        first = [sample for sample in samples if sample["sample_index"] == 0]
        path = self.run_dir.eval_samples  # made only by a run that evaluates
        if rows and path not in self._files:
            self._files[path] = self._open(path)
        for sample in first[:rows]:
            self._files[path].append({"step": step, **sample})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _finite(value: Any) -> Any:
    """The same value with None for every float that JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
