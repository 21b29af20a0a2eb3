"""A model over a mesh of processes trains as on one: losses, gradient norms, weights and outputs."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mesh_checks
import mesh_run
import pytest
import torch
from mesh_run import Case, key, label

from headrace.data.batch import Batch
from headrace.models.heads import critic_from
from headrace.models.mesh import Mesh
from headrace.training.engine import TrainingState

# float32 sums in another order: the largest difference seen is 3e-6; Adam moves a weight by up to 1e-3 an update
TOLERANCE = 2e-5
INTERLEAVED = {"pp": 2, "pp_chunks": 2}
TWO = [{"dp_replicate": 2}, {"zero3": 2}, {"tp": 2}, {"sp": 2}, {"pp": 2}]
FOUR = [
    {"dp_replicate": 2, "tp": 2},
    {"zero3": 2, "tp": 2},
    {"dp_replicate": 2, "zero3": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "dp_replicate": 2},
    {"pp": 2, "zero3": 2},
    {"sp": 4},  # more ranks than key/value heads, and than some micro-batches have tokens
    {"dp_replicate": 2, "sp": 2},
    {"zero3": 2, "sp": 2},
    {"sp": 2, "tp": 2},
    {"pp": 2, "sp": 2},
]
FOUR_DEEP = [{"pp": 4}, INTERLEAVED | {"zero3": 2}]
EIGHT = [{"pp": 2, "dp_replicate": 2, "tp": 2}, {"zero3": 2, "sp": 2, "tp": 2}]
CASES: list[Case] = [
    ("qwen3", True, "policy"),
    ("qwen3", False, "policy"),
    ("llama", True, "policy"),
    ("llama", False, "policy"),
    ("qwen2", True, "policy"),  # with gradient checkpointing
    ("gemma3", True, "policy"),  # scaled embedding, soft-capped logits, windows
    ("qwen3", True, "value"),
    ("llama", False, "value"),
    ("qwen3", False, "score"),
]
# more layers, of which stages have different numbers
DEEP: list[Case] = [("qwen3/5", True, "policy"), ("gemma3/5", False, "policy"), ("llama/5", True, "value")]
# learned positions and fused projections; adapters
SLICED: list[Case] = [("gpt2", True, "policy"), ("qwen3+lora", True, "policy")]
FOUR_CASES: list[Case] = [("qwen3", True, "policy"), ("llama", False, "policy"), ("qwen3", False, "value")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folders = {"state": str(tmp_path_factory.mktemp("state"))}
    for kind, tied in (("tied", True), ("untied", False), ("critic", True)):
        folders[kind] = str(tmp_path_factory.mktemp(kind))
        hf = mesh_run.build("llama" if kind == "untied" else "qwen3", tied).hf
        hf.generation_config.eos_token_id = [11, 12]
        hf.save_pretrained(folders[kind], max_shard_size="10KB")
    return mesh_run.spawn(
        mesh_checks.everything,
        2,
        tmp_path_factory.mktemp("two"),
        [*TWO, INTERLEAVED],
        [*CASES, *DEEP, *SLICED],
        folders,
    )


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cases = [FOUR_CASES[0], FOUR_CASES[2]]
    return mesh_run.spawn(mesh_checks.everything, 8, tmp_path_factory.mktemp("eight"), EIGHT, cases, {})


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return mesh_run.spawn(
        mesh_checks.everything,
        4,
        tmp_path_factory.mktemp("four"),
        [*FOUR, *FOUR_DEEP],
        [*FOUR_CASES, *DEEP],
        {},
    )


@cache
def alone(case: Case) -> dict[str, Any]:
    """The same five updates in this process, with all rows."""
    return mesh_run.run(mesh_run.make(*case, Mesh()), Mesh())


def name_of(case: Case) -> str:
    return f"{case[0]}-{'tied' if case[1] else 'untied'}-{case[2]}"


def check(ranks: list[dict[str, Any]], layout: dict[str, int], case: Case) -> None:
    expected = alone(case)
    prefix = {"policy": "actor", "value": "critic", "score": "reward_model"}[case[2]]
    assert all(
        m[f"{prefix}/grad_norm"] > mesh_run.MAX_GRAD_NORM for m in expected["metrics"]
    )  # clipping is active
    lengths = mesh_run.global_batch(1).lengths
    in_stage = len(ranks) // layout.get("pp", 1)
    assert sum(rank[key(layout, case)]["has_outputs"] for rank in ranks) == in_stage
    for first, last in zip(ranks[:in_stage], ranks[-in_stage:], strict=True):
        copies = [rank[key(layout, case)]["tied"] for rank in (first, last)]
        has_copies = "pp" in layout and case[1] and case[2] == "policy"
        assert list(copies[0]) == list(copies[1]) == (["model.embed_tokens.weight"] if has_copies else [])
        assert all(torch.equal(copies[0][name], copies[1][name]) for name in copies[0])
    for rank in ranks:
        got = rank[key(layout, case)]
        assert got["metrics"] == ranks[0][key(layout, case)]["metrics"]  # the same numbers, to the bit
        for mine, one in zip(got["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(one, rel=TOLERANCE, abs=TOLERANCE)
        assert got["tensors"].keys() == expected["tensors"].keys()
        for name, value in expected["tensors"].items():
            torch.testing.assert_close(
                got["tensors"][name], value, atol=TOLERANCE, rtol=0, msg=lambda m, n=name: n + m
            )
            assert torch.equal(got["tensors"][name], ranks[0][key(layout, case)]["tensors"][name])
        rows = {"scores": expected["outputs"]["scores"]} if case[2] == "score" else {}
        tokens = {} if rows else expected["outputs"]
        own = Batch(lengths, tokens, rows).select(got["rows"])
        assert got["outputs"].keys() == (own.columns if got["has_outputs"] else set())
        for name, value in got["outputs"].items():
            torch.testing.assert_close(value, own[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("layout", TWO, ids=label)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_two_processes_train_as_one(two, layout, case) -> None:
    check(two, layout, case)


@pytest.mark.parametrize("layout", [TWO[-1], INTERLEAVED], ids=label)
@pytest.mark.parametrize("case", DEEP, ids=name_of)
def test_stages_of_unlike_size_train_as_one(two, layout, case) -> None:
    check(two, layout, case)


@pytest.mark.parametrize("case", SLICED, ids=name_of)
def test_what_only_sp_shares_out_trains_as_one(two, case) -> None:
    check(two, {"sp": 2}, case)


def test_rows_alone_in_their_micro_batch(two) -> None:
    """Among them one of two tokens, of which a single one is computed, and one without a response."""
    expected = mesh_checks.row_by_row(Mesh())
    for rank in two:
        for mine, one in zip(rank["rows"]["logprobs"], expected["logprobs"], strict=True):
            torch.testing.assert_close(mine, one, atol=TOLERANCE, rtol=TOLERANCE)
        assert rank["rows"]["metrics"] == pytest.approx(expected["metrics"], rel=TOLERANCE, abs=TOLERANCE)
        for name, value in expected["tensors"].items():
            torch.testing.assert_close(rank["rows"]["tensors"][name], value, atol=TOLERANCE, rtol=0)


def test_sp_halves_what_the_backward_pass_needs(two) -> None:
    whole = mesh_checks.kept_bytes(Mesh())
    for rank in two:
        assert 0.45 * whole < rank["kept_bytes"] < 0.55 * whole


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR, ids=label)
@pytest.mark.parametrize("case", FOUR_CASES, ids=name_of)
def test_four_processes_train_as_one(four, layout, case) -> None:
    check(four, layout, case)


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR_DEEP, ids=label)
@pytest.mark.parametrize("case", DEEP, ids=name_of)
def test_many_stages_train_as_one(four, layout, case) -> None:
    check(four, layout, case)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EIGHT, ids=label)
@pytest.mark.parametrize("case", [FOUR_CASES[0], FOUR_CASES[2]], ids=name_of)
def test_eight_processes_train_as_one(eight, layout, case) -> None:
    check(eight, layout, case)


@pytest.mark.slow
def test_two_models_run_on_groups_of_their_own(tmp_path) -> None:
    ranks = mesh_run.spawn(mesh_checks.two_groups, 4, tmp_path)
    assert [rank["head"] for rank in ranks] == ["policy", "value", "policy", "value"]
    for rank in ranks:
        expected = alone(("qwen3", True, rank["head"]))
        for name, value in expected["tensors"].items():
            torch.testing.assert_close(rank["tensors"][name], value, atol=TOLERANCE, rtol=0)


def test_the_rows_are_uneven_and_once_missing() -> None:
    shares = [torch.bincount(torch.tensor(owners), minlength=2).tolist() for owners in mesh_run.OWNERS]
    assert any(0 in share for share in shares)
    assert sum(a != b for a, b in shares) >= 3


@pytest.mark.parametrize("layout", TWO, ids=label)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_on_all(two, layout) -> None:
    expected = mesh_checks.skip(Mesh())
    assert expected["unchanged"]
    for rank in two:
        got = rank["skip"][label(layout)]
        assert not math.isfinite(got["metrics"][0]["critic/grad_norm"])
        assert got["unchanged"]
        assert got["numbers"] == expected["numbers"] == {"updates": 1, "skipped": 1, "skipped_in_a_row": 0}
        assert got["metrics"][1] == pytest.approx(expected["metrics"][1], rel=TOLERANCE, abs=TOLERANCE)
        for name, value in expected["tensors"].items():
            torch.testing.assert_close(got["tensors"][name], value, atol=TOLERANCE, rtol=0)


def test_a_state_goes_from_layout_to_layout(two) -> None:
    """zero3x2 → tp2 → sp2 → pp2 → pp2 in four stages, one update each, then here on one process."""
    case: Case = ("qwen3/5", True, "policy")
    expected = alone(case)
    for rank in two:
        moved = rank["move"]
        for mine, one in zip(moved["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(one, rel=TOLERANCE, abs=TOLERANCE)
        for name, value in expected["tensors"].items():
            torch.testing.assert_close(moved["tensors"][name], value, atol=TOLERANCE, rtol=0)
    engine = mesh_run.make(*case, Mesh())
    engine.load_state_dict(TrainingState(two[1]["move"]["tensors"], two[1]["move"]["numbers"]))
    out = engine.outputs(mesh_run.global_batch(1), with_entropy=True)
    torch.testing.assert_close(out.logprobs, expected["outputs"]["logprobs"], atol=TOLERANCE, rtol=TOLERANCE)


def dense(softcap: float | None, has_bias: bool) -> dict[str, torch.Tensor]:
    """What the cut vocabulary computes, from whole logits by autograd."""
    tensors, targets = mesh_checks.vocabulary_inputs()
    leaves = {k: tensors[k].requires_grad_() for k in ("hidden", "weight", "bias")}
    logits = leaves["hidden"] @ leaves["weight"].T
    if has_bias:
        logits = logits + leaves["bias"]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / 0.7).log_softmax(-1)
    logprobs = logp[torch.arange(len(targets)), targets]
    entropy = -(logp.exp() * logp).sum(-1)
    (logprobs @ tensors["grad_logprobs"] + entropy @ tensors["grad_entropy"]).backward()
    grads = {k: v.grad if v.grad is not None else torch.zeros_like(v) for k, v in leaves.items()}
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "logits": logits.detach(), **grads}


@pytest.mark.parametrize("name, softcap, has_bias", [("plain", None, False), ("softcap and bias", 3.0, True)])
def test_logprobs_of_a_cut_vocabulary_equal_dense_float64(two, name, softcap, has_bias) -> None:
    expected = dense(softcap, has_bias)
    covered = []
    for rank in two:
        got = rank["vocab"][name]
        start, stop = got["rows"]
        covered += range(start, stop)
        for part in ("logprobs", "entropy", "hidden"):
            torch.testing.assert_close(got[part], expected[part], atol=1e-12, rtol=1e-12)
        for part in ("weight", "bias"):
            torch.testing.assert_close(got[part].double(), expected[part][start:stop], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(got["logits"].double(), expected["logits"], atol=1e-5, rtol=1e-6)
    assert covered == list(range(mesh_run.VOCAB))


@pytest.mark.parametrize("layout", TWO, ids=label)
def test_bfloat16_trains_float32_masters(two, layout) -> None:
    """Its noise is 1/256 of each number, so that only sizes can be compared; masters must keep what bfloat16 cannot."""
    one = mesh_run.run(mesh_run.make("qwen3", True, "policy", Mesh(), dtype=torch.bfloat16), Mesh())
    start = {k: p.detach().bfloat16().float() for k, p in mesh_run.build("qwen3", True).hf.named_parameters()}
    for rank in two:
        got = rank["bfloat16"][label(layout)]
        assert got["computes_in"] == "torch.bfloat16"
        for mine, expected in zip(got["metrics"], one["metrics"], strict=True):
            assert mine["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.1)
            assert mine["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=0.02)
        moved = apart = 0.0
        for name, value in start.items():
            master, expected = got["tensors"][f"weight/{name}"], one["tensors"][f"weight/{name}"]
            assert master.dtype == torch.float32
            moved += float((expected - value).square().sum())
            apart += float((expected - master).square().sum())
        assert apart < 0.1 * moved
        kept = got["tensors"]["weight/model.embed_tokens.weight"]
        assert not torch.equal(kept, kept.bfloat16().float())


@pytest.mark.parametrize("layout", TWO, ids=label)
@pytest.mark.parametrize("kind", ["tied", "untied", "critic"])
def test_a_model_is_read_in_slices(two, layout, kind) -> None:
    """Several files with an index; a critic from a policy's folder, whose head starts at 0."""
    case: Case = ("llama" if kind == "untied" else "qwen3", kind != "untied", "policy")
    one = mesh_run.make(*case, Mesh())
    if kind == "critic":
        one = mesh_run.engine_of(critic_from(mesh_run.build(*case[:2])), "value")
    metrics = mesh_run.step(one, 0, Mesh())
    whole = sum(p.nbytes for p in one.model.hf.parameters())
    assert two[0]["load"][f"{label(layout)} {kind}"]["saved"]
    for rank in two:
        got = rank["load"][f"{label(layout)} {kind}"]
        assert got["whole_loads"] == []
        assert got["metrics"][0] == pytest.approx(metrics, rel=TOLERANCE, abs=TOLERANCE)
        assert got["end_ids"] == ([] if kind == "critic" else [11, 12, 5])
        for name, value in one.state_dict().tensors.items():
            torch.testing.assert_close(got["tensors"][name], value.detach(), atol=TOLERANCE, rtol=0)
        if got["saved"]:
            weights = {
                k.removeprefix("weight/"): v for k, v in one.state_dict().tensors.items() if k[:6] == "weight"
            }
            assert got["saved"].keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(got["saved"][name], value.detach(), atol=TOLERANCE, rtol=0)
        wrong = ["already laid onto a mesh"]
        whole_copies = "dp_replicate" in layout or "sp" in layout
        if not whole_copies:
            wrong += ["cannot be copied"]
        if "pp" in layout:
            wrong += ["only some layers of the model"]
        assert len(got["refusals"]) == len(wrong)
        assert all(text in said for text, said in zip(wrong, got["refusals"], strict=True))
        if "pp" in layout:
            continue
        assert got["names"] == [name for name, _ in one.model.hf.named_parameters()]
        # norms are whole under tp, and one rank has the larger part of an odd vocabulary
        assert got["bytes"] <= whole if whole_copies else got["bytes"] < 0.53 * whole


