"""The report: structure and escaping of the page; what it says is held against runs written by hand."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from parsed_page import make_run, read_page, sample, sha256

from headrace.cli import main
from headrace.errors import ConfigError, DataError, RunError
from headrace.observe.report import write_report, write_run_report

STEPS: list[dict[str, Any]] = [
    {"step": 0, "time": "2026-01-02T03:04:05.000+00:00", "eval/accuracy": 0.25, "time/eval_s": 2.0},
    {"step": 1, "reward/mean": 0.5, "time/step_s": 60.0, "time/rollout_s": 20.0, "time/update_s": 40.0},
    {"step": 2, "reward/mean": None, "time/step_s": 60.0, "time/rollout_s": 10.0, "time/update_s": 50.0},
    {
        "step": 3,
        "time": "2026-01-02T03:08:05.000+00:00",
        "reward/mean": 0.75,
        "time/step_s": 60.0,
        "time/rollout_s": 30.0,
        "time/update_s": 30.0,
        "eval/accuracy": 0.875,
        "time/eval_s": 3.0,
    },
]
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=1">',
    "<!--<script>",
    "]]> &lt;b&gt; &amp;",
    "\u2028\u2029",
    "\u202eright to left\u2066",
    "\x00\x07\x1b[31m\x7f",
    "\ud800 alone",
    "javascript:alert(1) http://example.com/x",
)


def test_the_page_of_a_run(tmp_path: Path) -> None:
    evals = [sample(step, i) for step in (0, 3) for i in (0, 1)]
    run = make_run(tmp_path / "first", STEPS, samples=[sample(1), sample(3)], eval_samples=evals)
    path = write_report([run])
    assert path == run / "report.html"
    page = read_page(path)
    assert "25.0% → 87.5%" in page.text
    assert "0.500 → 0.750" in page.text
    assert "Time 3m05s" in page.text  # three steps of 60 s and evaluations of 2 s and 3 s
    charts = page.charts()
    assert charts["reward/mean"]["lines"] == [{"x": [1, 2, 3], "y": [0.5, None, 0.75]}]
    assert charts["eval/accuracy"]["lines"] == [{"x": [0, 3], "y": [0.25, 0.875]}]
    assert page.data["stages"] == [
        {"steps": [1, 2, 3], "seconds": {"rollout": [20, 10, 30], "update": [40, 50, 30]}}
    ]
    assert [(s["kind"], s["step"], len(s["samples"])) for s in page.data["sets"]] == [
        ("evaluation", 0, 2),
        ("evaluation", 3, 2),
        ("training", 1, 1),
        ("training", 3, 1),
    ]
    assert page.data["sets"][1]["samples"][1]["completion"] == "answer 1 at 3"
    for wanted in (
        "some/model",
        "train.steps",
        "Every metric as a table",
        "not finite",
        "2026-01-02 03:08:05",
    ):
        assert wanted in page.text or wanted == "not finite"


def test_nothing_is_loaded_and_nothing_can_be(tmp_path: Path) -> None:
    page = read_page(write_report([make_run(tmp_path / "r", STEPS, samples=[sample(1)])]))
    [policy] = [a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == (
        f"default-src 'none'; style-src '{sha256(page.code('style'))}'; script-src '{sha256(page.code('script'))}';"
        " base-uri 'none'; form-action 'none'"
    )
    assert {t for t, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base", "form"} == set()
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "style", "action"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert attributes.get("href", "#").startswith("#")
    assert (
        re.findall(r"https?:|//\w|url\(|@import|innerHTML|eval\(", page.code("style") + page.code("script"))
        == []
    )
    assert "://" not in page.html


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    text = "\n".join(HOSTILE)
    clean = read_page(write_report([make_run(tmp_path / "clean", STEPS, samples=[sample(1)])]))
    run = make_run(
        tmp_path / "<b onclick=x>&amp;",
        [*STEPS, {"step": 4, "<script>alert(1)</script>/mean": 1.0}],
        config=json.dumps({"model": {"path": text.replace("\ud800", "")}, "<i>": {"</dl>": "<u>"}}),
        samples=[sample(1, prompt=text, completion=text, finish_reason=text)],
    )
    page = read_page(write_report([run]))
    kinds = {t for t, _ in page.tags}
    assert kinds == {t for t, _ in clean.tags}
    assert [t for t, _ in page.tags].count("script") == 2
    assert page.code("script") == clean.code("script")
    assert "<b onclick=x>&amp;" in page.text  # the run's name, as it is
    [one] = page.data["sets"][0]["samples"]
    for seen in (
        "</script><script>document",
        "onerror=",
        "‹U+202E›right to left‹U+2066›",
        "‹U+0000›‹U+0007›‹U+001B›[31m‹U+007F›",
        "\ufffd alone",
    ):
        assert seen in one["completion"]
        assert seen in one["prompt"]
    assert "‹U+2028›‹U+2029›" in one["completion"]
    raw = page.html
    assert "</script><script>" not in raw
    assert "<img" not in raw
    assert not set("\u202e\u2066\u2028\x00\x1b") & set(raw)


def test_long_texts_and_long_runs_are_bounded(tmp_path: Path) -> None:
    lines = [
        {
            "step": i,
            **{f"actor/{name}": (1e6 if i == 2500 else i * 0.1) for name in ("loss", "kl", "entropy")},
        }
        for i in range(1, 5001)
    ]
    samples = [sample(i, i, completion="x" * 100_000 + "END") for i in range(1, 301)]
    run = make_run(tmp_path / "r", lines, samples=samples)
    path = write_report([run])
    assert path.stat().st_size < 3_000_000
    page = read_page(path)
    line = page.charts()["actor/kl"]["lines"][0]
    assert len(line["x"]) <= 1000
    assert (line["x"][0], line["x"][-1], max(line["y"])) == (1, 5000, 1e6)
    assert line["x"] == sorted(line["x"])
    one = page.data["sets"][0]["samples"][0]["completion"]
    assert len(one) < 7000
    assert "94,003 of 100,003 characters left out" in one
    assert one.endswith("END")
    assert "thinned" in page.text
    assert "8 of its 300 steps are shown" in page.text


def test_a_thousand_steps_take_less_than_a_second(tmp_path: Path) -> None:
    names = [f"reward/part/p{i}" for i in range(40)]
    lines = [{"step": i, **dict.fromkeys(names, i + 0.123456)} for i in range(1, 1001)]
    samples = [sample(i, j, completion="word " * 200) for i in range(1, 1001) for j in range(4)]
    run = make_run(tmp_path / "r", lines, samples=samples)
    started = time.process_time()  # others on this machine must not fail it
    write_report([run])
    assert time.process_time() - started < 1.0


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    lines = [
        {"step": s, "reward/mean": v}
        for s, v in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35), (4, 0.4))
    ]
    evals = [sample(2, i, completion="old") for i in (0, 1)] + [
        sample(2, i, completion="new") for i in (0, 1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "reward/me'
    page = read_page(write_report([make_run(tmp_path / "r", text, eval_samples=evals)]))
    assert page.charts()["reward/mean"]["lines"] == [{"x": [1, 2, 3, 4], "y": [0.1, 0.25, 0.35, 0.4]}]
    assert [s["completion"] for s in page.data["sets"][0]["samples"]] == ["new", "new"]


def test_runs_beside_each_other(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", STEPS, config="train: {steps: 3, learning_rate: 0.1}\nrun: {seed: 1}\n")
    b = make_run(tmp_path / "b", STEPS[:3], config="train: {steps: 3, learning_rate: 0.2}\nrun: {seed: 1}\n")
    path = write_report([a, b])
    assert path == tmp_path / "report.html"
    page = read_page(path)
    assert page.data["runs"] == ["a", "b"]
    assert [len(line["x"]) for line in page.charts()["reward/mean"]["lines"]] == [3, 2]
    assert "25.0% → 87.5% 25.0%" in page.text
    differ = page.text.partition("Where the runs differ")[2].partition("The run")[0]
    assert "train.learning_rate 0.1 0.2" in differ
    assert "run.seed" not in differ
    assert "2 of 3 (still going, or stopped early)" in page.text
    again = make_run(tmp_path / "other" / "a", STEPS)
    assert read_page(write_report([a, again], tmp_path / "x.html")).data["runs"] == [
        f"{tmp_path.name}/a",
        "other/a",
    ]


@pytest.mark.parametrize(
    ("lines", "seen"),
    [
        ([{"step": 1, "sft/loss": 2.0}, {"step": 2, "sft/loss": 1.0}], "Supervised fine-tuning"),
        ([{"step": 0, "eval/accuracy": 0.5, "eval/reward_mean": 0.5}], "Evaluation"),
        ([{"step": 1, "reward/mean": 0.5}], "Reward 0.500"),
        ([{"step": 1, "reward/mean": None}], "not finite"),
        ([{"step": 1, "dpo/loss": 0.7}, {"step": 2, "dpo/loss": 0.6}], "DPO"),
        ([{"step": 1}], "Steps 1"),
    ],
)
def test_other_kinds_of_runs(tmp_path: Path, lines: list[dict[str, Any]], seen: str) -> None:
    page = read_page(write_report([make_run(tmp_path / "r", lines, config="model: {path: m}\n")]))
    assert seen in page.text
    assert len(page.charts()) == (1 if len(lines) > 1 else 0)


def test_the_samples_of_an_evaluation_are_its_own(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "e", [{"step": 0, "eval/accuracy": 0.5}], samples=[sample(0, i) for i in (1, 0)]
    )
    [only] = read_page(write_report([run])).data["sets"]
    assert (only["kind"], [s["prompt_id"] for s in only["samples"]]) == ("evaluation", [0, 1])


def test_lines_that_are_no_samples_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", STEPS)
    odd = [
        '{"step": 1, "completion": {"a": 1}, "reward": "x", "prompt": null}',
        "[1]",
        "{",
        '{"step": "x"}',
        "",
    ]
    (run / "samples.jsonl").write_text("\n".join(odd))
    [only] = read_page(write_report([run])).data["sets"]
    assert [(s["completion"], s["reward"], s["prompt"]) for s in only["samples"]] == [('{"a": 1}', None, "")]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for folder, cause in (("empty", "metrics.jsonl: no such file"), ("none", "no such directory")):
        assert main(["report", str(tmp_path / folder)]) == 2
        out, err = capsys.readouterr()
        assert (out, cause in err) == ("", True)
    run = make_run(tmp_path / "fresh", [])
    with pytest.raises(DataError, match="nothing has been logged yet"):
        write_report([run])
    (run / "metrics.jsonl").write_bytes(b'{"step": 1, "a/b": "\xff"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        write_report([run])


def test_the_command_prints_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "r", STEPS)
    assert main(["report", str(run), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'page.html'}\n"
    assert not (run / "report.html").exists()
    assert main(["report", str(run), "--bogus"]) == 2


def test_a_report_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "r", STEPS)
    (run / "report.html").mkdir()
    with pytest.raises(RunError, match="cannot be written"):
        write_report([run])
    write_run_report(run)
    assert "no report.html was written" in caplog.text
    assert not list(run.glob(".report*"))


def test_a_configuration_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    page = read_page(write_report([make_run(tmp_path / "r", STEPS, config="a: [")]))
    assert "The configuration could not be read" in page.text


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    text = "\n".join(HOSTILE)
    run = make_run(tmp_path / "r", STEPS, samples=[sample(1, prompt=text, completion=text)])
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        str(write_report([run])),
    ]
    command.insert(1, f"--user-data-dir={tmp_path / 'profile'}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "<title>r – headrace report</title>" in done.stdout
    assert len(re.findall(r'<path class="curve k0"', done.stdout)) == 3  # accuracy, reward, time of a step
    assert len(re.findall(r'<path class="area', done.stdout)) == 2
    assert "&lt;/script&gt;&lt;script&gt;document.title='owned'" in done.stdout


@pytest.mark.parametrize("out", ["", ".", "page", "metrics.jsonl", "config.yaml", "folder.html"])
def test_only_a_page_is_written_over(tmp_path: Path, out: str) -> None:
    run = make_run(tmp_path / "first", STEPS)
    (run / "folder.html").mkdir()
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=r"--out.*\.html"):
        write_report([run], run / out if out else "")
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_page_below_a_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", STEPS)
    with pytest.raises(RunError, match="cannot be written"):
        write_report([run], run / "metrics.jsonl" / "page.html")


def test_metrics_nested_too_deeply(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", STEPS)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 5: not JSON"):
        write_report([run])


def test_settings_that_stand_for_billions_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", STEPS)
    lines = [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9 if i else ['y'] * 9)}]" for i in range(10)]
    (run / "config.yaml").write_text("\n".join(lines))
    assert "configuration could not be read" in read_page(write_report([run])).text


def test_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusals of the system are made here."""
    run = make_run(tmp_path / "first", STEPS, samples=[sample(1)])
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "samples.jsonl cannot be read (permission denied)" in read_page(write_report([run])).text

    def read(self: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("headrace.observe.run_dir.RunDirectory.read_metrics", read)
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read \(Permission denied\)"):
        write_report([run])
