"""Along a whole run, the gradients and tokens of compiled kernels are those of torch's operators at the same weights.

Runs themselves part company: rounding grows from update to update, as two orders of a sum do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import cli
from headrace.kernels import build
from headrace.models import gates
from headrace.observe.run_dir import RunDirectory

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"no kernels: {build.missing()}")
Updates = list[tuple[list[Tensor], list[Tensor]]]  # of each: gradients, and the weights after it


def recorded(updates: Updates) -> Callable[..., Any]:
    """An optimizer's step that also notes what it was given and what it made of it."""
    own = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        result = own(self)
        updates.append((gradients, [p.detach().clone() for p in parameters]))
        return result

    return step


def replayed(updates: Updates, differences: list[float]) -> Callable[..., Any]:
    """One that takes over the noted weights, whatever the gradients are."""
    noted = iter(updates)

    @torch.no_grad()
    def step(self: torch.optim.AdamW) -> None:
        gradients, weights = next(noted)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, gradient, weight in zip(parameters, gradients, weights, strict=True):
            given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if gradient.any() or given.any():
                differences.append(float((given - gradient).norm() / gradient.norm()))
            parameter.copy_(weight)

    return step


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("train", ["algorithm.name=grpo", "rollout.samples_per_prompt=4"]),
        ("train", ["algorithm.name=ppo", "algorithm.kl_coefficient=0.1", "critic.warmup_steps=0"]),
        ("reward-model", []),
    ],
    ids=["grpo", "ppo", "reward model"],
)
def test_gradients_and_tokens_along_a_run(
    command: str,
    settings: list[str],
    arithmetic: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if command == "reward-model":
        # as with larger layers: products by torch, gates by a kernel
        monkeypatch.setattr(gates, "LARGEST_TRAINED", 0)
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 20)}
        for a in range(9)
        for b in range(9)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    data = tmp_path / "pairs.jsonl" if command == "reward-model" else arithmetic / "train.jsonl"

    def run(name: str) -> list[dict[str, float]]:
        given = [
            f"model.path={arithmetic / 'model'}",
            f"data.path={data}",
            f"run.dir={tmp_path}",
            f"run.name={name}",
            "run.progress=off",
            "rollout.max_new_tokens=8",
            "train.prompts_per_step=8",
            "train.samples_per_update=16",
            "train.steps=8",
            "train.learning_rate=3e-3",
            *settings,
        ]
        if command == "train":
            given.append(f"reward.function={arithmetic / 'reward.py'}:score")
        assert cli.main([command, *given]) == 0
        return RunDirectory(tmp_path / name).read_metrics()

    updates: Updates = []
    monkeypatch.setattr(torch.optim.AdamW, "step", recorded(updates))
    compiled = run("compiled")
    differences: list[float] = []
    monkeypatch.setattr(torch.optim.AdamW, "step", replayed(updates, differences))
    request.getfixturevalue("without_kernels")
    plain = run("plain")
    assert len(updates) >= 8
    assert differences
    assert max(differences) < 2e-4
    for mine, theirs in zip(compiled, plain, strict=True):
        for name in {"rollout/tokens", "reward/mean", "train/step"} & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6)
