"""C kernels for CPUs, compiled once for each machine with its own compiler, as Triton's are for a GPU.

Only files of this package are compiled, and nothing is loaded from a folder that others can write to. Without a
compiler everything is computed by torch's own operators, slower.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace.errors import HeadraceError

logger = logging.getLogger(__name__)

SWITCH = "HEADRACE_CPU_KERNELS"  # "off": do without
SOURCES = ("attention.c", "feed_forward.c", "pointwise.c")
HEADERS = ("product.h", "vec.h")
FLAGS = (
    "-std=gnu11", "-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-fPIC",
)  # fmt: skip
LONGEST_BUILD_S = 300
DIGEST = hashlib.sha256().digest_size  # bytes at a file's end, which tell that it is whole


class CannotBuild(Exception):
    """What the kernels lack on this machine."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had."""
    return _library_or_reason()[0]


@cache
def _library_or_reason() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return load(), None
    except CannotBuild as reason:
        level = logging.DEBUG if os.environ.get(SWITCH) == "off" else logging.INFO
        logger.log(level, "the CPU computes without compiled kernels, which is slower: %s", reason)
        return None, str(reason)


@cache
def function(name: str, arguments: tuple[Any, ...]) -> Any:
    """A kernel, with the types of its arguments. Raises HeadraceError where there are none."""
    found = library()
    if found is None:
        raise HeadraceError("compiled kernels are called where there are none")
    kernel = getattr(found, name)
    kernel.argtypes, kernel.restype = arguments, ctypes.c_int
    return kernel


def missing() -> str | None:
    """Why there are no kernels here; None where there are. Builds them, which takes a second or two, once."""
    return _library_or_reason()[1]


def load() -> ctypes.CDLL:
    """Compiles the kernels if that was not done yet. Raises CannotBuild."""
    if os.environ.get(SWITCH) == "off":
        raise CannotBuild(f"{SWITCH}=off")
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        raise CannotBuild("they are for 64-bit Linux")
    compiler = _compiler()
    threads = thread_library()
    source = b"".join((Path(__file__).parent / name).read_bytes() for name in (*SOURCES, *HEADERS))
    # another processor or compiler gets a file of its own: home folders are shared between machines
    facts = repr((FLAGS, compiler, _version(compiler), _processor(), str(threads))).encode()
    name = f"kernels-{hashlib.sha256(facts + source).hexdigest()[:32]}.so"
    path = _private_folder() / name
    if not _is_whole(path):
        if not os.access(path.parent, os.W_OK):
            path = _temporary_folder() / name
        logger.info("compiling kernels for this machine's CPU into %s", path)
        _compile(compiler, threads, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotBuild(f"{path} cannot be loaded: {error}") from error


def _compiler() -> list[str]:
    """The command of the C compiler: $CC, with its arguments, or what there is."""
    given = os.environ.get("CC", "")
    try:
        command = shlex.split(given) or list(filter(shutil.which, ("gcc", "cc")))[:1]
    except ValueError as error:
        raise CannotBuild(f"CC={given}: {error}") from error
    if not command:
        raise CannotBuild("no C compiler (apt install gcc)")
    return command


def _version(compiler: list[str]) -> str:
    return _output([*compiler, "--version"], 20)


def _is_whole(path: Path) -> bool:
    """Whether `_compile` wrote this file to its end: using one that was cut off would end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _processor() -> str:
    """What the machine's instructions are."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [
                line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))
            ]
    except OSError:
        lines = []
    return "".join(sorted(set(lines))) or platform.processor() + platform.machine()


def _private_folder() -> Path:
    """Where compiled files are kept; a new temporary folder where that is not ours alone."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # by its definition without effect if not absolute
    try:
        folder = (base if base.is_absolute() else Path.home() / ".cache") / "headrace"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
        others = stat.S_IWGRP | stat.S_IWOTH
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & others:
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder is known
        logger.debug("no folder to keep compiled kernels in: %s", error)
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="headrace-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def thread_library() -> Path:
    """The OpenMP runtime that torch uses. With another the threads of both would wait for the same processors."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as file:
            loaded = {Path(line.split(maxsplit=5)[-1].strip()) for line in file if "/libgomp" in line}
    except OSError as error:
        raise CannotBuild(f"{error.filename}: {error.strerror}") from error
    # other packages bring one of their own
    package = Path(torch.__file__).parent
    own = {
        p for p in loaded if p.is_relative_to(package) or p.parent == package.with_name("torch.libs")
    } or loaded
    if len(own) != 1:
        raise CannotBuild(f"of torch {torch.__version__} it is not known which OpenMP runtime it uses")
    return own.pop()


def _compile(compiler: list[str], threads: Path, path: Path) -> None:
    """Under another name first: workers that start together may all compile, and the last one wins."""
    try:
        with tempfile.TemporaryDirectory(prefix="new-", dir=path.parent) as folder:
            sources = [str(Path(__file__).parent / name) for name in SOURCES]
            _output([*compiler, *FLAGS, "-c", *sources], LONGEST_BUILD_S, folder)
            objects = [f"{Path(name).stem}.o" for name in SOURCES]
            # without -fopenmp, which would link the compiler's own runtime
            _output(
                [*compiler, "-shared", *objects, str(threads), "-lm", "-o", path.name],
                LONGEST_BUILD_S,
                folder,
            )
            built = Path(folder) / path.name
            digest = hashlib.sha256(built.read_bytes()).digest()
            with built.open("ab") as file:
                file.write(digest)  # loaders do not look there
            os.replace(built, path)
    except OSError as error:
        raise CannotBuild(f"nothing can be built in {path.parent}: {error.strerror}") from error


def _output(command: list[str], timeout_s: float, folder: str | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
            cwd=folder,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        errors = [line for line in said if "error" in line.lower()]  # notes may follow them
        raise CannotBuild(f"{command[0]} ended with {done.returncode}: {(errors or said[-1:])[0]}")
    return done.stdout
