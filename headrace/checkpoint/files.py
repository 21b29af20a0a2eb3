"""Files that are there whole or not at all, and tensors written one at a time.

Tensors are in the safetensors format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_CODES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


def write_tensors(path: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file and waits until it is on the disk.

    One tensor at a time is copied to the CPU, so that a save needs no second copy of the model in memory.
    Where asking for a tensor takes several processes (training/gathered.py) all call, and those without a `path` only
    ask, in the same order. Raises OSError on a full disk.
    """
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    if path is None:
        for _ in tensors.values():
            pass
        return
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        sync(file.fileno())


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for; a context manager.

    Raises OSError or SafetensorError for a file that is not whole.
    """

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt", device="cpu")
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise KeyError(name) from error
        return tensor

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


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
