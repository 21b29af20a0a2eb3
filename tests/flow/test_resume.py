"""A run stopped at any step and resumed is the run that was never stopped: same metrics, same weights, bit for bit."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import Sections, configuration, even, lines

from headrace.flow.run import RunResult
from headrace.roles.actor import Actor
from headrace.trainers.launch import run_sft, train


def start(
    folder: Path, tmp_path: Path, score: Any = even, held_out: bool = False, **sections: dict[str, Any]
) -> RunResult:
    config = configuration(folder, tmp_path, sections)
    held = str(folder / "heldout.jsonl") if held_out else None
    return train(config, Actor(config.model), score, str(folder / "train.jsonl"), held)


def merged(base: Sections, **changes: dict[str, Any]) -> Sections:
    return {name: {**base.get(name, {}), **changes.get(name, {})} for name in {**base, **changes}}


def values(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock or the operating system says."""
    return [
        {
            k: v
            for k, v in line.items()
            if k not in ("time", "rollout/tokens_per_s") and not k.startswith(("time/", "memory/"))
        }
        for line in lines(run)
    ]


def assert_same_run(a: Path, b: Path) -> None:
    assert values(a) == values(b)
    for name in ("samples.jsonl", "eval_samples.jsonl"):
        assert (a / name).exists() == (b / name).exists()
        if (a / name).exists():
            assert (a / name).read_bytes() == (b / name).read_bytes()
    one, other = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)


GRPO: Sections = {
    "train": {"steps": 5, "prompts_per_step": 4, "samples_per_update": 8, "passes_per_step": 2},
    "algorithm": {"kl_coefficient": 0.1},
    "checkpoint": {"every_steps": 1, "keep": 99},
}
PPO: Sections = {
    "algorithm": {"name": "ppo", "kl_coefficient": 0.05, "kl_estimator": "k1", "kl_placement": "reward"},
    "critic": {"learning_rate": 3e-3, "warmup_steps": 2},
    "train": {"steps": 4, "samples_per_update": 8, "passes_per_step": 2, "schedule": "cosine"},
    "checkpoint": {"every_steps": 1, "keep": 99},
}
ADAPTIVE: Sections = {
    **GRPO,
    "train": {**GRPO["train"], "learning_rate": 1e-2},
    "algorithm": {"kl_coefficient": 0.5, "kl_target": 0.01},
}
# 60 rows, 25 a step: an epoch ends after every second step
EPOCHS: Sections = {
    "train": {"steps": 5, "prompts_per_step": 25},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 3},
    "checkpoint": {"every_steps": 1, "keep": 99},
}


def go_back(run: Path, step: int) -> None:
    """As if the run had been killed while its newest checkpoint was that of `step`."""
    (run / "checkpoints" / "latest").write_text(f"step_{step}\n")


@pytest.mark.parametrize(
    ("sections", "back"),
    [(GRPO, [3, 1]), (PPO, [1, 2, 3]), (EPOCHS, [1, 2, 4]), (ADAPTIVE, [2])],
    ids=["grpo", "ppo", "epochs", "adaptive KL"],
)
def test_resumed_from_any_step_it_is_the_same_run(
    arithmetic: Path, tmp_path: Path, sections: Sections, back: list[int]
) -> None:
    whole = start(arithmetic, tmp_path / "whole", held_out=True, **sections)
    again = start(arithmetic, tmp_path / "again", held_out=True, **sections)
    assert_same_run(whole.directory, again.directory)  # else nothing below means anything
    for step in back:
        go_back(again.directory, step)
        resumed = start(
            arithmetic, tmp_path / "again", held_out=True, **merged(sections, run={"resume": True})
        )
        assert_same_run(whole.directory, resumed.directory)
        assert resumed.evaluations.keys() == whole.evaluations.keys()
        assert resumed.metrics["train/step"] == whole.metrics["train/step"]
        newest = max(int(p.name[5:]) for p in (again.directory / "checkpoints").glob("step_*"))
        assert newest == sections["train"]["steps"]


