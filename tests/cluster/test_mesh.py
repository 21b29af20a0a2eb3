"""One order of ranks: worker groups, the meshes that models lie on, and the layouts that weights move between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.cluster.mesh import mesh_of, model_ranks
from headrace.cluster.placement import Parallelism
from headrace.cluster.worker import Site
from headrace.errors import ConfigError
from headrace.models.mesh import Mesh
from headrace.models.mesh import Parallelism as Degrees
from headrace.models.shards import Shards
from headrace.reshard.layout import Layout
from headrace.reshard.layout import Mesh as Grid
from headrace.reshard.model_layout import ModelOutline

SHAPES = {"column.weight": (12, 5), "row.weight": (5, 12), "norm.weight": (5,), "odd.weight": (7, 3)}
DIMS = {"column.weight": 0, "row.weight": 1, "odd.weight": 0}


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """This process as one of `world`; groups are made, and nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def site(p: Parallelism, group_rank: int, first: int) -> Site:
    ranks = tuple(range(first, first + p.size))
    return Site(ranks[group_rank], first + p.size, "g", group_rank, ranks, "host", "cpu", p)


@pytest.mark.parametrize(
    "p",
    [
        Parallelism(dp=4),
        Parallelism(dp=4, zero3=4),
        Parallelism(dp=4, zero3=2),
        Parallelism(dp=2, tp=3),
        Parallelism(dp=4, tp=2, zero3=2),
        Parallelism(dp=6, tp=2, zero3=3),
        Parallelism(dp=2, sp=3),
        Parallelism(dp=4, sp=2, tp=2, zero3=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [0, 3])
def test_worker_groups_meshes_and_layouts_agree_on_who_holds_what(p: Parallelism, first: int) -> None:
    described = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
    axes = {"dp_replicate": p.dp // p.zero3, "zero3": p.zero3, "sp": p.sp, "tp": p.tp}
    ranks = range(first, first + p.size)
    layout = ModelOutline(described, DIMS).layout(model_ranks(ranks, p), first + p.size)
    usual = Layout.parallel(described, Grid(axes, ranks), tp=DIMS, zero3="zero3")
    assert layout.fingerprint == usual.fingerprint
    for group_rank, rank in enumerate(ranks):
        with rank_of(rank, first + p.size):
            own = site(p, group_rank, first)
            mesh = mesh_of(own)
            replica, part, sp, tp = (mesh.rank(axis) for axis in ("dp_replicate", "zero3", "sp", "tp"))
            assert (own.dp_rank, own.tp_rank) == (replica * p.zero3 + part, tp)
            assert rank == first + ((replica * p.zero3 + part) * p.sp + sp) * p.tp + tp
            assert (mesh.data_rank, mesh.data_size) == (own.dp_rank, p.dp)
            assert mesh.copy == replica * p.sp + sp
            slices = mesh.group("sp")
            if slices is not None:
                assert dist.get_process_group_ranks(slices) == [rank + (i - sp) * p.tp for i in range(p.sp)]
            group = mesh.group("tp")
            if group is not None:
                assert dist.get_process_group_ranks(group) == [rank - tp + i for i in range(p.tp)]
                assert group.rank() == tp
            shards = Shards(mesh, dims=DIMS)
            for name, shape in SHAPES.items():
                box = layout.box(name, rank)
                assert box is not None
                held = shards.ranges(name, torch.Size(shape))
                if box.numel:
                    assert [(r.start, r.stop) for r in held] == list(zip(box.start, box.stop, strict=True))
                else:
                    assert 0 in map(len, held)


def test_meshes_that_cannot_be() -> None:
    with rank_of(1, 4):
        with pytest.raises(ConfigError, match=r"must ascend, and \[2, 1\] do not"):
            Mesh(Degrees(tp=2), ranks=[2, 1])
        with pytest.raises(ConfigError, match=r"rank 1 is none of the mesh's \[2, 3\]"):
            Mesh(Degrees(tp=2), ranks=[2, 3])
