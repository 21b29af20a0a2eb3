"""What the processes of tests/training/test_mesh_saves.py do: saves under one layout, loads under the others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mesh_run
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.checkpoint.files import TensorFile, write_tensors
from headrace.checkpoint.parts import TensorParts, part_path
from headrace.models.mesh import Mesh, Parallelism
from headrace.models.shards import local
from headrace.training.engine import TrainingState
from headrace.training.gathered import GatheredTensors
from headrace.training.torch_engine import TorchEngine

Layout = dict[str, int]
KINDS = {
    "float32 tied": ("qwen3", True, "policy", torch.float32),
    "bfloat16 untied": ("llama", False, "policy", torch.bfloat16),
    "critic": ("qwen3", False, "value", torch.float32),
}


def everything(layouts: list[Layout], saves: list[Layout], kinds: list[str], folder: str) -> dict[str, Any]:
    """Each kind of model saved under each layout, the smaller ones on the first ranks alone; all `saves` loaded."""
    meshes: dict[str, Mesh] = {}
    # larger ones first: the ranks of a mesh must have made equally many groups before
    for layout in sorted(layouts, key=lambda layout: -Parallelism(**layout).size):
        p = Parallelism(**layout)
        if dist.get_rank() < p.size:
            meshes[mesh_run.label(layout)] = Mesh(p, ranks=range(p.size))
    out: dict[str, Any] = {"saved": {}, "loaded": {}}
    for name, mesh in meshes.items():
        for kind in kinds:
            out["saved"][f"{kind}/{name}"] = save(kind, mesh, Path(folder) / kind / name)
    dist.barrier()
    for name, mesh in meshes.items():
        for kind in kinds:
            for other in map(mesh_run.label, saves):
                saved = Path(folder) / kind / other
                out["loaded"][f"{kind}/{other}/{name}"] = load(kind, mesh, saved)
    out["full"] = {name: full_disk(mesh, Path(folder) / "full" / name) for name, mesh in meshes.items()}
    return out


def make(kind: str, mesh: Mesh) -> TorchEngine:
    name, tied, head, dtype = KINDS[kind]
    return mesh_run.make(name, tied, head, mesh, dtype=dtype)


def save(kind: str, mesh: Mesh, folder: Path) -> dict[str, Any]:
    engine = make(kind, mesh)
    mesh_run.step(engine, 0, mesh)
    folder.mkdir(parents=True, exist_ok=True)
    file = part_path(folder / "actor.safetensors", dist.get_rank(), mesh.parallelism.size)
    with alone(), Allocations() as made:
        state = engine.state_dict()
        write_tensors(file, state.tensors)
    assert isinstance(state.tensors, GatheredTensors)
    return {
        "tensors": dict(state.tensors),  # put together by the ranks, in another way than files are
        "numbers": state.numbers,
        "extra": made.bytes,
        "owned": [own.tensor.nbytes for own in state.tensors.owned().values()],
    }


def load(kind: str, mesh: Mesh, folder: Path) -> dict[str, Any]:
    engine = make(kind, mesh)
    with torch.no_grad():
        for parameter in engine.model.trained_parameters().values():
            local(parameter).zero_()
    numbers = {"updates": 1, "skipped": 0, "skipped_in_a_row": 0}
    with alone(), counted_reads() as read, TensorParts(sorted(folder.glob("*.safetensors"))) as saved:
        engine.load_state_dict(TrainingState(saved, numbers))
    state = engine.state_dict()
    assert engine.optimizer is not None
    inside = engine.optimizer.state_dict()
    masters = zip(inside["masters"], engine.model.trained_parameters().values(), strict=True)
    own = [local(p) if master is None else master for master, p in masters]
    moments = [t for adam in inside["adam"] for t in adam.values() if t.dim()]
    return {
        "tensors": dict(state.tensors),
        "numbers": state.numbers,
        "read": sum(read),
        "needed": sum(t.nbytes for t in [*own, *moments]),
        "computes": all(
            torch.equal(local(p), master.to(p.dtype))
            for master, p in zip(own, engine.model.trained_parameters().values(), strict=True)
        ),
    }


def full_disk(mesh: Mesh, folder: Path) -> dict[str, Any]:
    """The last rank's file is on a device that is full."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks, rank = mesh.parallelism.size, dist.get_rank()
    file = part_path(folder / "actor.safetensors", rank, ranks)
    if rank == ranks - 1:
        os.symlink("/dev/full", file)
    engine, said, began = make("critic", mesh), "", time.monotonic()
    try:
        write_tensors(file, engine.state_dict().tensors)
    except OSError as error:
        said = str(error.strerror)
    return {"said": said, "seconds": time.monotonic() - began}


@contextmanager
def alone() -> Iterator[None]:
    """No process may wait for another."""
    names = ("all_gather", "all_reduce", "broadcast", "barrier", "send", "recv", "all_gather_into_tensor")
    real = {name: getattr(dist, name) for name in names}

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("another process was asked")

    for name in names:
        setattr(dist, name, refuse)
    try:
        yield
    finally:
        for name in names:
            setattr(dist, name, real[name])


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Bytes of every tensor that was read, but numbers."""
    sizes: list[int] = []
    real_read, real_get = TensorFile.read, TensorFile.__getitem__

    def read(self: TensorFile, name: str, ranges: Any) -> torch.Tensor:
        part = real_read(self, name, ranges)
        sizes.append(part.nbytes)
        return part

    def get(self: TensorFile, name: str) -> torch.Tensor:
        whole = real_get(self, name)
        sizes.append(whole.nbytes if whole.dim() else 0)
        return whole

    TensorFile.read, TensorFile.__getitem__ = read, get  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        TensorFile.read, TensorFile.__getitem__ = real_read, real_get  # type: ignore[method-assign]


class Allocations(TorchDispatchMode):
    """Bytes of memory that operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(t, DTensor) for t in args):
            return out  # what it is made of comes by itself
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes += tensor.untyped_storage().nbytes()
        return out
