import io
import logging
import os
import re
import sys

import pytest
from rich.console import Console

from headrace.observe import progress as module
from headrace.observe.progress import LiveProgress, PlainProgress, Progress, make_progress

STEP = {
    "reward/mean": 0.512,
    "actor/kl": 0.0123,
    "actor/loss": -0.0213,
    "gap/abs_logprob_mean": 3.1e-4,
    "rollout/response_tokens_mean": 87.25,
    "rollout/tokens_per_s": 1234.0,
    "time/step_s": 1.0,
}


class Clock:
    """time.monotonic under control."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def rendered(progress, width):
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    progress.console = console
    console.print(progress.render())
    return console.export_text().splitlines()


def live(width=80, total=200):
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    return LiveProgress(total, "grpo", console=console)


def test_time_left_is_from_the_steps_seen(clock):
    """10 s a step seen: 4 steps left are 40 s, 3 s later 37 s. A resumed run counts from where it began."""
    progress = Progress(10, "x")
    progress.start()
    assert progress.remaining_s is None
    clock.now += 10
    progress.update(5, {})
    clock.now += 10
    progress.update(6, {})
    assert progress.remaining_s == 40
    clock.now += 3
    assert progress.remaining_s == 37
    assert progress.elapsed_s == 23


def test_an_evaluation_before_the_first_step_says_nothing_about_speed(clock):
    progress = Progress(10, "x")
    progress.start()
    clock.now += 500
    progress.update(0, {"eval/accuracy": 0.1})
    assert progress.remaining_s is None
    clock.now += 2
    progress.update(1, {})
    assert progress.remaining_s == 18


def test_plain_lines_are_aligned_with_their_header(clock):
    out = io.StringIO()
    progress = PlainProgress(9999, "grpo", stream=out)
    with progress:
        for step in range(1, 4):
            clock.now += 7200
            progress.update(step, STEP | ({"eval/accuracy": 1.0} if step == 2 else {}))
    lines = out.getvalue().splitlines()
    assert lines[0] == "grpo: 9999 steps"
    header, first = lines[1], lines[2]
    assert header.split() == ["step", "reward", "KL", "loss", "gap", "response", "tok/s", "time", "left"]
    assert first.split() == [
        "1/9999",
        "0.512",
        "0.0123",
        "-0.0213",
        "3.1e-4",
        "87.2",
        "1.23k",
        "2h00m",
        "833d04h",
    ]
    # the evaluation opens a column, announced by a new header, which stays
    assert lines[3].split()[-3:] == ["eval", "time", "left"]
    assert lines[4].split()[-3] == "100.0%"
    assert lines[5].split()[-3] == "-"
    for line in lines[3:6]:
        ends = [match.end() for match in re.finditer(r"\S+", line)]
        assert ends[:8] == [match.end() for match in re.finditer(r"\S+", lines[3])][:8]
        assert len(line) <= 80
    assert lines[6] == "grpo: 3/9999 steps in 6h00m"
    assert len(lines) == 7


def test_plain_goes_to_stderr_and_repeats_its_header(capsys, clock):
    progress = make_progress("plain", 60, "sft")
    for step in range(1, 61):
        clock.now += 1.5
        progress.update(step, {"sft/loss": 1.5, "sft/perplexity": 4.48})
        progress.stage("update", 0.5)
    captured = capsys.readouterr()
    assert captured.out == ""
    headers = [line for line in captured.err.splitlines() if line.split()[0] == "step"]
    assert len(headers) == 3
    assert headers[0].split() == ["step", "loss", "perplexity", "time", "left"]


def test_plain_writes_at_most_a_line_a_second_but_every_evaluation_and_the_end(capsys, clock):
    progress = make_progress("plain", 20, "sft")
    for step in range(1, 21):
        clock.now += 0.25
        progress.update(step, {"sft/loss": 1.5} | ({"eval/accuracy": 0.5} if step == 6 else {}))
    lines = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    shown = [line for line in lines if "/" in line]
    assert shown == ["1/20", "5/20", "6/20", "10/20", "14/20", "18/20", "20/20"]


def test_off_writes_nothing(capfd):
    with make_progress("off", 10, "x") as progress:
        progress.update(1, STEP)
        progress.stage("rollout", 0.2)
        progress.message("hello")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_wraps_in_the_live_display(width, clock):
    progress = live(total=100000)
    progress.title = "a title of a run that is much longer than fits " * 4
    progress.start()
    for step in range(99_000, 99_150):
        clock.now += 3599
        progress.update(step, STEP | {"reward/mean": -0.001 * step, "eval/accuracy": 1.0})
    progress.update(99_150, STEP)
    progress.stage("a stage with a rather long name", 0.333)
    lines = rendered(progress, width)
    progress.stop()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= width
    text = "\n".join(lines)
    for part in (
        "step 99150/100000",
        "0.512",
        "0.0123 nats",
        "87.2 tokens",
        "1.23k",
        "100.0% (step 99149)",
        "left",
    ):
        assert part in text
    expected = {80: 3, 120: 2}[width]
    assert len(lines) == 2 + 2 + expected


def test_a_resumed_run_begins_where_it_was(clock):
    stream = io.StringIO()
    with PlainProgress(10, "grpo", stream, step=7) as plain:
        clock.now += 2
        plain.update(8, STEP)
    assert "grpo: 10 steps, 7 of them done before" in stream.getvalue()
    assert "8/10" in stream.getvalue()
    assert plain.remaining_s == pytest.approx(4.0)  # two steps at 2 s each
    assert "step 7/10" in rendered(LiveProgress(10, "grpo", step=7), 100)[1]
    assert make_progress("off", 10, "grpo", step=7).step == 7


def test_the_live_display_shows_what_is_there():
    progress = live()
    assert any("waiting for the first step" in line for line in rendered(progress, 80))
    progress.update(1, {"reward/mean": 0.25})
    progress.update(2, {"reward/mean": 0.75})
    progress.stage("rollout", 0.45)
    text = "\n".join(rendered(progress, 80))
    assert "reward ▁█" in text
    assert "rollout 45%" in text
    assert "KL" not in text
    assert "eval" not in text


def test_an_undocumented_metric_is_refused():
    for progress in (live(), PlainProgress(3, "x", stream=io.StringIO()), Progress(3, "x")):
        with pytest.raises(ValueError, match="reward/maen"):
            progress.update(1, {"reward/maen": 1.0})


def test_logging_goes_through_the_live_display_and_back(capsys):
    """A handler writes around a display that redraws unless it is moved; afterwards it is as it was."""
    logger = logging.getLogger("headrace.test_progress")
    handler = logging.StreamHandler(sys.stderr)
    to_file = logging.StreamHandler(io.StringIO())
    logger.addHandler(handler)
    logger.addHandler(to_file)
    before, file_before = handler.stream, to_file.stream
    try:
        progress = live()
        with progress:
            assert handler.stream is sys.stderr
            assert handler.stream is not before
            assert to_file.stream is file_before
            logger.warning("a log line")
            progress.message("[kept] as it is")
        assert handler.stream is before
        assert sys.stderr is before
    finally:
        logger.removeHandler(handler)
        logger.removeHandler(to_file)
    shown = progress.console.file.getvalue()
    assert "a log line" in shown
    assert "[kept] as it is" in shown
    assert "a log line" not in capsys.readouterr().err


def test_a_piped_stdout_stays_a_pipe():
    out = sys.stdout
    with live():
        assert sys.stdout is out


def test_the_display_ends_when_the_run_fails():
    progress = live()
    before = sys.stderr
    with pytest.raises(RuntimeError), progress:
        raise RuntimeError
    assert sys.stderr is before
    progress.stop()


def test_auto_is_live_only_on_a_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    assert type(make_progress("auto", 3, "x")) is PlainProgress
    assert type(make_progress("live", 3, "x")) is LiveProgress
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        assert type(make_progress("auto", 3, "x")) is LiveProgress
        monkeypatch.setenv("TERM", "dumb")
        assert type(make_progress("auto", 3, "x")) is PlainProgress
        monkeypatch.undo()
    os.close(controller)


def test_a_long_step_says_how_far_it_is_every_half_a_minute(clock):
    out = io.StringIO()
    progress = PlainProgress(3, "grpo", stream=out)
    progress.start()
    for second in range(1, 100):
        clock.now += 1
        progress.stage("rollout", second / 100)
        progress.stage("reward")
    assert out.getvalue().splitlines() == [
        "grpo: 3 steps",
        "step 1/3: rollout 30% done, 30s",
        "step 1/3: rollout 60% done, 1m00s",
        "step 1/3: rollout 90% done, 1m30s",
    ]
    progress.update(3, STEP)
    clock.now += 31
    progress.stage("eval", 0.5)
    assert out.getvalue().splitlines()[-1] == "after the last step: eval 50% done, 2m10s"
