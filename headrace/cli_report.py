"""`headrace report RUN [RUN ...]`: one HTML page about one or several runs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from headrace.errors import ConfigError


def add_parser(commands: Any) -> None:
    meaning = "write one HTML page about one or several runs"
    parser = commands.add_parser("report", help=meaning, description=meaning, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run, such as runs/first")
    parser.add_argument(
        "--out",
        metavar="FILE.html",
        help="where to write (default: report.html in RUN, or beside the first of several)",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Writes the page and prints its path. Raises ConfigError for a directory that holds no run."""
    from headrace.observe.report import write_report

    if rest:
        raise ConfigError(f"{rest[0]}: headrace report takes the directories of runs and --out FILE.html")
    sys.stdout.write(f"{write_report(arguments.runs, arguments.out)}\n")
    return 0
