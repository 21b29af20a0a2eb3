"""What is around an executor's Ray cluster: its environment, its start on this host, its address, its nodes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from headrace.errors import ConfigError

PASSED_ON = re.compile(
    r"PYTHONPATH|OMP_NUM_THREADS|MKL_NUM_THREADS|TOKENIZERS_PARALLELISM|HF_\w+|TRANSFORMERS_\w+|HEADRACE_\w+"
    r"|NCCL_\w+|NVSHMEM_\w+|GLOO_\w+|TORCH_\w+|TORCHINDUCTOR_\w+|PYTORCH_\w+|TRITON_\w+|CUDA_\w+"
)
"""Variables of the controller's environment that the ranks get. Nothing else of it reaches them."""
SYSTEM = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON\w*|RAY_\w+|__\w+|XDG_\w+"
    r"|SSL_CERT_\w+|no_proxy|NO_PROXY|https?_proxy|HTTPS?_PROXY|NVIDIA_\w+|KMP_\w+"
)
"""Variables that every process needs, as they are where it starts."""


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the controller sends along."""
    return {k: v for k, v in environment.items() if PASSED_ON.fullmatch(k) and k != "CUDA_VISIBLE_DEVICES"}


@contextlib.contextmanager
def one_start_at_a_time(longest_s: float) -> Iterator[None]:
    """Has launches of this user on this host start their clusters in turn: together they run into Ray's time limits.

    The lock goes with the process that holds it. After `longest_s` the start is tried without it.
    """
    path = Path(tempfile.gettempdir()) / f"headrace-start-{os.getuid()}.lock"
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + longest_s
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def private_environment() -> Iterator[None]:
    """While a private cluster starts: what its processes inherit is the allow-list, and Ray writes no token at home."""
    before = dict(os.environ)
    kept = {k: v for k, v in before.items() if SYSTEM.fullmatch(k) or PASSED_ON.fullmatch(k)}
    os.environ.clear()
    # Ray would give ranks niceness 15, with which the run yields to everything else on this host
    default = {"RAY_worker_niceness": "0"}
    os.environ.update(default | kept | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"})
    os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        added = {k: v for k, v in os.environ.items() if k not in kept and k.startswith("RAY_")}
        os.environ.clear()
        os.environ.update(before | added)


def join_in_time(environment: MutableMapping[str, str]) -> None:
    """Has Ray, which reads these when it is imported, try once and for seconds where it would try for many minutes."""
    environment.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    environment.setdefault("RAY_py_gcs_connect_timeout_s", "10")


def require_answer(address: str) -> None:
    """Raises ConfigError where nothing listens at HOST:PORT or ray://HOST:PORT; others are for Ray itself to refuse."""
    import ray

    match = re.fullmatch(r"(ray://)?\[?([^/\[\]]+?)\]?:(\d+)", address)
    if match is None:
        return  # `auto` and the like
    host, taken_as = match[2], ""
    if not match[1] and host in ("localhost", "127.0.0.1", "::1"):
        # Ray replaces these by the address that other hosts have for this one
        host = str(ray.util.get_node_ip_address())
        taken_as = f" (which Ray takes as {host}:{match[3]})"
    try:
        socket.create_connection((host, int(match[3])), timeout=10).close()
    except OSError as error:
        raise ConfigError(f"RAY_ADDRESS: no Ray cluster answers at '{address}'{taken_as}: {error}") from error


def let_ray_print(yes: bool) -> None:
    """Whether Ray may write to stdout, as it does in a few hundred words when a process of its cluster dies.

    The switch is Ray's own, and not a public one: where a version has none, Ray prints.
    """
    with contextlib.suppress(ImportError):
        import ray._private.worker as worker

        worker._worker_logs_enabled = yes


def object_store_bytes() -> int:
    """Ray's shared memory only carries rows on their way: a tenth of what is free, within bounds."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return min(2 << 30, max(80 << 20, shutil.disk_usage(folder).free // 10))
