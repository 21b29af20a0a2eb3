"""Runs whose models take turns on the device (train.offload_parameters) are those of runs whose models stay."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Sections, configuration, even, go, lines, same, weights

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import turn_checks
from turn_checks import Moves

from headrace.cluster.worker import Site
from headrace.data.batch import Batch
from headrace.flow.remote import describe_role
from headrace.roles.actor import Actor
from headrace.roles.reference import Reference
from headrace.roles.worker import RoleWorker
from headrace.training.turns import TURNS

PPO: Sections = {
    "algorithm": {"name": "ppo", "kl_coefficient": 0.1},
    "critic": {"learning_rate": 1e-3},
    "train": {"samples_per_update": 8},
    "checkpoint": {"every_steps": 1},
    "eval": {"every_steps": 1},
}
OFFLOAD = {"offload_parameters": True}


@pytest.fixture
def moves() -> Iterator[Moves]:
    with turn_checks.moves() as made:
        yield made
    TURNS.begin(False)


def plain(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if not k.startswith(("time", "memory")) and not k.endswith("_per_s")}
        for line in lines(folder / "r")
    ]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_and_its_resume(arithmetic: Path, tmp_path: Path, rank: int, request: Any) -> None:
    """Rollout, evaluation, reference, critic and updates; what is left on the device would be NaN."""
    if rank:
        pytest.importorskip("peft")
    sections = PPO | {"lora": {"rank": rank}}
    held_out = str(arithmetic / "heldout.jsonl")
    _, _, stays = go(arithmetic, tmp_path / "a", held_out=held_out, **sections)
    moves: Moves = request.getfixturevalue("moves")
    train = {**PPO["train"], **OFFLOAD}
    first = {**sections, "train": {**train, "steps": 1}}
    go(arithmetic, tmp_path / "b", held_out=held_out, **first)
    assert moves.bytes["home"] > 0
    sections = {**sections, "train": {**train, "steps": 2}, "run": {"resume": True}}
    _, _, takes = go(arithmetic, tmp_path / "b", held_out=held_out, **sections)
    assert plain(tmp_path / "a") == plain(tmp_path / "b")
    TURNS.begin(False)
    assert same(weights(stays), weights(takes))


def test_who_is_there_at_each_stage(
    arithmetic: Path, tmp_path: Path, moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []
    loaded: dict[str, Any] = {}
    real = TURNS.bring

    def bring(engine: Any) -> None:
        real(engine)
        if engine is not None:
            loaded[engine.prefix] = engine.model
            seen.append((engine.prefix, [name for name, model in loaded.items() if moves.is_here(model)]))

    monkeypatch.setattr(TURNS, "bring", bring)
    go(arithmetic, tmp_path, **{**PPO, "train": {**PPO["train"], **OFFLOAD, "steps": 1}})
    assert loaded.keys() == {"actor", "reference", "critic"}
    assert all(here == [name] for name, here in seen)
    stages = [name for name, _ in seen]
    assert stages.count("reference") == 1
    assert stages.count("actor") >= 2


def test_an_actor_is_trained_again_without(arithmetic: Path, tmp_path: Path, moves: Moves) -> None:
    """A later run whose models stay has them back."""
    from headrace.trainers.launch import train

    config = configuration(arithmetic, tmp_path, {**PPO, "train": {**PPO["train"], **OFFLOAD, "steps": 1}})
    actor = Actor(config.model)
    train(config, actor, even, str(arithmetic / "train.jsonl"))
    TURNS.bring(None)
    assert not moves.is_here(actor.model)
    config = configuration(arithmetic, tmp_path, {"run": {"name": "again"}})
    train(config, actor, even, str(arithmetic / "train.jsonl"))
    assert moves.is_here(actor.model)
    assert [line["actor/updates"] for line in lines(tmp_path / "again")] == [1, 1]


@pytest.mark.gpu
def test_a_run_on_a_device(arithmetic: Path, tmp_path: Path) -> None:
    """The first step is that of models that stay, to a GPU's rounding; where the weights are afterwards."""
    sections: Sections = {**PPO, "model": {"dtype": "bfloat16"}, "run": {"device": "cuda"}}
    go(arithmetic, tmp_path / "a", **sections)
    _, _, actor = go(arithmetic, tmp_path / "b", **{**sections, "train": {**PPO["train"], **OFFLOAD}})
    stays, takes = (lines(tmp_path / name / "r") for name in "ab")
    assert [line.keys() for line in stays] == [line.keys() for line in takes]
    for name in ("rollout/tokens", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
        assert takes[0][name] == pytest.approx(stays[0][name], rel=0.02, abs=1e-3)
    assert [line["actor/updates"] for line in takes] == [2, 2]
    TURNS.bring(actor.engine)
    assert {p.device.type for p in actor.model.parameters()} == {"cuda"}
    TURNS.bring(None)
    assert {p.device.type for p in actor.model.parameters()} == {"cpu"}
    TURNS.begin(False)
    assert {p.device.type for p in actor.model.parameters()} == {"cuda"}


def test_workers_of_one_process(arithmetic: Path, tmp_path: Path, moves: Moves) -> None:
    config = configuration(arithmetic, tmp_path, {**PPO, "train": {**PPO["train"], **OFFLOAD}})
    site = Site(0, 1, "all", 0, (0,), "here", "cpu")
    workers = {}
    for name, kind, trains in (("actor", Actor, True), ("reference", Reference, False)):
        description = describe_role(
            kind(config.model), config, name=name, trains=trains, supervised=False, total_updates=2
        )
        workers[name] = RoleWorker(site, **description)
    models = {name: worker.role.engine.model for name, worker in workers.items()}
    assert [moves.is_here(models[name]) for name in workers] == [False, True]
    batch = Batch.from_rows(
        {"input_ids": [[1, 2, 3, 4], [2, 3]], "response_mask": [[False, True, True, True], [False, True]]}
    )
    context = {"step": 1, "total_steps": 2, "evaluation": False, "kl_coefficient": 0.1}
    outputs = {}
    for name, column in (("actor", "logprobs"), ("reference", "reference_logprobs"), ("actor", "logprobs")):
        outcome = workers[name].stage(batch, function="logprobs", method=True, context=context)
        assert [moves.is_here(models[other]) for other in workers] == [other == name for other in workers]
        outputs[name] = outcome.rows[column]
        assert bool(outputs[name].isfinite().all())
    assert outputs["actor"].tolist() == outputs["reference"].tolist()  # the same weights
    workers["reference"].weights()
    assert [moves.is_here(models[name]) for name in workers] == [False, True]
    file = tmp_path / "actor.safetensors"
    saved = workers["actor"].save_state(str(file))  # from where the weights are
    assert saved == {"name": "actor.safetensors", "size": file.stat().st_size}
    numbers = workers["actor"].numbers()
    assert numbers is not None
    assert not moves.is_here(models["actor"])
    workers["actor"].load_state([str(file)], numbers)
    assert moves.is_here(models["actor"])