def test_sft_is_the_same_run(arithmetic: Path, tmp_path: Path) -> None:
    def go(name: str, **run: Any) -> Path:
        sections: Sections = {
            "run": {"name": name, **run},
            "data": {"completion": "answer"},
            "train": {"steps": 6, "samples_per_update": 25},  # 2 steps an epoch
            "eval": {"path": str(arithmetic / "heldout.jsonl"), "every_steps": 2},
            "reward": {"function": f"{arithmetic / 'reward.py'}:score"},
            "checkpoint": {"every_steps": 1, "keep": 99},
        }
        assert run_sft(configuration(arithmetic, tmp_path, sections)) == 0
        return tmp_path / name

    whole, again = go("whole"), go("again")
    for step in (2, 3):
        go_back(again, step)
        go("again", resume=True)
        assert_same_run(whole, again)
    samples = lines(whole, "eval_samples.jsonl")
    assert [s["step"] for s in samples] == [step for step in (0, 2, 4, 6) for _ in range(8)]
    assert len({tuple(s["prompt"] for s in samples[i : i + 8]) for i in range(0, 32, 8)}) == 1


def test_bfloat16_masters_are_kept(arithmetic: Path, tmp_path: Path) -> None:
    """The parameters are the masters rounded; continuing from the rounded ones would go another way."""
    sections = merged(GRPO, model={"dtype": "bfloat16"}, train={"learning_rate": 1e-5, "steps": 3})
    whole = start(arithmetic, tmp_path / "whole", **sections)
    again = start(arithmetic, tmp_path / "again", **sections)
    go_back(again.directory, 1)
    start(arithmetic, tmp_path / "again", **merged(sections, run={"resume": True}))
    assert_same_run(whole.directory, again.directory)
    saved = load_file(again.directory / "checkpoints" / "step_3" / "actor.safetensors")
    assert {str(t.dtype) for t in saved.values()} == {"torch.float32"}


def test_float32_weights_are_stored_once(arithmetic: Path, tmp_path: Path) -> None:
    result = start(arithmetic, tmp_path, train={"steps": 1})
    saved = load_file(result.directory / "checkpoints" / "step_1" / "actor.safetensors")
    model = load_file(result.directory / "model" / "model.safetensors")
    size = sum(t.numel() for t in model.values())
    stored = sum(t.numel() for n, t in saved.items() if not n.startswith("step/"))
    assert stored == 3 * size  # the weights and Adam's two moments
    for name, tensor in model.items():
        assert torch.equal(saved[f"weight/{name}"], tensor)


# ---- what the user's own code draws and keeps


def test_the_users_random_numbers_go_on(arithmetic: Path, tmp_path: Path) -> None:
    import numpy as np

    def noisy(completion: str) -> float:
        return even(completion) + random.random() + float(np.random.rand()) + float(torch.rand(()))

    sections = merged(GRPO, train={"steps": 4})
    whole = start(arithmetic, tmp_path / "whole", noisy, **sections)
    again = start(arithmetic, tmp_path / "again", noisy, **sections)
    go_back(again.directory, 2)
    start(arithmetic, tmp_path / "again", noisy, **merged(sections, run={"resume": True}))
    assert_same_run(whole.directory, again.directory)


