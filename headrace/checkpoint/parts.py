"""The files of one role in a checkpoint: one, or one of each rank that trained it, with its slices of the tensors.

`actor.safetensors`, or `actor-00001-of-00004.safetensors` and so on. A slice says in its file's metadata where it
belongs (files.py); what says nothing is whole, as everything that one process writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError
from torch import Tensor

from headrace.checkpoint.files import SLICES, TensorFile
from headrace.training.slices import SlicedTensors

_NAME = re.compile(r"(?P<role>.+?)(-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.safetensors")


def part_path(path: Path, rank: int, ranks: int) -> Path:
    """The file of one of `ranks` ranks (from 0) for what a single process writes to `path`."""
    return path if ranks == 1 else path.with_name(_part_name(path.stem, rank + 1, ranks))


def _part_name(role: str, number: int, count: int) -> str:
    return f"{role}-{number:05}-of-{count:05}.safetensors"


def part_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Role → its files among `names`, in order. Raises ValueError naming a file that is not there."""
    roles: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for name in names:
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"{name} is no file of a role")
        role = found["role"]
        count = int(found["count"] or 1)
        if counts.setdefault(role, count) != count:
            raise ValueError(f"{name} is one of {count} files and others of {counts[role]}")
        roles.setdefault(role, {})[int(found["number"] or 1)] = name
    for role, parts in roles.items():
        missing = sorted(set(range(1, counts[role] + 1)) - parts.keys())
        if missing:
            raise ValueError(f"{_part_name(role, missing[0], counts[role])} is missing")
    return {role: [parts[number] for number in sorted(parts)] for role, parts in roles.items()}


@dataclass(frozen=True)
class _Stored:
    """A slice in a file: `box` has a range for each dimension of the whole tensor."""

    file: TensorFile
    box: tuple[range, ...]


class TensorParts(SlicedTensors):
    """The tensors of a role, whole or in slices, from any number of files; a context manager.

    Whichever ranks wrote them: a slice that is read may lie in several of them. Raises OSError or ValueError, naming the
    file, for one that is not whole, and ValueError for tensors of which something is in none.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._shapes: dict[str, torch.Size] = {}
        self._stored: dict[str, list[_Stored]] = {}
        with ExitStack() as files:
            for path in paths:
                try:
                    self._take(files.enter_context(TensorFile(path)))
                except (SafetensorError, OSError) as error:
                    raise OSError(f"{path.name} cannot be read: {error}") from error
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{path.name}: {SLICES} in its metadata are wrong ({error})") from error
            for name, shape in self._shapes.items():
                there = sum(_numel(stored.box) for stored in self._stored[name])
                if there != shape.numel():
                    raise ValueError(f"{there} of {shape.numel()} elements of {name} are there")
            self._files = files.pop_all()

    def _take(self, file: TensorFile) -> None:
        slices = json.loads(file.metadata.get(SLICES, "{}"))
        for name in file:
            extents = file.shape(name)
            start, whole = (0,) * len(extents), extents
            if name in slices:
                start, whole = tuple(slices[name]["start"]), torch.Size(slices[name]["of"])
            box = tuple(range(first, first + n) for first, n in zip(start, extents, strict=True))
            if any(own.start < 0 or own.stop > n for own, n in zip(box, whole, strict=True)):
                raise ValueError(f"the slice of {name} is not in it")
            if self._shapes.setdefault(name, whole) != whole:
                raise ValueError(
                    f"{name} is of shape {list(whole)}, and in others {list(self._shapes[name])}"
                )
            others = self._stored.setdefault(name, [])
            if others and others[0].file.dtype(name) != file.dtype(name):
                raise ValueError(f"{name} is {file.dtype(name)}, and in others {others[0].file.dtype(name)}")
            others.append(_Stored(file, box))

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name]

    def __getitem__(self, name: str) -> Tensor:
        parts = self._stored[name]
        if len(parts) == 1:
            return parts[0].file[name]
        return self.read(name, [range(n) for n in self._shapes[name]])

    def read(self, name: str, ranges: Sequence[range]) -> Tensor:
        parts, missing = self._stored[name], _numel(ranges)
        if not missing:
            return torch.empty([len(wanted) for wanted in ranges], dtype=parts[0].file.dtype(name))
        read: Tensor | None = None
        for stored in parts:
            common = [_overlap(own, wanted) for own, wanted in zip(stored.box, ranges, strict=True)]
            if not all(common):
                continue
            part = stored.file.read(name, _seen_from(stored.box, common))
            if _numel(common) == _numel(ranges):
                return part
            if read is None:
                read = part.new_empty([len(wanted) for wanted in ranges])
            read[tuple(slice(own.start, own.stop) for own in _seen_from(ranges, common))] = part
            missing -= _numel(common)
        if read is None or missing:
            raise ValueError(f"{missing} elements of {name} are in no file")
        return read

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __enter__(self) -> TensorParts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()


def _numel(box: Sequence[range]) -> int:
    return torch.Size([len(own) for own in box]).numel()


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _seen_from(box: Sequence[range], inside: Sequence[range]) -> list[range]:
    return [range(i.start - b.start, i.stop - b.start) for b, i in zip(box, inside, strict=True)]
