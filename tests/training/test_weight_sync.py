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
ALL = [0, 1, 2, 3]
Case = tuple[Pair, str]
TIED, UNTIED, GEMMA = "qwen3 tied 2", "llama untied 2", "gemma3 tied 2"
TWO: list[Case] = [
    ((ZERO2, HERE, DP2, HERE), TIED),
    ((ZERO2, HERE, DP2, HERE), GEMMA),
    ((ZERO2, HERE, TP2, HERE), TIED),
    ((ZERO2, HERE, TP2, HERE), UNTIED),
    ((TP2, HERE, DP2, HERE), TIED),
    ((TP2, HERE, DP2, HERE), UNTIED),
    ((DP2, HERE, TP2, HERE), GEMMA),
    ((ONE, [0], ONE, [1]), UNTIED),
]
FOUR_PAIRS: list[Pair] = [
    ({"zero3": 2, "tp": 2}, ALL, {"dp_replicate": 4}, ALL),
    ({"zero3": 2, "tp": 2}, ALL, {"tp": 4}, ALL),
    (DP2, [0, 1], TP2, [2, 3]),
    (ZERO2, [0, 1], TP2, [2, 3]),
    (ZERO2, [0, 1], ONE, [1]),
    (ZERO2, [2, 3], ONE, [0]),
]
FOUR: list[Case] = [(pair, kind) for pair in FOUR_PAIRS for kind in ("qwen3 tied 4", "llama untied 4")]
# float32 sums in another order under tp
TOLERANCE = 2e-5


def case_name(case: Case) -> str:
    return f"{label(case[0])}, {case[1]}"


def spawned(world: int, cases: list[Case], folder: Any) -> list[dict[str, Any]]:
    """The folders have no weights: what a rollout model knows, the trained one must have told it."""
    folders = {}
    for _, kind in cases:
        folders[kind] = str(folder / kind.replace(" ", "-"))
        sync_checks.model_of(kind).hf.config.save_pretrained(folders[kind])
    return mesh_run.spawn(sync_checks.everything, world, folder, cases, folders, world == 2)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(4, FOUR, tmp_path_factory.mktemp("four"))


def check(ranks: list[dict[str, Any]], pair: Pair, kind: str) -> None:
    got = [rank[f"{label(pair)}, {kind}"] for rank in ranks]
    _, a, rollout, b = pair
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
    lacking, new = float32_bytes(pair, whole)
    for rank in {*a, *b}:
        for report in got[rank]["reports"]:
            assert report["bytes_moved"] == report["bytes_minimum"] == lacking
            assert report["staging_bytes"] <= BUCKET
        empty, first, freed, second = got[rank]["bytes"]
        assert empty == freed == 0
        assert first == second == report["new_bytes"] == new[rank]
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


def elements(axes: dict[str, int], index: int, name: str, shape: torch.Size) -> set[int]:
    """The numbers of a parameter's elements on one rank of a mesh: cut by Megatron's rules, then FSDP's."""
    part = torch.arange(shape.numel()).view(shape)
    tp, zero3 = axes.get("tp", 1), axes.get("zero3", 1)
    if any(row in name for row in ("o_proj.weight", "down_proj.weight")):
        part = part.chunk(tp, 1)[index % tp]
    elif not any(whole in name for whole in ("norm", "o_proj.bias", "down_proj.bias")):
        part = part.chunk(tp)[index % tp]
    return set(part.chunk(zero3)[index // tp % zero3].flatten().tolist())


def float32_bytes(pair: Pair, whole: dict[str, torch.Tensor]) -> tuple[int, dict[int, int]]:
    """(what all ranks lack, rank → memory of the parameters that it does not hold in one piece)."""
    train, a, rollout, b = pair
    lacking, new = 0, dict.fromkeys({*a, *b}, 0)
    for name, value in whole.items():
        has = {rank: elements(train, index, name, value.shape) for index, rank in enumerate(a)}
        for index, rank in enumerate(b):
            needed = elements(rollout, index, name, value.shape)
            lacking += 4 * len(needed - has.get(rank, set()))
            new[rank] += 4 * len(needed) if needed - has.get(rank, set()) else 0
    return lacking, new


@pytest.mark.parametrize("case", TWO, ids=case_name)
def test_two_processes(two, case) -> None:
    check(two, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=case_name)
def test_four_processes(four, case) -> None:
    check(four, *case)


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
        assert (
            "the two models are not the same: only one has a parameter 'lm_head.weight'"
            in said["other model"]
        )
        assert "is for 2 different ranks; there are [0, 1, 2]" in said["too many"]
        assert "cannot talk: rank" in said["no such rank"]
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
