"""How rows travel between workers: a JSON header and raw buffers, nothing that could run code when it is read.

Shapes: R rows, N tokens of all rows together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import RunError

Column = Tensor | list[Any]


@dataclass(frozen=True)
class Message:
    """`header` is plain JSON, `buffers` are one-dimensional uint8 arrays."""

    header: Mapping[str, Any]
    buffers: Sequence[np.ndarray] = field(default_factory=tuple)

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers)


def plain_bytes(value: Any, what: str) -> bytes:
    """`value` as JSON. Raises RunError naming `what` for anything but None, booleans, numbers, texts, lists, dicts."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"{what}: {error}; only plain values (numbers, texts, lists, dicts) can be sent to another process"
        ) from error
    return text.encode("utf-8", "surrogatepass")


def plain_value(data: bytes | memoryview) -> Any:
    return json.loads(bytes(data).decode("utf-8", "surrogatepass"))


def to_buffer(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor of any dtype, without a copy where it is a contiguous one on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    buffer: np.ndarray = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return buffer


def from_buffer(buffer: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor of its own: what arrives may be read-only memory that others share."""
    if buffer.nbytes == 0:
        return torch.empty(*shape, dtype=dtype)
    return torch.from_numpy(buffer.copy()).view(dtype).reshape(*shape)


def pack_columns(columns: Mapping[str, Column]) -> Message:
    """Columns as a message. Raises RunError naming a list column with values that are not plain."""
    header: list[list[Any]] = []
    buffers: list[np.ndarray] = []
    for name, column in columns.items():
        if isinstance(column, Tensor):
            header.append([name, str(column.dtype).removeprefix("torch."), list(column.shape)])
            buffers.append(to_buffer(column))
        else:
            _require_plain(column, name)
            header.append([name, None, [len(column)]])
            buffers.append(np.frombuffer(plain_bytes(column, f"column '{name}'"), np.uint8))
    return Message({"columns": header}, buffers)


def unpack_columns(message: Message, first: int = 0) -> dict[str, Column]:
    """The columns of `pack_columns`, whose buffers begin at index `first`. Raises RunError for an unknown dtype."""
    out: dict[str, Column] = {}
    for (name, dtype, shape), buffer in zip(message.header["columns"], message.buffers[first:], strict=True):
        if dtype is None:
            out[name] = plain_value(buffer.tobytes())
        else:
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype):
                raise RunError(f"column '{name}' came with the unknown dtype {dtype!r}")
            out[name] = from_buffer(buffer, kind, shape)
    return out


def _require_plain(value: Any, name: str) -> None:
    """JSON would turn tuples into lists and numbers as keys into texts; refuse what does not come back as it was."""
    kind = type(value)
    if kind is list:
        for item in value:
            _require_plain(item, name)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise RunError(
                    f"column '{name}': a dict with the key {key!r}, which is no text, cannot be sent"
                )
            _require_plain(item, name)
    elif value is not None and kind not in (bool, int, float, str):
        raise RunError(
            f"column '{name}': a value of type {kind.__name__} cannot be sent to another process; use numbers, texts,"
            " lists and dicts, or a tensor for the whole column"
        )
