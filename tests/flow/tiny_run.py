"""Runs of the tiny arithmetic model, for the tests beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from headrace.config import Config
from headrace.config_load import from_mapping
from headrace.flow.run import RunResult
from headrace.roles.actor import Actor
from headrace.trainers.launch import train

Sections = dict[str, dict[str, Any]]


def even(completion: str) -> float:
    """Dense, so that groups differ: the share of even digits."""
    return sum(c in "02468" for c in completion) / 5


def configuration(folder: Path, tmp_path: Path, sections: Sections | None = None) -> Config:
    values: Sections = {
        "run": {"dir": str(tmp_path), "name": "r", "progress": "off", "tensorboard": False},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "train.jsonl")},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 5},
        "train": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
    }
    for section, given in (sections or {}).items():
        values.setdefault(section, {}).update(given)
    return from_mapping(values)


def go(
    folder: Path, tmp_path: Path, score: Any = even, held_out: Any = None, **sections: dict[str, Any]
) -> tuple[RunResult, list[dict[str, Any]], Actor]:
    """The result, the lines of metrics.jsonl and the trained actor."""
    config = configuration(folder, tmp_path, sections)
    actor = Actor(config.model)
    result = train(config, actor, score, str(folder / "train.jsonl"), held_out)
    return result, lines(result.directory), actor


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in actor.model.hf.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
