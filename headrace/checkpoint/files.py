"""Files that are there whole or not at all, and tensors written one at a time.

Tensors are in the safetensors format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.training.gathered import GatheredTensors
from headrace.training.slices import Slice, SlicedTensors

SLICES = "slices"
"""What of a file's metadata says which of its tensors are slices."""
CHECKPOINT = "checkpoint"
"""What of it says which checkpoint the file is of: those of two steps are of the same size."""
_BEING_WRITTEN = re.compile(r"\.(step_\d+)-.+")
"""The folder of a checkpoint until it is whole (save.py)."""
_CODES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file and waits until it is on the disk.

    Of tensors that several processes have together it has what this one owns (training/gathered.py): where that is a
    slice, the file's metadata `slices` say of which tensor (`{name: {"start": …, "of": shape}}`, JSON). One tensor at a
    time is copied to the CPU, so that a save needs no second copy of the model in memory, and no process waits for
    another. Raises OSError on a full disk.
    """
    if isinstance(tensors, GatheredTensors):
        slices = tensors.owned()
    else:
        slices = {name: Slice.all_of(tensor) for name, tensor in tensors.items()}
    with path.open("wb") as file:
        being_written = _BEING_WRITTEN.fullmatch(path.parent.name)
        header = _header(slices, {CHECKPOINT: being_written[1]} if being_written else {})
        file.write(len(header).to_bytes(8, "little") + header)
        for own in slices.values():
            flat = own.tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        sync(file.fileno())


def _header(slices: Mapping[str, Slice], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {}
    cut = {
        name: {"start": list(own.start), "of": list(own.whole)}
        for name, own in slices.items()
        if not own.is_whole
    }
    if cut:
        metadata = {**metadata, SLICES: json.dumps(cut, separators=(",", ":"))}
    if metadata:
        header["__metadata__"] = metadata
    end = 0
    for name, own in slices.items():
        start, end = end, end + own.tensor.nbytes
        shape = list(own.tensor.shape)
        header[name] = {"dtype": _CODES[own.tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


class TensorFile(SlicedTensors):
    """The tensors of a safetensors file, each read when it is asked for; a context manager.

    Raises OSError or SafetensorError for a file that is not whole.
    """

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt", device="cpu")
        self._names = list(self._file.keys())
        self.metadata: dict[str, str] = self._file.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise KeyError(name) from error
        return tensor

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        code = self._file.get_slice(name).get_dtype()
        return next(dtype for dtype, own in _CODES.items() if own == code)

    def read(self, name: str, ranges: Sequence[range]) -> Tensor:
        """What is within `ranges`, one for each dimension, and nothing else."""
        part: Tensor = self._file.get_slice(name)[tuple(slice(own.start, own.stop) for own in ranges)]
        return part

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, traceback)


def write_text(path: Path, text: str) -> None:
    """Replaces a small file by one with `text`: readers see the old one or the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            sync(file.fileno())
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def has_size(path: Path, size: int) -> bool:
    """Whether it is a file of so many bytes."""
    return path.is_file() and path.stat().st_size == size


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
