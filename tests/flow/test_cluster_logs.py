"""The folder that ranks write their logs to before a run has its own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.cluster.layouts import resolve
from headrace.config import Config, RunConfig
from headrace.errors import ConfigError
from headrace.flow.cluster import open_runtime


def test_a_run_dir_that_cannot_be_made(tmp_path: Path) -> None:
    """Permissions do not tell of this: a full disk, a file system that the kernel refuses to write to."""
    (tmp_path / "file").touch()
    config = Config(run=RunConfig(dir=str(tmp_path / "file" / "runs")))
    with (
        ExitStack() as held,
        pytest.raises(ConfigError, match=r"^run\.dir: cannot write to .*runs \(Not a dir"),
    ):
        open_runtime(resolve("cpu_2"), config, None, held)
