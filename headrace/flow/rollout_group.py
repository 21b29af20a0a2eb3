"""An actor's rollouts in a layout of their own: a second model, which gets the actor's weights by resharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.cluster.group import WorkerGroup
from headrace.cluster.workers import Executor


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

    def refresh(self, version: int) -> None:
        """Gives the rollout the actor's weights of now, which have had `version` updates, unless it has them."""
        if version != self._version:
            self._both("sync_weights", {"version": version})
            self._version = version

    def generated(self) -> None:
        """Memory that the two models share on a device goes back to the one that trains."""
        if self.colocated:
            self.group.call("free_weights")
            self._version = None

    def _both(self, method: str, arguments: Mapping[str, Any]) -> None:
        """A call on every rank that has a part of either model: all of them exchange weights, so none waits alone."""
        calls = [self.group.start(method, arguments=arguments)]
        if not self.colocated:
            calls.append(self.actor.start(method, arguments=arguments))
        for call in calls:
            call.result()


def _place(group: WorkerGroup) -> dict[str, Any]:
    p = group.parallelism
    degrees = {"dp": p.dp, "tp": p.tp, "pp": p.pp, "zero3": p.zero3}
    return {"ranks": list(group.ranks), "parallelism": degrees}