@pytest.mark.parametrize("kind", ["tied", "untied", "critic"])
def test_a_stage_has_no_layer_of_another(two, kind) -> None:
    ends = {
        "tied": ["model.embed_tokens.weight", "model.norm.weight"],
        "untied": ["model.norm.weight", "lm_head.weight"],
        "critic": ["model.norm.weight", "score.weight"],
    }
    one = mesh_run.build("llama" if kind == "untied" else "qwen3", kind != "untied").hf
    sizes = {n: p.nbytes for n, p in one.named_parameters()} | {"score.weight": 32 * 4}
    for rank, expected in enumerate((["model.embed_tokens.weight"], ends[kind])):
        got = two[rank]["load"][f"pp2 {kind}"]
        layer = [name for name in sizes if name.startswith(f"model.layers.{rank}.")]
        assert sorted(got["names"]) == sorted([*expected, *layer])
        assert got["bytes"] == sum(sizes[name] for name in got["names"])


def test_a_wrong_last_stage_is_refused_by_all(two) -> None:
    assert two[0]["wrong"] == two[1]["wrong"]
    assert "headrace does not compute LlamaForCausalLM correctly" in two[0]["wrong"]


def test_a_rollout_under_tp_samples_the_same_tokens(two) -> None:
    expected = mesh_checks.rollout(mesh_run.build("llama", False))
    for rank in two:
        assert rank["rollout"]["ids"] == expected["ids"]
        for mine, one in zip(rank["rollout"]["logprobs"], expected["logprobs"], strict=True):
            assert mine == pytest.approx(one, abs=TOLERANCE)
