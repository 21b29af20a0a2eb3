"""Data sets as rows: from a file, a Python function, a list, a folder or the hub. Errors name file and line."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import itertools
import json
import sys
import traceback
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.config import DataConfig
from headrace.errors import ConfigError, DataError, HeadraceError, MissingExtraError

Source = str | Path | Callable[[], Iterable[Mapping[str, Any]]] | Sequence[Mapping[str, Any]]
Row = dict[str, Any]


class Rows:
    """The rows of a data set, as dicts with the same columns each (a value that a row lacks is None).

    `name` is what errors call the data set; `columns` are in order of first appearance.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        name: str,
        *,
        columns: Sequence[str] | None = None,
        lines: Sequence[int] | None = None,
    ) -> None:
        """`lines`: the 1-based line of the file each row starts at (default: rows are counted, not lines)."""
        self._rows = rows
        self._lines = lines
        self.name = name
        if columns is None:
            columns = list(dict.fromkeys(str(key) for row in rows for key in row))
        self.columns: list[str] = list(columns)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Row `index`, counted from 0, with every column."""
        row = self._rows[index]
        return {column: row.get(column) for column in self.columns}

    def __iter__(self) -> Iterator[Row]:
        return (self.row(i) for i in range(len(self)))

    def where_null(self, columns: Collection[str], rows: Iterable[int]) -> dict[str, list[int]]:
        """For each of `columns` those of `rows`, counted from 0, that have no value in it."""
        found: dict[str, list[int]] = {column: [] for column in columns}
        for i in rows if columns else ():
            row = self._rows[i]
            for column, empty in found.items():
                if row.get(column) is None:
                    empty.append(i)
        return found

    def where(self, index: int) -> str:
        """How an error names row `index`: "line 12" of a file, else "row 12", counted from 1."""
        return f"row {index + 1}" if self._lines is None else f"line {self._lines[index]}"

    def __repr__(self) -> str:
        return f"Rows({self.name}: {len(self)} rows, columns {self.columns})"


def load_rows(
    path: Source,
    *,
    subset: str | None = None,
    split: str = "train",
    limit_rows: int | None = None,
    key: str = "data.path",
) -> Rows:
    """The rows of `path`: a .jsonl, .jsonl.gz, .json, .csv or .parquet file, "path/to/file.py:function", a Python
    callable without arguments, a list of dicts, or a folder or hub id read by `datasets.load_dataset`.

    `subset` and `split` choose a part of a folder or hub data set. `limit_rows` keeps the first rows only (later
    ones are not even read from .jsonl and .csv). `key` is the setting that errors name. CSV values stay text.
    Raises DataError (missing, empty, malformed; with file and line) or MissingExtraError.
    """
    if limit_rows is not None and limit_rows < 1:
        raise ConfigError(f"{key}: limit_rows must be at least 1, got {limit_rows}")
    if isinstance(path, str | Path):
        rows = _from_text(str(path), subset, split, limit_rows, key)
    elif callable(path):
        name = getattr(path, "__qualname__", type(path).__name__)
        rows = _from_iterable(path(), name, limit_rows, key)
    else:
        rows = _from_iterable(path, "the given rows", limit_rows, key)
    if len(rows) == 0:
        raise DataError(f"{key}: {rows.name} has no rows")
    return rows


class HFDataset:
    """A data set for a trainer: `HFDataset("openai/gsm8k", subset="main", split="train", prompt="question")`.

    `source` is anything load_rows takes. The other keywords are the settings of the `data` section (prompt,
    template, format, system_prompt, max_prompt_tokens, over_limit, limit_rows, ...); `config` holds them.
    Rows are read at the first use. Raises ConfigError for an unknown or ill-typed keyword.
    """

    def __init__(
        self, source: Source, *, split: str = "train", subset: str | None = None, **settings: Any
    ) -> None:
        from headrace.config_load import from_mapping

        if "path" in settings:
            raise ConfigError("path: the data set is the first argument of HFDataset; drop path")
        path = str(source) if isinstance(source, str | Path) else None
        section = {**settings, "split": split, "subset": subset, "path": path}
        self.source = source
        self.config: DataConfig = from_mapping({"data": section}).data
        self._rows: Rows | None = None

    @property
    def rows(self) -> Rows:
        """All rows, loaded once. Raises DataError."""
        if self._rows is None:
            c = self.config
            self._rows = load_rows(self.source, subset=c.subset, split=c.split, limit_rows=c.limit_rows)
        return self._rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows.row(index)


def _from_text(path: str, subset: str | None, split: str, limit: int | None, key: str) -> Rows:
    file, separator, function = path.rpartition(":")
    if separator and file.endswith(".py"):
        with _users_code(path, key):
            return _from_iterable(_call_function(Path(file), function, key), path, limit, key)
    local = Path(path).expanduser()
    reader = next((r for suffix, r in _READERS.items() if path.lower().endswith(suffix)), None)
    if local.is_file():
        if reader is None:
            hint = f"; write {path}:function" if path.endswith(".py") else ""
            raise DataError(f"{key}: cannot read {path}: the extensions are {', '.join(_READERS)}{hint}")
        return reader(local, limit, key)
    if not local.exists() and (reader is not None or path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise DataError(f"{key}: {path} does not exist (looked in {Path.cwd()})")
    return _from_datasets(str(local) if local.exists() else path, subset, split, limit, key)


def _from_iterable(items: Any, name: str, limit: int | None, key: str) -> Rows:
    if isinstance(items, Rows):
        return (
            items
            if limit is None
            else Rows([items.row(i) for i in range(min(limit, len(items)))], items.name)
        )
    if not isinstance(items, Iterable) or isinstance(items, str | bytes | Mapping):
        raise DataError(f"{key}: {name} gave a {type(items).__name__}; expected an iterable of dicts")
    rows = list(itertools.islice(items, limit))
    _require_objects(rows, name, key)
    return Rows(rows, name)


def _require_objects(rows: Sequence[Any], name: str, key: str, lines: Sequence[int] | None = None) -> None:
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            where = f"row {i + 1}" if lines is None else f"line {lines[i]}"
            raise DataError(
                f"{key}: {name} {where} is a {type(row).__name__}; every row must be an object with named columns"
            )


@contextmanager
def _users_code(name: str, key: str) -> Iterator[None]:
    """What the user's own file raises, sys.exit included, becomes one DataError with the line it came from."""
    try:
        yield
    except HeadraceError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{key}: {name} failed: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        ) from error


