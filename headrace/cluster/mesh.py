"""The mesh that a role's model is laid onto: the ranks of its worker group, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cluster import placement
from headrace.cluster.worker import Site
from headrace.models.mesh import Mesh, Parallelism
from headrace.reshard.model_layout import ModelRanks


def mesh_of(site: Site) -> Mesh:
    """For the factory of a role's object; every rank of the group has to call."""
    where = model_ranks(site.ranks, site.parallelism)
    return Mesh(where.parallelism, site.device, where.ranks)


def model_ranks(ranks: Sequence[int], p: placement.Parallelism) -> ModelRanks:
    """How a role's model lies on the ranks of its group: plain values, for a mesh or a WeightSync.

    Data-parallel index d is copy d // zero3 and part d % zero3 of the weights, so that the parts of one copy are
    neighbours.
    """
    return ModelRanks(
        tuple(ranks), Parallelism(dp_replicate=p.dp // p.zero3, zero3=p.zero3, tp=p.tp, pp=p.pp, sp=p.sp)
    )
