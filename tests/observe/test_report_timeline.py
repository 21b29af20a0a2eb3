"""The timeline of a report: hand-worked bars and busy shares, which steps are shown, odd files, hostile names."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from parsed_page import Page, make_run, read_page

from headrace.observe.report import write_report
from headrace.observe.report_runs import read_run
from headrace.observe.report_timeline import (
    MOST_BARS,
    Bar,
    StepTimes,
    picture,
    read_timeline,
    timelines,
    typical,
)

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
COLOURS = {"rollout": 0, "values": 1, "critic": 2, "update": 3}


def line(
    step: int, stage: str, begin_s: float, end_s: float, group: str = "actor", **more: Any
) -> dict[str, Any]:
    return {"step": step, "stage": stage, "group": group, "begin_s": begin_s, "end_s": end_s, **more}


def logged(*seconds: float) -> list[dict[str, Any]]:
    """metrics.jsonl of steps 1, 2, … of so many seconds each."""
    return [
        {"step": i, "time/step_s": s, "time/rollout_s": s / 2, "time/update_s": s / 4}
        for i, s in enumerate(seconds, start=1)
    ]


def parts(page: Page, name: str) -> list[dict[str, str | None]]:
    """The attributes of the pictures' parts of a class."""
    return [a for _, a in page.tags if name in (a.get("class") or "").split()]


def test_bars_stand_where_their_seconds_are() -> None:
    step = StepTimes(
        3,
        10.0,
        (
            Bar("rollout", "actor", 0.0, 4.0),
            Bar("values", "critic", 4.0, 5.0),
            Bar("critic", "critic", 4.5, 8.5),  # overlaps on its own group, so it gets a line of its own
            Bar("update", "actor", 5.0, 9.0),
        ),
    )
    drawn = picture(step, ["actor", "critic"], COLOURS)
    actor, critic = drawn["rows"]
    assert [(b["x"], b["width"], b["colour"]) for b in actor["bars"]] == [("0%", "40%", 0), ("50%", "40%", 3)]
    assert [(b["x"], b["width"], b["colour"]) for b in critic["bars"]] == [
        ("40%", "10%", 1),
        ("45%", "40%", 2),
    ]
    assert actor["bars"][0]["y"] == actor["bars"][1]["y"] == actor["y"]
    assert critic["bars"][1]["y"] >= critic["bars"][0]["y"] + drawn["bar_height"]
    assert critic["y"] >= actor["y"] + actor["height"]
    assert critic["bars"][1]["y"] + drawn["bar_height"] <= critic["y"] + critic["height"] <= drawn["bottom"]
    # 4 + 4 of 10 seconds; from 4 to 8.5, the half second of both counted once
    assert (actor["busy"], critic["busy"]) == ("80%", "45%")
    assert drawn["ticks"] == [
        ("0%", "0 s"),
        ("20%", "2 s"),
        ("40%", "4 s"),
        ("60%", "6 s"),
        ("80%", "8 s"),
        ("100%", "10 s"),
    ]
    assert actor["bars"][1]["text"] == "update: 4.00 s, from 5.00 s to 9.00 s"


def test_a_bar_inside_another_adds_nothing() -> None:
    bars = (Bar("rollout", "a", 0, 8), Bar("values", "a", 1, 2), Bar("critic", "a", 3, 10))
    assert StepTimes(1, 20.0, bars).busy("a") == 0.5
    assert StepTimes(1, 20.0, bars).busy("b") == 0.0


def test_clocks_that_differ_widen_the_axis() -> None:
    """A host whose clock is behind begins before the step, one that is ahead ends after it."""
    step = StepTimes(1, 5.0, (Bar("values", "critic", -1.0, 1.0), Bar("update", "actor", 1.0, 7.0)))
    rows = picture(step, ["critic", "actor"], COLOURS)["rows"]
    assert [(r["bars"][0]["x"], r["bars"][0]["width"], r["busy"]) for r in rows] == [
        ("0%", "25%", "25%"),
        ("25%", "75%", "75%"),
    ]


def test_the_typical_step_is_the_median_of_the_last() -> None:
    steps = [StepTimes(i, s, (Bar("update", "a", 0.0, 1.0),)) for i, s in enumerate([9.0, 2.0, 3.0, 8.0], 1)]
    assert typical(steps).step == 3  # of 2, 3, 8 and 9 seconds, the shorter of the middle two
    # the long steps before the last 50 do not count
    slow, quick = [100.0] * 60, [1.0] * 24 + [2.0] + [3.0] * 25
    many = [StepTimes(i, s, (Bar("update", "a", 0.0, 1.0),)) for i, s in enumerate(slow + quick, 1)]
    assert typical(many).step == 85