class Curriculum:
    """A stage with a state: it counts its calls and adds the count to the reward."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, reward: Any) -> Any:
        self.calls += 1
        return torch.as_tensor(reward) * self.calls

    def score(self, completion: str) -> float:
        """The same, as a method that is the reward function."""
        self.calls += 1
        return even(completion) * (self.calls % 7)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_a_stage_with_a_state_is_restored(arithmetic: Path, tmp_path: Path) -> None:
    from headrace import Flow, grpo_advantages

    def go(name: str, steps: int, resume: bool = False) -> tuple[Path, Curriculum]:
        config = configuration(arithmetic, tmp_path, {"run": {"name": name, "resume": resume}})
        actor, curriculum = Actor(config.model), Curriculum()
        flow = Flow("own", config)
        rollout = flow.add_stage("rollout", actor.generate)
        reward = flow.add_stage("score", even, depends_on=rollout)
        own = flow.add_stage("own", curriculum.add, reads=["reward"], writes=["reward"], depends_on=reward)
        advantage = flow.add_stage("advantage", grpo_advantages, depends_on=own)
        flow.add_stage("update", actor.update, depends_on=advantage)
        result = flow.compile().run(str(arithmetic / "train.jsonl"), steps=steps)
        return result.directory, curriculum

    whole, _ = go("whole", 4)
    go("parts", 2)
    parts, curriculum = go("parts", 4, resume=True)
    assert curriculum.calls == 4
    assert_same_run(whole, parts)

    whole = start(arithmetic, tmp_path / "w", Curriculum().score, train={"steps": 4}).directory
    parts = start(arithmetic, tmp_path / "p", Curriculum().score, train={"steps": 2}).directory
    sections: Sections = {"run": {"resume": True}, "train": {"steps": 4}}
    start(arithmetic, tmp_path / "p", Curriculum().score, **sections)
    assert_same_run(whole, parts)


def test_a_module_as_a_reward_is_no_state(arithmetic: Path, tmp_path: Path) -> None:
    class Judge(torch.nn.Linear):
        def __call__(self, completion: str) -> float:
            return even(completion)

    start(arithmetic, tmp_path, Judge(2, 2), train={"steps": 1})


# ---- Ctrl-C


def test_interrupted_anywhere_it_is_the_same_run(arithmetic: Path, tmp_path: Path) -> None:
    """The first signal in reward call 3 (the first evaluation), 14 (step 1), 30 (evaluation at step 2), 50 (the last).

    10 held-out rows, 8 and 2 at a time, come before the first step and after steps 2 and 3; a step has 8 samples.
    """
    sections = merged(
        PPO, train={"steps": 3, "passes_per_step": 1, "prompts_per_step": 2}, eval={"every_steps": 2}
    )
    sections = merged(sections, checkpoint={"every_steps": 0}, critic={"warmup_steps": 0})
    sections = merged(sections, rollout={"max_concurrent_sequences": 2})
    whole = start(arithmetic, tmp_path / "whole", held_out=True, **sections)
    for number, steps in ((3, 0), (14, 0), (30, 2), (50, 3)):
        calls = 0

        def score(completion: str) -> float:
            nonlocal calls
            calls += 1
            if calls == number:  # noqa: B023
                signal.raise_signal(signal.SIGINT)
            return even(completion)

        first = start(arithmetic, tmp_path / f"{number}", score, held_out=True, **sections)
        assert (first.interrupted, first.steps) == (True, steps)
        resumed = merged(sections, run={"resume": True})
        rest = start(arithmetic, tmp_path / f"{number}", held_out=True, **resumed)
        assert not rest.interrupted
        assert_same_run(whole.directory, rest.directory)


def test_the_critic_and_the_actor_have_seen_the_same_steps(arithmetic: Path, tmp_path: Path) -> None:
    """A signal that comes while the critic updates is heeded after the actor has."""
    from headrace.roles.critic import Critic

    before = Critic.update

    def update(self: Critic, batch: Any, context: Any) -> None:
        before(self, batch, context)
        if context.step == 2:
            signal.raise_signal(signal.SIGINT)

    update.__stage_spec__ = before.__stage_spec__  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Critic, "update", update)
        result = start(arithmetic, tmp_path, **merged(PPO, critic={"warmup_steps": 0}))
    assert result.interrupted
    assert [s["step"] for s in lines(result.directory)] == [1, 2]
    assert lines(result.directory)[1]["actor/updates"] == lines(result.directory)[1]["critic/updates"] == 4
