"""Where every part of every parameter lies: which box of it each global rank holds."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from headrace.errors import ConfigError
from headrace.reshard.box import Box
from headrace.reshard.live import describe_local, gather_descriptions

Placement = Replicate | Shard
Stages = Callable[[str], Iterable[int]]
"""Parameter name → the pipeline stages that hold it."""


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid with a name for each axis, the last axis running fastest, as in torch's device meshes."""

    axes: Mapping[str, int]
    ranks: Sequence[int] | None = None
    """Global ranks in row-major order; 0 … n-1 when left out."""

    def __post_init__(self) -> None:
        size = prod(self.axes.values())
        ranks = tuple(range(size) if self.ranks is None else self.ranks)
        if any(n < 1 for n in self.axes.values()) or len(ranks) != size or len(set(ranks)) != size:
            raise ConfigError(
                f"mesh {dict(self.axes)} needs {size} different ranks; it was given {list(ranks)}"
            )
        object.__setattr__(self, "ranks", ranks)

    @cached_property
    def rank_array(self) -> np.ndarray:
        """[n] global ranks."""
        return np.asarray(self.ranks, dtype=np.int64)

    def coordinates(self, axis: str) -> np.ndarray:
        """[n] each rank's index on an axis."""
        grid = np.indices(tuple(self.axes.values())).reshape(len(self.axes), -1)
        return grid[list(self.axes).index(axis)]


@dataclass(frozen=True, eq=False)
class Pieces:
    """The boxes of all W ranks of one parameter, or of many that lie alike.

    start, stop: [W, D] int64; held: [W] bool, false where the parameter is not on the rank at all (another pipeline
    stage). A rank may hold an empty box: the last ones of an uneven split do.
    """

    start: np.ndarray
    stop: np.ndarray
    held: np.ndarray

    @cached_property
    def numel(self) -> np.ndarray:
        """[W] elements each rank holds; 0 where it holds none."""
        return np.where(self.held, (self.stop - self.start).prod(axis=1), 0)

    def box(self, rank: int) -> Box | None:
        """What a rank holds, or None when it has no part in it."""
        if not self.held[rank]:
            return None
        return Box(tuple(self.start[rank].tolist()), tuple(self.stop[rank].tolist()))

    @cached_property
    def key(self) -> bytes:
        """Equal for equal pieces."""
        return b"".join(np.ascontiguousarray(a).tobytes() for a in (self.start, self.stop, self.held))


@dataclass(frozen=True)
class Parameter:
    """One storage: its shape as a whole, its dtype, and who holds which part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Pieces


Described = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Parameter name → (global shape, dtype)."""


