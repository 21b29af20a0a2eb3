from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.config import Config
from headrace.config_load import load_config
from headrace.errors import ConfigError, RunError

NEEDED = ["model=Qwen/x", "data=d.jsonl", "reward=r.py:score"]


class Launched:
    """Stands for headrace.trainers.launch: remembers what was started, returns or raises what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Config]] = []
        self.outcome: Any = 0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    seen = Launched()

    def start(name: str, config: Config) -> int:
        seen.calls.append((name, config))
        if isinstance(seen.outcome, BaseException):
            raise seen.outcome
        return int(seen.outcome)

    module = types.ModuleType("headrace.trainers.launch")
    for name in ("train", "sft", "eval"):
        setattr(module, f"run_{name}", lambda config, name=name: start(name, config))
    import headrace.trainers

    monkeypatch.setitem(sys.modules, "headrace.trainers.launch", module)
    monkeypatch.setattr(headrace.trainers, "launch", module, raising=False)
    monkeypatch.setattr(cli, "set_up_logging", lambda: None)
    return seen


def test_overrides_and_flags_reach_the_run(launched: Launched) -> None:
    argv = ["train", *NEEDED, "--rollout-batch-size=16", "--learning_rate", "1e-5", "train.steps=3"]
    assert (
        cli.main([*argv, "--parallel-config", "{tp: 1, dp: 1}", "--train.epochs=2", "--device-map=cpu"]) == 0
    )
    ((name, config),) = launched.calls
    assert name == "train"
    assert (config.train.prompts_per_step, config.train.learning_rate) == (16, 1e-5)
    assert (config.train.steps, config.train.epochs, config.run.device) == (3, 2.0, "cpu")


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_commands(launched: Launched, command: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: m\ndata: d\nreward: r.py:f\nrun: {seed: 4}\n")
    launched.outcome = 7
    assert cli.main([command, "--seed", "4", str(tmp_path / "c.yaml")]) == 7
    assert [(name, c.run.seed) for name, c in launched.calls] == [(command, 4)]


@pytest.mark.parametrize(
    "flag", [["--offload-optimizer"], ["--offload_optimizer=true"], ["--offload-optimizer", "yes"]]
)
def test_a_bare_switch_does_not_swallow_the_file(launched: Launched, flag: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: m\ndata: d\nreward: r.py:f\n")
    assert cli.main(["train", *flag, str(tmp_path / "c.yaml")]) == 0
    (call,) = launched.calls
    assert call[1].train.offload_optimizer is True
    assert call[1].model.path == "m"
    assert cli.main(["train", "--offload-optimizer=false", str(tmp_path / "c.yaml")]) == 0
    assert launched.calls[1][1].train.offload_optimizer is False


def test_every_problem_on_its_own_line(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", *NEEDED, "train.learning_rte=1", "--learning-rte", "3", "--device-map", "tpu"]
    assert cli.main([*argv, "train.steps=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("headrace: ") for line in lines)
    text = "\n".join(lines)
    assert "train.learning_rte: unknown key; did you mean train.learning_rate?" in text
    assert "--learning-rte: unknown flag; did you mean --learning-rate?" in text
    assert "device_map: 'tpu' names no devices" in text
    assert "train.steps: expected" in text
    assert launched.calls == []


@pytest.mark.parametrize(
    "argv, part",
    [
        (["train", "a.yaml", "b.yaml"], "b.yaml: expected key=value"),
        (["train", *NEEDED, "--steps=3", "train.steps=4"], "train.steps: set to 4 and by a flag to 3"),
        (["train", *NEEDED, "--batch-size=3", "--rollout-batch-size=4"], "train.prompts_per_step"),
        (["train", *NEEDED, "--steps", "[1"], "train.steps: '[1' cannot be read"),
        (["config", "--explain", "nothing"], "nothing: unknown section"),
        (["config", "--explain", "run", "x.yaml"], "x.yaml"),
        (["train"], "model.path: not given"),
    ],
)
def test_exit_code_2(
    launched: Launched, argv: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    assert part in capsys.readouterr().err
    assert launched.calls == []


def test_errors_of_a_run(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    launched.outcome = RunError("step 3 failed")
    assert cli.main(["train", *NEEDED]) == 1
    assert capsys.readouterr().err == "headrace: step 3 failed\n"
    launched.outcome = ConfigError(["one", "two"])
    assert cli.main(["train", *NEEDED]) == 2
    assert capsys.readouterr().err == "headrace: one\nheadrace: two\n"
    with pytest.raises(ConfigError):
        cli.main(["train", *NEEDED, "--debug"])
    launched.outcome = ZeroDivisionError("a defect keeps its traceback")
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", *NEEDED])


def test_ctrl_c(
    launched: Launched,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    launched.outcome = KeyboardInterrupt()
    assert cli.main(["train", *NEEDED, "run.name=mine"]) == 130
    assert capsys.readouterr().err == "headrace: stopped by Ctrl-C\n"  # before there was a directory
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert cli.main(["train", *NEEDED, "run.name=mine"]) == 130
    assert capsys.readouterr().err == "headrace: stopped by Ctrl-C; what is finished is in runs/mine\n"
    assert cli.main(["train", *NEEDED]) == 130
    assert capsys.readouterr().err.endswith("what is finished is in the newest folder of runs\n")

    def plan(*args: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_plan", plan)
    assert cli.main(["plan", *NEEDED, "run.name=mine"]) == 130
    assert capsys.readouterr().err == "headrace: stopped by Ctrl-C\n"  # a plan finishes nothing


def test_config_prints_yaml_that_loads_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["config", *NEEDED, "--steps=3"]) == 0
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "c.yaml") == load_config(None, [*NEEDED, "train.steps=3"])


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--explain"]) == 0
    everything = capsys.readouterr().out
    assert cli.main(["config", "--explain", "train"]) == 0
    part = capsys.readouterr().out
    assert part.strip() in everything
    assert "flags: --rollout-batch-size, --batch-size" in part


def test_help_version_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert cli.main(["--version"]) == 0
    assert "headrace 0." in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["train", "--help"]) == 0
    assert "--num-generations" in capsys.readouterr().out


def test_logging(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("headrace")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    cli.set_up_logging()
    cli.set_up_logging()
    logging.getLogger("headrace.flow.run").info("step %d", 3)
    logging.getLogger("headrace.flow.run").debug("unseen")
    out = capsys.readouterr()
    assert (out.out, out.err.count("step 3"), "unseen" in out.err) == ("", 1, False)
    assert transformers_logging.get_verbosity() == logging.WARNING
    assert not transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, headrace.cli as c; c.main(['config', '--explain']);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers', 'datasets', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def test_module_and_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "train", "train.learning_rte=1", *NEEDED],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "headrace: train.learning_rte: unknown key; did you mean train.learning_rate?\n"
    assert done.stdout == ""


def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "headrace", "config", "--explain"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_null_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a file; the word itself needs quotes."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "model=m", "data=d", "run.dir=null"]) == 2
    assert "run.dir" in capsys.readouterr().err
    assert cli.main(["config", "model=m", "data=d", "run.dir='null'"]) == 0
    assert "dir: 'null'" in capsys.readouterr().out
