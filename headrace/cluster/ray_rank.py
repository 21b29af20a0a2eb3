"""One rank as a Ray actor: the process around a Worker, its log file, its environment and its process groups."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from headrace.cluster.faults import failure_report, position
from headrace.cluster.wire import Message, plain_bytes, plain_value
from headrace.cluster.worker import Site, Worker
from headrace.cluster.workers import become_worker

Wire = tuple[bytes, list[np.ndarray]]
"""A Message as Ray carries it: JSON, and arrays that it moves as raw buffers."""


def to_wire(message: Message) -> Wire:
    return plain_bytes(message.header, "a message"), list(message.buffers)


def from_wire(wire: Wire) -> Message:
    return Message(plain_value(wire[0]), wire[1])


class RankProcess:
    """What the controller's Ray actor is. Orders run on one thread; `serve`, `plan`, `where`, `pulse` … on others."""

    def __init__(self, setup: bytes) -> None:
        """`setup`: the rank's place in the cluster as JSON (see RayExecutor)."""
        self.setup = plain_value(setup)
        become_worker(self.setup["rank"])
        self.worker: Worker | None = None
        self.store: Any = None
        self.thread: int | None = None
        self.failed = False

    def arrive(self) -> str:
        """Opens the log. Returns what is wrong where this host does not see the run directory, or an empty string."""
        mark = Path(self.setup["mark"])
        if not (mark.is_file() and mark.read_text() == self.setup["run"]):
            return (
                f"run.dir: host {self.host_name()} does not see the folder {mark.parent} of the controller; all hosts"
                " must have run.dir on one shared file system"
            )
        self._open_log()
        node = "" if self.setup["address"] else f", Ray node {_node()}"
        logging.getLogger(__name__).info("process %d on host %s%s", os.getpid(), self.host_name(), node)
        return ""

    def host_name(self) -> str:
        """This host, in a joined cluster with its address there."""
        name = socket.gethostname()
        return name if self.setup["address"] else f"{name} ({_own_address()})"

    def _open_log(self) -> None:
        """Everything this process writes, also from C++, goes to the file of its rank."""
        path = Path(self.setup["log"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        form = f"%(asctime)s rank {self.setup['rank']} %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=self.setup["log_level"].upper(), format=form, force=True)

    def open_store(self) -> tuple[str, int]:
        """Binds the port that the ranks meet at, then says which it is; nobody can take it in between."""
        host = self.setup["address"] or _own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.bind((host, 0))
            listening.listen(2048)
            port = listening.getsockname()[1]
            self.store = dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.setup["timeout_s"]),
                master_listen_fd=listening.detach(),
            )
        return host, port

    def join(self, host: str, port: int) -> str:
        """Forms the process group of all ranks and those of the placement's groups; returns this host's name."""
        s = self.setup
        if not s["address"]:
            use_interface_of(_own_address(), os.environ)
        timeout = timedelta(seconds=s["timeout_s"])
        device = "cpu"
        if s["device"] == "cuda":
            # Ray shows each rank its own GPU only
            device = "cuda:0"
            torch.cuda.set_device(0)
        store = self.store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
        dist.init_process_group(
            s["backend"], store=store, rank=s["rank"], world_size=s["world"], timeout=timeout
        )
        mine = None
        for name, ranks in s["groups"].items():
            made = dist.new_group(ranks, timeout=timeout)
            mine = made if name == s["group"] else mine
        if len(s["groups"]) > 1:
            # weights go between groups among some ranks; the first call of an NCCL group must be one of all its ranks
            dist.all_reduce(torch.zeros(1, device=device))
        site = Site(
            s["rank"],
            s["world"],
            s["group"],
            s["group_rank"],
            tuple(s["groups"][s["group"]]),
            socket.gethostname(),
            device,
            process_group=mine,
        )
        self.worker = Worker(site, self)
        return self.host_name()

    def run(self, order: bytes) -> bytes:
        """Carries an order out. A failure is returned, not raised, so that no pickled exception leaves the process."""
        self.thread = threading.get_ident()
        if self.setup["device"] == "cuda":
            torch.cuda.set_device(0)  # it is a setting of the thread
        if self.failed or self.worker is None:
            return plain_bytes({"error": {"cause": "not ready", "time": time.time(), "secondary": True}}, "")
        try:
            return self.worker.run(order)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the border of the process: all goes to the controller
            self.failed = True
            report = failure_report(error)
            logging.getLogger(__name__).error("%s", report.pop("traceback"))
            return plain_bytes({"error": report}, "a failure")

    def serve(self, topic: str, wire: Wire) -> Wire:
        """Rows for another worker (or for the controller, where it asks for them)."""
        if self.worker is None:
            raise RuntimeError("this rank has not joined yet")
        return to_wire(self.worker.serve(topic, from_wire(wire)))

    def where(self) -> bytes:
        """What the thread of the orders is doing, for the controller to find a rank that hangs."""
        doing = None if self.worker is None else self.worker.current
        return plain_bytes(position(self.thread, doing), "a position")

    def pulse(self, call: int) -> bytes:
        """How far the rank is with a call (Pulse.read)."""
        return plain_bytes({} if self.worker is None else self.worker.site.pulse.read(call), "a pulse")

    def hold(self, call: int) -> int:
        """See Pulse."""
        return 0 if self.worker is None else self.worker.site.pulse.hold(call)

    def leave_at(self, call: int, point: int | None) -> None:
        """See Pulse."""
        if self.worker is not None:
            self.worker.site.pulse.leave_at(call, point)

    def leave(self) -> None:
        """Lets go of the process groups, and of what they hold in shared memory."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def ask(self, requests: Sequence[tuple[int, str, Message]]) -> list[Message]:
        """Peers.ask: straight from rank to rank."""
        import ray

        refs = []
        for rank, topic, message in requests:
            peer = ray.get_actor(actor_name(self.setup["run"], rank), namespace=self.setup["namespace"])
            options = peer.serve.options(concurrency_group="plan" if topic == "plan" else "rows")
            refs.append(options.remote(topic, to_wire(message)))
        return [from_wire(answer) for answer in ray.get(refs)]


def _own_address() -> str:
    """The address by which the other hosts of the Ray cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def use_interface_of(address: str, environment: MutableMapping[str, str]) -> None:
    """Has gloo speak where Ray does: by itself it takes what the host's name stands for, on many hosts loopback."""
    name = _interface(address)
    if name is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", name)


def _interface(address: str) -> str | None:
    """The network interface that has this IPv4 address, on Linux."""
    if not sys.platform.startswith("linux") or ":" in address:
        return None
    ask_for_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = socket.inet_ntoa(fcntl.ioctl(any_socket, ask_for_address, request)[20:24])
            except OSError:
                continue  # it has none
            # all of 127.* is one interface
            if found == address or (found.startswith("127.") and address.startswith("127.")):
                return name
    return None


def actor_name(run: str, rank: int) -> str:
    return f"{run}-rank-{rank}"
