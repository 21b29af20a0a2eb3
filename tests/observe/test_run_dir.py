import errno
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.errors import ConfigError, DataError, RunError
from headrace.observe.run_dir import RunDirectory


def make_run(parent, name="a"):
    run = RunDirectory.create(parent, name)
    run.write_config("model: x\n")
    return run


def test_layout_and_configuration(tmp_path):
    run = make_run(tmp_path / "runs")
    assert run.path == tmp_path / "runs" / "a"
    assert run.config.read_text() == "model: x\n"
    assert run.read_metrics() == []
    names = {p.name for p in (run.metrics, run.samples, run.tensorboard, run.checkpoints, run.model)}
    assert names == {"metrics.jsonl", "samples.jsonl", "tensorboard", "checkpoints", "model"}


def test_an_existing_run_is_kept_unless_asked(tmp_path):
    make_run(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.name.*run\.overwrite=true") as error:
        RunDirectory.create(tmp_path, "a")
    assert (tmp_path / "a" / "config.yaml").exists()
    assert "run.resume" not in str(error.value)  # there is nothing to go on from
    (tmp_path / "a" / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"set run\.resume=true to go on"):
        RunDirectory.check(tmp_path, "a")
    again = RunDirectory.create(tmp_path, "a", overwrite=True)
    assert list(again.path.iterdir()) == []


def test_overwrite_deletes_only_runs_and_empty_folders(tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    RunDirectory.create(tmp_path, "thesis", overwrite=True)
    (folder / "chapter.tex").write_text("years of work")
    (folder / "config.yaml").write_text("")
    (tmp_path / "file").write_text("x")
    make_run(tmp_path, "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("thesis", "file", "link"):
        with pytest.raises(ConfigError, match=r"run\.overwrite.*not the directory of a run"):
            RunDirectory.create(tmp_path, name, overwrite=True)
    assert (folder / "chapter.tex").read_text() == "years of work"
    assert (tmp_path / "real" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "/etc", "a\0b", "a\nb", "\ud800", "x" * 300])
def test_a_name_cannot_leave_the_folder_of_runs(tmp_path, name):
    with pytest.raises(ConfigError, match=r"run\.name"):
        RunDirectory.create(tmp_path, name, overwrite=True)


def test_a_place_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir.*file"):
        RunDirectory.create(tmp_path / "file", "a")


def test_simultaneous_runs_without_a_name_get_one_each(tmp_path):
    with ThreadPoolExecutor(10) as pool:
        runs = list(pool.map(lambda _: RunDirectory.create(tmp_path, None, prefix="grpo"), range(10)))
    assert len({run.path for run in runs}) == 10
    assert all(run.name.startswith("grpo-") for run in runs)


def test_a_prefix_cannot_leave_the_folder_of_runs(tmp_path):
    run = RunDirectory.create(tmp_path, None, prefix="../up and/away")
    assert run.path.parent == tmp_path
    assert run.name.startswith("..-up-and-away-")


def test_reading_metrics_names_what_is_wrong(tmp_path):
    run = make_run(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"step": 2, "rew')
    assert run.read_metrics() == [{"step": 1}]
    run.metrics.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(DataError, match="line 2"):
        run.read_metrics()
    with pytest.raises(DataError, match="no such file"):
        RunDirectory(tmp_path / "nowhere").read_metrics()


def test_what_a_run_left_that_was_killed_as_it_began_is_replaced(tmp_path, monkeypatch):
    """Killed before its configuration was whole: an empty metrics.jsonl and a hidden file."""
    run = RunDirectory.create(tmp_path, "a")
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", lambda *names: sys.exit("killed"))
        with pytest.raises(SystemExit):
            run.write_config("run: {}")
    assert {p.name.split("-")[0] for p in run.path.iterdir()} == {"metrics.jsonl", ".config.yaml"}
    again = RunDirectory.create(tmp_path, "a", overwrite=True)
    assert list(again.path.iterdir()) == []
    again.metrics.write_text('{"mine": 1}\n')  # somebody's file of that name
    with pytest.raises(ConfigError, match=r"run\.overwrite"):
        RunDirectory.create(tmp_path, "a", overwrite=True)


def test_one_process_writes_to_a_run(tmp_path):
    run = make_run(tmp_path)
    holder = "from headrace.observe.run_dir import RunDirectory as R; import sys\n"
    holder += f"with R({str(run.path)!r}).locked(): print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another process is writing"), run.locked():
            pass
        other.kill()
    with run.locked():  # the lock went with its process
        pass


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path, "a")

    def full(*args, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(run.config), "write_text", full)
    with pytest.raises(RunError, match=r"config\.yaml: cannot write \(No space left on device\)"):
        run.write_config("run: {}")


def test_a_run_that_may_not_be_written_is_not_continued(tmp_path, monkeypatch):
    """Root may write everything, so the refusal of the system is made here."""
    run = RunDirectory.create(tmp_path, "r")
    run.write_config("")
    assert RunDirectory.open(tmp_path, "r").path == run.path
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"run\.resume: .*r cannot be written to"):
        RunDirectory.open(tmp_path, "r")
