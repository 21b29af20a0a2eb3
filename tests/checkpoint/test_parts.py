"""Tensors of a checkpoint in the slices of many ranks: each element written once, and any slice read back."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headrace.checkpoint.files import TensorFile, write_tensors
from headrace.checkpoint.parts import TensorParts, part_names, part_path
from headrace.models.mesh import ALL_AXES, Mesh, Parallelism
from headrace.models.shards import Shards
from headrace.training.gathered import GatheredTensors
from headrace.training.slices import own_part

SETTINGS = settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])


class Place(Mesh):
    """A place in a grid of processes that are not there: what a rank does must need no other."""

    def __init__(self, parallelism: Parallelism, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.parallelism, self._ranks = parallelism, dict(zip(ALL_AXES, ranks, strict=True))

    def rank(self, axis: Any) -> int:
        return self._ranks[axis]

    def group(self, axis: Any) -> Any:
        raise AssertionError("another process was asked")


def places(p: Parallelism) -> list[Place]:
    grid = itertools.product(*(range(getattr(p, axis)) for axis in ALL_AXES))
    return [Place(p, ranks) for ranks in grid]


# name → shape, the dimension cut over tp, the stages of two that have it
MODEL: dict[str, tuple[tuple[int, ...], int | None, tuple[int, ...]]] = {
    "embed": ((7, 4), 0, (0, 1)),  # tied: both stages have it
    "column": ((6, 5), 0, (0,)),
    "row": ((5, 6), 1, (1,)),
    "norm": ((3,), None, (1,)),  # fewer rows than some ranks
    "bias": ((6,), 0, (0,)),
}


def whole_state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for name, (shape, _, _) in MODEL.items():
        state |= {f"{kind}/{name}": torch.randn(shape, generator=g) for kind in ("weight", "exp_avg")}
        state[f"step/{name}"] = torch.tensor(3.0)
    return state


def shards_at(place: Place) -> Shards:
    p = place.parallelism
    return Shards(
        place,
        {name: torch.Size(shape) for name, (shape, _, _) in MODEL.items()},
        {name: dim for name, (_, dim, _) in MODEL.items() if dim is not None} if p.tp > 1 else {},
        stages={name: stages for name, (_, _, stages) in MODEL.items()} if p.pp > 1 else {},
    )


def parts_at(shards: Shards) -> dict[str, torch.Tensor]:
    """What the rank has, cut by hand."""
    here = shards.mesh.rank("pp")
    own = {}
    for key, tensor in whole_state().items():
        name = key.partition("/")[2]
        if here in shards.stages.get(name, (here,)):
            own[key] = shards.cut(name, tensor).clone()
    return own


LAYOUTS = [
    Parallelism(),
    Parallelism(dp_replicate=2),
    Parallelism(zero3=2),
    Parallelism(zero3=4),
    Parallelism(tp=2),
    Parallelism(pp=2),
    Parallelism(zero3=2, tp=2),
    Parallelism(sp=2),
    Parallelism(zero3=2, sp=2, tp=2),
    Parallelism(dp_replicate=3, zero3=2),
    Parallelism(pp=2, dp_replicate=2, zero3=3, tp=2),
]


def save(folder: Path, p: Parallelism) -> list[Path]:
    files = []
    for rank, place in enumerate(places(p)):
        shards = shards_at(place)
        files.append(part_path(folder / "actor.safetensors", rank, p.size))
        write_tensors(files[-1], GatheredTensors(parts_at(shards), shards))
    return files


@pytest.mark.parametrize("p", LAYOUTS, ids=str)
def test_ranks_write_each_element_once(tmp_path: Path, p: Parallelism) -> None:
    """Put together here by hand, with the safetensors library, from what the files say themselves."""
    whole, seen = whole_state(), {}
    for key, tensor in whole.items():
        seen[key] = torch.zeros(tensor.shape, dtype=torch.int64)
    total = 0
    for path in save(tmp_path, p):
        with safe_open(path, framework="pt") as file:
            slices = json.loads((file.metadata() or {}).get("slices", "{}"))
        for key, part in load_file(path).items():
            start = slices[key]["start"] if key in slices else [0] * part.dim()
            assert tuple(slices[key]["of"] if key in slices else part.shape) == tuple(whole[key].shape)
            box = tuple(slice(s, s + n) for s, n in zip(start, part.shape, strict=True))
            assert torch.equal(part, whole[key][box])
            seen[key][box] += 1
            total += part.nbytes
    assert all(bool((count == 1).all()) for count in seen.values())
    assert total == sum(tensor.nbytes for tensor in whole.values())


@pytest.mark.parametrize("p", LAYOUTS, ids=str)
def test_what_is_saved_is_loaded_under_any_other_layout(tmp_path: Path, p: Parallelism) -> None:
    with TensorParts(save(tmp_path, p)) as saved:
        assert saved.keys() == whole_state().keys()
        assert all(torch.equal(saved[key], tensor) for key, tensor in whole_state().items())
        for other in LAYOUTS:
            for place in places(other):
                shards = shards_at(place)
                for key, part in parts_at(shards).items():
                    assert torch.equal(own_part(saved, key, shards), part)


def test_replicas_share_the_work(tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in save(tmp_path, Parallelism(dp_replicate=3))]
    largest = max(tensor.nbytes for tensor in whole_state().values())
    assert max(sizes) - min(sizes) < largest + 300  # bytes of a header


def test_one_process_writes_whole_tensors_and_says_nothing_of_slices(tmp_path: Path) -> None:
    (file,) = save(tmp_path, Parallelism())
    assert file.name == "actor.safetensors"
    with TensorFile(file) as saved:
        assert saved.metadata == {}
        assert {key: saved[key].shape for key in saved} == {k: t.shape for k, t in whole_state().items()}


@SETTINGS
@given(st.data())
def test_any_box_of_any_cut_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Files written by the safetensors library, a tensor cut at any places along each dimension."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    pieces = []
    for n in shape:
        cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))})
        pieces.append(list(itertools.pairwise(cuts)))
    folder, boxes = tmp_path_factory.mktemp("parts"), list(itertools.product(*pieces))
    files = []
    for number, box in enumerate(boxes):
        files.append(part_path(folder / "a.safetensors", number, len(boxes)))
        part = whole[tuple(slice(*own) for own in box)].contiguous()
        slices = {"t": {"start": [own[0] for own in box], "of": shape}}
        save_file({"t": part}, files[-1], metadata={"slices": json.dumps(slices)})
    ranges = []
    for n in shape:
        start = data.draw(st.integers(0, n))
        ranges.append(range(start, data.draw(st.integers(start, n))))
    with TensorParts(files) as saved:
        assert saved.shape("t") == whole.shape
        assert torch.equal(saved["t"], whole)
        got = saved.read("t", ranges)
    assert torch.equal(got, whole[tuple(slice(r.start, r.stop) for r in ranges)])


def test_only_what_a_rank_needs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = TensorFile.read

    def counted(self: TensorFile, name: str, ranges: Any) -> torch.Tensor:
        part = real(self, name, ranges)
        read.append(part.nbytes)
        return part

    monkeypatch.setattr(TensorFile, "read", counted)
    for before, after in itertools.product(LAYOUTS[::4], LAYOUTS):
        folder = tmp_path / f"{LAYOUTS.index(before)}"
        folder.mkdir(exist_ok=True)
        with TensorParts(save(folder, before)) as saved:
            for place in places(after):
                read.clear()
                shards = shards_at(place)
                parts = {key: part for key, part in parts_at(shards).items() if part.dim()}
                for key in parts:
                    own_part(saved, key, shards)
                assert sum(read) == sum(part.nbytes for part in parts.values())


# ---- names, and files that are not what they should be


def test_names() -> None:
    assert part_path(Path("x/actor-2.safetensors"), 0, 1) == Path("x/actor-2.safetensors")
    assert part_path(Path("x/actor-2.safetensors"), 2, 12) == Path("x/actor-2-00003-of-00012.safetensors")
    two = ["actor-2-00001-of-00002.safetensors", "actor-2-00002-of-00002.safetensors"]
    assert part_names(["critic.safetensors", *reversed(two), "ahead.safetensors"]) == {
        "critic": ["critic.safetensors"],
        "actor-2": two,
        "ahead": ["ahead.safetensors"],
    }
    with pytest.raises(ValueError, match=r"^actor-2-00001-of-00002\.safetensors is missing"):
        part_names(two[1:])
    with pytest.raises(ValueError, match="is one of 3 files and others of 2"):
        part_names([*two, "actor-2-00003-of-00003.safetensors"])
    with pytest.raises(ValueError, match=r"note\.txt is no file of a role"):
        part_names(["note.txt"])


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    files = save(tmp_path, Parallelism(zero3=2))
    with pytest.raises(ValueError, match=r"\d+ of \d+ elements of \w+/\w+ are there"):
        TensorParts(files[:1])
    files[1].write_bytes(files[1].read_bytes()[:-1])
    with pytest.raises(OSError, match=r"actor-00002-of-00002\.safetensors cannot be read"):
        TensorParts(files)
    files[1].unlink()
    with pytest.raises(OSError, match=r"actor-00002-of-00002\.safetensors cannot be read"):
        TensorParts(files)


@pytest.mark.parametrize(
    "slices, said",
    [
        ("[", "metadata are wrong"),
        ("[]", None),
        ('{"t": 3}', "metadata are wrong"),
        ('{"t": {"start": [0, 0], "of": [4]}}', "metadata are wrong"),
        ('{"t": {"start": [3], "of": [4]}}', "the slice of t is not in it"),
        ('{"t": {"start": [-1], "of": [4]}}', "the slice of t is not in it"),
        ('{"t": {"start": [2], "of": [4, 1]}}', "metadata are wrong"),
        ('{"t": {"start": [2], "of": [5]}}', "t is of shape"),
    ],
)
def test_wrong_slices_are_refused(tmp_path: Path, slices: str, said: str | None) -> None:
    files = [part_path(tmp_path / "a.safetensors", rank, 2) for rank in (0, 1)]
    good = json.dumps({"t": {"start": [0], "of": [4]}})
    save_file({"t": torch.zeros(2)}, files[0], metadata={"slices": good})
    save_file({"t": torch.zeros(2)}, files[1], metadata={"slices": slices})
    with pytest.raises(ValueError, match=said or "t is of shape"):
        TensorParts(files)
