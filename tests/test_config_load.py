"""Files that would break what reads them: too long, too deep, standing for billions of values."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config_load import load_config
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9 if i else ['y'] * 9)}]" for i in range(9)),
            "100,000",
        ),
        ("train: &a {steps: *a}", "holds itself"),
        ("train.steps: 3", "write 'steps:' under 'train:'"),
        ("model: {path: " + "m" * 256 + "}", "model.path: 'mm"),
        ('data: {path: "a\\0b"}', "to be a path"),
        ("reward: {function: " + "r/" * 3000 + "a.py:f}", "reward.function: 'r/"),
    ],
)
def test_texts_that_would_break_what_reads_them(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, command=None)
    [violation] = caught.value.violations
    assert said in violation
    assert len(violation) < 300


def test_an_alias_used_twice_is_no_loop(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: &m some/model\nreference: {path: *m}\nrollout: {stop: &s [a, b]}\n")
    config = load_config(path, command=None)
    assert config.reference.path == "some/model"
    path.write_text("rollout: {stop: &s [a, b]}\ncheckpoint: {allow_changed: *s}\n")
    assert load_config(path, command=None).checkpoint.allow_changed == ["a", "b"]
