"""An actor's rollouts in a layout of their own: a second model, which gets the actor's weights by resharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headrace.cluster.group import WorkerGroup
from headrace.cluster.workers import Executor
from headrace.observe.metrics import MetricSums


class RolloutGroup:
    """The workers that generate for an actor whose own layout cannot, or that has other devices for it."""

    def __init__(
        self, executor: Executor, actor: WorkerGroup, worker: str, description: Mapping[str, Any]
    ) -> None:
        """Makes the model, without weights. `description`: the factory's arguments for the actor itself."""
        self.actor = actor
        self.group = WorkerGroup(executor, "rollout", f"{actor.name}.rollout")
        arguments = {**description, "name": self.group.name, "trains": False, "weights_from": actor.name}
        self.group.create(worker, **arguments)
        self.colocated = self.group.group == actor.group
        self._version: int | None = None
        hosts = [seat.host for seat in executor.placement.seats]
        places = {"source": _place(actor), "target": _place(self.group), "hosts": hosts}
        self._both("make_sync", places)

    def refresh(self, version: int, metrics: MetricSums) -> None:
        """Gives the rollout the actor's weights of now, which have had `version` updates, unless it has them."""
        if version == self._version:
            return
        reports = self._both("sync_weights", {"version": version})
        self._version = version
        metrics.add_total("sync/weights_s", max(r["seconds"] for r in reports))
        metrics.add_total("sync/weights_bytes", reports[0]["moved"])
        metrics.add_total("sync/weights_minimum_bytes", reports[0]["minimum"])
        metrics.add_max("sync/weights_extra_bytes", max(r["extra"] for r in reports))

    def generated(self) -> None:
        """Memory that the two models share on a device goes back to the one that trains."""
        if self.colocated:
            self.group.call("free_weights")
            self._version = None

    def _both(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """The values of a call on all ranks that have a part of either model: they exchange weights."""
        calls = [self.group.start(method, arguments=arguments)]
        if not self.colocated:
            calls.append(self.actor.start(method, arguments=arguments))
        return [value for call in calls for value in call.result().every_value]


def _place(group: WorkerGroup) -> dict[str, Any]:
    return {"ranks": list(group.ranks), "parallelism": asdict(group.parallelism)}
