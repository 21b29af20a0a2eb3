"""What the processes of tests/training/test_turns.py do, and the book that stands for a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mesh_run
import torch
from torch import Tensor, nn

from headrace.models.mesh import Mesh, Parallelism
from headrace.models.shards import local
from headrace.training import turns as module
from headrace.training.turns import Turns

HOME = torch.device("cpu", 0)
"""Stands for the device: another name of the CPU."""


class Moves:
    """Counts what goes where. What a tensor leaves behind becomes NaN, so that whoever still looks there is found out."""

    def __init__(self) -> None:
        self.bytes = {"cpu": 0, "home": 0}
        self._away: set[int] = set()

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        moved = tensor.detach().clone()
        self.bytes["cpu" if device == module.AWAY else "home"] += moved.nbytes
        tensor.detach().fill_(float("nan"))
        # memory of models that are gone may be used again
        self._away -= {tensor.data_ptr(), moved.data_ptr()}
        if device == module.AWAY:
            self._away.add(moved.data_ptr())
        return moved

    def is_here(self, model: nn.Module) -> bool:
        """Whether all is; some of a model that is away is none."""
        there = [local(p).data_ptr() in self._away for p in model.parameters() if local(p).numel()]
        return not any(there)


@contextmanager
def moves() -> Iterator[Moves]:
    made = Moves()
    real = module.move, module.has_memory_of_its_own, module.home_of
    module.move = made.move
    module.has_memory_of_its_own = lambda device: True
    module.home_of = lambda tensor: HOME
    try:
        yield made
    finally:
        module.move, module.has_memory_of_its_own, module.home_of = real


def everything(cases: list[tuple[dict[str, int], str]]) -> dict[str, Any]:
    return {
        f"{mesh_run.label(layout)} {dtype}": compare(Mesh(Parallelism(**layout)), getattr(torch, dtype))
        for layout, dtype in cases
    }


def compare(mesh: Mesh, dtype: torch.dtype) -> dict[str, Any]:
    stays = train(mesh, dtype, Turns())
    with moves() as made:
        turns = Turns()
        turns.begin(True)
        takes = train(mesh, dtype, turns)
        return {
            "stays": stays,
            "turns": takes,
            "moved": made.bytes["home"],
            "away": not takes.pop("here")(made),
        }


def train(mesh: Mesh, dtype: torch.dtype, turns: Turns) -> dict[str, Any]:
    """Updates and outputs of two models in turn, and the state of both."""
    actor = mesh_run.make("qwen3", True, "policy", mesh, dtype=dtype)
    critic = mesh_run.make("llama", False, "value", mesh, dtype=dtype)
    for engine in (actor, critic):
        turns.add(engine)
    metrics: list[Any] = []
    for update in range(2):
        for engine in (critic, actor):
            turns.bring(engine)
            own = engine.outputs(mesh_run.global_batch(update).select(mesh_run.rank_rows(update, mesh)))
            metrics.append([x.tolist() for x in vars(own).values() if x is not None])
            metrics.append(mesh_run.step(engine, update, mesh))
    turns.bring(None)
    out: dict[str, Any] = {"metrics": metrics}
    if turns.active:
        out["here"] = lambda made: made.is_here(actor.model) or made.is_here(critic.model)
    tensors = {f"actor {k}": v for k, v in actor.state_dict().tensors.items()}
    out["tensors"] = tensors | {f"critic {k}": v for k, v in critic.state_dict().tensors.items()}
    return out
