"""What headers of weight files tell: files that are not whole, and heads that are not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import ConfigError
from headrace.models.weight_files import refuse_broken_weights, weight_problems


@pytest.fixture
def model(arithmetic: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(arithmetic / "model", tmp_path / "model"))


def test_whole_files_are_fine(model: Path) -> None:
    assert weight_problems(str(model), "model.path") == []
    refuse_broken_weights({(str(model), "model.path"): False})


def test_a_file_cut_short(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    [problem] = weight_problems(str(model), "critic.path")
    assert problem.startswith(f"critic.path: '{file}' is no whole safetensors file")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"version https://git-lfs.github.com/spec/v1\n"])
def test_no_safetensors_file(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.path: .*is no whole safetensors file"):
        refuse_broken_weights({(str(model), "model.path"): False})


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    [problem] = weight_problems(str(model), "model.path")
    assert "holds no weights" in problem
    torch.save({}, model / "pytorch_model.bin")
    assert weight_problems(str(model), "model.path") == []


def test_a_file_of_the_index_that_is_absent(model: Path) -> None:
    (model / "model.safetensors").rename(model / "a.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    [problem] = weight_problems(str(model), "model.path")
    assert "b.safetensors' cannot be read (No such file" in problem
    index.write_text("[1]")
    [problem] = weight_problems(str(model), "model.path")
    assert "the index of the weights" in problem


def test_a_head_that_is_not_there(model: Path) -> None:
    [problem] = weight_problems(str(model), "reward.model", needs_head=True)
    assert problem == f"reward.model: '{model}' has no trained scalar head (missing score.weight)"
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "score.weight": torch.zeros(1, 4)}, model / "model.safetensors")
    assert weight_problems(str(model), "reward.model", needs_head=True) == []


def test_what_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert weight_problems(str(tmp_path / "x.gguf"), "model.path") == []
    with pytest.raises(ConfigError, match=r"model\.path: .*does not exist"):
        weight_problems(str(tmp_path / "no" / "such"), "model.path")