def _call_function(file: Path, function: str, key: str) -> Any:
    """What `function` of the Python file returns."""
    file = file.expanduser()
    if not file.is_file():
        raise DataError(f"{key}: {file} does not exist (looked in {Path.cwd()})")
    module_name = f"headrace_data_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise DataError(f"{key}: {file} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        # so that the file can import its neighbours
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise DataError(f"{key}: {file} has no function '{function}'; it has {', '.join(there) or 'none'}")
    return found()


def _read_jsonl(path: Path, limit: int | None, key: str) -> Rows:
    rows: list[Any] = []
    lines: list[int] = []
    # Lines end at \n only: a JSON text may hold U+2028, which str.splitlines would split at.
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, raw in enumerate(_lines_of(file, path, key), 1):
            if limit is not None and len(rows) == limit:
                break
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                rows.append(json.loads(text, object_pairs_hook=_once))
            except UnicodeDecodeError as error:
                raise DataError(f"{key}: {path} line {number} is not UTF-8: {error}") from error
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{key}: {path} line {number} is not JSON: {error.msg} at column {error.colno}"
                ) from error
            except (ValueError, RecursionError) as error:  # a vast number, or nested too deeply
                raise DataError(f"{key}: {path} line {number} cannot be read: {error}") from error
            lines.append(number)
    _require_objects(rows, str(path), key, lines)
    return Rows(rows, str(path), lines=lines)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a name that stands in it twice, of which one value would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object names {next(n for n in names if names.count(n) > 1)!r} twice")
    return made


def _lines_of(file: Iterable[bytes], path: Path, key: str) -> Iterator[bytes]:
    try:
        yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{key}: {path} is no complete gzip file: {error}") from error


def _read_json(path: Path, limit: int | None, key: str) -> Rows:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {path} is not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        hint = "; if it holds one object a line, name it .jsonl" if error.msg == "Extra data" else ""
        raise DataError(
            f"{key}: {path} line {error.lineno} is not JSON: {error.msg} at column {error.colno}{hint}"
        ) from error
    except (ValueError, RecursionError) as error:  # a vast number, or nested too deeply
        raise DataError(f"{key}: {path} cannot be read: {error}") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("data"), list):
        loaded = loaded["data"]
    if not isinstance(loaded, list):
        raise DataError(f'{key}: {path} must hold a list of objects, or {{"data": [...]}} with one')
    loaded = loaded[:limit]
    _require_objects(loaded, str(path), key)
    return Rows(loaded, str(path))


def _read_csv(path: Path, limit: int | None, key: str) -> Rows:
    rows: list[Row] = []
    lines: list[int] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            columns = next(reader, [])
            twice = sorted({c for c in columns if columns.count(c) > 1})
            if twice:
                raise DataError(f"{key}: {path} line 1 names the column {twice[0]!r} twice")
            line = reader.line_num + 1
            for values in reader:
                if limit is not None and len(rows) == limit:
                    break
                if values:
                    if len(values) != len(columns):
                        raise DataError(
                            f"{key}: {path} line {line} has {len(values)} values; the header has {len(columns)}"
                        )
                    rows.append(dict(zip(columns, values, strict=True)))
                    lines.append(line)
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {path} is not UTF-8: {error}") from error
    except csv.Error as error:
        raise DataError(f"{key}: {path} line {reader.line_num} is not CSV: {error}") from error
    return Rows(rows, str(path), columns=columns, lines=lines)


def _read_parquet(path: Path, limit: int | None, key: str) -> Rows:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"{key} '{path}'", "pyarrow", "parquet") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{key}: {path} cannot be read as parquet: {error}") from error
    return Rows(table.slice(0, limit).to_pylist(), str(path), columns=table.column_names)


_READERS: dict[str, Callable[[Path, int | None, str], Rows]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _from_datasets(path: str, subset: str | None, split: str, limit: int | None, key: str) -> Rows:
    """A folder or hub data set through `datasets`; its rows are decoded when they are read."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(f"{key} '{path}' (a folder or hub data set)", "datasets", "hub") from error
    try:
        if (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise ValueError(f"there is no split '{split}'; the splits are {', '.join(loaded)}")
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(path, name=subset, split=split)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        # hub, network and format errors all derive from these
        what = "folder" if Path(path).is_dir() else "file, folder or hub data set"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{key}: no {what} '{path}' (split '{split}') could be loaded: {reason}") from error
    if limit is not None:
        loaded = loaded.select(range(min(limit, len(loaded))))
    return Rows(loaded, f"{path}[{split}]", columns=loaded.column_names)
