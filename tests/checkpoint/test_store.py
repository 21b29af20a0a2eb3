"""Which checkpoints there are after saves, kills and failures: the newest, the best, and never none."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headrace.checkpoint import files
from headrace.checkpoint.parts import part_path
from headrace.checkpoint.resume import find_checkpoint, read_checkpoint
from headrace.checkpoint.save import CheckpointStore
from headrace.errors import ConfigError, RunError


def write(store: CheckpointStore, step: int, best: int | None = None) -> None:
    tensors = {"w": torch.full((2,), float(step))}
    store.write(step, {"step": step}, {"actor": lambda file: files.write_tensors(file, tensors)}, best)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_the_newest_and_the_best_stay(folder: Path) -> None:
    store = CheckpointStore(folder, keep=2)
    for step in range(1, 7):
        write(store, step, best=2 if step >= 2 else None)
    assert names(folder) == {"step_2", "step_5", "step_6", "latest", "best"}
    assert (folder / "latest").read_text() == "step_6\n"
    assert (folder / "best").read_text() == "step_2\n"


def test_keep_one_after_a_restart(folder: Path) -> None:
    """Newest and best exist, and the one that was resumed from."""
    first = CheckpointStore(folder, keep=1)
    for step in (1, 2, 3):
        write(first, step, best=1)
    again = CheckpointStore(folder, keep=1, resumed=find_checkpoint(first).path.name)
    write(again, 4, best=1)
    assert names(folder) == {"step_1", "step_3", "step_4", "latest", "best"}
    write(again, 5, best=5)
    assert names(folder) == {"step_3", "step_5", "latest", "best"}
    write(CheckpointStore(folder, keep=1, resumed="step_5"), 6, best=5)
    assert names(folder) == {"step_5", "step_6", "latest", "best"}


def test_a_course_that_was_left_goes(folder: Path) -> None:
    """Resumed from step 2 while 3 and 4 are there: they are not newer than the new 3."""
    store = CheckpointStore(folder, keep=2)
    for step in (1, 2, 3, 4):
        write(CheckpointStore(folder, keep=9), step)
    (folder / "latest").write_text("step_2\n")
    store.resumed = find_checkpoint(store).path.name
    assert store.resumed == "step_2"
    write(store, 3)
    assert names(folder) == {"step_2", "step_3", "latest"}
    assert find_checkpoint(store).step == 3


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_latest_and_best_are_always_there(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, bool, bool]], keep: int
) -> None:
    """Saves at any steps, of which some are new bests and some come after a restart."""
    folder = tmp_path_factory.mktemp("store") / "checkpoints"
    store, best = CheckpointStore(folder, keep), None
    for step, is_best, restart in saves:
        if restart and folder.exists():
            store = CheckpointStore(folder, keep, resumed=find_checkpoint(store).path.name)
        best = step if is_best or best is None or best > step else best
        write(store, step, best)
        assert store.pointer("latest") == f"step_{step}"
        assert find_checkpoint(store).step == step
        assert store.pointer("best") in {None, f"step_{best}"}
        assert store.pointer("best") is None or (folder / f"step_{best}" / "state.json").is_file()
        assert len(store.steps()) <= keep + 2


class Stop(BaseException):
    """Stands for the end of the process: no handler of the code under test may see it as an error."""


@pytest.mark.parametrize("same_step", [False, True], ids=["next step", "same step again"])
def test_stopped_at_every_point_there_is_a_whole_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, same_step: bool
) -> None:
    """At the n-th fsync, rename or rmtree, with nothing after it done: the old or the new one is found, whole."""
    step, number, found = 2 if same_step else 3, 0, set()
    real = {"fsync": os.fsync, "rename": os.rename, "rmtree": shutil.rmtree}
    while True:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        write(CheckpointStore(folder, keep=1), 2)
        left, dead = number, False

        def counted(name: str):
            def call(*arguments, **keywords):
                nonlocal left, dead
                left -= 1
                dead = dead or left <= 0
                if dead:
                    raise Stop
                return real[name](*arguments, **keywords)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", counted("fsync"))
            patch.setattr(os, "rename", counted("rename"))
            patch.setattr(shutil, "rmtree", counted("rmtree"))
            with contextlib.suppress(Stop):
                write(CheckpointStore(folder, keep=1), step, best=step)
        store = CheckpointStore(folder, keep=1)
        store.clean()
        assert not [n for n in names(folder) if n.startswith(".")]
        checkpoint = find_checkpoint(store)
        with checkpoint.tensors("actor") as tensors:
            assert torch.equal(tensors["w"], torch.full((2,), float(checkpoint.step)))
        found.add(checkpoint.step)
        if not dead:
            break
    assert found == {2, step}
    assert number > 8


@pytest.mark.parametrize("failing", ["write_tensors", "write_text", "sync", "rename"])
def test_a_full_disk_leaves_the_earlier_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store = CheckpointStore(folder, keep=1)
    write(store, 1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    module, name = {
        "write_tensors": ("headrace.checkpoint.files", "write_tensors"),
        "write_text": ("headrace.checkpoint.save", "write_text"),
        "sync": ("headrace.checkpoint.files", "sync"),
        "rename": ("os", "rename"),
    }[failing]
    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.{name}", fail)
        with pytest.raises(RunError, match=r"step_2: .*No space left on device.*step_1, is still good"):
            write(store, 2)
    assert names(folder) == {"step_1", "latest"}
    assert find_checkpoint(store).step == 1
    write(store, 2)
    assert names(folder) == {"step_2", "latest"}
    assert files.sync is not fail


def test_a_damaged_one_is_passed_over_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(folder, keep=3)
    for step in (1, 2, 3):
        write(store, step)
    (folder / "step_3" / "actor.safetensors").write_bytes(b"")
    (folder / "step_2" / "state.json").write_text('{"format": 1')
    assert find_checkpoint(store).step == 1
    assert "step_3: the checkpoint is damaged (actor.safetensors is not" in caplog.text
    assert "step_2: the checkpoint is damaged" in caplog.text


def test_none_at_all_says_so(folder: Path) -> None:
    store = CheckpointStore(folder, keep=1)
    with pytest.raises(ConfigError, match=r"run\.resume: there is no checkpoint to resume from"):
        find_checkpoint(store)
    write(store, 1)
    state = folder / "step_1" / "state.json"
    state.write_text(state.read_text().replace('"format": 2', '"format": 99'))
    with pytest.raises(ConfigError) as error:
        find_checkpoint(store)
    assert "format 99" in error.value.violations[0]
    assert len(error.value.violations) == 2


def write_parts(store: CheckpointStore, step: int) -> None:
    """As two ranks do, of one tensor in two halves each."""
    whole = torch.arange(4.0) + step

    def write(file: Path) -> None:
        for rank in (0, 1):
            slices = {"w": {"start": [2 * rank], "of": [4]}}
            part = whole[2 * rank : 2 * rank + 2].clone()
            save_file({"w": part}, part_path(file, rank, 2), metadata={"slices": json.dumps(slices)})

    store.write(step, {"step": step, "roles": {"actor": {}}}, {"actor": write})


def test_files_of_several_ranks(folder: Path) -> None:
    store = CheckpointStore(folder, keep=2)
    write_parts(store, 1)
    checkpoint = find_checkpoint(store)
    names = ["actor-00001-of-00002.safetensors", "actor-00002-of-00002.safetensors"]
    assert [file.name for file in checkpoint.files("actor")] == names == sorted(checkpoint.state["sizes"])
    with checkpoint.tensors("actor") as tensors:
        assert torch.equal(tensors["w"], torch.arange(4.0) + 1)
    with pytest.raises(ConfigError, match=r"step_1: the checkpoint is damaged \(no file of the critic"):
        checkpoint.tensors("critic")


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def overwrite(file: Path) -> None:
    file.write_bytes(b"x" * file.stat().st_size)


def of_another_size(file: Path) -> None:
    slices = {"w": {"start": [1], "of": [3]}}
    save_file({"w": torch.zeros(2)}, file, metadata={"slices": json.dumps(slices)})


@pytest.mark.parametrize(
    "damage, said",
    [
        (Path.unlink, r"actor-00002-of-00002\.safetensors is missing"),
        (cut_off, r"actor-00002-of-00002\.safetensors is not \d+ bytes long"),
        (overwrite, r"actor-00002-of-00002\.safetensors cannot be read"),
        (of_another_size, r"actor-00002-of-00002\.safetensors: .*w is of shape \[3\], and in others \[4\]"),
    ],
)
def test_a_damaged_part_is_named_and_the_one_before_is_taken(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], said: str
) -> None:
    store = CheckpointStore(folder, keep=2)
    write_parts(store, 1)
    write_parts(store, 2)
    damage(folder / "step_2" / "actor-00002-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"step_2: the checkpoint is damaged .*" + said):
        read_checkpoint(folder / "step_2")
    assert find_checkpoint(store).step == 1
    assert "resuming from step_1 instead" in caplog.text


def test_a_file_of_another_step(folder: Path) -> None:
    """Of the same size and form, as after a copy that mixed two: not taken for this step's."""
    store = CheckpointStore(folder, keep=2)
    write(store, 1)
    write(store, 2)
    old, new = (folder / step / "actor.safetensors" for step in ("step_1", "step_2"))
    assert old.stat().st_size == new.stat().st_size
    new.write_bytes(old.read_bytes())
    with pytest.raises(
        ConfigError, match=r"step_2: the checkpoint is damaged \(actor\.safetensors is of step_1\)"
    ):
        read_checkpoint(folder / "step_2")
    assert find_checkpoint(store).step == 1