@dataclass(frozen=True, eq=False)
class Layout:
    """All parameters of a model over `world` global ranks.

    `parameters` has one entry a storage; `tied` maps the other names of a storage to its name there (`lm_head.weight`
    → `model.embed_tokens.weight`). A rank of a pipeline may know a storage by its other name only.
    """

    world: int
    parameters: Mapping[str, Parameter]
    tied: Mapping[str, str] = field(default_factory=dict)

    def box(self, name: str, rank: int) -> Box | None:
        """What a rank holds of a parameter, or None when it has no part in it."""
        return self.parameters[self.storage(name)].pieces.box(rank)

    def storage(self, name: str) -> str:
        """The name of `parameters` under which a name's storage is."""
        return self.tied.get(name, name)

    def names(self, storage: str) -> list[str]:
        """All names of a storage, its own first."""
        return [storage, *sorted(n for n, own in self.tied.items() if own == storage)]

    def bytes_held(self, rank: int) -> int:
        """Bytes of this layout on a rank."""
        return sum(int(p.pieces.numel[rank]) * p.dtype.itemsize for p in self.parameters.values())

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal layouts, on any machine."""
        digest = hashlib.sha256(f"{self.world} {sorted(self.tied.items())}".encode())
        for name, p in self.parameters.items():
            digest.update(f"{name} {p.shape} {p.dtype}".encode())
            digest.update(p.pieces.key)
        return digest.hexdigest()

    @classmethod
    def on_mesh(
        cls,
        parameters: Described,
        mesh: Mesh,
        placements: Callable[[str], Mapping[str, Placement]] | Mapping[str, Placement],
        *,
        order: Sequence[str] | None = None,
        stages: Stages | None = None,
        tied: Mapping[str, str] | None = None,
        world: int | None = None,
    ) -> Layout:
        """Every parameter over one mesh, with a placement for each axis (Replicate where none is named).

        `placements` is for all parameters, or a function of the name. Axes that split the same dimension do so one
        after the other in the order of the mesh, or in `order`; each split is `torch.chunk`'s, whose last parts are
        smaller or empty. `stages` says which indices of the axis `pp` hold a parameter. `world` is the number of
        global ranks, at least the mesh's largest plus one. ConfigError names parameters that cannot be placed.
        """
        size = max(mesh.ranks or ()) + 1 if world is None else world
        _check_order(mesh, order, stages, size)
        tied = dict(tied or {})
        made: dict[tuple[object, ...], Pieces] = {}
        found: dict[str, Parameter] = {}
        for name, (shape, dtype) in parameters.items():
            if name in tied:
                continue
            own = placements(name) if callable(placements) else placements
            splits = [(a, p.dim) for a in (order or mesh.axes) if isinstance(p := own.get(a), Shard)]
            if bad := [(a, d) for a, d in splits if not 0 <= d < len(shape)]:
                raise ConfigError(
                    f"parameter {name} of shape {tuple(shape)} has no dimension to split as in {bad}"
                )
            if unknown := set(own) - set(mesh.axes):
                raise ConfigError(
                    f"parameter {name} is placed on {sorted(unknown)}, which mesh {dict(mesh.axes)} lacks"
                )
            on: tuple[int, ...] | None = None
            if stages is not None:
                aliases = [alias for alias, storage in tied.items() if storage == name]
                on = tuple(sorted({stage for n in (name, *aliases) for stage in stages(n)}))
            key = (tuple(shape), tuple(splits), on)
            if key not in made:
                made[key] = _split(tuple(shape), mesh, splits, on, size)
            found[name] = Parameter(tuple(shape), dtype, made[key])
        return cls(size, found, tied)

    @classmethod
    def parallel(
        cls,
        parameters: Described,
        mesh: Mesh,
        *,
        tp: Mapping[str, int | None] | None = None,
        zero3: str | None = None,
        stages: Stages | None = None,
        tied: Mapping[str, str] | None = None,
        world: int | None = None,
    ) -> Layout:
        """The usual layouts: axis `tp` by a table, axis `zero3` as FSDP2 does it, axis `pp` by stages, others replicate.

        tp: name pattern (as `*.q_proj.weight`) → the dimension that tensor parallelism splits (0 for colwise and
        vocabulary, 1 for rowwise), None for replicated; the first match counts, none means replicated.
        zero3: the axis over which dimension 0 of every parameter is split, after tensor parallelism has split it, as
        DTensor's strided shard does. stages: see `stages_of_layers`.
        """

        def placements(name: str) -> dict[str, Placement]:
            found: dict[str, Placement] = {}
            dim = next((d for pattern, d in (tp or {}).items() if fnmatch.fnmatchcase(name, pattern)), None)
            if dim is not None and "tp" in mesh.axes:
                found["tp"] = Shard(dim)
            if zero3 is not None and len(parameters[name][0]) > 0:
                found[zero3] = Shard(0)
            return found

        order = [*(a for a in mesh.axes if a != zero3), *([zero3] if zero3 else [])]
        return cls.on_mesh(parameters, mesh, placements, order=order, stages=stages, tied=tied, world=world)

    @classmethod
    def of_model(
        cls,
        model: torch.nn.Module,
        group: dist.ProcessGroup | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> Layout:
        """The layout of a live model's parameters; to be called by all ranks of the group together.

        Parameters that are one object under two names are tied. `tied` names ties that no rank can see: those across
        pipeline stages.
        """
        described = describe(model)
        own = dict(model.named_parameters(remove_duplicate=False))
        return cls.of_tensors(
            {name: own[name] for name in described[0]}, group, {**described[1], **(tied or {})}
        )

    @classmethod
    def of_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> Layout:
        """The layout of this rank's tensors (DTensors, or plain ones that are whole) and of those of all other ranks.

        Collective over the group. Every DTensor's box is computed from its mesh and placements and compared with the
        one torch reports (RunError when they differ). ConfigError when ranks disagree about a shape or dtype.
        """
        own = {name: tensor for name, tensor in tensors.items() if (tied or {}).get(name, "") not in tensors}
        everyone = gather_descriptions(describe_local(own), tied or {}, group)
        world = dist.get_world_size() if dist.is_initialized() else 1
        names = {alias: storage for _, ties in everyone.values() for alias, storage in ties.items()}
        boxes: dict[str, dict[int, Box]] = {}
        kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        for rank, (described, _) in everyone.items():
            for name, (shape, dtype, box) in described.items():
                storage = names.get(name, name)
                if kinds.setdefault(storage, (shape, dtype)) != (shape, dtype):
                    raise ConfigError(
                        f"parameter {name}: rank {rank} has {dtype} of shape {shape}, another rank has"
                        f" {kinds[storage][1]} of shape {kinds[storage][0]}"
                    )
                boxes.setdefault(storage, {})[rank] = box
        return cls(
            world,
            {
                n: Parameter(
                    kinds[n][0], getattr(torch, kinds[n][1]), pieces_from(boxes[n], kinds[n][0], world)
                )
                for n in boxes
            },
            names,
        )


def describe(model: torch.nn.Module) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, str]]:
    """(global shape and dtype of every parameter, its other names → the first one) of a model; it may be on meta."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        storage = first.setdefault(id(parameter), name)
        if storage != name:
            tied[name] = storage
        else:
            found[name] = (tuple(parameter.shape), parameter.dtype)
    return found, tied


