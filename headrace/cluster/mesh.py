"""The mesh that a role's model is laid onto: the ranks of its worker group, in their order."""

from __future__ import annotations

from headrace.cluster.worker import Site
from headrace.errors import ConfigError
from headrace.models.mesh import Mesh, Parallelism


def mesh_of(site: Site) -> Mesh:
    """For the factory of a role's object; every rank of the group has to call.

    Data-parallel index d is copy d // zero3 and part d % zero3 of the weights, so that the parts of one copy are
    neighbours. Raises ConfigError for pp above 1.
    """
    p = site.parallelism
    if p.pp > 1:
        raise ConfigError(f"parallelism: pp {p.pp} was asked for; the training engine has no pipeline stages")
    return Mesh(Parallelism(p.dp // p.zero3, p.zero3, p.tp), site.device, site.ranks)
