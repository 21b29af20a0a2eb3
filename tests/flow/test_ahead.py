"""Rollouts made a step ahead: in which order, of which weights, and what a run that stops in between goes on with."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_resume import assert_same_run, go_back, merged, start
from tiny_run import Sections, configuration, even, lines

from headrace.algorithms.stages import advantage_stage
from headrace.config_load import from_mapping
from headrace.data.batch import Batch
from headrace.data.loader import Loader
from headrace.errors import ConfigError, RunError
from headrace.flow import run as run_module
from headrace.flow.ahead import Ahead
from headrace.flow.collect import run_step
from headrace.flow.compile import CheckedFlow
from headrace.flow.flow import Flow
from headrace.flow.interrupt import InterruptGuard
from headrace.flow.runtime import LocalRuntime, Rows, Started
from headrace.flow.source import prepare_data
from headrace.observe.metrics import MetricSums
from headrace.observe.progress import Progress
from headrace.rewards.stage import RewardStage
from headrace.roles.actor import Actor
from headrace.stages import StageContext, stage
from headrace.trainers.recipes import policy_flow

AHEAD: Sections = {
    "rollout": {"staleness": 1},
    "algorithm": {"importance_weights": "token_truncate", "gap_warn": 9.0},
    "train": {"steps": 5, "prompts_per_step": 4, "samples_per_update": 8, "learning_rate": 1e-3},
    "checkpoint": {"every_steps": 1, "keep": 99},
}


class Later(LocalRuntime):
    """Does a stage's work when it is begun, and says so, or what went wrong, when it is waited for."""

    in_turn = False

    def __init__(self, fails: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.fails = fails
        self.seen: list[str] = []

    def start(self, flow: CheckedFlow, stage: Any, rows: Rows, context: StageContext) -> Started:
        done = super().start(flow, stage, rows, context)
        name = f"{stage.name} {context.step}"
        self.seen.append(f"{name} begins")
        runtime = self

        class Waiting:
            span = done.span

            def finish(self, rows: Rows) -> Rows:
                runtime.seen.append(f"{name} ends")
                if (stage.name, context.step) == runtime.fails:
                    raise RunError(f"{name} failed")
                return done.finish(rows)

        return Waiting()


class Prompts:
    name = "prompts"

    def __len__(self) -> int:
        return 8

    def batch(self, indices: Any) -> Batch:
        ids = torch.tensor(list(indices), dtype=torch.int64)
        return Batch([0] * len(ids), rows={"prompt_id": ids, "prompt": ["a"] * len(ids)})


def test_the_order_and_the_weights_by_hand() -> None:
    """Each step's rollout but the first begins before the step before it trains, and sees the weights before that."""
    version = 0
    learned: list[tuple[int, list[int], list[int]]] = []

    @stage(reads=("prompt_id",), writes=("version", "prompt_id"), makes_rows=True)
    def rollout(batch: Batch, context: StageContext) -> Batch:
        made = Batch([0] * batch.num_rows, rows=dict(batch.rows))
        return made.with_columns({"version": torch.full((batch.num_rows,), version)})

    @stage(reads=("version", "prompt_id"), trains=True)
    def update(batch: Batch, context: StageContext) -> None:
        nonlocal version
        learned.append((version, batch["version"].tolist(), batch["prompt_id"].tolist()))
        version += 1

    flow = Flow("by_hand", from_mapping({"rollout": {"staleness": 1}, "train": {"prompts_per_step": 2}}))
    flow.config.algorithm.importance_weights = "token_truncate"
    first = flow.add_stage("rollout", rollout)
    flow.add_stage("update", update, depends_on=first)
    checked = flow.compile()
    assert checked.works_ahead
    loader = Loader(Prompts(), 2, shuffle=False, seed=0)
    runtime = Later()
    ahead = Ahead(runtime, checked, loader)
    for step in (1, 2, 3, 4):
        context = StageContext(checked.config, step, 4, MetricSums())
        run_step(runtime, checked, loader, context, Progress(4, ""), InterruptGuard(), ahead)
        assert [t.stage for t in context.times] == ["rollout"] * (step == 1) + ["update"]
        assert [t.stage for t in ahead.late] == ["rollout"] * (step > 1)
    assert runtime.seen == [
        "rollout 1 begins",
        "rollout 1 ends",
        "rollout 2 begins",
        "update 1 begins",
        "update 1 ends",
        "rollout 2 ends",
        "rollout 3 begins",
        "update 2 begins",
        "update 2 ends",
        "rollout 3 ends",
        "rollout 4 begins",
        "update 3 begins",
        "update 3 ends",
        "rollout 4 ends",
        "update 4 begins",
        "update 4 ends",
    ]
    # updates the trainer has had, those of the weights that generated, and the prompts
    assert learned == [(0, [0, 0], [0, 1]), (1, [0, 0], [2, 3]), (2, [1, 1], [4, 5]), (3, [2, 2], [6, 7])]


def test_a_run_equals_its_stages_called_by_hand(arithmetic: Path, tmp_path: Path) -> None:
    """generate(1), generate(2), update(1), generate(3), update(2), … on one actor, without the loop."""
    result = start(arithmetic, tmp_path, **AHEAD)
    config = configuration(arithmetic, tmp_path, AHEAD)
    actor = Actor(config.model)
    flow = policy_flow(config, actor, even).compile()
    data = prepare_data(flow, str(arithmetic / "train.jsonl"))
    loader = Loader(data.dataset, 4, shuffle=True, seed=config.run.seed)
    actor.prepare(config, total_updates=10, trains=True)
    reward, advantage = RewardStage(even, settings=config.reward), advantage_stage("grpo")
    gaps = []

    def context(step: int) -> StageContext:
        return StageContext(config, step, 5, MetricSums())

    rows = actor.generate(loader.next(), context(1))
    for step in range(1, 6):
        later = actor.generate(loader.next(), context(step + 1)) if step < 5 else rows
        now = context(step)
        for column in (reward, advantage):
            rows = rows.with_columns(column(rows, now))
        actor.update(rows, now)
        gaps.append(now.metrics.means()["gap/abs_logprob_mean"])
        rows = later
    saved = load_file(result.directory / "model" / "model.safetensors")
    mine = actor.model.hf.state_dict()
    assert all(torch.equal(saved[name], mine[name]) for name in saved)
    logged = lines(result.directory)
    assert [line["gap/abs_logprob_mean"] for line in logged] == pytest.approx(gaps)
    assert gaps[0] < 1e-5 < 1e-2 < min(gaps[1:])
    # two updates a step
    assert [line["rollout/weight_lag_updates"] for line in logged] == [0, 2, 2, 2, 2]
    assert logged[0]["importance/weight_mean"] == pytest.approx(1.0)
    assert logged[1]["importance/weight_mean"] != pytest.approx(1.0, abs=1e-4)


def test_without_it_nothing_lags(arithmetic: Path, tmp_path: Path) -> None:
    result = start(arithmetic, tmp_path, train={"steps": 2, "samples_per_update": 8})
    assert [line["rollout/weight_lag_updates"] for line in lines(result.directory)] == [0, 0]


# ---- stopping


def test_resumed_from_any_step_it_is_the_same_run(arithmetic: Path, tmp_path: Path) -> None:
    whole = start(arithmetic, tmp_path / "whole", held_out=True, **AHEAD)
    again = start(arithmetic, tmp_path / "again", held_out=True, **AHEAD)
    assert_same_run(whole.directory, again.directory)
    for step in (1, 3, 4):
        go_back(again.directory, step)
        start(arithmetic, tmp_path / "again", held_out=True, **merged(AHEAD, run={"resume": True}))
        assert_same_run(whole.directory, again.directory)


def test_interrupted_anywhere_it_is_the_same_run(arithmetic: Path, tmp_path: Path) -> None:
    """A signal while the rollout ahead is made (in one process), in a reward, and in an update."""
    sections = merged(AHEAD, checkpoint={"every_steps": 0}, train={"steps": 4})
    whole = start(arithmetic, tmp_path / "whole", **sections)
    for where, step, steps in (("generate", 3, 1), ("generate", 1, 0), ("update", 2, 2)):
        before = getattr(Actor, where)

        def stopped(self: Actor, batch: Batch, context: StageContext) -> Any:
            if context.step == step:  # noqa: B023
                signal.raise_signal(signal.SIGINT)
            return before(self, batch, context)  # noqa: B023

        stopped.__name__, stopped.__stage_spec__ = where, before.__stage_spec__  # type: ignore[attr-defined]
        folder = tmp_path / f"{where}-{step}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Actor, where, stopped)
            first = start(arithmetic, folder, **sections)
        assert (first.interrupted, first.steps) == (True, steps)
        start(arithmetic, folder, **merged(sections, run={"resume": True}))
        assert_same_run(whole.directory, folder / "r")


@pytest.mark.parametrize("stage_name, kept", [("reward", True), ("rollout", False)])
def test_an_error_keeps_the_rows_there_are(
    arithmetic: Path, tmp_path: Path, stage_name: str, kept: bool
) -> None:
    """A reward that fails in step 3 leaves step 2 and the rows of 3; a rollout of 3 that fails, step 2 and no rows."""
    sections = merged(AHEAD, checkpoint={"every_steps": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "open_runtime", lambda *_: Later(fails=(stage_name, 3)))
        with pytest.raises(RunError, match=f"{stage_name} 3 failed"):
            start(arithmetic, tmp_path, **sections)
    saved = tmp_path / "r" / "checkpoints" / "step_2"
    assert saved.is_dir()
    assert (saved / "ahead.safetensors").exists() is kept
    start(arithmetic, tmp_path, **merged(sections, run={"resume": True}))
    whole = start(arithmetic, tmp_path / "whole", **sections)
    logged = lines(tmp_path / "r")
    # without rows those of step 3 are made by the weights of then, from the same prompts
    assert [line["rollout/weight_lag_updates"] for line in logged] == [0, 2, 2 if kept else 0, 2, 2]
    assert [line["data/epoch"] for line in logged] == [line["data/epoch"] for line in lines(whole.directory)]
    if kept:
        assert_same_run(whole.directory, tmp_path / "r")


def test_a_change_that_is_allowed_makes_the_rows_anew(arithmetic: Path, tmp_path: Path) -> None:
    """Other prompts a step, or no staleness any more: rows made before it would not fit, and no prompt is passed over."""
    start(arithmetic, tmp_path, **AHEAD)
    go_back(tmp_path / "r", 2)
    now = merged(
        AHEAD,
        run={"resume": True},
        rollout={"staleness": 0},
        checkpoint={"allow_changed": ["rollout.staleness"]},
    )
    start(arithmetic, tmp_path, **now)
    logged = lines(tmp_path / "r")
    assert [line["rollout/weight_lag_updates"] for line in logged] == [0, 2, 0, 0, 0]
    assert [line["data/epoch"] for line in logged] == pytest.approx(
        [(step + 1) / 15 for step in (1, 2)] + [step / 15 for step in (3, 4, 5)]
    )


# ---- refusals

SHARED = {
    "device": "cpu",
    "groups": {"train": 1, "others": 1},
    "roles": {
        "actor": {"gpu_group": "train"},
        "rollout": {"gpu_group": "others"},
        "reference": {"gpu_group": "others"},
    },
}


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"algorithm": {"importance_weights": "off"}},
            r"algorithm\.importance_weights, such as token_truncate",
        ),
        ({"algorithm": {"filter_groups": True}}, r"algorithm\.filter_groups decides"),
        ({"cluster": {"layout": "cpu_2"}}, r"group 'all' with the actor.*a group of its own"),
        (
            {"cluster": {"layout": SHARED}, "algorithm": {"kl_coefficient": 0.1}},
            r"group 'others' with the reference",
        ),
    ],
)
def test_refused_by_name(arithmetic: Path, tmp_path: Path, changes: Sections, words: str) -> None:
    config = configuration(arithmetic, tmp_path, merged(AHEAD, **changes))
    with pytest.raises(ConfigError, match=f"rollout.staleness: .*{words}") as caught:
        policy_flow(config, Actor(config.model), even).compile()
    assert len(caught.value.violations) == 1
    plain = configuration(arithmetic, tmp_path, merged(AHEAD, **changes, rollout={"staleness": 0}))
    policy_flow(plain, Actor(plain.model), even).compile()


