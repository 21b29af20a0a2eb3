"""`headrace plan`: its numbers by hand, the violations of `train`, and that it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.observe.machine import Memory

Run = Any


@pytest.fixture
def settings(arithmetic: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.path={arithmetic / 'model'}",
        f"data.path={arithmetic / 'train.jsonl'}",
        f"eval.path={arithmetic / 'heldout.jsonl'}",
        "eval.every_steps=3",
        f"reward.function={arithmetic / 'reward.py'}:score",
        f"run.dir={tmp_path / 'runs'}",
        "run.name=r",
        "run.device=cpu",
        "run.progress=off",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=5",
        "train.prompts_per_step=4",
        "train.samples_per_update=8",
        "train.passes_per_step=2",
        "train.epochs=0.5",
    ]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("headrace.roles.role.load_causal_lm", load)


@pytest.mark.usefixtures("no_weights")
def test_the_numbers(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """60 rows in steps of 4 are 15 an epoch, half of it 8; 16 samples in updates of 8, twice: 4 a step."""
    assert cli.main(["plan", *settings, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    wanted = {
        "flow": "grpo",
        "rows": 60,
        "rows_checked": 60,
        "held_out_rows": 10,
        "steps_per_epoch": 15,
        "steps": 8,
        "updates": 32,
        "evaluations": 4,  # before, after steps 3, 6 and 8
        "longest_sequence_tokens": 4 + 5,  # "9+6=" and five new ones
    }
    assert {name: plan[name] for name in wanted} == wanted
    assert [s["name"] for s in plan["stages"]] == ["rollout", "reward", "advantage", "update"]
    assert plan["memory"]["peak_bytes"] > plan["memory"]["least_bytes"] > 0


@pytest.mark.usefixtures("no_weights")
def test_the_text(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = [
        "algorithm.name=ppo",
        "algorithm.kl_coefficient=0.1",
        "critic.warmup_steps=2",
        "train.schedule=cosine",
    ]
    assert cli.main(["plan", *settings, *more]) == 0
    out = capsys.readouterr().out
    for line in (
        "reference  input_ids, response_mask → reference_logprobs",
        "[trains critic]",
        "4 prompts x 4 samples = 16 samples",
        "2 passes x 2 updates of 8 samples = 4 a step",
        "at most 144 a step, 80 of them sampled",
        "10 responses each time, at most 50 tokens",
        "8 (15 an epoch, so 0.533 epochs); the actor rests for the first 2 steps",
        "24 of the actor",
        "cosine 1e-06, falling to 0",
        "the largest phase",
        "Nothing was started",
    ):
        assert line in out


@pytest.mark.usefixtures("no_weights")
def test_sft(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sft = ["--command", "sft", "data.completion=answer", "train.steps=5"]
    assert cli.main(["plan", *settings, *sft]) == 0
    out = capsys.readouterr().out
    assert "sft on this machine" in out
    assert "8 sequences" in out
    assert "5 of the actor" in out


@pytest.mark.usefixtures("no_weights")
def test_it_leaves_nothing_behind(
    settings: list[str], arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graded.py").write_text("def score(completion):\n    return 1.0\n")
    before = sorted(p for f in (arithmetic, tmp_path) for p in f.rglob("*"))
    assert cli.main(["plan", *settings, f"reward.function={tmp_path / 'graded.py'}:score"]) == 0
    assert sorted(p for f in (arithmetic, tmp_path) for p in f.rglob("*")) == before


@pytest.mark.usefixtures("no_weights")
def test_of_many_rows_the_first_are_checked(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n" for _ in range(2001)))
    assert cli.main(["plan", *settings, f"data.path={file}"]) == 0
    out = capsys.readouterr().out
    assert "2,001 rows of" in out
    assert "the first 512 were tokenized and checked" in out
    assert "250 (about 500 an epoch" in out


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    "wrong",
    [
        ["train.learning_rte=1"],
        ["train.samples_per_update=7", "rollout.samples_per_prompt=1"],
        ["reward.function=numeric_mach"],
        ["reward.function={folder}/reward.py:other"],
        ["data.prompt=nothing", "eval.path={folder}/none.jsonl"],
        ["data.path={folder}/none.jsonl"],
        ["train.prompts_per_step=100"],
        ["model.path={folder}/none/at/all"],
        ["rollout.max_new_tokens=1000"],
        ["run.name=a/b"],
        ["algorithm.kl_coefficient=0.1", "reference.path={folder}/none/at/all"],
        ["run.device=cuda"],
    ],
    ids=lambda wrong: wrong[0].split("{")[0],
)
def test_the_violations_are_those_of_train(
    settings: list[str], arithmetic: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [w.format(folder=arithmetic) for w in wrong]
    told = []
    for command in ("train", "plan"):
        assert cli.main([command, *settings, *overrides]) == 2
        told.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("headrace: ")])
    assert told[0] == told[1] != []


@pytest.mark.usefixtures("no_weights")
def test_what_cannot_fit_is_exit_2(
    settings: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.flow.memory.host_memory", lambda: Memory(1 << 20, 1 << 20))
    assert cli.main(["plan", *settings]) == 2
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("headrace: ")]
    assert "this machine has 1.00 MiB" in line
    assert "actor weights 1.89 MiB (use a smaller model.path)" in line


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["dpo", "reward-model"])
def test_pairs(command: str, settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12 pairs in updates of 4 are 3 an epoch; the longest sequence is "9+6=", "15" and the end token."""
    rows = [{"prompt": f"9+{i % 6}=", "chosen": str(9 + i % 6), "rejected": "1"} for i in range(11)]
    rows += [{"prompt": "9+6=", "chosen": "15", "rejected": "1"}]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [s for s in settings if s.startswith(("model.", "run."))]
    kept += [f"data.path={pairs}", f"eval.path={pairs}", "train.samples_per_update=4", "train.epochs=2"]
    assert cli.main(["plan", "--command", command, *kept, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = {k: plan[k] for k in ("rows", "steps_per_epoch", "steps", "updates", "longest_sequence_tokens")}
    assert found == {
        "rows": 12,
        "steps_per_epoch": 3,
        "steps": 6,
        "updates": 6,
        "longest_sequence_tokens": 4 + 2 + 1,
    }
    assert "rollout" not in plan["memory"]["phases"]
    assert cli.main(["plan", "--command", command, *kept]) == 0
    text = capsys.readouterr().out
    assert "4 pairs = 8 sequences" in text
    assert f"6 of the {'actor' if command == 'dpo' else 'reward model'}" in text
