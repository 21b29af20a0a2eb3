import json
import sys

import pytest

from headrace.errors import DataError, MissingExtraError
from headrace.observe.curves import plot_curves
from headrace.observe.run_dir import RunDirectory


def write_run(parent, name, lines):
    run = RunDirectory.create(parent, name)
    run.write_config("")
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run.path


@pytest.fixture
def runs(tmp_path):
    a = write_run(tmp_path, "a", [{"step": s, "reward/mean": s / 10 if s != 2 else None} for s in (1, 2, 3)])
    b = write_run(tmp_path, "b", [{"step": 1, "reward/mean": 0.5, "eval/accuracy": 0.25}])
    return a, b


def test_one_panel_per_metric_that_was_logged(runs, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k)
    )
    out = plot_curves(
        runs,
        tmp_path / "docs" / "curves.png",
        ["reward/mean", "eval/accuracy", "actor/kl"],
        labels=["GRPO", "PPO"],
    )
    assert out.read_bytes().startswith(b"\x89PNG")
    axes = drawn[0].axes
    assert [a.get_title() for a in axes] == ["reward/mean", "eval/accuracy"]
    assert axes[1].get_ylabel() == "fraction"
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes[0].lines}
    assert lines == {"GRPO": [[1, 0.1], [3, 0.3]], "PPO": [[1, 0.5]]}


def test_what_cannot_be_drawn_is_named(runs, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(DataError, match="none of actor/kl was logged"):
        plot_curves(runs, tmp_path / "x.png", ["actor/kl"])
    with pytest.raises(DataError, match=r"metrics\.jsonl: no such file"):
        plot_curves([tmp_path / "nothing"], tmp_path / "x.png")
    with pytest.raises(ValueError, match="not documented"):
        plot_curves(runs, tmp_path / "x.png", ["reward/maen"])


def test_without_matplotlib_the_extra_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"headrace\[plot\]"):
        plot_curves(runs, tmp_path / "x.png")
