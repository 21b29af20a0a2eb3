"""What is left of a private cluster whose controller was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cluster import sweeper

MAKES_IT_ANEW = """
import os, sys, time
while True:
    os.makedirs(sys.argv[1], exist_ok=True)
    time.sleep(0.01)
"""


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="there is no /proc")
def test_processes_that_nobody_had_named_yet(tmp_path: Path) -> None:
    folder = tmp_path / "hr-x"
    late = subprocess.Popen([sys.executable, "-c", MAKES_IT_ANEW, str(folder)])
    try:
        while not folder.exists():
            assert late.poll() is None
        subprocess.run([sys.executable, sweeper.__file__, str(folder)], input=b"", timeout=30, check=True)
        assert late.wait(timeout=5) == -9
        assert not folder.exists()
    finally:
        late.kill()
