"""What the machine is, from files written by the test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.observe import machine
from headrace.observe.machine import Memory, Requirement


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable:   600 kB\n")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


def test_without_a_container_the_machine_counts(fake: Path) -> None:
    assert machine.host_memory() == Memory(1000 << 10, 600 << 10)
    assert machine.cpu_cores() == 8


def test_a_container_of_cgroup_2(fake: Path) -> None:
    (fake / "memory.max").write_text("409600\n")
    (fake / "memory.current").write_text("300000\n")
    (fake / "memory.stat").write_text("anon 5\ninactive_file 200000\nactive_file 7\n")
    (fake / "cpu.max").write_text("250000 100000\n")
    assert machine.host_memory() == Memory(409600, 309600)  # page cache can be given back
    assert machine.cpu_cores() == 3


def test_a_container_of_cgroup_1(fake: Path) -> None:
    for name, text in (
        ("memory/memory.limit_in_bytes", "409600"),
        ("memory/memory.usage_in_bytes", "300000"),
        ("memory/memory.stat", "total_inactive_file 100000"),
        ("cpu/cpu.cfs_quota_us", "200000"),
        ("cpu/cpu.cfs_period_us", "100000"),
    ):
        (fake / name).parent.mkdir(exist_ok=True)
        (fake / name).write_text(text + "\n")
    assert machine.host_memory() == Memory(409600, 209600)
    assert machine.cpu_cores() == 2


def test_no_limit_is_no_limit(fake: Path) -> None:
    (fake / "memory.max").write_text("max\n")
    (fake / "cpu.max").write_text("max 100000\n")
    assert machine.host_memory() == Memory(1000 << 10, 600 << 10)
    assert machine.cpu_cores() == 8


@pytest.mark.parametrize(
    ("specifier", "version", "allowed"),
    [
        (">=2.11,<2.15", "2.13.0+cpu", True),
        (">=2.11,<2.15", "2.15.0", False),
        (">=2.11,<2.15", "2.9.1", False),
        ("<2.15,>=2.11", "2.14.1", True),
        (">=5.17", "5.17", True),
        (">=5.17", "5.17.0.dev0", True),
        (">=5.17", "5.9", False),
        ("==1.0", "1.0.0", True),
        ("!=1.0", "1.0", False),
        ("", "3", True),
    ],
)
def test_versions_against_ranges(specifier: str, version: str, allowed: bool) -> None:
    assert Requirement("x", specifier, "").allows(version) == allowed


def test_the_requirements_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch<2.15,>=2.11",
        "PyYAML>=6.0",
        'datasets>=3.0; extra == "hub"',
        "gguf[gui] (>=0.10) ; extra == 'gguf'",
    ]
    monkeypatch.setattr(machine.importlib.metadata, "requires", lambda name: lines)
    assert machine.requirements() == [
        Requirement("torch", "<2.15,>=2.11", ""),
        Requirement("PyYAML", ">=6.0", ""),
        Requirement("datasets", ">=3.0", "hub"),
        Requirement("gguf", ">=0.10", "gguf"),
    ]


def test_the_environment_of_a_run(tmp_path: Path) -> None:
    machine.write_environment(tmp_path)
    found = json.loads((tmp_path / machine.ENVIRONMENT).read_text())
    assert found["torch"] == machine.installed_version("torch")
    assert found["cpu_cores"] >= 1
    assert found["memory_bytes"] > 1 << 20


def test_disk_of_a_folder_that_is_yet_to_be_made(tmp_path: Path) -> None:
    assert machine.free_disk(tmp_path / "a" / "b") > 0
