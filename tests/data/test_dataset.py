from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.dataset import HFDataset, Rows, load_rows
from headrace.errors import ConfigError, DataError, MissingExtraError

WANTED = [{"q": "a", "n": 1}, {"q": "b", "n": 2}, {"q": "c", "n": 3}]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(r) + "\n" for r in rows)


def write_parquet(path: Path) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(WANTED), path)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda folder: write(folder / "d.jsonl", jsonl(WANTED)),
    "jsonl without a last newline": lambda folder: write(folder / "d.jsonl", jsonl(WANTED).rstrip()),
    "jsonl with a byte order mark": lambda folder: write(folder / "d.jsonl", "\ufeff" + jsonl(WANTED)),
    "jsonl.gz": lambda folder: write(folder / "d.jsonl.gz", gzip.compress(jsonl(WANTED).encode())),
    "json": lambda folder: write(folder / "d.json", json.dumps(WANTED)),
    "json with data": lambda folder: write(folder / "d.json", json.dumps({"data": WANTED})),
    "parquet": lambda folder: write_parquet(folder / "d.parquet"),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("limit", [None, 1, 2, 9])
def test_files(kind: str, limit: int | None, tmp_path: Path) -> None:
    path = WRITERS[kind](tmp_path)
    rows = load_rows(path, limit_rows=limit)
    assert list(rows) == WANTED[:limit]
    assert rows.columns == ["q", "n"]
    assert rows.name == str(path)


def test_csv_keeps_text(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", 'q,n\n"two\nlines, one cell",007\n\nx,1e5\n')
    rows = load_rows(path)
    assert list(rows) == [{"q": "two\nlines, one cell", "n": "007"}, {"q": "x", "n": "1e5"}]
    assert [rows.where(i) for i in (0, 1)] == ["line 2", "line 5"]
    assert len(load_rows(path, limit_rows=1)) == 1


def test_a_row_has_every_column(tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path / "d.jsonl", '{"a": 1}\n\n{"b": "\u2028"}\n'))
    assert list(rows) == [{"a": 1, "b": None}, {"a": None, "b": "\u2028"}]
    assert rows.where(1) == "line 3"


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.text() | st.integers()), min_size=1))
def test_jsonl_round_trip(tmp_path_factory: pytest.TempPathFactory, wanted: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in wanted)
    if any("\ud800" <= c <= "\udfff" for c in text):
        return
    rows = load_rows(write(tmp_path_factory.mktemp("d") / "d.jsonl", text))
    columns = {k for row in wanted for k in row}
    assert list(rows) == [{c: row.get(c) for c in rows.columns} for row in wanted]
    assert set(rows.columns) == columns


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("d.jsonl", b'{"a": 1}\n{"a": \n', ["line 2", "not JSON", "column"]),
        ("d.jsonl", b'{"a": 1}\n\n[1]\n', ["line 3", "is a list"]),
        ("d.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ["line 2", "UTF-8"]),
        ("d.jsonl", b"\n \n", ["no rows"]),
        ("d.jsonl.gz", b"no gzip", ["gzip"]),
        ("d.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999)[:-9], ["gzip"]),
        ("d.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xff" * 40, ["gzip"]),
        ("d.jsonl", b'{"a": 1}\n' + b"[" * 100_000, ["line 2", "recursion"]),
        ("d.jsonl", b'{"a": ' + b"9" * 5000 + b"}", ["line 1", "digits"]),
        ("d.json", b"[" * 100_000, ["recursion"]),
        ("d.json", b'[{"a": 1},\n oops]', ["line 2", "not JSON"]),
        ("d.json", b'{"a": 1}\n{"a": 2}', [".jsonl"]),
        ("d.json", b'{"a": 1}', ["list of objects"]),
        ("d.json", b'[{"a": 1}, 3]', ["row 2", "is a int"]),
        ("d.json", b"[]", ["no rows"]),
        ("d.csv", b"", ["no rows"]),
        ("d.csv", b"a,b\n", ["no rows"]),
        ("d.csv", b'a,b\n"1\n1",2\n3\n', ["line 4", "1 values; the header has 2"]),
        ("d.csv", b"a,b,a\n1,2,3\n", ["line 1", "'a' twice"]),
        ("d.csv", b"a\n\xff\n", ["UTF-8"]),
        ("d.parquet", b"no parquet", ["parquet"]),
        ("d.txt", b"text", [".jsonl", ".parquet"]),
        ("d.py", b"", ["d.py:function"]),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, name: str, content: bytes, parts: list[str]) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        load_rows(path, key="eval.path")
    message = str(caught.value)
    assert message.startswith("eval.path: ")
    for part in [str(path), *parts]:
        assert part in message


def test_later_rows_are_not_read_under_a_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"a": 1}\nbroken\n')
    assert len(load_rows(path, limit_rows=1)) == 1


