"""Models that take turns on a device, which here is a book of who is where: what is left behind is spoiled at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mesh_run
import pytest
import torch
import turn_checks
from mesh_run import label
from turn_checks import Moves

from headrace.config import LoraConfig
from headrace.models.heads import critic_from
from headrace.models.hf import copy_causal_lm
from headrace.models.lora import add_adapters
from headrace.models.mesh import Mesh, Parallelism
from headrace.models.starting_policy import StartingPolicy
from headrace.reshard.model_layout import ModelRanks
from headrace.training import turns as module
from headrace.training.torch_engine import TorchEngine
from headrace.training.turns import Turns
from headrace.training.weight_sync import WeightSync


@pytest.fixture
def moves() -> Any:
    with turn_checks.moves() as made:
        yield made


def size(engine: TorchEngine) -> int:
    return sum(p.nbytes for p in engine.model.parameters())


def engines() -> tuple[TorchEngine, TorchEngine, TorchEngine]:
    """An actor, a frozen copy of it and a critic."""
    actor = mesh_run.make("qwen3", True, "policy", Mesh())
    reference = TorchEngine(copy_causal_lm(actor.model), prefix="reference", tokens_per_microbatch=24)
    return actor, reference, mesh_run.make("qwen3", False, "value", Mesh())


def test_only_those_whose_turn_it_is_are_there(moves: Moves) -> None:
    turns = Turns()
    turns.begin(True)
    actor, reference, critic = every = engines()
    for engine in every:
        turns.bring(None)
        turns.add(engine)
    assert moves.bytes == {"cpu": size(actor) + size(reference), "home": 0}
    for engine in (actor, critic, critic, reference):
        turns.bring(engine)
        assert [moves.is_here(other.model) for other in every] == [other is engine for other in every]
    assert moves.bytes["home"] == size(actor) + size(critic) + size(reference)
    turns.bring(None)
    assert not any(moves.is_here(other.model) for other in every)
    turns.begin(False)
    assert all(moves.is_here(other.model) for other in every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_models_that_stay(moves: Moves, dtype: torch.dtype) -> None:
    expected = mesh_run.run(mesh_run.make("qwen3", True, "policy", Mesh(), dtype=dtype), Mesh())
    turns = Turns()
    turns.begin(True)
    actor = mesh_run.make("qwen3", True, "policy", Mesh(), dtype=dtype)
    other = mesh_run.make("llama", False, "value", Mesh())
    turns.add(actor)
    turns.add(other)
    metrics = []
    for update in range(mesh_run.UPDATES):
        turns.bring(other)
        mesh_run.step(other, update, Mesh())
        turns.bring(actor)
        metrics.append(mesh_run.step(actor, update, Mesh()))
    turns.bring(None)
    assert metrics == expected["metrics"]
    state = actor.state_dict().tensors
    assert all(torch.equal(state[name], tensor) for name, tensor in expected["tensors"].items())
    assert moves.bytes["cpu"] > 0


def test_weights_that_two_share_stay_for_either(moves: Moves) -> None:
    """The base of a policy with adapters, of its critic and of its reference: one memory, wherever it is."""
    pytest.importorskip("peft")
    turns = Turns()
    turns.begin(True)
    policy = mesh_run.build("qwen3", True)
    policy.adapters = add_adapters(policy.hf, LoraConfig(rank=2), "base")
    actor = mesh_run.engine_of(policy, "policy")
    turns.add(actor)
    reference = TorchEngine(StartingPolicy(policy), prefix="reference")
    turns.add(reference)
    critic = mesh_run.engine_of(critic_from(policy), "value")
    turns.add(critic)
    base = dict(policy.hf.named_parameters())["model.layers.0.mlp.up_proj.base_layer.weight"]
    name = "model.layers.0.mlp.up_proj.base_layer.weight"
    its = dict(critic.model.hf.named_parameters())[name]
    assert base is not its
    assert base.data_ptr() == its.data_ptr()
    turns.bring(critic)
    assert moves.is_here(critic.model)
    assert base.data_ptr() == its.data_ptr()
    before = moves.bytes["home"]
    turns.bring(reference)
    assert moves.is_here(actor.model)  # the same weights
    assert not moves.is_here(critic.model)
    turns.bring(None)
    assert base.data_ptr() == its.data_ptr()
    turns.bring(critic)
    assert base.data_ptr() == its.data_ptr()
    assert moves.is_here(critic.model)
    assert moves.bytes["home"] > before


def test_a_rollout_gives_up_its_views_of_weights_that_leave(moves: Moves) -> None:
    """Views would keep the memory; the next sync makes them anew."""
    turns = Turns()
    turns.begin(True)
    actor, other, _ = engines()
    turns.add(actor)
    turns.add(other)
    generates = mesh_run.build("qwen3", True)
    ranks = ModelRanks((0,), Parallelism())
    sync = WeightSync(ranks, ranks, actor.model, generates)
    expected = [p.detach().clone() for p in actor.model.hf.parameters()]
    for _ in range(2):
        turns.bring(actor)
        sync.run()
        pairs = list(zip(actor.model.hf.parameters(), generates.hf.parameters(), expected, strict=True))
        assert all(own.data_ptr() == view.data_ptr() for own, view, _ in pairs)
        assert all(torch.equal(view, value) for _, view, value in pairs)
        sync.free()
        assert all(own.data_ptr() == view.data_ptr() for own, view, _ in pairs)
        sync.free(views=True)
        assert not any(view.untyped_storage().nbytes() for _, view, _ in pairs)
        turns.bring(other)


def test_models_on_a_cpu_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("moved")

    monkeypatch.setattr(module, "move", refuse)
    turns = Turns()
    turns.begin(True)
    actor, reference, _ = engines()
    turns.add(actor)
    turns.add(reference)
    turns.bring(reference)
    turns.bring(None)


def test_a_model_that_is_gone_is_forgotten(moves: Moves) -> None:
    import gc
    import weakref

    turns = Turns()
    turns.begin(True)
    actor = mesh_run.make("qwen3", True, "policy", Mesh())
    turns.add(actor)
    turns.bring(None)
    model = weakref.ref(actor.model)
    del actor
    gc.collect()
    assert model() is None
    turns.bring(None)


# cut weights are plain tensors under tp, as whole ones are
CASES = [({"zero3": 2}, "float32"), ({"zero3": 2}, "bfloat16"), ({"pp": 2}, "float32")]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return mesh_run.spawn(turn_checks.everything, 2, tmp_path_factory.mktemp("two"), CASES)


@pytest.mark.parametrize("layout, dtype", CASES)
def test_shards_take_turns(two: list[dict[str, Any]], layout: dict[str, int], dtype: str) -> None:
    """Parts of an odd vocabulary too, which FSDP pads; to the bit what models that stay compute."""
    for rank in two:
        got = rank[f"{label(layout)} {dtype}"]
        assert got["turns"]["metrics"] == got["stays"]["metrics"]
        assert got["turns"]["tensors"].keys() == got["stays"]["tensors"].keys()
        for name, tensor in got["stays"]["tensors"].items():
            assert torch.equal(got["turns"]["tensors"][name], tensor)
        assert got["moved"] > 0
        assert got["away"]


@pytest.mark.gpu
def test_on_a_device(tmp_path: Path) -> None:
    """Memory of the device when neither, one and the other are there; and the same numbers as without turns."""
    device = torch.device("cuda")

    def on_device(make: Callable[[], TorchEngine]) -> TorchEngine:
        with torch.device("cpu"):
            engine = make()
        engine.release()
        engine.model.hf.to(device)
        prefix = "policy" if engine.prefix == "actor" else "value"
        return mesh_run.engine_of(engine.model, prefix)

    def both() -> tuple[TorchEngine, TorchEngine]:
        return (
            on_device(lambda: mesh_run.make("qwen3", True, "policy", Mesh(), dtype=torch.bfloat16)),
            on_device(lambda: mesh_run.make("llama", False, "value", Mesh())),
        )

    def train(turns: Turns) -> list[Any]:
        actor, critic = both()
        turns.add(actor)
        turns.add(critic)
        out: list[Any] = []
        for update in range(mesh_run.UPDATES):
            for engine in (actor, critic):
                turns.bring(engine)
                assert all(p.device.type == "cuda" for p in engine.model.parameters())
                out.append(mesh_run.step(engine, update, Mesh()))
        turns.bring(None)
        for engine in (actor, critic):
            out += [t.cpu() for t in engine.state_dict().tensors.values()]
            assert turns.active == all(p.device.type == "cpu" for p in engine.model.parameters())
        return out

    stays, goes = Turns(), Turns()
    goes.begin(True)
    for one, other in zip(train(stays), train(goes), strict=True):
        if isinstance(
            one, torch.Tensor
        ):  # sums of a GPU have no fixed order; an update moves a weight by 1e-3
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)
        else:
            assert one == pytest.approx(other, rel=1e-2, abs=1e-3)
    torch.cuda.empty_cache()
    actor, critic = both()
    goes.add(actor)
    goes.add(critic)
    full = torch.cuda.memory_allocated()
    goes.bring(actor)
    assert torch.cuda.memory_allocated() <= full - 0.9 * size(critic)
    goes.bring(None)
    assert torch.cuda.memory_allocated() <= full - 0.9 * (size(actor) + size(critic))
