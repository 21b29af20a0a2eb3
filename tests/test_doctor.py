"""`headrace doctor`: its table, its exit codes, and each kind of trouble made on purpose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace import cli, cli_doctor
from headrace.observe.machine import Memory, Requirement


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = cli.main(["doctor", "--json", *arguments])
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] == (code == 0)
    return code, {check["name"]: check for check in record["checks"]}


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tests run here, so the main job does; the self-test trains and generates."""
    code, checks = doctor(capsys, "--dir", str(tmp_path / "runs"))
    assert code == 0
    for name in (
        "python",
        "torch",
        "transformers",
        "pydantic",
        "memory",
        "run.dir",
        "engine native",
        "self-test",
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert "not used by this version" in checks["engine vllm"]["text"]
    assert not (tmp_path / "runs").exists()


def test_quick_leaves_the_self_test_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "self-test" not in doctor(capsys, "--quick", "--dir", str(tmp_path))[1]
    assert cli.main(["doctor", "--quick", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("headrace can train on this machine.\n")
    assert len({line.index(" ", 9) for line in out.splitlines() if line.startswith("ok ")}) >= 1


def test_versions_and_extras(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [
        Requirement("torch", ">=99", ""),
        Requirement("no-such-package", ">=1", ""),
        Requirement("pydantic", ">=2", ""),
        Requirement("nor-this-one", ">=1", "hub"),
        Requirement("numpy", ">=1", "plot"),
    ]
    monkeypatch.setattr(cli_doctor, "requirements", lambda: wanted)
    code, checks = doctor(capsys, "--quick", "--dir", str(tmp_path))
    assert code == 1
    assert checks["torch"]["status"] == "problem"
    assert checks["torch"]["text"].endswith("is outside >=99: pip install 'torch>=99'")
    assert checks["no-such-package"]["text"] == "not installed: pip install 'no-such-package>=1'"
    assert checks["pydantic"]["status"] == "ok"
    assert checks["extra hub"] == {
        "name": "extra hub",
        "status": "missing",
        "text": 'data sets by hub id; needs nor-this-one: pip install "headrace[hub]"',
    }
    assert checks["extra plot"]["status"] == "ok"


def test_a_run_dir_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, checks = doctor(capsys, "--quick", "--dir", str(tmp_path / "file" / "runs"))
    assert (code, checks["run.dir"]["status"]) == (1, "problem")


def test_little_memory_and_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_doctor, "host_memory", lambda: Memory(1 << 30, 1 << 29))
    monkeypatch.setattr(cli_doctor, "free_disk", lambda path: 1 << 20)
    code, checks = doctor(capsys, "--quick", "--dir", str(tmp_path))
    assert code == 1
    assert checks["memory"] == {"name": "memory", "status": "problem", "text": "1.0 GiB in all, 0.5 GiB free"}
    assert checks["run.dir"]["status"] == "problem"


def test_a_self_test_that_fails_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Any:
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setattr(cli_doctor, "_try_tiny_model", fail)
    code, checks = doctor(capsys, "--dir", str(tmp_path))
    assert (code, checks["self-test"]["text"]) == (1, "RuntimeError: no kernel image")


@pytest.mark.parametrize("lacking", [None, "no C compiler (apt install gcc)"])
def test_the_kernels_for_cpus(
    lacking: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.kernels.build.missing", lambda: lacking)
    code, checks = doctor(capsys, "--quick", "--dir", str(tmp_path))
    assert code == 0
    assert checks["cpu kernels"]["status"] == ("missing" if lacking else "ok")
    assert (lacking or "compiled") in checks["cpu kernels"]["text"]


def test_the_cache_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("models--a--b", "models--c--d", "datasets--e--f"):
        os.makedirs(tmp_path / "hub" / name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    _, checks = doctor(capsys, "--quick", "--dir", str(tmp_path))
    assert f"{tmp_path / 'hub'}: 2 models, 1 data sets" in checks["hub cache"]["text"]


def test_other_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--fast"]) == 2
    assert "--fast" in capsys.readouterr().err
