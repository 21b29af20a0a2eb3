"""The training state of a model on a mesh, as whole tensors: each is put together when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from headrace.models.shards import Shards


class GatheredTensors(Mapping[str, Tensor]):
    """`<kind>/<parameter>` → the whole tensor, from the parts of all ranks along zero3 and tp.

    Every rank has to ask for the same names in the same order; each then has that one whole tensor, which lives as long
    as the caller keeps it. On a mesh of one process these are the tensors themselves.
    """

    def __init__(self, parts: Mapping[str, Tensor], shards: Shards) -> None:
        self._parts, self._shards = parts, shards

    def __getitem__(self, key: str) -> Tensor:
        return self._shards.join(key.partition("/")[2], self._parts[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, key: object) -> bool:
        return key in self._parts
