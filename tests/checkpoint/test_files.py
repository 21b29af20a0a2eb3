"""The files of a checkpoint against the safetensors library; small files that change whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from headrace.checkpoint.files import TensorFile, write_tensors, write_text


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randn(3, 5),
        "scalar/step": torch.tensor(7.0),
        "half ü": torch.randn(7).to(torch.bfloat16),
        "turned": torch.randn(4, 6).t(),
        "double": torch.randn(2, dtype=torch.float64),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "empty": torch.zeros(0, 3),
    }


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_tensors(tmp_path / "t.safetensors", tensors)
    read = load_file(tmp_path / "t.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor.detach())


def test_a_file_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_tensors(tmp_path / "t.safetensors", tensors)
    with TensorFile(tmp_path / "t.safetensors") as file:
        assert set(file) == set(tensors)
        assert "odd" in file
        assert "even" not in file
        assert torch.equal(file["odd"], tensors["odd"])
        with pytest.raises(KeyError):
            file["even"]


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, some_tensors())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SafetensorError):
        TensorFile(path)


def test_small_files_change_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest"
    write_text(path, "step_1\n")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(OSError, match="No space"):
            write_text(path, "step_2\n")
    assert path.read_text() == "step_1\n"
    assert list(tmp_path.iterdir()) == [path]
    write_text(path, "step_2\n")
    assert path.read_text() == "step_2\n"
