"""What a resume refuses, by name, before anything of the run is touched; and what it lets pass."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_resume import assert_same_run, go_back, merged, start
from tiny_run import Sections, configuration, even, lines

from headrace.checkpoint.fingerprint import refused_changes
from headrace.checkpoint.resume import find_checkpoint, require_members
from headrace.checkpoint.save import CheckpointStore
from headrace.errors import ConfigError, RunError
from headrace.models.hf import load_causal_lm
from headrace.observe.run_dir import RunDirectory
from headrace.roles.actor import Actor
from headrace.trainers.launch import train

BASE: Sections = {"train": {"steps": 3}, "checkpoint": {"every_steps": 1}}


@pytest.fixture(scope="module")
def ended(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(arithmetic, tmp_path_factory.mktemp("ended"), **BASE).directory


@pytest.fixture
def run(ended: Path, tmp_path: Path) -> Path:
    """A copy of a run that ended after step 3."""
    return Path(shutil.copytree(ended, tmp_path / "r"))


def resume(arithmetic: Path, there: Path, /, **changes: dict[str, Any]) -> Any:
    return start(arithmetic, there.parent, **merged(BASE, **merged({"run": {"resume": True}}, **changes)))


def content(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


CHANGES: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"train": {"learning_rate": 2e-3}}, "train.learning_rate: was 0.001 .* is 0.002 now"),
    ({"rollout": {"temperature": 0.5}}, "rollout.temperature: was 1.0 .* is 0.5 now"),
    ({"algorithm": {"clip_high": 0.3}}, "algorithm.clip_high: was 0.2 .* is 0.3 now"),
    ({"run": {"seed": 1}}, "run.seed: was 0 .* is 1 now"),
    ({"data": {"template": "{prompt} "}}, r"data.template: was None .* is '\{prompt\} ' now"),
    ({"data": {"shuffle": False}}, "data.shuffle: was True .* is False now"),
    ({"train": {"prompts_per_step": 8}}, "train.prompts_per_step: was 4 .* is 8 now"),
]


@pytest.mark.parametrize(("changed", "message"), CHANGES, ids=[m.split(":")[0] for _, m in CHANGES])
def test_a_changed_setting_is_refused_by_name_or_allowed_by_name(
    arithmetic: Path, run: Path, changed: dict[str, dict[str, Any]], message: str
) -> None:
    before = content(run)
    (section, values), more = next(iter(changed.items())), {"train": {"steps": 5}}
    (key,) = values
    with pytest.raises(ConfigError, match=message) as error:
        resume(arithmetic, run, **merged(more, **changed))
    (violation,) = error.value.violations
    assert f"'{section}.{key}' to checkpoint.allow_changed" in violation
    assert content(run) == before
    allowed = {"checkpoint": {"allow_changed": [f"{section}.{key}"]}}
    assert resume(arithmetic, run, **merged(more, **changed, **allowed)).steps == 5
    assert [s["step"] for s in lines(run)] == [1, 2, 3, 4, 5]


def test_every_change_is_named_at_once(arithmetic: Path, run: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resume(
            arithmetic,
            run,
            train={"learning_rate": 1.0},
            algorithm={"clip_low": 0.1},
            checkpoint={"allow_changed": ["train.learning_rte"]},
        )
    text = "\n".join(error.value.violations)
    assert len(error.value.violations) == 3
    assert "'train.learning_rte' is no setting; did you mean train.learning_rate?" in text


def test_what_does_not_bear_on_the_numbers_may_change(arithmetic: Path, run: Path, tmp_path: Path) -> None:
    """More steps, other evaluation, display, memory limits, another folder: the run is the longer one."""
    whole = start(arithmetic, tmp_path / "whole", **merged(BASE, train={"steps": 5}))
    resume(
        arithmetic,
        run,
        train={"steps": 5, "max_skipped_updates": 3, "offload_optimizer": True},
        run={"samples_per_step": 4, "tensorboard": True, "save_final": True},
        eval={"every_steps": 7, "temperature": 0.5},
        algorithm={"gap_warn": 0.5},
        checkpoint={"keep": 1, "every_steps": 2},
    )
    assert_same_run(whole.directory, run)
    # these change the order of float32 sums, so no more than rounding
    rounding: Sections = {
        "rollout": {"max_concurrent_sequences": 3},
        "model": {"gradient_checkpointing": True},
    }
    more = resume(arithmetic, run, train={"steps": 6, "tokens_per_microbatch": 100}, **rounding)
    assert more.steps == 6


def test_other_rows_are_another_run(arithmetic: Path, run: Path, tmp_path: Path) -> None:
    """The same rows from another file are the same data; one changed answer is not, though no prompt changed."""
    rows = lines(arithmetic, "train.jsonl")
    other = tmp_path / "other.jsonl"

    def go(*allowed: str) -> Any:
        sections = merged(BASE, run={"resume": True}, train={"steps": 4}, data={"path": str(other)})
        sections = merged(sections, checkpoint={"allow_changed": list(allowed)})
        config = configuration(arithmetic, run.parent, sections)
        return train(config, Actor(config.model), even, str(other))

    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert go().steps == 4
    rows[7]["answer"] = "-1"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"data\.path: was 60 rows with hash \w+ .* is 60 rows with hash"):
        go()
    other.write_text("".join(json.dumps(row) + "\n" for row in rows[:50]))
    with pytest.raises(ConfigError, match=r"data\.path: was 60 rows .* is 50 rows"):
        go()
    assert go("data.path").steps == 4


def test_the_schedule_is_spread_over_the_steps_it_was_made_for(arithmetic: Path, tmp_path: Path) -> None:
    linear = merged(BASE, train={"schedule": "linear"})
    run = start(arithmetic, tmp_path, **linear).directory
    longer = merged(linear, train={"steps": 5}, run={"resume": True})
    with pytest.raises(ConfigError, match=r"train\.steps: .*linear.* which were 3 and are 5 now"):
        start(arithmetic, tmp_path, **longer)
    start(arithmetic, tmp_path, **merged(longer, checkpoint={"allow_changed": ["train.steps"]}))
    # 1e-3 falling to 0 over 3 updates, then the last two of 5
    assert [s["actor/learning_rate"] for s in lines(run)] == pytest.approx([1e-3, 5e-4, 0.0, 2.5e-4, 0.0])


def test_another_reference_is_refused(arithmetic: Path, tmp_path: Path) -> None:
    """A run goes on against the model as it started. One whose folder now holds other weights cannot."""
    model = Path(shutil.copytree(arithmetic / "model", tmp_path / "model"))
    sections = merged(BASE, model={"path": str(model)}, algorithm={"kl_coefficient": 0.1})
    run = start(arithmetic, tmp_path, **sections).directory
    longer = merged(sections, train={"steps": 4}, run={"resume": True})
    shutil.copy(run / "model" / "model.safetensors", model / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"reference\.path: the frozen weights of the reference are not those"
    ):
        start(arithmetic, tmp_path, **longer)
    shutil.copy(arithmetic / "model" / "model.safetensors", model / "model.safetensors")
    assert start(arithmetic, tmp_path, **longer).steps == 4
    # without a reference nothing depends on what the folder holds
    plain = merged(BASE, model={"path": str(model)}, run={"name": "plain"})
    start(arithmetic, tmp_path, **plain)
    shutil.copy(run / "model" / "model.safetensors", model / "model.safetensors")
    assert start(arithmetic, tmp_path, **merged(plain, train={"steps": 4}, run={"resume": True})).steps == 4


def test_the_reference_is_the_start_not_the_checkpoint(arithmetic: Path, tmp_path: Path) -> None:
    from headrace.roles.reference import Reference

    seen: list[dict[str, torch.Tensor]] = []
    before = Reference.prepare

    def prepare(self: Reference, *arguments: Any, **keywords: Any) -> None:
        before(self, *arguments, **keywords)
        seen.append(self.model.hf.state_dict())

    sections = merged(BASE, algorithm={"kl_coefficient": 0.1})
    start(arithmetic, tmp_path, **sections)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "prepare", prepare)
        start(arithmetic, tmp_path, **merged(sections, train={"steps": 4}, run={"resume": True}))
    original = load_causal_lm(str(arithmetic / "model")).hf.state_dict()
    assert all(torch.equal(seen[0][name], original[name]) for name in original)


def test_an_actor_in_memory_has_its_start_no_more(arithmetic: Path, tmp_path: Path) -> None:
    """The same actor object in one Python session: what the reference would be copied from is trained by now."""
    sections = merged(BASE, algorithm={"kl_coefficient": 0.1})
    config = configuration(arithmetic, tmp_path, sections)
    actor = Actor(config.model)
    train(config, actor, even, str(arithmetic / "train.jsonl"))
    config.run.resume, config.train.steps = True, 4
    with pytest.raises(ConfigError, match="frozen weights of the reference"):
        train(config, actor, even, str(arithmetic / "train.jsonl"))
    assert train(config, Actor(config.model), even, str(arithmetic / "train.jsonl")).steps == 4


def test_another_dtype_is_refused(arithmetic: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype: was 'auto' .* is 'bfloat16' now"):
        resume(arithmetic, run, train={"steps": 4}, model={"dtype": "bfloat16"})
    allowed = {"checkpoint": {"allow_changed": ["model.dtype"]}}
    assert resume(arithmetic, run, train={"steps": 4}, model={"dtype": "bfloat16"}, **allowed).steps == 4


def test_nothing_to_resume(arithmetic: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.resume: set run\.name"):
        resume(arithmetic, run, run={"name": None})
    with pytest.raises(ConfigError, match=r"run\.resume: there is no run to continue in .*nowhere"):
        resume(arithmetic, run, run={"name": "nowhere"})
    with pytest.raises(ConfigError, match=r"run\.resume: run\.overwrite would delete"):
        resume(arithmetic, run, run={"overwrite": True})
    shutil.rmtree(run / "checkpoints")
    before = content(run)
    with pytest.raises(ConfigError, match=r"run\.resume: there is no checkpoint to resume from in"):
        resume(arithmetic, run)
    assert content(run) == before


def test_nothing_left_to_do_is_said(arithmetic: Path, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, weights = content(run), load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "model")
    result = resume(arithmetic, run)
    assert "has done 3 steps; nothing is left to do" in caplog.text
    assert result.steps == 3
    assert result.metrics["train/step"] == 3
    again = load_file(
        run / "model" / "model.safetensors"
    )  # the run may have been killed before it was written
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    after = content(run)
    assert all(
        after[n] == before[n]
        for n in before
        if n not in ("config.yaml", "report.html") and not n.startswith("model/")
    )
    assert resume(arithmetic, run, train={"steps": 2}).steps == 3


def test_a_run_in_progress_is_left_alone(arithmetic: Path, run: Path) -> None:
    """Another process holds it. A second descriptor of this one stands for it, as flock sees it."""
    before = content(run)
    with RunDirectory(run).locked():
        with pytest.raises(ConfigError, match=r"run\.name: another process is writing to"):
            resume(arithmetic, run, train={"steps": 4})
        with pytest.raises(ConfigError, match=r"run\.name: another process is writing to"):
            start(arithmetic, run.parent, run={"overwrite": True})
    assert content(run) == before
    assert resume(arithmetic, run, train={"steps": 4}).steps == 4


def test_logged_to_step_3_resumed_at_1(arithmetic: Path, run: Path) -> None:
    """Nothing lost, nothing doubled, in the files of lines and in TensorBoard; half a line is dropped."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shutil.rmtree(run)
    start(arithmetic, run.parent, **merged(BASE, run={"tensorboard": True}, checkpoint={"keep": 9}))
    metrics = lines(run)
    go_back(run, 1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    resume(arithmetic, run, run={"tensorboard": True})
    assert [s["step"] for s in lines(run)] == [1, 2, 3]
    assert [s["step"] for s in lines(run, "samples.jsonl")] == [step for step in (1, 2, 3) for _ in range(4)]
    assert lines(run)[0] == metrics[0]  # the line itself, with its time
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (s["step"], pytest.approx(s["reward/mean"])) for s in metrics
    ]