def stages_of_layers(
    layers_per_stage: Sequence[int],
    first: Sequence[str] = ("model.embed_tokens.*",),
    pattern: str = r"\.layers\.(\d+)\.",
) -> Stages:
    """Layer i on the stage whose layers include it; names that match `first` on stage 0, all others on the last one."""
    bounds = np.cumsum(layers_per_stage)

    def stages(name: str) -> list[int]:
        if layer := re.search(pattern, name):
            stage = int(np.searchsorted(bounds, int(layer[1]), side="right"))
            if stage == len(bounds):
                raise ConfigError(
                    f"parameter {name}: stages of {list(layers_per_stage)} layers have no layer {layer[1]}"
                )
            return [stage]
        return [0 if any(fnmatch.fnmatchcase(name, p) for p in first) else len(bounds) - 1]

    return stages


def pieces_from(boxes: Mapping[int, Box], shape: tuple[int, ...], world: int) -> Pieces:
    """Pieces from the boxes of the ranks that hold one."""
    start, stop = np.zeros((2, world, len(shape)), dtype=np.int64)
    held = np.zeros(world, dtype=bool)
    for rank, box in boxes.items():
        start[rank], stop[rank], held[rank] = box.start, box.stop, True
    return Pieces(start, stop, held)


def _check_order(mesh: Mesh, order: Sequence[str] | None, stages: Stages | None, world: int) -> None:
    if order is not None and sorted(order) != sorted(mesh.axes):
        raise ConfigError(f"order {list(order)} must name each axis of mesh {dict(mesh.axes)} once")
    if stages is not None and "pp" not in mesh.axes:
        raise ConfigError(f"stages need an axis pp; mesh {dict(mesh.axes)} has none")
    if mesh.rank_array.min() < 0 or mesh.rank_array.max() >= world:
        raise ConfigError(f"mesh ranks {mesh.rank_array.tolist()} are not among {world} ranks")


def _split(
    shape: tuple[int, ...],
    mesh: Mesh,
    splits: Sequence[tuple[str, int]],
    stages: tuple[int, ...] | None,
    world: int,
) -> Pieces:
    n = len(mesh.rank_array)
    start = np.zeros((n, len(shape)), dtype=np.int64)
    stop = np.tile(np.asarray(shape, dtype=np.int64), (n, 1))
    for axis, d in splits:
        length = stop[:, d] - start[:, d]
        size = -(-length // mesh.axes[axis])
        begin = np.minimum(size * mesh.coordinates(axis), length)
        stop[:, d] = start[:, d] + np.minimum(begin + size, length)
        start[:, d] += begin
    inside = np.ones(n, dtype=bool) if stages is None else np.isin(mesh.coordinates("pp"), stages)
    starts, stops = np.zeros((2, world, len(shape)), dtype=np.int64)
    held = np.zeros(world, dtype=bool)
    ranks = mesh.rank_array[inside]
    starts[ranks], stops[ranks], held[ranks] = start[inside], stop[inside], True
    return Pieces(starts, stops, held)
