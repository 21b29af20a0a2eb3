"""Bad input through the command line: exit 2 with key, file or row, before a model is loaded; exit 1 with the cause."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.flow.flow import Flow
from headrace.roles.actor import Actor
from headrace.trainers import recipes

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def command(arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `headrace train` with a good configuration and the given overrides: (exit code, stderr)."""

    def run(*overrides: str, name: str = "train") -> tuple[int, str]:
        good = [
            f"model.path={arithmetic / 'model'}",
            f"data.path={arithmetic / 'train.jsonl'}",
            f"reward.function={arithmetic / 'reward.py'}:score",
            f"run.dir={tmp_path / 'runs'}",
            "run.name=r",
            "run.progress=off",
            "run.tensorboard=false",
            "rollout.samples_per_prompt=4",
            "rollout.max_new_tokens=5",
            "train.prompts_per_step=4",
            "train.steps=3",
            "train.learning_rate=1e-3",
        ]
        given = {o.split("=")[0] for o in overrides}
        code = cli.main([name, *[g for g in good if g.split("=")[0] not in given], *overrides])
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def refused(command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """stderr of a command that must end with exit code 2, no model loaded, no run directory, no traceback."""

    def load(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("headrace.models.hf.load_causal_lm", load)
    monkeypatch.setattr("headrace.roles.role.load_causal_lm", load)

    def run(*overrides: str, name: str = "train") -> str:
        code, err = command(*overrides, name=name)
        assert code == 2, err
        assert "Traceback" not in err
        assert not (tmp_path / "runs").exists()
        lines = [line for line in err.splitlines() if line.startswith("headrace: ")]
        assert lines
        return "\n".join(lines)

    return run


def test_the_good_configuration_is_good(command: Run, tmp_path: Path) -> None:
    """Guards the tests below against failing for another reason."""
    assert command()[0] == 0
    assert (tmp_path / "runs" / "r" / "model" / "config.json").is_file()


def test_the_guard_would_notice_a_loaded_model(refused: Any, command: Run) -> None:
    with pytest.raises(AssertionError, match="a model was loaded"):
        command()


@pytest.mark.parametrize(
    "override, parts",
    [
        ("train.learning_rte=1", ["train.learning_rte", "did you mean train.learning_rate?"]),
        ("train.steps=many", ["train.steps", "'many'"]),
        ("train.steps=0", ["train.steps", "0"]),
        ("rollout.samples_per_prompt=1", ["rollout.samples_per_prompt", "at least 2"]),
        ("rollout.samples_per_prompt=99999999999999", ["rollout.samples_per_prompt", "up to 65536"]),
        ("train.samples_per_update=5", ["train.samples_per_update", "5 does not divide", "16 samples"]),
        ("train.microbatches_per_update=17", ["train.microbatches_per_update", "17"]),
        ("train.prompts_per_step=64", ["train.prompts_per_step", "60 usable rows", "train.jsonl"]),
        ("rollout.max_new_tokens=64", ["rollout.max_new_tokens", "64 tokens", "no room for a prompt"]),
        ("run.name=../up", ["run.name"]),
        ("run.device=cuda:7", ["run.device", "cuda:7"]),
        ("model.chat_template=none.jinja", ["model.chat_template", "none.jinja"]),
        ("model.tokenizer=no/such/tokenizer", ["model.tokenizer", "'no/such/tokenizer' does not exist"]),
        ("eval.path=nothing.jsonl", ["eval.path", "nothing.jsonl does not exist"]),
        ("data.path=nothing.csv", ["data.path", "nothing.csv does not exist"]),
        ("data.prompt=promt", ["data.prompt", "'promt'", "prompt"]),
        ("data.template={promt}", ["data.template", "'promt'"]),
        ("data.format=chat", ["data.format", "chat template"]),
        ("reward.function=nothing.py:score", ["reward.function", "nothing.py"]),
        ("reward.function=no_such_module:score", ["reward.function", "no_such_module"]),
        ("reward.function=exact_mtch", ["reward.function", "did you mean 'exact_match'?"]),
        ("algorithm.name=gpro", ["algorithm.name", "got 'gpro'; did you mean 'grpo'?"]),
        ("algorithm.name=GRPO", ["algorithm.name", "got 'GRPO'; did you mean 'grpo'?"]),
        ("algorithm.name=gsop", ["algorithm.name", "got 'gsop'; did you mean 'gspo'?"]),
    ],
)
def test_a_wrong_setting(refused: Any, override: str, parts: list[str]) -> None:
    err = refused(override)
    assert all(part in err for part in parts), err


@pytest.mark.parametrize(
    "path",
    ["no/such/model", "./model", "/no/such/model", "~/no-such-model", "model.gguf", "sub/weights.gguf"],
)
def test_a_model_path_that_does_not_exist(refused: Any, path: str) -> None:
    err = refused(f"model.path={path}")
    (line,) = err.splitlines()
    assert line.startswith(f"headrace: model.path: '{path}' does not exist (looked in ")


def test_a_hub_id_without_a_hub(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear sentence at once instead of a minute of retries."""
    monkeypatch.setattr("headrace.models.find.reachable", lambda url: False)
    (line,) = refused("model.path=nobody-0f3a/nothing").splitlines()
    assert "model.path: there is no folder 'nobody-0f3a/nothing' here" in line
    assert "cannot be reached" in line


@pytest.mark.parametrize(
    "files, parts",
    [
        ({}, ["config.json"]),
        ({"config.json": "{"}, ["model.path"]),
        ({"config.json": '{"model_type": "no-such-architecture"}'}, ["no-such-architecture"]),
        ({"config.json": '{"auto_map": {"AutoConfig": "evil.C"}, "model_type": "evil"}'}, ["model.path"]),
    ],
)
def test_a_folder_that_is_no_model(
    refused: Any, tmp_path: Path, files: dict[str, str], parts: list[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    err = refused(f"model.path={folder}")
    assert f"model.path: '{folder}'" in err or f"from '{folder}'" in err
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", ["has no rows"]),
        ('{"prompt": "1+1=", "answer": "2"}\n', ["1 usable rows", "train.prompts_per_step"]),
        ('{"text": "1+1="}\n' * 4, ["data.prompt", "prompt, question", "text"]),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": null, "answer": "2"}\n', ["line 2", "null"]),
        ('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "", "answer": "2"}\n', ["line 3", "empty"]),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": 7}\n', ["line 2"]),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": ', ["line 2 is not JSON"]),
        ("[1, 2]\n", ["line 1 is a list"]),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1", "prompt": "2"}\n', ["line 2", "'prompt' twice"]),
        ('{"prompt": "1+1="}\n{"prompt": "1\\ud8001="}\n', ["line 2", "\\ud800", "no character"]),
        ('{"prompt": "1+1=", "reward": 1}\n' * 4, ["reward", "rename it in the data"]),
        ('{"prompt": "1+1=", "anser": "2"}\n' * 4, ["asks for 'answer'", "did you mean 'anser'?"]),
        ('{"prompt": "' + "1+" * 40 + '1=", "answer": "2"}\n', ["line 1: 82 tokens", "59 tokens"]),
    ],
)
def test_a_data_set_that_cannot_be_used(refused: Any, tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    err = refused(f"data.path={file}")
    assert all(part in err for part in parts), err
    assert "rows.jsonl" in err or "reward.function" in err


@pytest.mark.parametrize(
    "source, parts",
    [
        ("def other(completion): return 1", ["has no 'score'"]),
        ("score = 3", ["has type int"]),
        ("def score(): return 1", ["takes no completion"]),
        ("def score(completion, gold): return 1", ["asks for 'gold'", "columns:"]),
        ("import no_such_package_0f3a", ["failed", "ModuleNotFoundError"]),
        ("def score(completion) return 1", ["failed", "SyntaxError"]),
    ],
)
def test_a_reward_function_that_cannot_be_used(
    refused: Any, tmp_path: Path, source: str, parts: list[str]
) -> None:
    (tmp_path / "bad_reward.py").write_text(source + "\n")
    err = refused(f"reward.function={tmp_path / 'bad_reward.py'}:score")
    assert "reward.function: " in err
    assert all(part in err for part in parts), err


def test_a_column_that_the_held_out_data_lack(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+1=", "anser": "2"}\n')
    (line,) = refused(f"eval.path={tmp_path / 'held.jsonl'}").splitlines()
    assert "asks for 'answer', which is no column of " in line
    assert "held.jsonl; did you mean 'anser'?" in line


def test_a_column_that_is_null_in_some_rows(
    command: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning and no error: the function may know what to do with None. What is not used does not count."""
    rows = [{"prompt": "1+1=", "answer": "2", "note": "x"}] * 4 + [{"prompt": "2+1="}] * 2
    rows.append({"prompt": "1+" * 50 + "1="})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command(f"data.path={tmp_path / 'rows.jsonl'}", "train.steps=1", "data.over_limit=drop")[0] == 0
    (warning,) = [r.getMessage() for r in caplog.records if "is null in" in r.getMessage()]
    assert "rows.jsonl: 'answer', which" in warning
    assert "is null in 2 of 6 rows, first in line 5; it gets None there" in warning


def test_a_cache_too_small_for_one_response(refused: Any) -> None:
    """4 tokens of prompt and 20 new ones, the last of which is never stored; 40 tokens are 2 blocks of 16."""
    assert "rollout.kv_cache_tokens: 40" in refused("rollout.kv_cache_tokens=40", "rollout.max_new_tokens=30")
    assert "23 tokens" in refused("rollout.kv_cache_tokens=16", "rollout.max_new_tokens=20")


def test_everything_is_reported_at_once(refused: Any, tmp_path: Path) -> None:
    err = refused("train.learning_rte=1", "rollout.samples_per_prompt=1", "rollout.temperature=hot")
    for part in ("learning_rte", "rollout.samples_per_prompt", "rollout.temperature"):
        assert part in err
    (tmp_path / "rows.jsonl").write_text('{"prompt": ""}\n{"prompt": null}\n')
    err = refused(f"data.path={tmp_path / 'rows.jsonl'}", "eval.path=nothing.jsonl")
    for part in ("empty (line 1", "null (line 2", "asks for 'answer'", "eval.path: nothing.jsonl"):
        assert part in err


def test_a_bad_reward_does_not_hide_bad_data(refused: Any) -> None:
    err = refused("reward.function=nofile.py:score", "data.path=nope.jsonl", "eval.path=alsono.jsonl")
    for part in ("reward.function: 'nofile.py:score'", "data.path: nope.jsonl", "eval.path: alsono.jsonl"):
        assert part in err


@pytest.mark.parametrize("name", ["sft", "eval"])
def test_nor_in_the_other_commands(refused: Any, name: str) -> None:
    wrong = ["reward.function=nofile.py:score", "data.path=nope.jsonl"]
    err = refused(*wrong, "eval.path=alsono.jsonl", name=name)
    assert "reward.function: 'nofile.py:score'" in err
    assert "eval.path: alsono.jsonl" in err
    assert ("data.path: nope.jsonl" in err) == (name == "sft")
    assert "data.path: nope.jsonl" in refused(*wrong, name=name)


def test_half_a_character_in_a_completion(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "1", "answer": "2"}\n{"prompt": "1", "answer": "\\udc00"}\n'
    )
    err = refused(f"data.path={tmp_path / 'rows.jsonl'}", "data.completion=answer", name="sft")
    assert "column 'answer' holds \\udc00" in err
    assert "line 2" in err


def test_the_other_commands_refuse_too(refused: Any, tmp_path: Path) -> None:
    assert "model.path: 'no/such/model' does not exist" in refused("model.path=no/such/model", name="sft")
    assert "model.path: 'no/such/model' does not exist" in refused("model.path=no/such/model", name="eval")
    assert "data.completion" in refused("data.completion=answr", name="sft")
    assert "eval.path: " in refused("eval.path=nothing.jsonl", name="eval")


def test_an_existing_run_is_not_touched(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "runs" / "r"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    monkeypatch.setattr("headrace.roles.role.load_causal_lm", None)
    code, err = command()
    assert (code, "run.name: " in err) == (2, True)
    code, err = command("run.overwrite=true")
    assert (code, "run.overwrite: " in err) == (2, True)
    assert [p.name for p in mine.iterdir()] == ["notes.txt"]


def test_a_model_that_cannot_be_loaded_leaves_no_run_and_no_loss(
    command: Run, arithmetic: Path, tmp_path: Path
) -> None:
    """Weights that are garbage show only while loading: an older run of that name must survive it."""
    import shutil

    shutil.copytree(arithmetic / "model", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"garbage")
    code, err = command(f"model.path={tmp_path / 'broken'}")
    assert (code, "Traceback" in err) == (2, False)
    assert f"model.path: '{tmp_path / 'broken'}' cannot be loaded" in err
    assert not (tmp_path / "runs").exists()
    assert command("train.steps=1")[0] == 0
    assert command(f"model.path={tmp_path / 'broken'}", "run.overwrite=true")[0] == 2
    assert (tmp_path / "runs" / "r" / "model" / "model.safetensors").is_file()


# ---- at run time


def failing(tmp_path: Path, source: str, *more: str) -> list[str]:
    (tmp_path / "run_reward.py").write_text(source)
    return [f"reward.function={tmp_path / 'run_reward.py'}:score", *more]


def metrics(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]


SECOND_STEP = """
calls = 0
def score(completions, answer):
    global calls
    calls += 1
    if calls == 2:
        {failure}
    return [float(i % 2) for i in range(len(completions))]
"""


@pytest.mark.parametrize(
    "failure, part",
    [
        ("raise KeyError('gold')", "it raised KeyError: 'gold'"),
        ("return [1.0]", "it returned 1 values for 16 completions"),
        ("return [float('inf')] * 16", "it returned inf; to leave a row out, return None"),
        ("return ['good'] * 16", "it returned 'good', a str; wanted a number"),
    ],
)
def test_a_reward_that_fails_shows_the_sample_and_keeps_what_was_learned(
    command: Run, tmp_path: Path, failure: str, part: str
) -> None:
    code, err = command(*failing(tmp_path, SECOND_STEP.format(failure=failure)))
    assert code == 1
    assert "Traceback" not in err
    assert part in err
    assert re.search(r"prompt: +'\d\+\d='", err)
    assert "completion: '" in err
    assert [m["step"] for m in metrics(tmp_path)] == [1]
    assert (tmp_path / "runs" / "r" / "model" / "model.safetensors").is_file()


def test_a_reward_that_fails_at_once_saves_no_model(command: Run, tmp_path: Path) -> None:
    code, _ = command(*failing(tmp_path, "def score(completion):\n    return 1 / 0\n"))
    assert code == 1
    assert not (tmp_path / "runs" / "r" / "model").exists()


def test_non_finite_losses_are_skipped_counted_and_then_stop_the_run(command: Run, tmp_path: Path) -> None:
    """1e38 is finite, its square is not in float32."""
    code, err = command(
        *failing(tmp_path, "def score(completion):\n    return 1e38\n"),
        "algorithm.name=ppo",
        "train.samples_per_update=8",
        "train.max_skipped_updates=5",
    )
    assert code == 1
    assert "5 updates in a row had non-finite gradients" in err
    first, second = metrics(tmp_path)
    assert (first["critic/skipped_updates"], first["critic/updates"]) == (2, 0)
    assert second["critic/skipped_updates"] == 2


def test_defects_in_the_users_own_stages_are_not_swallowed(
    command: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(reward: Any) -> Any:
        raise RuntimeError("a defect of the user's")

    def recipe(config: Any, actor: Actor, reward: Any) -> Flow:
        flow = recipes.policy_flow(config, actor, reward)
        flow.add_stage("mine", broken, "reward", reads=["reward"], writes=["shaped"])
        return flow

    monkeypatch.setattr("headrace.trainers.launch.policy_flow", recipe)
    with pytest.raises(RuntimeError, match="a defect of the user's") as caught:
        command()
    assert caught.value.__notes__ == ["in stage 'mine' of flow 'grpo', step 1"]
