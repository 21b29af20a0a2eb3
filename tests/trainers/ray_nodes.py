"""Several Ray nodes on this host, each with an address of its own, in a process that obeys lines on its input.

Run as a file by test_cluster_nodes.py; every command is answered by one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MEMORY = 80 << 20
SYSTEM = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}


class Nodes:
    """The test's side."""

    def __init__(self, folder: Path, count: int) -> None:
        """`count` nodes of one CPU each, and one without for the controllers; `folder`, a short path, is for Ray."""
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(folder),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "cluster.log").open("w"),
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        self.address: str = self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError("the Ray nodes did not start; see cluster.log")
        return json.loads(line)

    def _ask(self, *words: str) -> Any:
        print(*words, file=self._process.stdin, flush=True)
        return self._answer()

    def add(self, hidden: Path | None = None) -> str:
        """One more node; returns its id. `hidden`: a folder that it sees empty (needs root)."""
        return str(self._ask("add", *([str(hidden)] if hidden else [])))

    def kill(self, node: str) -> None:
        """SIGKILL for the raylet with this id, as when its host is gone: its workers follow."""
        self._ask("kill", node)

    def state(self) -> dict[str, Any]:
        """`nodes`: id → address of those alive with a CPU; `free`: CPUs; `actors`: named; `groups`: of placement."""
        found: dict[str, Any] = self._ask("state")
        return found

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(60)


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    cluster = Cluster()
    nodes: dict[str, Any] = {}
    made = 0

    def add(cpus: int = 1, **more: Any) -> str:
        nonlocal made
        made += 1
        # 127.0.0.1 is an address that Ray replaces by the host's own
        node = cluster.add_node(
            num_cpus=cpus, node_ip_address=f"127.0.0.{made + 1}", object_store_memory=MEMORY, **more
        )
        nodes[node.node_id] = node
        return str(node.node_id)

    def add_in_own_mounts(hidden: str) -> str:
        nonlocal made
        made += 1
        before = {n["NodeID"] for n in ray.nodes()}
        ray_command = str(Path(sys.executable).parent / "ray")
        start = (
            f"mount -t tmpfs tmpfs {hidden} && exec {ray_command} start --block --address {cluster.address} --num-cpus 1"
            f" --node-ip-address 127.0.0.{made + 1} --object-store-memory {MEMORY}"
        )
        process = subprocess.Popen(["unshare", "-m", "sh", "-c", start])
        while not (new := {n["NodeID"] for n in ray.nodes()} - before):
            if process.poll() is not None:
                raise RuntimeError("the node did not start")
        node = str(new.pop())
        nodes[node] = process
        return node

    def state() -> dict[str, Any]:
        groups = ray.util.placement_group_table().values()
        return {
            "nodes": {
                n["NodeID"]: n["NodeManagerAddress"]
                for n in ray.nodes()
                if n["Alive"] and "CPU" in n["Resources"]
            },
            "free": ray.available_resources().get("CPU", 0),
            "actors": ray.util.list_named_actors(all_namespaces=True),
            "groups": [g["state"] for g in groups if g["state"] != "REMOVED"],
        }

    def kill(node: str) -> None:
        gone = nodes.pop(node)
        if isinstance(gone, subprocess.Popen):
            gone.terminate()
            gone.wait(30)
        else:
            cluster.remove_node(gone, allow_graceful=False)

    add(0, include_dashboard=False, _system_config=SYSTEM)
    ray.init(cluster.address, log_to_driver=False)
    for _ in range(int(sys.argv[1])):
        add()
    commands = {"add": lambda *a: add_in_own_mounts(*a) if a else add(), "kill": kill, "state": state}
    print(json.dumps(cluster.address), file=answers, flush=True)
    for line in sys.stdin:
        word, *arguments = line.split()
        print(json.dumps(commands[word](*arguments)), file=answers, flush=True)
    for node in list(nodes):
        if isinstance(nodes[node], subprocess.Popen):
            kill(node)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
