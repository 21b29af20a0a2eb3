"""A model that trains in one layout generates in another: the weights, what it says with them, bytes and memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import mesh_run
import pytest
import sync_checks
import torch
from sync_checks import BUCKET, Pair, label

from headrace.models.load_sharded import empty_on_mesh
from headrace.models.mesh import Mesh
from headrace.reshard.model_layout import ModelRanks
from headrace.training.weight_sync import WeightSync

DP2, TP2, ZERO2, ONE = {"dp_replicate": 2}, {"tp": 2}, {"zero3": 2}, {}  # type: ignore[var-annotated]
HERE = [0, 1]
TWO: list[Pair] = [
    (ZERO2, HERE, DP2, HERE),
    (ZERO2, HERE, TP2, HERE),
    (TP2, HERE, DP2, HERE),
    (DP2, HERE, TP2, HERE),
    (DP2, HERE, DP2, HERE),
    (ONE, [0], ONE, [1]),
]
ALL = [0, 1, 2, 3]
FOUR: list[Pair] = [
    ({"zero3": 2, "tp": 2}, ALL, {"dp_replicate": 4}, ALL),
    ({"zero3": 2, "tp": 2}, ALL, {"tp": 4}, ALL),
    (DP2, [0, 1], TP2, [2, 3]),
    (ZERO2, [0, 1], TP2, [2, 3]),
    (ZERO2, [0, 1], DP2, [1, 2]),
    (ZERO2, [1, 3], ONE, [0]),
]
KINDS = ["qwen3 tied 2", "llama untied 2", "gemma3 tied 2"]
FOUR_KINDS = ["qwen3 tied 4", "llama untied 4"]
# float32 sums in another order under tp
TOLERANCE = 2e-5


def spawned(world: int, pairs: list[Pair], kinds: list[str], folder: Any) -> list[dict[str, Any]]:
    """The folders have no weights: what a rollout model knows, the trained one must have told it."""
    folders = {}
    for kind in kinds:
        folders[kind] = str(folder / kind.replace(" ", "-"))
        sync_checks.model_of(kind).hf.config.save_pretrained(folders[kind])
    return mesh_run.spawn(sync_checks.everything, world, folder, pairs, folders)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(2, TWO, KINDS, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(4, FOUR, FOUR_KINDS, tmp_path_factory.mktemp("four"))


def check(ranks: list[dict[str, Any]], pair: Pair, kind: str) -> None:
    got = [rank[f"{label(pair)}, {kind}"] for rank in ranks]
    train, a, rollout, b = pair
    whole = got[a[0]]["whole"]
    expected = alone(kind, got[a[0]])
    start = dict(sync_checks.model_of(kind).hf.named_parameters())
    assert all(not torch.equal(value, start[name]) for name, value in whole.items())  # it has learned
    for rank in b:
        assert got[rank]["held"].keys() == whole.keys()
        for name, (part, ranges) in got[rank]["held"].items():
            index = tuple(slice(*r) for r in ranges)
            assert torch.equal(part, whole[name][index]), name
        assert got[rank]["ids"] == expected["ids"]
        exact = 0.0 if "tp" not in rollout else TOLERANCE
        torch.testing.assert_close(got[rank]["logprobs"], expected["logprobs"], atol=exact, rtol=exact)
    for rank in {*a, *b}:
        for report in got[rank]["reports"]:
            assert report["bytes_moved"] == report["bytes_minimum"] == moved(pair, whole)
            assert report["staging_bytes"] <= BUCKET
        empty, first, freed, second = got[rank]["bytes"]
        assert empty == freed == 0
        assert first == second == report["new_bytes"] == new_bytes(pair, whole, got[rank].get("held", {}))
        assert len(set(got[rank]["live"])) == 1  # syncs leave nothing behind
    sent = sum(got[rank]["reports"][0]["sent_bytes"] for rank in {*a, *b})
    received = sum(got[rank]["reports"][0]["received_bytes"] for rank in {*a, *b})
    assert sent == received == report["bytes_moved"]


@cache
def _models(kind: str) -> Any:
    return sync_checks.model_of(kind)


def alone(kind: str, source: dict[str, Any]) -> dict[str, Any]:
    """What one process says with the whole weights of the source."""
    model = _models(kind)
    with torch.no_grad():
        for name, parameter in model.hf.named_parameters():
            parameter.copy_(source["whole"][name])
    return sync_checks.outputs(model)


def cut_dim(name: str, shape: torch.Size) -> int | None:
    """The dimension that tp cuts, by Megatron's rules."""
    if any(part in name for part in ("o_proj.weight", "down_proj.weight")):
        return 1
    if "o_proj.bias" in name or "down_proj.bias" in name or "norm" in name:
        return None
    return 0