@pytest.mark.parametrize("path", ["missing.jsonl", "/no/where", "./here", "a/b/c"])
def test_a_missing_file_is_not_looked_for_on_the_hub(path: str) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_rows(path)


def test_a_missing_hub_data_set_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    import huggingface_hub.constants

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        load_rows("nobody/nothing", subset="main")
    assert caught.value.exit_code == 2
    assert len(caught.value.violations) == 1
    assert "\n" not in str(caught.value)
    assert "nobody/nothing" in str(caught.value)


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", jsonl(WANTED))
    rows = load_rows(folder, limit_rows=2)
    assert list(rows) == WANTED[:2]
    assert rows.columns == ["q", "n"]
    with pytest.raises(DataError, match=r"data\.path: no folder .*split 'test'"):
        load_rows(folder, split="test")
    datasets.DatasetDict({"test": datasets.Dataset.from_list(WANTED)}).save_to_disk(tmp_path / "saved")
    assert list(load_rows(tmp_path / "saved", split="test")) == WANTED
    with pytest.raises(DataError, match="the splits are test"):
        load_rows(tmp_path / "saved", split="train")


def test_missing_extras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"headrace\[hub\]"):
        load_rows("owner/name")
    with pytest.raises(MissingExtraError, match=r"headrace\[parquet\]"):
        load_rows(write(tmp_path / "d.parquet", b""))


def test_callables_and_lists() -> None:
    def generate() -> Iterator[dict[str, Any]]:
        n = 0
        while True:
            yield {"n": n}
            n += 1

    assert list(load_rows(generate, limit_rows=3)) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert list(load_rows(lambda: WANTED)) == WANTED
    assert list(load_rows(tuple(WANTED))) == WANTED
    assert "generate" in load_rows(generate, limit_rows=1).name
    with pytest.raises(DataError, match="row 2 is a int"):
        load_rows([{"a": 1}, 2])  # type: ignore[list-item]
    with pytest.raises(DataError, match="expected an iterable of dicts"):
        load_rows(lambda: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match="no rows"):
        load_rows([])
    with pytest.raises(ConfigError, match="at least 1"):
        load_rows(WANTED, limit_rows=0)


def test_a_function_of_a_file(tmp_path: Path) -> None:
    write(tmp_path / "neighbour_of_rows.py", "ROWS = [{'a': 1}, {'a': 2}]")
    file = write(
        tmp_path / "make_rows.py",
        "import neighbour_of_rows\ndef rows():\n    yield from neighbour_of_rows.ROWS\nCONSTANT = 3\n",
    )
    assert list(load_rows(f"{file}:rows")) == [{"a": 1}, {"a": 2}]
    for name in ("row", "CONSTANT"):
        with pytest.raises(DataError, match=rf"no function '{name}'; it has rows"):
            load_rows(f"{file}:{name}")
    with pytest.raises(DataError, match=r"none\.py does not exist"):
        load_rows(f"{tmp_path}/none.py:rows")


@pytest.mark.parametrize(
    "text, words",
    [
        ("def rows(): raise KeyError('x')", r"KeyError: 'x' \(.*failing\.py, line 1\)"),
        ("import sys\ndef rows(): sys.exit(0)", r"SystemExit: 0 \(.*line 2\)"),
        ("def rows():\n    yield {'a': 1}\n    yield 1 / 0", r"ZeroDivisionError: .*line 3"),
        ("def rows(n): return []", "TypeError"),
        ("def rows(:", "SyntaxError"),
    ],
)
def test_a_function_that_fails_is_an_error_of_the_data(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path / "failing.py", text)
    with pytest.raises(DataError, match=rf"^eval\.path: .*failing\.py:rows failed: {words}"):
        load_rows(f"{file}:rows", key="eval.path")


def test_hf_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", jsonl(WANTED))
    dataset = HFDataset(path, split="validation", limit_rows=2, prompt="q", max_prompt_tokens=7)
    assert (len(dataset), list(dataset), dataset[1]) == (2, WANTED[:2], WANTED[1])
    assert (dataset.config.prompt, dataset.config.max_prompt_tokens) == ("q", 7)
    assert (dataset.config.path, dataset.config.split) == (str(path), "validation")
    assert isinstance(dataset.rows, Rows)
    assert len(HFDataset(WANTED)) == 3
    assert HFDataset(lambda: WANTED).config.path is None


def test_hf_dataset_is_lazy_but_checks_its_settings() -> None:
    lazy = HFDataset("missing.jsonl")
    with pytest.raises(DataError, match="does not exist"):
        len(lazy)
    with pytest.raises(ConfigError, match=r"data\.promt: unknown key; did you mean data\.prompt"):
        HFDataset(WANTED, promt="q")
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens: expected a whole number"):
        HFDataset(WANTED, max_prompt_tokens="many")
    with pytest.raises(ConfigError, match="first argument"):
        HFDataset(WANTED, path="x")
