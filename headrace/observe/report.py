"""The report of one or several runs: one self-contained HTML page that needs no network and fetches nothing.

The page's look is in report_page/. Its texts come from models and are hostile: everything is escaped, and the
page's own Content-Security-Policy allows its one style and its one script, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, DataError, HeadraceError, RunError
from headrace.observe.report_charts import page_data
from headrace.observe.report_facts import facts, headlines, notes, numbers_table, setting_text, title
from headrace.observe.report_runs import ReportRun, read_run, settings_that_differ
from headrace.observe.report_timeline import timelines

logger = logging.getLogger(__name__)


def write_report(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes the page about the runs and returns its path.

    Without `out` it is `report.html` in the run's directory; of several runs, in the folder of the first one's.

    Raises ConfigError for an `out` that is no .html file, DataError for a directory that holds no run, RunError
    when the page cannot be written.
    """
    paths = [Path(path) for path in run_dirs]
    if not paths:
        raise DataError("report: give the directory of at least one run")
    if out is not None and (Path(out).suffix.lower() not in (".html", ".htm") or Path(out).is_dir()):
        raise ConfigError(f"--out: '{out}' is no name of a page; name a file that ends with .html")
    runs = [read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    target = (
        Path(out) if out is not None else (paths[0] if len(paths) == 1 else paths[0].parent) / "report.html"
    )
    # written aside and moved into place, so that a reader never finds half a page
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(render(runs), encoding="utf-8", errors="replace")
        aside.replace(target)
    except OSError as error:
        raise RunError(f"{target}: the report cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return target


def write_run_report(run_dir: Path) -> None:
    """The report at the end of a run: whatever keeps it from being written is a warning, since the run is done."""
    from jinja2 import TemplateError

    try:
        if (run_dir / "metrics.jsonl").stat().st_size:
            logger.info("the report is %s", write_report([run_dir]))
    except (HeadraceError, TemplateError, OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("no report.html was written: %s: %s", type(error).__name__, error)


def render(runs: Sequence[ReportRun]) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    page = files("headrace.observe") / "report_page"
    style, script = ((page / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["setting"] = setting_text
    environment.filters["breakable"] = _breakable
    timeline = timelines(runs)  # first, since it may add to the notes
    template = environment.from_string((page / "page.html").read_text(encoding="utf-8"))
    return template.render(
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=Markup(_json(page_data(runs))),
        title=title(runs),
        runs=[facts(run) for run in runs],
        headlines=headlines(runs),
        timeline=timeline,
        numbers=numbers_table(runs),
        differences=settings_that_differ(runs) if len(runs) > 1 else [],
        notes=notes(runs),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
    )


def _breakable(text: str) -> Any:
    """The text with places after . _ / and : at which a narrow table may break it."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[._/:])(?=\w)", text))


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of what is above them as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{p[-1]} ({i + 1})" for i, p in enumerate(parts)]


def _json(value: Any) -> str:
    """JSON that cannot end the element it stands in, whatever its texts are."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
