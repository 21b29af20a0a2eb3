"""Compiling the kernels: once, into a folder of our own, and never at the cost of a run."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.kernels import build

USE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import torch
from headrace.models.attention import PackedAttention
q = torch.randn(5, 2, 4)
out = PackedAttention([5], "cpu").attend(0, q, q, q, scale=1.0, window=None)
want = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(0, 1)] * 3, is_causal=True, scale=1.0)
torch.testing.assert_close(out, want.transpose(0, 1))
from headrace.kernels.build import missing
print("missing:", missing())
"""


def run(tmp_path: Path, **environment: str) -> str:
    """What a process says that computes attention; it must succeed."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path), **environment}
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "headrace").glob("*"))


def needs_kernels() -> None:
    if build.missing() is not None:
        pytest.skip(f"no kernels: {build.missing()}")


def test_where_there_is_gcc_there_are_kernels() -> None:
    """Else the tests of kernels that do not compile would all be left out."""
    if sys.platform == "linux" and shutil.which("gcc") and os.environ.get(build.SWITCH) != "off":
        assert build.missing() is None


def test_compiled_once_into_a_folder_of_our_own(tmp_path: Path) -> None:
    needs_kernels()
    first = run(tmp_path)
    assert "compiling kernels" in first
    assert "missing: None" in first
    (file,) = built(tmp_path)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    before = file.stat().st_mtime_ns
    assert "compiling" not in run(tmp_path)
    assert file.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HEADRACE_CPU_KERNELS": "off"}, "HEADRACE_CPU_KERNELS=off"),
        ({"CC": "/nowhere/cc"}, "/nowhere/cc"),
        ({"CC": "/bin/false"}, "/bin/false ended with 1"),
        ({"CC": "", "PATH": ""}, "no C compiler"),
        ({"CC": "gcc 'x"}, "CC=gcc 'x: No closing quotation"),
    ],
)
def test_without_a_compiler_torch_computes(tmp_path: Path, environment: dict[str, str], reason: str) -> None:
    said = run(tmp_path, **environment)
    assert f"missing: {reason}" in said
    assert built(tmp_path) == []


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path) -> None:
    fake = tmp_path / "cc"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\nprintf "no such instruction \\351" >&2\nexit 3\n'
    )
    fake.chmod(0o755)
    said = run(tmp_path, CC=str(fake))
    assert "ended with 3: no such instruction \ufffd" in said
    assert built(tmp_path) == []


def test_a_note_behind_an_error_is_not_the_reason(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    lines = ("vec.h: In function 'sum':", "vec.h:3: error: no such type", "vec.h:9: note: declared here")
    compiler.write_text("#!/bin/sh\n" + "".join(f'echo "{line}" >&2\n' for line in lines) + "exit 1\n")
    compiler.chmod(0o700)
    assert "ended with 1: vec.h:3: error: no such type\n" in run(tmp_path, CC=str(compiler))


def test_a_file_that_cannot_be_loaded_is_done_without(tmp_path: Path) -> None:
    fake = tmp_path / "cc"
    fake.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo junk > "$2"; shift; done\n')
    fake.chmod(0o755)
    assert "cannot be loaded" in run(tmp_path, CC=str(fake))


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, kind: str) -> None:
    needs_kernels()
    folder = tmp_path / "cache" / "headrace"
    folder.parent.mkdir()
    if kind == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.write_text("")
    said = run(tmp_path)
    assert "missing: None" in said
    assert not folder.is_dir() or not list(folder.iterdir())
    assert not list(tmp_path.glob("headrace-kernels-*"))  # the temporary folder has gone


def test_the_threads_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other packages bring OpenMP runtimes of their own, which may be loaded too."""
    needs_kernels()
    chosen = build.thread_library()
    copy = tmp_path / "libgomp-of-another-package.so.1"
    shutil.copy(chosen, copy)
    ctypes.CDLL(str(copy))
    assert str(copy) in Path("/proc/self/maps").read_text()
    assert build.thread_library() == chosen


@pytest.mark.parametrize("share", [0.0, 0.99])
def test_a_file_that_was_cut_off_is_built_again(tmp_path: Path, share: float) -> None:
    """The loader does not see it: a page behind a file's end ends the process when it is touched."""
    needs_kernels()
    run(tmp_path)
    (file,) = built(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    assert "missing: None" in run(tmp_path)
    assert len(file.read_bytes()) == len(whole)


def test_a_compiler_with_arguments(tmp_path: Path) -> None:
    needs_kernels()
    assert "missing: None" in run(tmp_path, CC=f"{build._compiler()[0]} -m64 -DNOTHING='a b'")


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build._private_folder() == tmp_path / ".cache" / "headrace"


def test_a_failing_build_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have taken minutes, and what is missing is not there the second time."""
    tries = []

    def fail() -> None:
        tries.append(1)
        raise build.CannotBuild("no")

    monkeypatch.setattr(build, "load", fail)
    for cached in (build.library, build._library_or_reason):
        cached.cache_clear()
    try:
        assert build.library() is None
        assert build.missing() == "no"
        assert len(tries) == 1
    finally:
        for cached in (build.library, build._library_or_reason):
            cached.cache_clear()


def test_another_processor_gets_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs_kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.load()
    monkeypatch.setattr(build, "_processor", lambda: "another")
    build.load()
    assert len(built(tmp_path)) == 2