def test_more_than_one_step_is_refused(arithmetic: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.staleness"):
        configuration(arithmetic, tmp_path, merged(AHEAD, rollout={"staleness": 2}))


def test_a_rollout_after_another_stage_is_refused(arithmetic: Path, tmp_path: Path) -> None:
    config = configuration(arithmetic, tmp_path, AHEAD)
    actor = Actor(config.model)
    flow = Flow("late", config)
    flow.add_stage("look", lambda prompt: prompt, reads=["prompt"], writes=["looked"])
    first = flow.add_stage("rollout", actor.generate, depends_on="look")
    scored = flow.add_stage("reward", even, depends_on=first)
    flow.add_stage(
        "update",
        actor.update,
        depends_on=flow.add_stage("advantage", advantage_stage("grpo"), depends_on=scored),
    )
    with pytest.raises(
        ConfigError, match="first stage can be made ahead, not 'rollout', which comes after 'look'"
    ):
        flow.compile()


def test_sft_and_evaluation_pass_it_over(arithmetic: Path, tmp_path: Path) -> None:
    from headrace.trainers.recipes import evaluation_flow, sft_flow

    config = configuration(arithmetic, tmp_path, merged(AHEAD, algorithm={"importance_weights": "off"}))
    actor = Actor(config.model)
    assert not sft_flow(config, actor).compile().works_ahead
    assert not evaluation_flow(config, actor, even).compile().works_ahead