def test_the_page_shows_three_steps(tmp_path: Path) -> None:
    times = [
        line(step, stage, begin * s, end * s, group)
        for step, s in ((1, 8.0), (2, 2.0), (3, 4.0))
        for stage, begin, end, group in (
            ("rollout", 0, 0.5, "actor"),
            ("values", 0.5, 0.75, "critic"),
            ("update", 0.5, 1, "actor"),
        )
    ]
    page = read_page(write_report([make_run(tmp_path / "r", logged(8, 2, 4), timeline=times)]))
    assert ("a", {"href": "#timeline"}) in page.tags
    assert [(p["data-choice"], "hidden" in p) for p in parts(page, "picture")] == [
        ("typical", False),
        ("first", True),
        ("last", True),
    ]
    assert "Stages of step 3 4.00 s, the median of the last 3 steps" in page.text
    assert "Stages of step 1 8.00 s, the first step" in page.text
    assert "Busy: actor 100% critic 25%" in page.text
    bars = parts(page, "stage")
    # rollout and update have the colours they have among the stage times; values, which is not there, comes after
    assert [(b["x"], b["width"], b["class"]) for b in bars[:3]] == [
        ("0%", "50%", "stage f0 k0"),
        ("50%", "50%", "stage f1 k1"),
        ("50%", "25%", "stage f2 k2"),
    ]
    assert len(bars) == 9


def test_one_process_is_one_row(tmp_path: Path) -> None:
    times = [line(1, "rollout", 0, 1, "all"), line(1, "update", 1, 1.5, "all")]
    page = read_page(write_report([make_run(tmp_path / "r", logged(2), timeline=times)]))
    assert len(parts(page, "lane")) == 1
    assert len(parts(page, "stage")) == 2
    assert "Busy: all 75%" in page.text
    assert "timeline-controls" not in {a.get("id") for _, a in page.tags}  # there is one step