def test_a_part_that_state_json_forgot(folder: Path) -> None:
    store = CheckpointStore(folder, keep=2)
    write_parts(store, 1)
    state = folder / "step_1" / "state.json"
    content = json.loads(state.read_text())
    del content["sizes"]["actor-00001-of-00002.safetensors"]
    state.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"\(ValueError: actor-00001-of-00002\.safetensors is missing"):
        read_checkpoint(folder / "step_1")


def test_a_checkpoint_of_the_format_before(folder: Path) -> None:
    """One file a role, as one process writes it still."""
    store = CheckpointStore(folder, keep=1)
    write(store, 1)
    state = folder / "step_1" / "state.json"
    state.write_text(state.read_text().replace('"format": 2', '"format": 1'))
    assert json.loads(state.read_text())["format"] == 1
    with find_checkpoint(store).tensors("actor") as tensors:
        assert torch.equal(tensors["w"], torch.ones(2))


def test_a_pointer_that_names_no_checkpoint(folder: Path) -> None:
    store = CheckpointStore(folder, keep=2)
    write(store, 1)
    write(store, 2)
    for text in ("step_7\n", "../elsewhere\n", ""):
        (folder / "latest").write_text(text)
        assert find_checkpoint(store).step == 2
    (folder / "latest").unlink()
    assert find_checkpoint(store).step == 2


def test_what_a_checkpoint_holds_is_not_executed(folder: Path) -> None:
    """A pickle in the place of the tensors is no tensor file."""
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {folder / 'executed'}",)

    store = CheckpointStore(folder, keep=1)
    write(store, 1)
    payload = pickle.dumps(Evil())
    (folder / "step_1" / "actor.safetensors").write_bytes(payload)
    state = folder / "step_1" / "state.json"
    size = (folder / "step_1" / "actor.safetensors").stat().st_size
    import json

    content = json.loads(state.read_text()) | {"sizes": {"actor.safetensors": size}}
    state.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="damaged"):
        find_checkpoint(store)
    assert not (folder / "executed").exists()
