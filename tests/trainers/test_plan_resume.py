"""`headrace plan` with run.resume: what a resume refuses, without weights and without touching the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.observe.run_dir import RunDirectory


@pytest.fixture(scope="module")
def settings(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of a run of 3 steps in float32 that has ended, with a checkpoint after steps 2 and 3."""
    out = [
        f"model.path={arithmetic / 'model'}",
        f"data.path={arithmetic / 'train.jsonl'}",
        f"reward.function={arithmetic / 'reward.py'}:score",
        f"run.dir={tmp_path_factory.mktemp('runs')}",
        "run.name=r",
        "run.device=cpu",
        "run.progress=off",
        "run.tensorboard=false",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=3",
        "train.prompts_per_step=4",
        "checkpoint.keep=2",
        "checkpoint.every_steps=2",
    ]
    assert cli.main(["train", *out, "train.steps=3"]) == 0
    return out


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("headrace.roles.role.load_causal_lm", load)


def run_of(settings: list[str]) -> Path:
    [parent] = [s.partition("=")[2] for s in settings if s.startswith("run.dir=")]
    return Path(parent) / "r"


def content(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


@pytest.mark.usefixtures("no_weights")
def test_where_it_would_go_on(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = content(run_of(settings))
    more = [*settings, "run.resume=true", "train.steps=5"]
    assert cli.main(["plan", *more]) == 0
    out = capsys.readouterr().out
    where = run_of(settings) / "checkpoints/step_3"
    assert f"from {where}, after step 3 of 5: 2 are left" in out
    assert "frozen weights" in out
    assert cli.main(["plan", *more, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["resume"] == {"checkpoint": str(where), "step": 3, "steps_left": 2}
    assert cli.main(["plan", *settings, "run.resume=true", "train.steps=3"]) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert content(run_of(settings)) == before


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    "changed",
    [
        ["train.learning_rate=0.5", "rollout.temperature=0.5"],
        ["run.seed=7"],
        ["data.template={prompt} "],
        ["data.limit_rows=20"],
        ["train.prompts_per_step=8"],
        ["algorithm.kl_coefficient=0.1"],
        ["run.name=other"],
        ["run.overwrite=true"],
        ["checkpoint.allow_changed=[train.learning_rte]"],
    ],
    ids=lambda changed: changed[0].split("=")[0],
)
def test_the_refusals_are_those_of_train(
    settings: list[str], changed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, told = content(run_of(settings)), []
    for command in ("train", "plan"):
        assert cli.main([command, *settings, "run.resume=true", "train.steps=5", *changed]) == 2
        told.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("headrace: ")])
    assert told[0] == told[1] != []
    assert content(run_of(settings)) == before


@pytest.mark.usefixtures("no_weights")
def test_another_precision_is_known_without_weights(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` was float32 here, so the setting itself has to be allowed for the precision to be what is left."""
    changed = [*settings, "run.resume=true", "train.steps=5", "model.dtype=bfloat16"]
    assert cli.main(["plan", *changed]) == 2
    assert "model.dtype: was 'auto' when" in capsys.readouterr().err
    state = run_of(settings) / "checkpoints/step_3/state.json"
    saved = json.loads(state.read_text())
    try:
        state.write_text(json.dumps({**saved, "dtypes": {"actor": "torch.bfloat16"}}))
        assert cli.main(["plan", *settings, "run.resume=true", "train.steps=5"]) == 2
        assert "model.dtype: was torch.bfloat16 when" in capsys.readouterr().err
    finally:
        state.write_text(json.dumps(saved, indent=1) + "\n")


@pytest.mark.usefixtures("no_weights")
def test_a_run_that_is_going_on_is_refused(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory(run_of(settings)).locked():
        fresh = [s for s in settings if not s.startswith("run.resume")]
        assert cli.main(["plan", *fresh, "run.overwrite=true"]) == 2
        assert "another process is writing" in capsys.readouterr().err
        assert cli.main(["plan", *settings, "run.resume=true", "train.steps=5"]) == 2
    assert "another process is writing" in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
def test_a_damaged_checkpoint_is_passed_over(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    state = run_of(settings) / "checkpoints/step_3/state.json"
    text = state.read_text()
    try:
        state.write_text("{")
        assert cli.main(["plan", *settings, "run.resume=true", "train.steps=5"]) == 0
    finally:
        state.write_text(text)
    out = capsys.readouterr()
    assert "step_2, after step 2 of 5" in out.out
    assert "the checkpoint is damaged" in out.err
