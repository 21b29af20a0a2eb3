"""What ranks save together under one layout is loaded under any other, bit for bit, and each byte is written once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mesh_run
import pytest
import save_checks
import torch
from mesh_run import label
from safetensors.torch import load_file

from headrace.checkpoint.files import write_tensors
from headrace.checkpoint.parts import TensorParts
from headrace.models.mesh import Mesh, Parallelism
from headrace.training.engine import TrainingState

ALONE = {"dp_replicate": 1}
TWO = [{"dp_replicate": 2}, {"zero3": 2}, {"tp": 2}, {"sp": 2}, {"pp": 2}]
FOUR = [*TWO, {"zero3": 2, "tp": 2}]
Ranks = list[dict[str, Any]]


@dataclass
class Saves:
    """What each rank did, and where the files are: of each kind of model, under each layout."""

    ranks: Ranks
    folder: Path
    layouts: list[dict[str, int]]
    kinds: list[str]

    def each(self) -> list[tuple[dict[str, int], str]]:
        return list(itertools.product(self.layouts, self.kinds))

    def of(self, what: str, layout: dict[str, int], key: str) -> Ranks:
        """What the ranks of a layout say."""
        return [rank[what][key] for rank in self.ranks[: Parallelism(**layout).size]]

    def files(self, layout: dict[str, int], kind: str) -> list[Path]:
        return sorted((self.folder / kind / label(layout)).iterdir())


def made(world: int, layouts: list[dict[str, int]], kinds: list[str], factory: Any) -> Saves:
    folder = factory.mktemp("saves")
    for kind in kinds:
        engine = save_checks.make(kind, Mesh())
        mesh_run.step(engine, 0, Mesh())
        (folder / kind / label(ALONE)).mkdir(parents=True)
        write_tensors(folder / kind / label(ALONE) / "actor.safetensors", engine.state_dict().tensors)
    arguments = (layouts, [ALONE, *layouts], kinds, str(folder))
    ranks = mesh_run.spawn(save_checks.everything, world, factory.mktemp("ranks"), *arguments)
    return Saves(ranks, folder, layouts, kinds)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return made(2, TWO, list(save_checks.KINDS)[:2], tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return made(4, FOUR, list(save_checks.KINDS), tmp_path_factory)


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.slow)])
def saves(request: pytest.FixtureRequest) -> Saves:
    found: Saves = request.getfixturevalue(request.param)
    return found


def test_files_hold_one_copy(saves: Saves) -> None:
    for layout, kind in saves.each():
        size = Parallelism(**layout).size
        saved, files = saves.of("saved", layout, f"{kind}/{label(layout)}"), saves.files(layout, kind)
        assert [f.name for f in files] == [f"actor-{i + 1:05}-of-{size:05}.safetensors" for i in range(size)]
        expected = saved[0]["tensors"]
        kinds = ("weight", "exp_avg", "exp_avg_sq", "step")
        assert {f"{k}/model.norm.weight" for k in kinds} <= expected.keys()
        held = [sum(t.nbytes for t in load_file(file).values()) for file in files]
        assert sum(held) == sum(t.nbytes for t in expected.values())
        assert held == [sum(rank["owned"]) for rank in saved]
        assert min(held) > 0.4 * max(held)  # all have work
        with TensorParts(files) as tensors:
            assert tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(tensors[name], tensor)
                assert tensors[name].dtype == tensor.dtype


def test_a_save_puts_nothing_together(saves: Saves) -> None:
    """No process asks another (they would have failed), and none makes memory for the state or a part of it."""
    for layout, kind in saves.each():
        for saved in saves.of("saved", layout, f"{kind}/{label(layout)}"):
            assert saved["extra"] <= 0.01 * sum(saved["owned"])


def test_a_save_is_loaded_under_every_layout(saves: Saves) -> None:
    for (after, kind), before in itertools.product(saves.each(), [ALONE, *saves.layouts]):
        for got in saves.of("loaded", after, f"{kind}/{label(before)}/{label(after)}"):
            with TensorParts(saves.files(before, kind)) as expected:
                assert got["tensors"].keys() == expected.keys()
                assert all(torch.equal(got["tensors"][name], tensor) for name, tensor in expected.items())
            assert got["computes"]
            assert got["numbers"] == {"updates": 1, "skipped": 0, "skipped_in_a_row": 0}
            assert got["read"] == got["needed"] > 0


def test_a_save_is_loaded_by_one_process(saves: Saves) -> None:
    """From a state of other numbers; then it trains on."""
    for before, kind in saves.each():
        engine = save_checks.make(kind, Mesh())
        mesh_run.step(engine, 4, Mesh())
        saved = saves.of("saved", before, f"{kind}/{label(before)}")[0]
        with TensorParts(saves.files(before, kind)) as tensors:
            engine.load_state_dict(TrainingState(tensors, saved["numbers"]))
        state = engine.state_dict()
        assert state.tensors.keys() == saved["tensors"].keys()
        assert all(torch.equal(state.tensors[name], tensor) for name, tensor in saved["tensors"].items())
        assert mesh_run.step(engine, 2, Mesh())[f"{engine.prefix}/grad_norm"] > 0


def test_a_full_disk_keeps_no_other_rank_waiting(saves: Saves) -> None:
    for layout in saves.layouts:
        full = saves.of("full", layout, label(layout))
        assert [rank["said"] for rank in full] == [""] * (len(full) - 1) + ["No space left on device"]
        assert all(rank["seconds"] < 30 for rank in full)
        for file in sorted((saves.folder / "full" / label(layout)).iterdir())[:-1]:
            load_file(file)
