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
from headrace.cluster.faults import Failure
from headrace.cluster.placement import Placement
from headrace.cluster.ray_cluster import (
    allowed_environment,
    join_in_time,
    let_ray_print,
    object_store_bytes,
    one_start_at_a_time,
    private_environment,
    require_answer,
)
from headrace.cluster.ray_orders import RayOrders, one_sentence
from headrace.cluster.ray_rank import RankProcess, actor_name, from_wire, to_wire
from headrace.cluster.sweeper import Sweeper
from headrace.cluster.wire import Message, plain_bytes
from headrace.cluster.workers import Executor, Pending
from headrace.errors import ConfigError, MissingExtraError, RunError, WorkerError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
START_S = 120.0
"""Longest wait for the processes of all ranks to be there."""
SHOWN_HOSTS = 8
NOTICE_S = 10.0
"""After so long the wait for devices is worth a line."""


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
        self.failed: WorkerError | None = None
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
        except OSError as error:  # of the temporary folder, or of that of the logs
            self.close()
            raise RunError(f"the processes cannot be started: {error}") from error
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
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"a cluster of several processes needs Ray, which is installed but cannot be imported: {error}"
            ) from error
        if ray.is_initialized():
            raise RunError("Ray is in use in this process already; end that (ray.shutdown()) before a run")
        let_ray_print(False)  # what its messages are about, our errors say by rank and stage
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
            logger.info("joining the Ray cluster at %s", address)
            require_answer(address)
            try:
                ray.init(address=address, **common)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"RAY_ADDRESS: cannot join a Ray cluster at '{address}': {one_sentence(error)}"
                ) from error
            self._connected = True
            return
        logger.info("starting Ray on this host, for %d processes", self.placement.world)
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
        logger.info("waiting for the processes, each of which loads torch")
        problems = self._get([a.arrive.remote() for a in self._actors.values()], deadline, "start")
        mark.unlink()
        if any(problems):
            raise ConfigError(list(dict.fromkeys(p for p in problems if p)))
        store = self._get([self._actors[0].open_store.remote()], deadline, "start")[0]
        joins = [actor.join.remote(*store) for actor in self._actors.values()]
        self.hosts = dict(zip(self._actors, self._get(joins, deadline, "join"), strict=True))
        hosts = list(dict.fromkeys(self.hosts.values()))
        shown = ", ".join(hosts) if len(hosts) <= SHOWN_HOSTS else f"{len(hosts)} hosts"
        logger.info("%d processes have joined, on %s", p.world, shown)
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
            raise WorkerError(
                f"a rank failed to {what}: {one_sentence(error)}; logs are in {self.logs}"
            ) from error

    def move_logs(self, folder: Path) -> None:
        """Open files stay open under their new name, so the ranks need not know."""
        if self.placement.logging.save_dir is None and self.logs != folder.resolve():
            self.logs = self.logs.rename(folder.resolve())
        logger.info("each process has a log in %s", self.logs)

    def log_path(self, rank: int) -> Path:
        seat = self.placement.seats[rank]
        return self.logs / f"{seat.group}-rank-{rank}.log"

    # working

    def submit(self, orders: Mapping[int, bytes], what: str, timeout_s: float | None = None) -> Pending:
        self._require_alive()
        refs = {self._actors[rank].run.remote(order): rank for rank, order in orders.items()}
        return RayOrders(
            self._actors, refs, timeout_s or self.timeout_s, lambda failure: self._blame(what, failure)
        )

    def ask(self, requests: Sequence[tuple[int, str, Message]]) -> list[Message]:
        import ray

        self._require_alive()
        refs = [
            self._actors[rank].serve.options(concurrency_group="rows").remote(topic, to_wire(message))
            for rank, topic, message in requests
        ]
        deadline = time.monotonic() + self.timeout_s
        replies: list[Message] = []
        for ref, (rank, _, _) in zip(refs, requests, strict=True):
            try:
                replies.append(from_wire(ray.get(ref, timeout=max(1.0, deadline - time.monotonic()))))
            except ray.exceptions.GetTimeoutError as error:
                failure = Failure(rank, f"it did not hand them over within {self.timeout_s:g} s", 0.0)
                raise self._blame("reading rows from the workers", failure) from error
            except ray.exceptions.RayError as error:
                died = isinstance(error, ray.exceptions.ActorDiedError)
                cause = "its process died" if died else "it did not hand them over"
                failure = Failure(rank, f"{cause} ({one_sentence(error)})", 0.0)
                raise self._blame("reading rows from the workers", failure) from error
        return replies

    def _require_alive(self) -> None:
        if self.failed is not None:
            raise self.failed
        if not self._connected:
            raise RunError("the workers have been closed")

    def _blame(self, what: str, failure: Failure) -> WorkerError:
        rank = failure.rank
        seat, host = self.placement.seats[rank], self.hosts.get(rank, "an unknown host")
        message = (
            f"{what}: rank {rank} ({seat.group} {seat.group_rank}, host {host}) failed: {failure.cause}; its log is"
            f" {self.log_path(rank)}"
        )
        return self.fail(WorkerError(message, failure.exit_code))

    def fail(self, error: WorkerError) -> WorkerError:
        """Releases every rank at once and remembers why; returns the first error, which is the cause of others."""
        if self.failed is None:
            self.failed = error
            self._kill()
        return self.failed

    # ending

    def _kill(self) -> None:
        import ray

        for actor in self._actors.values():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor, no_restart=True)
        self._actors = {}

    def close(self) -> None:
        if self._connected:
            import ray

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
        let_ray_print(True)
        if self._sweeper is not None:
            self._sweeper.dismiss()
            self._sweeper = None
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None