def moved(pair: Pair, whole: dict[str, torch.Tensor]) -> int:
    """Bytes between ranks, worked out by hand for each pair."""
    train, a, rollout, b = pair
    total = 0
    for name, value in whole.items():
        dim = cut_dim(name, value.shape)
        copies = len(b) if dim is None or "tp" not in rollout else 1
        if not set(a) & set(b):
            part = copies  # all of it goes to each copy
        elif a != b:
            part = copies - 0.5  # rank 1 has one half of the rows: it lacks the other; 97 rows are 49 and 48
            if value.shape[0] % 2:
                total += (value.shape[0] // 2 + 1 + value.shape[0]) * value[0].numel() * 4
                continue
        elif train == {"dp_replicate": 2}:
            part = 0  # every rank has all
        elif train == {"zero3": 2} and rollout == {"tp": 2}:
            # cut by rows, the shard is the part; cut by columns, each rank has half of its own
            part = {0: 0, 1: 0.5, None: 1}[dim]
        elif train == {"tp": 2}:
            part = 0 if dim is None else 1  # a rank lacks what the other has
        elif train == {"zero3": 2}:
            part = 1
        elif rollout == {"dp_replicate": 4}:
            # each of 4 ranks has a quarter of what tp cuts, and half of a norm
            part = 2 if dim is None else 3
        else:
            # tp 4: rank r of (zero3 z, tp t) = (r // 2, r % 2) needs quarter r; by rows it has quarter 2 t + z
            part = {0: four_rows(value.shape[0]), 1: 0.75, None: 2}[dim]
        total += int(part * value.numel()) * 4
    return total


def four_rows(rows: int) -> float:
    """The share of rows that four ranks lack, element by element: halves over tp, then halves of those over zero3."""
    half = -(-rows // 2)
    quarter = -(-rows // 4)
    lacking = 0
    for rank in range(4):
        z, t = divmod(rank, 2)
        first = range(t * half, min(rows, (t + 1) * half))
        step = -(-len(first) // 2)
        has = {*first[z * step : (z + 1) * step]}
        lacking += len({*range(rank * quarter, min(rows, (rank + 1) * quarter))} - has)
    return lacking / rows


def new_bytes(pair: Pair, whole: dict[str, torch.Tensor], held: dict[str, Any]) -> int:
    """Of a rank's target: everything but the parameters that lie here in one piece."""
    train, a, rollout, b = pair
    total = 0
    for name, (part, _) in held.items():
        dim = cut_dim(name, whole[name].shape)
        if a == b and (
            train == {"dp_replicate": 2}
            or (train == {"zero3": 2} and rollout == {"tp": 2} and dim == 0)
            or (train == {"tp": 2} and dim is None)
        ):
            continue
        total += part.nbytes
    return total


@pytest.mark.parametrize("pair", TWO, ids=label)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes(two, pair, kind) -> None:
    check(two, pair, kind)


@pytest.mark.slow
@pytest.mark.parametrize("pair", FOUR, ids=label)
@pytest.mark.parametrize("kind", FOUR_KINDS)
def test_four_processes(four, pair, kind) -> None:
    check(four, pair, kind)


def test_float32_shards_are_rounded_before_they_travel(two) -> None:
    for rank in two:
        got = rank["bfloat16"]
        assert got["held"].keys() == got["whole"].keys()
        for name, master in got["whole"].items():
            assert master.dtype == torch.float32
            assert torch.equal(got["held"][name], master.bfloat16())
        assert not torch.equal(master, master.bfloat16().float())
        assert got["moved"] == 2 * sum(value.numel() for value in got["whole"].values())


def test_every_rank_says_what_is_wrong(two) -> None:
    """The rank with the fault by name, the other that there is one: none waits for the other."""
    first, second = (rank["refusals"] for rank in two)
    another = "ConfigError: weight sync: another rank's model does not fit"
    assert first["no model"].startswith(another)
    assert "rank 1 was given no target model; it lies on ranks [0, 1]" in second["no model"]
    for rank, said in enumerate((first, second)):
        assert f"rank {rank} has [range(" in said["other parallelism"]
        assert "of source parameter" in said["other parallelism"]
        assert "by the given ranks and parallelism it would have" in said["order"]
        assert "cannot be cut by zero3" in said["cut target"]
        assert "the two models are not the same: only one has a parameter 'lm_head.weight'" in said["other model"]
        assert "is for 2 different ranks; there are [0, 1, 2]" in said["too many"]
        assert "called by rank" in said["no such rank"]
        assert said["good again"] == "nothing"
    assert "ConfigError: another rank was given tensors that do not fit" in first["changed dtype"]
    assert "target tensor model.norm.weight is torch.float64" in second["changed dtype"]


def test_one_process_shares_its_weights(tmp_path) -> None:
    source = sync_checks.model_of("qwen3 tied 2")
    source.hf.config.save_pretrained(tmp_path)
    target = empty_on_mesh(str(tmp_path), Mesh(), tokenizer=mesh_run.NO_TOKENIZER)
    assert sum(p.nbytes for p in target.parameters()) == 0
    sync = WeightSync(ModelRanks(), ModelRanks(), source, target)
    report = sync.run()
    assert (report.bytes_moved, report.new_bytes) == (0, 0)
    expected, got = sync_checks.outputs(source), sync_checks.outputs(target)
    assert torch.equal(got["logprobs"], expected["logprobs"])
    assert got["ids"] == expected["ids"]