def test_older_runs_have_no_timeline(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", logged(2, 3))
    empty = make_run(tmp_path / "empty", logged(2, 3), timeline=[])
    for run in (old, empty):
        page = read_page(write_report([run]))
        assert "Timeline" not in page.text
        assert "timeline" not in {a.get("id") for _, a in page.tags}


def test_runs_beside_each_other(tmp_path: Path) -> None:
    split = [line(1, "rollout", 0, 1), line(1, "critic", 0, 2, "critic")]
    runs = [
        make_run(tmp_path / "split", logged(2), timeline=split),
        make_run(tmp_path / "old", logged(2)),
        make_run(tmp_path / "one", logged(4), timeline=[line(1, "critic", 0, 1, "all")]),
    ]
    page = read_page(write_report(runs, tmp_path / "page.html"))
    assert len(parts(page, "picture")) == 2
    assert "split step 1: 2.00 s, the only one with times" in page.text
    assert "one step 1: 4.00 s" in page.text
    # a stage has one colour on the whole page
    assert [b["class"] for b in parts(page, "stage")] == ["stage f0 k0", "stage f2 k2", "stage f2 k2"]


def test_broken_lines_are_passed_over(tmp_path: Path) -> None:
    good = [line(1, "rollout", 0, 1), line(2, "rollout", 0, 1), line(2, "update", 1, 2)]
    bad = [
        line(2, "backwards", 2, 1),
        line(2, "null", None, 1),  # type: ignore[arg-type]
        line(2, "true", True, 1),
        line(2, "text", "0", 1),  # type: ignore[arg-type]
        line(2, "huge", 0, 1e300),
        line(2, 7, 0, 1),  # type: ignore[arg-type]
        {"step": 2, "stage": "groupless", "begin_s": 0, "end_s": 1},
    ]
    folder = make_run(tmp_path / "r", logged(2, 2), timeline=[*good, *bad])
    with (folder / "timeline.jsonl").open("a", encoding="utf-8") as file:
        file.write('[1]\nnonsense\n\n{"step": 2, "stage": \n{"step": 2, "stage": NaN}\n')
        file.write('{"step": 3, "stage": "update", "group": "actor", "begi')  # killed while it wrote
    run = read_run(folder)
    steps = read_timeline(run)
    assert [(s.step, [b.stage for b in s.bars]) for s in steps] == [
        (1, ["rollout"]),
        (2, ["rollout", "update"]),
    ]
    assert run.notes == ["timeline.jsonl: 11 lines that are no stage's time were passed over."]
    assert "11 lines that are no stage" in read_page(write_report([folder])).text


def test_a_step_that_has_not_ended_is_left_out(tmp_path: Path) -> None:
    times = [line(1, "rollout", 0, 1), line(2, "rollout", 0, 1)]
    run = read_run(make_run(tmp_path / "r", logged(2), timeline=times))
    assert [s.step for s in read_timeline(run)] == [1]


def test_a_step_that_was_run_again_counts_once(tmp_path: Path) -> None:
    times = [line(1, "rollout", 0, 1), line(2, "rollout", 0, 1), line(3, "rollout", 0, 1)]
    again = [line(2, "rollout", 0, 5), line(3, "rollout", 0, 6)]
    run = read_run(make_run(tmp_path / "r", logged(1, 5, 6), timeline=[*times, *again]))
    assert [(s.step, s.bars[0].end_s, len(s.bars)) for s in read_timeline(run)] == [
        (1, 1.0, 1),
        (2, 5.0, 1),
        (3, 6.0, 1),
    ]


def test_long_files_are_bounded(tmp_path: Path) -> None:
    times = [line(step, f"s{i}", i, i + 1) for step in range(1, 2001) for i in range(8)]
    times += [line(2001, "rollout", i, i + (2 if i == 700 else 0.5)) for i in range(1000)]
    run = read_run(make_run(tmp_path / "r", logged(*[8.0] * 2000, 1000.0), timeline=times))
    started = time.perf_counter()
    steps = read_timeline(run)
    assert [s.step for s in steps] == [1, *range(1952, 2002)]  # the first and the last 50
    found = timelines([run])
    assert time.perf_counter() - started < 2
    assert found is not None
    last = found["runs"][0]["pictures"][2]
    assert sum(len(row["bars"]) for row in last["rows"]) == MOST_BARS == 1000 - last["left_out"]
    assert any(bar["width"] == "0.2%" for bar in last["rows"][0]["bars"])  # the longest stays


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 3e-5, 0.7, 86_400.0, 9e8])
def test_axes_of_any_length(seconds: float) -> None:
    drawn = picture(StepTimes(1, seconds, (Bar("update", "a", 0.0, seconds),)), ["a"], COLOURS)
    assert 2 <= len(drawn["ticks"]) <= 11
    assert all(0 <= float(x[:-1]) <= 100.001 for x, _ in drawn["ticks"])
    assert len({text for _, text in drawn["ticks"]}) == len(drawn["ticks"])


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    stage, group = '"><script>alert(1)</script>', "</svg><img src=x onerror=alert(2)>\u202e\n\x00\ud800"
    clean = make_run(tmp_path / "clean", logged(2), timeline=[line(1, "rollout", 0, 1)])
    long = line(1, "x" * 5000, 0, 1, group)
    run = make_run(tmp_path / "r", logged(2), timeline=[line(1, stage, 0, 1, group), long])
    page, plain = read_page(write_report([run])), read_page(write_report([clean]))
    assert {t for t, _ in page.tags} == {t for t, _ in plain.tags}
    assert [t for t, _ in page.tags].count("script") == 2
    assert f"{stage}: 1.00 s" in page.text
    assert "</svg><img src=x onerror=alert(2)>‹U+202E› ‹U+0000›\ufffd" in page.text
    assert "<img" not in page.html
    assert not set("\u202e\x00") & set(page.html)
    assert "x" * 61 not in page.html
    for tag, attributes in page.tags:
        assert not {"src", "style"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_button_shows_another_step(tmp_path: Path) -> None:
    times = [line(step, "update", 0, 1) for step in (1, 2)]
    path = write_report([make_run(tmp_path / "r", logged(2, 3), timeline=times)])
    # the page's policy lets no other script run, so the click is in a copy without it
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text(encoding="utf-8"))
    click = "<script>document.querySelector('button[data-choice=last]').click()</script></body>"
    copy = tmp_path / "copy.html"
    copy.write_text(html.replace("</body>", click), encoding="utf-8")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(BROWSER), profile, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    shown = re.findall(r'<div class="picture" data-choice="(\w+)">', done.stdout)
    assert shown == ["last"]
    assert '<button type="button" data-choice="last" aria-pressed="true">' in done.stdout
