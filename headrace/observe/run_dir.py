"""The directory of a run: where its configuration, metrics, samples, checkpoints and model lie."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, DataError, RunError
from headrace.observe.machine import write_environment

LONGEST_NAME = 255  # bytes; what file systems allow


class RunDirectory:
    """`<parent>/<name>/`: config.yaml, metrics.jsonl, timeline.jsonl, (eval_)samples.jsonl, tensorboard/, …"""

    def __init__(self, path: str | Path) -> None:
        """A handle on a directory that exists or that `create` makes; touches nothing."""
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.eval_samples = self.path / "eval_samples.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.logs = self.path / "logs"  # of the ranks, where there are several

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(
        cls, parent: str | Path, name: str | None, *, overwrite: bool = False, prefix: str = "run"
    ) -> RunDirectory:
        """Makes the directory, empty. Without a name: `<prefix>-<date>-<time>`, numbered when that is taken.

        `overwrite` replaces a directory that is empty or that a run wrote (it holds config.yaml and
        metrics.jsonl), and nothing else. Raises ConfigError naming run.name, run.overwrite or run.dir.
        """
        if name is None:
            plain = re.sub(r"[^\w.-]+", "-", prefix)[:100]  # it may be the name of a user's flow
            return cls._create_numbered(Path(parent), f"{plain}-{datetime.now():%Y%m%d-%H%M%S}")
        cls.check(parent, name, overwrite=overwrite)
        run = cls(Path(parent) / name)
        if not run._make():
            cls.check(parent, name, overwrite=overwrite)  # another launch may have made it just now
            with run.locked():
                shutil.rmtree(run.path)
            if not run._make():
                raise ConfigError(
                    f"run.name: another run has just started in {run.path}; choose another name"
                )
        return run

    @classmethod
    def open(cls, parent: str | Path, name: str | None) -> RunDirectory:
        """The directory of an earlier run. Raises ConfigError naming run.resume where there is none to write to."""
        if name is None:
            raise ConfigError("run.resume: set run.name to the run that is to be continued")
        run = cls(Path(parent) / name)
        if not (run.config.is_file() and run.metrics.is_file()):
            raise ConfigError(
                f"run.resume: there is no run to continue in {run.path} (no config.yaml and metrics.jsonl); check"
                " run.dir and run.name, or start it without run.resume"
            )
        if not os.access(run.path, os.W_OK | os.X_OK):
            raise ConfigError(f"run.resume: {run.path} cannot be written to; change its permissions")
        return run

    def clean(self) -> None:
        """Removes what a run left that was killed while it wrote its configuration or its model."""
        for path in self.path.glob(f".{self.model.name}-*"):
            shutil.rmtree(path)
        for path in self.path.glob(f".{self.config.name}-*"):
            path.unlink()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps every other process from writing to the run; the lock ends with the process, however that ends.

        Raises ConfigError when another process holds it.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"run.name: another process is writing to {self.path}; wait for its end, or choose another name"
                ) from error
            yield
        finally:
            os.close(descriptor)

    @classmethod
    def check(cls, parent: str | Path, name: str | None, *, overwrite: bool = False) -> None:
        """What `create` would refuse, without touching anything. Raises ConfigError naming the key."""
        above = next(p for p in (Path(parent).absolute(), *Path(parent).absolute().parents) if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise ConfigError(
                f"run.dir: cannot create {parent} ({above} is no folder that can be written to)"
            )
        if name is None:
            return
        odd = name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable()
        if odd or len(name.encode()) > LONGEST_NAME:
            raise ConfigError(
                f"run.name: {name!r} must be a plain folder name; set run.dir to choose the place"
            )
        run = cls(Path(parent) / name)
        if not run.path.exists() and not run.path.is_symlink():
            return
        if not overwrite:
            resume = (
                "run.resume=true to go on from its latest checkpoint, " if run.checkpoints.is_dir() else ""
            )
            raise ConfigError(
                f"run.name: {run.path} exists already; set {resume}another name, or run.overwrite=true to replace it"
            )
        if not run.is_replaceable():
            raise ConfigError(
                f"run.overwrite: {run.path} is not the directory of a run (no config.yaml and metrics.jsonl"
                " in it), so it is not deleted; choose another run.name"
            )
        with run.locked():  # refused where another process writes to it
            pass

    @classmethod
    def _create_numbered(cls, parent: Path, stem: str) -> RunDirectory:
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        return next(run for run in (cls(parent / name) for name in names) if run._make())

    def _make(self) -> bool:
        """False when the path exists already. Simultaneous launches cannot both get True."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot create {self.path.parent} ({error.strerror})") from error
        try:
            self.path.mkdir()
        except FileExistsError:
            return False
        except OSError as error:
            raise ConfigError(f"run.dir: cannot create {self.path} ({error.strerror})") from error
        return True

    def is_replaceable(self) -> bool:
        """True for an empty directory or one that a run wrote; never for a link or a file."""
        if self.path.is_symlink() or not self.path.is_dir():
            return False
        return (self.config.is_file() and self.metrics.is_file()) or all(
            path.name.startswith(f".{self.config.name}-")
            or (path == self.metrics and not path.stat().st_size)
            for path in self.path.iterdir()  # nothing, or what a run killed in `write_config` left
        )

    def write_config(self, yaml_text: str) -> None:
        """Writes the resolved configuration, where it runs, and the empty metrics.jsonl that marks a run's directory.

        Raises RunError on a full disk.
        """
        try:
            self.metrics.touch()
            # by a rename: when a run is resumed, the old one stays until the new one is whole
            temporary = self.path / f".{self.config.name}-{os.getpid()}"
            temporary.write_text(yaml_text, encoding="utf-8")
            os.rename(temporary, self.config)
            write_environment(self.path)
        except OSError as error:
            raise RunError(f"{self.config}: cannot write ({error.strerror})") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """The logged steps in order; a last line that a killed run left unfinished is not one of them.

        Raises DataError when there is no metrics.jsonl, or a line that is not a JSON object.
        """
        if not self.metrics.is_file():
            raise DataError(f"{self.metrics}: no such file; give the directory of a run (run.dir/run.name)")
        steps: list[dict[str, Any]] = []
        with self.metrics.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith("\n"):
                    break
                try:
                    steps.append(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{self.metrics}, line {number}: not JSON ({error})") from error
        return steps
