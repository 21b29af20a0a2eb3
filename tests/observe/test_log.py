import json
import math
import subprocess
import sys
from datetime import datetime

import pytest

from headrace.observe.log import RunLogger
from headrace.observe.run_dir import RunDirectory


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path, "r")
    run.write_config("")
    return run


def strict_lines(path):
    """Parsed lines; NaN and Infinity, which Python would accept, are refused as other readers do."""

    def refuse(name):
        raise ValueError(name)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().split("\n")[:-1]]


def test_each_step_is_a_line_that_can_be_read_at_once(run):
    with RunLogger(run, tensorboard=False) as log:
        log.log(1, {"reward/mean": 0.5})
        assert strict_lines(run.metrics)[0]["reward/mean"] == 0.5
        log.log(2, {"reward/mean": math.nan, "actor/grad_norm": math.inf, "actor/kl": -0.25})
    first, second = strict_lines(run.metrics)
    assert second["reward/mean"] is None
    assert second["actor/grad_norm"] is None
    assert second["actor/kl"] == -0.25
    assert (first["step"], second["step"]) == (1, 2)
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert list(first)[:2] == ["step", "time"]


def test_an_undocumented_metric_is_refused_and_nothing_is_written(run):
    with RunLogger(run, tensorboard=False) as log, pytest.raises(ValueError, match="reward/maen"):
        log.log(1, {"reward/mean": 1.0, "reward/maen": 0.5})
    assert run.metrics.read_bytes() == b""


def test_a_half_written_line_of_a_killed_run_is_dropped_before_the_next(run):
    run.metrics.write_bytes(b'{"step": 1}\n{"step": 2, "reward/me')
    with RunLogger(run, tensorboard=False) as log:
        log.log(2, {"reward/mean": 1.0})
    assert [line["step"] for line in strict_lines(run.metrics)] == [1, 2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_FSIZE as a full disk")
def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path):
    """A file size limit stands for the disk: the write that crosses it comes back short."""
    path = tmp_path / "metrics.jsonl"
    script = f"""
import pathlib, resource, signal
from headrace.errors import RunError
from headrace.observe.log import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
lines = JsonLines(pathlib.Path({str(path)!r}))
lines.append({{"step": 1}})
try:
    lines.append({{"step": 2, "text": "x" * 100}})
except RunError as error:
    raise SystemExit(f"refused: {{error}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "refused" in done.stderr
    assert "metrics.jsonl" in done.stderr
    assert path.read_text() == '{"step": 1}\n'


def test_samples_are_a_fixed_draw_of_each_step(run, tmp_path):
    samples = [{"prompt": f"p{i}", "reward": math.nan if i == 0 else i} for i in range(10)]
    other = RunDirectory.create(tmp_path, "other")
    for directory in (run, other):
        with RunLogger(directory, tensorboard=False, samples_per_step=4, seed=7) as log:
            log.log_samples(1, samples)
            log.log_samples(2, samples)
            log.log_samples(3, samples[:2])
    lines = strict_lines(run.samples)
    assert [line["step"] for line in lines] == [1] * 4 + [2] * 4 + [3] * 2
    prompts = [[line["prompt"] for line in lines if line["step"] == step] for step in (1, 2)]
    assert all(len(set(p)) == 4 and p == sorted(p) for p in prompts)
    assert prompts[0] != prompts[1]
    assert run.samples.read_bytes() == other.samples.read_bytes()


def test_any_text_survives(run):
    texts = ["añb 中文", 'quote " and \\', "two\nlines", "sep\u2028arator", "half \ud83d emoji"]
    with RunLogger(run, tensorboard=False, samples_per_step=9) as log:
        log.log_samples(1, [{"completion": text, "nested": [{"x": math.inf}]} for text in texts])
    lines = strict_lines(run.samples)
    assert [line["completion"] for line in lines] == texts
    assert lines[0]["nested"] == [{"x": None}]
    assert "中文" in run.samples.read_text()


def test_tensorboard_gets_every_scalar(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLogger(run, tensorboard=True) as log:
        log.log(1, {"reward/mean": 0.25})
        log.log(3, {"reward/mean": 0.75, "actor/kl": 1.5})
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (3, 0.75)]
    assert [(e.step, e.value) for e in events.Scalars("actor/kl")] == [(3, 1.5)]
