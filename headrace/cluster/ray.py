"""The executor on Ray: one actor a rank, on this host or many.

Ray starts the processes, carries orders, and rows from rank to rank; torch.distributed carries tensors of collectives.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.cluster.bundles import by_node, nodes_violations, shares_of_hosts
from headrace.cluster.faults import Failure, root_cause
from headrace.cluster.placement import Placement
from headrace.cluster.ray_cluster import (
    allowed_environment,
    join_in_time,
    object_store_bytes,
    one_start_at_a_time,
    private_environment,
    require_answer,
)
from headrace.cluster.ray_rank import RankProcess, actor_name, from_wire, to_wire
from headrace.cluster.sweeper import Sweeper
from headrace.cluster.wire import Message, plain_bytes, plain_value
from headrace.cluster.workers import Executor, Pending
from headrace.errors import ConfigError, HeadraceError, MissingExtraError, RunError, WorkerError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
START_S = 120.0
"""Longest wait for the processes of all ranks to be there."""
GRACE_S = 3.0
"""After a first failure: how long the others have to say that they were the cause."""
NOTICE_S = 10.0
"""After so long the wait for devices is worth a line."""
HEARTBEAT_S = 5.0
NODE_LOST_S = 25.0
"""Longest wait for Ray to say that a node is gone whose ranks cannot be reached."""
FROZEN_S = 30.0
"""A rank that does not answer for so long, though it only has to say where it is, counts as hung."""


class RayExecutor(Executor):
    """Joins the cluster at `address` (or RAY_ADDRESS), or starts a private one that only this host can reach.

    After a failure all ranks are gone and every further call raises the same error.
    """

    def __init__(
        self,
        placement: Placement,
        logs: Path,
        *,
        address: str | None = None,
        timeout_s: float = 1800.0,
        start_s: float = START_S,
    ) -> None:
        """`logs`: folder for one file a rank, made where there is none.

        Raises MissingExtraError without Ray, ConfigError when the cluster has too few devices, RunError when it or
        a rank does not start within `start_s`.
        """
        super().__init__(placement, timeout_s)
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError("a cluster of several processes", "ray", "ray")
        self._folder = logs.resolve()
        self.logs = Path(placement.logging.save_dir or logs).resolve()
        self.failed: HeadraceError | None = None
        self.hosts: dict[int, str] = {}
        self._run = f"headrace-{secrets.token_hex(6)}"
        self._actors: dict[int, Any] = {}
        self._group: Any = None
        self._private: Path | None = None
        self._sweeper: Sweeper | None = None
        self._connected = False
        address = address or os.environ.get("RAY_ADDRESS")
        try:
            self._connect(address)
            self._start(start_s)
        except BaseException:
            self.close()
            raise

    # starting

    def _connect(self, address: str | None) -> None:
        if not address:
            # read when Ray is imported: a node on loopback, as on Windows; its own option for this is overruled
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        else:
            join_in_time(os.environ)
        import ray

        if ray.is_initialized():
            raise RunError("Ray is in use in this process already; end that (ray.shutdown()) before a run")
        passed = allowed_environment(os.environ)
        if not self.placement.communication.rdma_enabled:
            passed["NCCL_IB_DISABLE"] = "1"
        common: dict[str, Any] = {
            "namespace": self._run,
            "log_to_driver": False,
            "configure_logging": False,
            "logging_level": "error",
            "runtime_env": {"env_vars": passed},
        }
        if address:
            require_answer(address)
            try:
                ray.init(address=address, **common)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"RAY_ADDRESS: cannot join a Ray cluster at '{address}': {_short(error)}"
                ) from error
            self._connected = True
            return
        common["runtime_env"]["env_vars"] |= {
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"
        }
        self._private = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp" if os.path.isdir("/tmp") else None))
        self._sweeper = Sweeper(self._private)
        with one_start_at_a_time(START_S), private_environment():
            for attempt in (1, 2, 3):
                try:
                    ray.init(
                        address="local",
                        num_cpus=self.placement.world,
                        include_dashboard=False,
                        object_store_memory=object_store_bytes(),
                        _temp_dir=str(self._private),
                        **common,
                    )
                    self._connected = True
                    break
                except Exception as error:  # what Ray raises here is a plain Exception
                    # another launch may have taken a port that Ray had picked
                    ray.shutdown()
                    if attempt == 3:
                        raise RunError(f"a private Ray cluster did not start: {error}") from error
                    time.sleep(attempt * (0.5 + secrets.randbelow(1000) / 1000))
        if not ray.util.get_node_ip_address().startswith("127."):
            raise RunError(
                "the private Ray cluster would be open to the network, because Ray was imported before this; set"
                " RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 for the whole process, or join a cluster by RAY_ADDRESS"
            )

    def _start(self, start_s: float) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        p = self.placement
        resource = "GPU" if p.device == "cuda" else "CPU"
        nodes = [int(n["Resources"].get(resource, 0)) for n in ray.nodes() if n["Alive"]]
        problems = nodes_violations(p, resource, nodes, joined=self._private is None)
        if problems:
            raise ConfigError(problems)
        shares = shares_of_hosts(p)
        bundles = [{"CPU": float(n)} | ({"GPU": float(n)} if resource == "GPU" else {}) for n in shares]
        # one host of a layout is one node; a private cluster has one node for all of them
        strategy = "PACK" if not p.hosts_named else "STRICT_SPREAD" if self._private is None else "SPREAD"
        deadline = time.monotonic() + start_s
        self._group = placement_group(bundles, strategy=strategy)
        if not self._group.wait(min(start_s, NOTICE_S)):
            logger.warning("waiting for %d %ss that other work on the Ray cluster holds", p.world, resource)
            if not self._group.wait(max(0.1, deadline - time.monotonic())):
                raise RunError(
                    f"the Ray cluster did not make {p.world} {resource}s free within {start_s:.0f} s"
                )
        bundle_of = by_node(p, ray.util.placement_group_table(self._group)["bundles_to_node_id"])
        mark = self._mark()
        rank_class = ray.remote(
            num_cpus=1,
            num_gpus=1 if resource == "GPU" else 0,
            max_restarts=0,
            concurrency_groups={"rows": 4, "plan": 4, "control": 1},
        )(RankProcess)
        groups = {name: list(p.ranks(name)) for name in p.groups}
        for seat in p.seats:
            setup = {
                "rank": seat.rank,
                "world": p.world,
                "group": seat.group,
                "group_rank": seat.group_rank,
                "groups": groups,
                "device": p.device,
                "backend": p.backend,
                "timeout_s": self.timeout_s,
                "log": str(self.log_path(seat.rank)),
                "mark": str(mark),
                "log_level": p.logging.level,
                "address": LOOPBACK if self._private is not None else None,
                "run": self._run,
                "namespace": self._run,
            }
            where = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle_of[seat.rank]
            )
            options = {"name": actor_name(self._run, seat.rank), "scheduling_strategy": where}
            self._actors[seat.rank] = rank_class.options(**options).remote(plain_bytes(setup, "a setup"))
        if self._sweeper is not None:
            self._sweeper.watch()
        problems = self._get([a.arrive.remote() for a in self._actors.values()], deadline, "start")
        mark.unlink()
        if any(problems):
            raise ConfigError(list(dict.fromkeys(p for p in problems if p)))
        store = self._get([self._actors[0].open_store.remote()], deadline, "start")[0]
        joins = [actor.join.remote(*store) for actor in self._actors.values()]
        self.hosts = dict(zip(self._actors, self._get(joins, deadline, "join"), strict=True))
        if self._sweeper is not None:
            self._sweeper.watch()

    def _mark(self) -> Path:
        """A file beside the logs by which a rank sees that it has the same run directory."""
        self._folder.mkdir(parents=True, exist_ok=True)
        mark = self._folder / f".{self._run}"
        mark.write_text(self._run)
        return mark

    def _get(self, refs: list[Any], deadline: float, what: str) -> list[Any]:
        import ray

        try:
            return list(ray.get(refs, timeout=max(1.0, deadline - time.monotonic())))
        except ray.exceptions.GetTimeoutError as error:
            raise RunError(f"the ranks did not {what} in time; their logs are in {self.logs}") from error
        except ray.exceptions.RayError as error:
            raise WorkerError(f"a rank failed to {what}: {_short(error)}; logs are in {self.logs}") from error

    def move_logs(self, folder: Path) -> None:
        """Open files stay open under their new name, so the ranks need not know."""
        if self.placement.logging.save_dir is None and self.logs != folder.resolve():
            self.logs = self.logs.rename(folder.resolve())

    def log_path(self, rank: int) -> Path:
        seat = self.placement.seats[rank]
        return self.logs / f"{seat.group}-rank-{rank}.log"

    # working

    def submit(self, orders: Mapping[int, bytes], what: str, timeout_s: float | None = None) -> Pending:
        self._require_alive()
        refs = {self._actors[rank].run.remote(order): rank for rank, order in orders.items()}
        return _Orders(self, refs, what, timeout_s or self.timeout_s)

    def ask(self, requests: Sequence[tuple[int, str, Message]]) -> list[Message]:
        import ray

        self._require_alive()
        refs = [
            self._actors[rank].serve.options(concurrency_group="rows").remote(topic, to_wire(message))
            for rank, topic, message in requests
        ]
        try:
            return [from_wire(wire) for wire in ray.get(refs, timeout=self.timeout_s)]
        except ray.exceptions.RayError as error:
            raise self.fail(
                WorkerError(f"rows could not be read from the workers: {_short(error)}")
            ) from error

    def _require_alive(self) -> None:
        if self.failed is not None:
            raise self.failed
        if not self._connected:
            raise RunError("the workers have been closed")

    def fail(self, error: WorkerError) -> WorkerError:
        """Releases every rank at once and remembers why."""
        self.failed = error
        self._kill()
        return error

    # ending

    def _kill(self) -> None:
        import ray

        for actor in self._actors.values():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor, no_restart=True)
        self._actors = {}

    def close(self) -> None:
        import ray

        if self._connected:
            if self.failed is None and self._actors:
                leaving = [
                    actor.leave.options(concurrency_group="control").remote()
                    for actor in self._actors.values()
                ]
                ray.wait(leaving, num_returns=len(leaving), timeout=5.0)
            self._kill()
            # a private cluster ends as a whole, and its own server may be gone already
            if self._group is not None and self._private is None:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.util.remove_placement_group(self._group)
            self._group = None
            ray.shutdown()
            self._connected = False
        if self._sweeper is not None:
            self._sweeper.dismiss()
            self._sweeper = None
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None


class _Orders:
    """Orders given to ranks. Finds the one that is to blame when they do not all come back."""

    def __init__(self, executor: RayExecutor, refs: Mapping[Any, int], what: str, timeout_s: float) -> None:
        self.executor, self.what, self.timeout_s = executor, what, timeout_s
        self._waiting = dict(refs)
        self._replies: dict[int, bytes] = {}
        self._failures: dict[int, Failure] = {}
        self._unreachable: set[int] = set()
        self._deadline = time.monotonic() + timeout_s
        self._pings: dict[int, Any] = {}
        self._answered: dict[int, float] = {}

    def result(self) -> Mapping[int, bytes]:
        import ray

        first_failure: float | None = None
        next_beat = time.monotonic() + HEARTBEAT_S
        while self._waiting:
            now = time.monotonic()
            step = 0.2 if first_failure is not None else 1.0
            pending = list(self._waiting)
            done, _ = ray.wait(pending, num_returns=len(pending), timeout=step, fetch_local=False)
            for ref in done:
                self._collect(ref, self._waiting.pop(ref))
            if self._failures:
                first_failure = first_failure or now
                if not all(f.secondary for f in self._failures.values()) or now - first_failure > GRACE_S:
                    break
            elif now > self._deadline:
                self._find_hung(f"did not finish within {self.timeout_s:g} s")
                break
            elif now > next_beat:
                next_beat = now + HEARTBEAT_S
                self._beat(now)
        if self._failures:
            self._find_dead()
            if all(f.secondary for f in self._failures.values()) and self._waiting:
                self._find_hung("did not take part while the others waited for it")
            raise self._error()
        return self._replies

    def _collect(self, ref: Any, rank: int) -> None:
        import ray

        try:
            reply = ray.get(ref)
        except ray.exceptions.ActorUnavailableError as error:
            self._failures[rank] = Failure(rank, f"it cannot be reached ({_short(error)})", 0.5)
            self._unreachable.add(rank)
            return
        except ray.exceptions.RayError as error:
            self._failures[rank] = Failure(rank, f"its process died ({_short(error)})", 0.0)
            return
        if reply.startswith(b'{"error"'):
            e = plain_value(reply)["error"]
            self._failures[rank] = Failure(rank, e["cause"], e["time"], e["secondary"], e.get("exit_code", 1))
        else:
            self._replies[rank] = reply

    def _beat(self, now: float) -> None:
        """Asks the ranks at work whether they are there; one that is frozen cannot say so."""
        import ray

        for rank in self._waiting.values():
            ping = self._pings.get(rank)
            if ping is not None and not ray.wait([ping], timeout=0)[0]:
                if now - self._answered[rank] > FROZEN_S:
                    self._failures[rank] = Failure(rank, f"it has not answered for {FROZEN_S:g} s", 0.0)
                continue
            self._answered[rank] = now
            where = self.executor._actors[rank].where.options(concurrency_group="control")
            self._pings[rank] = where.remote()

    def _find_hung(self, why: str) -> None:
        """Blames the ranks that neither finished nor wait for another one."""
        import ray

        ranks = list(self._waiting.values())
        asked = {
            self.executor._actors[rank].where.options(concurrency_group="control").remote(): rank
            for rank in ranks
        }
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=5.0)
        waiting: dict[int, str] = {}
        for ref in silent:
            self._failures[asked[ref]] = Failure(asked[ref], f"it {why} and does not answer", 0.0)
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                place = plain_value(ray.get(ref))
                cause = f"it {why}; it is at {place['line']}"
                if place["waiting"]:
                    waiting[asked[ref]] = cause
                else:
                    self._failures[asked[ref]] = Failure(asked[ref], cause, 1.0)
        if all(f.secondary for f in self._failures.values()):
            for rank, cause in waiting.items():
                self._failures[rank] = Failure(rank, cause, 2.0)

    def _find_dead(self) -> None:
        """Blames a rank that is gone, of these orders or not: others failed when they asked it for rows.

        That it cannot be reached is known at once, why only when Ray has found its node gone.
        """
        import ray

        deadline = time.monotonic() + NODE_LOST_S
        if {rank for rank, failure in self._failures.items() if not failure.secondary} - self._unreachable:
            return
        asked = list(self._unreachable or self.executor._actors)
        while asked:
            refs = {
                self.executor._actors[rank].where.options(concurrency_group="control").remote(): rank
                for rank in asked
            }
            answered, silent = ray.wait(list(refs), num_returns=len(refs), timeout=5.0)
            # one of these orders that is silent hangs, which is found out next
            silent = [ref for ref in silent if refs[ref] not in self._waiting.values()]
            asked = [refs[ref] for ref in silent]
            for ref in answered:
                rank = refs[ref]
                try:
                    ray.get(ref)
                except ray.exceptions.ActorUnavailableError as error:
                    self._failures[rank] = Failure(rank, f"it cannot be reached ({_short(error)})", 0.5)
                    asked.append(rank)
                except ray.exceptions.RayError as error:
                    self._failures[rank] = Failure(rank, f"its process died ({_short(error)})", 0.0)
                    return
            if time.monotonic() > deadline:
                for ref in silent:
                    self._failures[refs[ref]] = Failure(refs[ref], "it does not answer", 0.5)
                return
            time.sleep(0.5)

    def _error(self) -> WorkerError:
        cause = root_cause(self._failures)
        seat = self.executor.placement.seats[cause.rank]
        host = self.executor.hosts.get(cause.rank, "an unknown host")
        message = (
            f"{self.what}: rank {cause.rank} ({seat.group} {seat.group_rank}, host {host}) failed: {cause.cause}; its log"
            f" is {self.executor.log_path(cause.rank)}"
        )
        return self.executor.fail(WorkerError(message, cause.exit_code))


def _short(error: BaseException) -> str:
    """The sentence of a Ray error that says what happened."""
    text = " ".join(str(error).split())
    for mark in ("Worker exit type:", "The actor is dead because"):
        if mark in text:
            text = text[text.index(mark) :]
    return text.partition("Some common causes")[0].strip()[:300]
