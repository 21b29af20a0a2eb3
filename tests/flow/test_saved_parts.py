"""A checkpoint that ranks write together: whole or not at all, whichever of them fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint.parts import part_path
from headrace.checkpoint.resume import find_checkpoint
from headrace.checkpoint.save import CheckpointStore
from headrace.cluster.group import WorkerGroup
from headrace.cluster.inprocess import InProcess
from headrace.cluster.layouts import resolve
from headrace.cluster.worker import Site
from headrace.errors import RunError
from headrace.flow.cluster import ClusterRuntime
from headrace.roles.worker import RoleWorker
from headrace.training.engine import TrainingState


class Rank(RoleWorker):
    """Has one tensor, named by its rank; what befalls it in a save stands in a file."""

    def __init__(self, site: Site, folder: str) -> None:
        self.site, self.folder = site, Path(folder)
        self.role: Any = self

    def state_dict(self) -> TrainingState:
        return TrainingState({f"w{self.site.group_rank}": torch.arange(3.0)}, {})

    def save_state(self, path: str) -> dict[str, Any]:
        fate = self.folder / f"rank-{self.site.group_rank}.txt"
        file = part_path(Path(path), self.site.group_rank, len(self.site.ranks))
        how = fate.read_text() if fate.exists() else ""
        if how == "full":
            os.symlink("/dev/full", file)
        reply = super().save_state(path)
        if how == "elsewhere":
            file.unlink()
        if how == "other":
            file.write_bytes(b"")
        return reply


@pytest.fixture
def runtime(tmp_path: Path) -> ClusterRuntime:
    roles = {"actor": {"gpu_group": "a", "parallelism": {"dp": 3}}}
    executor = InProcess(resolve({"device": "cpu", "roles": roles}, roles=["actor"]))
    group = WorkerGroup(executor, "actor")
    group.create(f"{__file__}:Rank", folder=str(tmp_path))
    made = ClusterRuntime(executor)
    made.groups, made.trained = {"actor": group}, {"actor": None}  # type: ignore[dict-item]
    return made


@pytest.mark.parametrize(
    "fates, said",
    [
        ({1: "full"}, r"\(actor-00002-of-00003\.safetensors: No space left on device\)"),
        (
            {0: "full", 2: "full"},
            r"\(actor-00001-of-00003\.safetensors: No space.*; actor-00003-of-00003\.safetensors: No space",
        ),
        ({2: "elsewhere"}, r"\(actor-00003-of-00003\.safetensors is not here as a rank wrote it\)"),
        ({2: "other"}, r"\(actor-00003-of-00003\.safetensors is not here as a rank wrote it\)"),
    ],
)
def test_a_rank_that_fails_fails_the_save(
    runtime: ClusterRuntime, tmp_path: Path, fates: dict[int, str], said: str
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.write(1, {"step": 1}, runtime.writers())
    for rank, fate in fates.items():
        (tmp_path / f"rank-{rank}.txt").write_text(fate)
    with pytest.raises(RunError, match=r"step_2: the checkpoint cannot be written " + said) as error:
        store.write(2, {"step": 2}, runtime.writers())
    assert str(error.value).endswith("the checkpoint before it, step_1, is still good")
    assert {p.name for p in store.folder.iterdir()} == {"step_1", "latest"}
    checkpoint = find_checkpoint(store)
    assert checkpoint.step == 1
    assert [p.name for p in checkpoint.files("actor")] == [
        f"actor-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    with checkpoint.tensors("actor") as tensors:
        assert {name: tensors[name].tolist() for name in tensors} == {f"w{i}": [0, 1, 2] for i in range(3)}
    for rank in fates:
        (tmp_path / f"rank-{rank}.txt").unlink()
    store.write(2, {"step": 2}, runtime.writers())
    assert find_checkpoint(store).step == 2
