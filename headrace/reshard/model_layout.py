"""The layout of a model that `shard_model` laid onto a mesh, from plain values: no rank has to be asked what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Shard

from headrace.errors import ConfigError
from headrace.models.causal_lm import Backbone
from headrace.models.mesh import ALL_AXES, Parallelism
from headrace.reshard.layout import Described, Layout, Mesh, Placement


@dataclass(frozen=True)
class ModelRanks:
    """The global ranks that hold a model, in the order of its mesh, and how it is cut over them."""

    ranks: tuple[int, ...] = (0,)
    parallelism: Parallelism = field(default_factory=Parallelism)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if len(set(self.ranks)) != self.parallelism.size:
            raise ConfigError(
                f"parallelism: {self.parallelism} is for {self.parallelism.size} different ranks; there are"
                f" {list(self.ranks)}"
            )


def same_layout(source: ModelRanks, target: ModelRanks) -> bool:
    """Whether a model that trains on `source` is, as it lies there, the model that generates on `target`.

    There is then one model and nothing to move. Shards of `zero3` are no such model: its weights are put together for
    each layer's pass, and ranks with other rows would have to make equally many passes.
    """
    return source == target and source.parallelism.zero3 == 1


@dataclass(frozen=True)
class ModelOutline:
    """A model's parameters as whole tensors, by their names in `hf` (tied ones once), the dimensions that tp cuts, and
    the ranks along pp that have a parameter (a name that is missing: all of them)."""

    parameters: Described
    dims: Mapping[str, int]
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Backbone) -> ModelOutline:
        """Of a model on a mesh or on one device; its parameters may have no memory."""
        own, shards = dict(model.hf.named_parameters()), model.shards
        kind = next(iter(own.values())).dtype  # of layers that other ranks have; there is one dtype
        names = shards.shapes if shards.mesh.size("pp") > 1 else own
        parameters = {
            n: (
                tuple(shards.shape(n, own[n]) if n in own else shards.shapes[n]),
                own[n].dtype if n in own else kind,
            )
            for n in names
        }
        return cls(parameters, dict(shards.dims), dict(shards.stages))

    def layout(self, where: ModelRanks, world: int) -> Layout:
        """Which box of every parameter each of `world` global ranks holds: what `Shards.ranges` says on each."""
        p = where.parallelism
        mesh = Mesh({axis: getattr(p, axis) for axis in ALL_AXES}, where.ranks)

        def placements(name: str) -> dict[str, Placement]:
            found: dict[str, Placement] = {"tp": Shard(self.dims[name])} if name in self.dims else {}
            return found | ({"zero3": Shard(0)} if self.parameters[name][0] else {})

        order = [*(axis for axis in ALL_AXES if axis != "zero3"), "zero3"]
        every = tuple(range(p.pp))
        return Layout.on_mesh(
            self.parameters,
            mesh,
            placements,
            order=order,
            stages=lambda name: self.stages.get(name, every),
            world=world,
        )

    def plain(self) -> dict[str, Any]:
        """For `from_plain` in another process; JSON."""
        kinds = {n: [list(s), str(d).removeprefix("torch.")] for n, (s, d) in self.parameters.items()}
        return {"parameters": kinds, "dims": dict(self.dims), "stages": dict(self.stages)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ModelOutline:
        kinds = {n: (tuple(s), getattr(torch, d)) for n, (s, d) in plain["parameters"].items()}
        return cls(kinds, plain["dims"], {n: tuple(on) for n, on in plain["stages"].items()})
