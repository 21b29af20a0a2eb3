"""Finding reward functions by name, and refusing what cannot be one."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.rewards.functions import RewardFunction

ROWS = {"completion": ["a", "bb", "ccc"]}


class Grader:
    def __call__(self, completion):
        return len(completion)


def length(completion):
    return len(completion)


def rewards(spec):
    return RewardFunction.resolve(spec).score(ROWS, 3).rewards


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "neighbour_of_grade.py").write_text("FACTOR = 3\n")
    (tmp_path / "grade.py").write_text(
        "from dataclasses import dataclass\n"
        "import neighbour_of_grade\n"
        "@dataclass\nclass Judge:\n    factor: float\n"
        "    def score(self, completion): return self.factor * len(completion)\n"
        "judge = Judge(2.0)\n"
        "def score(completion): return neighbour_of_grade.FACTOR * len(completion)\n"
        "limit = 5\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\nimport not_installed_anywhere\n")
    (tmp_path / "raising.py").write_text("def f(completion): return 1\nraise RuntimeError('no key set')\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('usage')\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    package = tmp_path / "graders_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "maths.py").write_text("def score(completion): return len(completion)\n")
    return tmp_path


def test_from_a_file_and_from_a_module(folder: Path):
    assert rewards("grade.py:score") == [3, 6, 9]
    assert rewards(f"{folder}/grade.py:judge.score") == [2, 4, 6]
    assert rewards("graders_package.maths:score") == [1, 2, 3]


@pytest.mark.parametrize(
    "spec, words",
    [
        ("missing.py:score", "no file 'missing.py'"),
        ("grade.py:scores", "did you mean 'score'"),
        ("grade.py:limit", "has type int; wanted a function"),
        ("grade.py:Judge", "is a class"),
        ("grade.py", "file.py:function"),
        ("grade.py:", "file.py:function"),
        ("numeric_mach", "did you mean 'numeric_match'"),
        (
            "broken.py:f",
            r"ModuleNotFoundError: No module named 'not_installed_anywhere' \(.*broken.py, line 2\)",
        ),
        ("raising.py:f", "RuntimeError: no key set"),
        ("leaving.py:f", "SystemExit: usage"),
        ("syntax.py:f", "SyntaxError"),
        ("no_such_module_here:f", "no module 'no_such_module_here'"),
        ("graders_package.physics:f", "no module 'graders_package.physics'"),
        ("broken:f", "No module named 'not_installed_anywhere'"),
        (".:f", "reward.function"),
    ],
)
def test_bad_names(folder: Path, spec, words):
    with pytest.raises(ConfigError, match=words) as caught:
        RewardFunction.resolve(spec)
    assert str(caught.value).startswith("reward.function: ")


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda: 1, "takes no completion"),
        (Grader, "is a class"),
        (3, "has type int; wanted"),
        (lambda **columns: 1, "takes no completion"),
        (functools.partial(length, completion="x"), "takes no completion"),
    ],
)
def test_bad_callables(function, words):
    with pytest.raises(ConfigError, match=words) as caught:
        RewardFunction.resolve(function)
    assert "reward.function" in str(caught.value)
