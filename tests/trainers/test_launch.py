"""What the commands print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main


def test_the_output_of_eval_is_json_whatever_the_reward_prints(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loud.py").write_text("def score(completion):\n    print('grading')\n    return 1.0\n")
    code = main(
        [
            "eval",
            f"model={arithmetic / 'model'}",
            f"eval={arithmetic / 'heldout.jsonl'}",
            f"reward={tmp_path / 'loud.py'}:score",
            f"run.dir={tmp_path / 'runs'}",
            "run.progress=off",
            "rollout.max_new_tokens=2",
        ]
    )
    out, err = capsys.readouterr()
    assert code == 0
    assert json.loads(out)["eval/accuracy"] == 1.0
    assert err.count("grading") == 10
