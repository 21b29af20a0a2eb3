"""Slices of named tensors: what one process has of each, and reading a slice of what is stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.models.shards import Shards


@dataclass(frozen=True)
class Slice:
    """`tensor` is what a tensor of shape `whole` has from index `start` on, in every dimension."""

    tensor: Tensor
    start: tuple[int, ...]
    whole: torch.Size

    @classmethod
    def all_of(cls, tensor: Tensor) -> Slice:
        return cls(tensor, (0,) * tensor.dim(), tensor.shape)

    @property
    def is_whole(self) -> bool:
        return self.tensor.shape == self.whole


class SlicedTensors(Mapping[str, Tensor]):
    """Named tensors of which a slice is read without the rest."""

    @abstractmethod
    def shape(self, name: str) -> torch.Size:
        """The shape of the whole tensor, without reading it. Raises KeyError."""

    @abstractmethod
    def read(self, name: str, ranges: Sequence[range]) -> Tensor:
        """The part of a tensor within `ranges`, one for each dimension. Raises KeyError."""


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    return tensors.shape(name) if isinstance(tensors, SlicedTensors) else tensors[name].shape


def own_part(tensors: Mapping[str, Tensor], key: str, shards: Shards) -> Tensor:
    """This process's part of the tensor `<kind>/<parameter>`, nothing else being read where that can be; a number is not
    cut."""
    name = key.partition("/")[2]
    if not isinstance(tensors, SlicedTensors):
        return shards.cut(name, tensors[key])
    whole = tensors.shape(key)
    return tensors.read(key, shards.ranges(name, whole)) if whole else tensors[key]