def test_files_that_were_deleted_are_missed_aloud(
    arithmetic: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "samples.jsonl").unlink()
    resume(arithmetic, run, train={"steps": 4})
    assert "samples.jsonl: has fewer lines than when the checkpoint was written" in caplog.text
    assert {s["step"] for s in lines(run, "samples.jsonl")} == {4}


def test_leftovers_of_a_killed_save_are_removed(arithmetic: Path, run: Path) -> None:
    for name in (".step_4-abc", ".deleted-step_1"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / ".latest-77").write_text("step_4")
    (run / ".model-xyz").mkdir()
    resume(arithmetic, run, train={"steps": 4})
    assert not list(run.rglob(".*"))


# ---- failures


def test_a_failed_save_warns_and_the_run_goes_on(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.flow import runtime

    real, calls = runtime.write_tensors, 0

    def write(*arguments: Any, **keywords: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        real(*arguments, **keywords)

    monkeypatch.setattr(runtime, "write_tensors", write)
    result = start(arithmetic, tmp_path, **merged(BASE, checkpoint={"keep": 9}))
    assert result.steps == 3
    (error,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "step_2: the checkpoint cannot be written (No space left on device)" in error
    assert error.endswith("the checkpoint before it, step_1, is still good; the run goes on without it")
    assert {p.name for p in (tmp_path / "r" / "checkpoints").iterdir()} == {"step_1", "step_3", "latest"}


def test_the_last_save_failing_fails_the_run_and_keeps_the_model(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headrace.flow.runtime.write_tensors", write)
    with pytest.raises(
        RunError, match=r"r/checkpoints/step_3: the checkpoint cannot be written \(No space left"
    ):
        start(arithmetic, tmp_path, train={"steps": 3})
    assert (tmp_path / "r" / "model" / "model.safetensors").is_file()
    assert [s["step"] for s in lines(tmp_path / "r")] == [1, 2, 3]


def test_an_error_leaves_a_checkpoint_of_the_step_before(arithmetic: Path, tmp_path: Path) -> None:
    """A reward function that breaks in step 3: mended, the run goes on from step 2 as if nothing had been."""
    calls = 0

    def broken(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 40:
            raise OSError("the grader is gone")
        return even(completion)

    sections: Sections = {"train": {"steps": 4}}
    whole = start(arithmetic, tmp_path / "whole", **sections)
    with pytest.raises(RunError, match="the grader is gone"):
        start(arithmetic, tmp_path, broken, **sections)
    assert [s["step"] for s in lines(tmp_path / "r")] == [1, 2]
    start(arithmetic, tmp_path, **merged(sections, run={"resume": True}))
    assert_same_run(whole.directory, tmp_path / "r")


def test_no_checkpoint_is_made_of_half_a_step(
    arithmetic: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The critic has learned from step 2 and the actor fails: the weights are those of no step."""

    def fail(self: Actor, batch: Any, context: Any) -> None:
        if context.step == 2:
            raise RunError("the update failed")

    fail.__stage_spec__ = Actor.update.__stage_spec__  # type: ignore[attr-defined]
    sections: Sections = {"algorithm": {"name": "ppo"}, "checkpoint": {"every_steps": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actor, "update", fail)
        with pytest.raises(RunError, match="the update failed"):
            start(arithmetic, tmp_path, **sections)
    assert "the error came within a step" in caplog.text
    assert (tmp_path / "r" / "checkpoints" / "latest").read_text() == "step_1\n"


def test_keep_0_writes_none(arithmetic: Path, tmp_path: Path) -> None:
    result = start(arithmetic, tmp_path, checkpoint={"keep": 0, "every_steps": 1})
    assert not (result.directory / "checkpoints").exists()


@pytest.mark.parametrize("part", ["rng", "loader", "roles", "fingerprint"])
@pytest.mark.parametrize("value", [None, []])
def test_a_checkpoint_that_lacks_a_part(run: Path, tmp_path: Path, part: str, value: Any) -> None:
    shutil.copytree(run / "checkpoints" / "step_3", tmp_path / "checkpoints" / "step_3")
    state = tmp_path / "checkpoints" / "step_3" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), part: value}))
    with pytest.raises(
        ConfigError, match=rf"step_3: the checkpoint is damaged \(state\.json has no '{part}'\)"
    ):
        require_members(find_checkpoint(CheckpointStore(tmp_path / "checkpoints", 2)))


def test_a_key_of_a_later_version_had_its_default(run: Path) -> None:
    """A fingerprint that lacks a key compares as if it were there with its default."""
    saved = json.loads((run / "checkpoints" / "step_3" / "state.json").read_text())["fingerprint"]
    now = json.loads(json.dumps(saved))
    del saved["settings"]["algorithm.clip_low"]
    assert refused_changes(saved, now) == []
    now["settings"]["algorithm.clip_low"] = 0.1
    (violation,) = refused_changes(saved, now)
    assert "algorithm.clip_low: was 0.2" in violation
    saved["flow"] = "grpo: rollout → update"
    assert len(refused_changes(saved, now, ["algorithm.clip_low"])) == 1
    assert refused_changes(saved, now, ["algorithm.clip_low", "flow"]) == []


def test_relative_paths_are_the_same_from_elsewhere(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(arithmetic)
    first = merged(BASE, model={"path": "model"}, reward={"function": "reward.py:score"})
    start(arithmetic, tmp_path, **first)
    monkeypatch.chdir(tmp_path)
    where = os.path.relpath(arithmetic, tmp_path)
    second = merged(
        BASE,
        model={"path": f"{where}/model"},
        reward={"function": f"{where}/reward.py:score"},
        run={"resume": True},
    )
    assert start(arithmetic, tmp_path, **merged(second, train={"steps": 4})).steps == 4
