"""The `headrace` command. Exit codes: 0 done, 1 the run failed, 2 the configuration or data is wrong, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import difflib
import gc
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace import __version__, cli_doctor, cli_report
from headrace.cli_export import add_export, run_export
from headrace.config import Command, Config
from headrace.config_aliases import ALIASES, STRUCTURED, apply_aliases, suggest
from headrace.config_explain import explain, sections
from headrace.config_load import config_to_yaml, load_config, parse_value
from headrace.errors import ConfigError, HeadraceError
from headrace.observe.console import set_up_logging

logger = logging.getLogger(__name__)

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=", re.DOTALL)

COMMANDS: dict[str, str] = {
    "train": "train a model with reinforcement learning",
    "sft": "fine-tune a model on prompts with known responses",
    "reward-model": "train a reward model on pairs of a chosen and a rejected response",
    "dpo": "train a model on such pairs directly (DPO), without a reward model",
    "eval": "score a model on a held-out data set",
}


def flag(alias: str) -> str:
    return "--" + alias.replace("_", "-")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Reinforcement-learning post-training for language models.",
        epilog="Every setting: headrace config --explain",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, meaning in COMMANDS.items():
        _add_settings(commands.add_parser(name, help=meaning, description=meaning, allow_abbrev=False))
    add_export(commands)
    meaning = "print a resolved configuration, or explain every setting"
    config = commands.add_parser("config", help=meaning, description=meaning, allow_abbrev=False)
    _add_settings(config)
    config.add_argument(
        "--explain",
        nargs="?",
        const="all",
        metavar="SECTION",
        help=f"explain the settings of a section ({', '.join(sections())}), or of all",
    )
    meaning = "check a run and print what it would do and take; starts nothing"
    plan = commands.add_parser("plan", help=meaning, description=meaning, allow_abbrev=False)
    _add_settings(plan)
    plan.add_argument(
        "--command",
        dest="planned",
        choices=[c for c in COMMANDS if c != "eval"],
        default="train",
        help="of what run",
    )
    plan.add_argument(
        "--json", nargs="?", const="", metavar="FILE", help="write JSON to FILE.json, or print it instead"
    )
    plan.add_argument(
        "--svg", metavar="FILE", help="draw the stages and what moves between them into FILE.svg"
    )
    cli_report.add_parser(commands)
    cli_doctor.add_parser(commands)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "items",
        nargs="*",
        metavar="CONFIG.yaml key=value",
        help="a YAML file (optional when overrides suffice) and overrides such as train.steps=200",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    group = parser.add_argument_group("other names of settings", "each sets one key, like an override")
    for alias, meaning in {**{a: f"sets {key}" for a, key in ALIASES.items()}, **STRUCTURED}.items():
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if alias in _SWITCHES else {}
        group.add_argument(flag(alias), dest=alias, metavar="VALUE", help=meaning, **switch)
        if "_" in alias:
            group.add_argument(f"--{alias}", dest=alias, help=argparse.SUPPRESS, **switch)


# Flags that may stand without a value, and the values they take.
_SWITCHES = {"offload_optimizer", "enable_gradient_checkpointing"}
_SWITCH_VALUES = {"true", "false", "yes", "no", "on", "off", "1", "0"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; every deliberate error becomes lines on stderr."""
    try:
        arguments, rest = build_parser().parse_known_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    config: Config | None = None
    try:
        if "run" in arguments:  # a command of its own, not one of settings
            return int(arguments.run(arguments, rest))
        if arguments.command == "config" and arguments.explain is not None:
            return _explain(arguments, rest)
        if arguments.command == "export":
            set_up_logging()
            return run_export(arguments, rest)
        config = _load(arguments, rest)
        if arguments.command == "config":
            return _write(config_to_yaml(config))
        if arguments.command == "plan":
            return _plan(config, arguments)
        return _run(arguments.command, config)
    except HeadraceError as error:
        if arguments.debug:
            raise
        for line in error.violations if isinstance(error, ConfigError) else [str(error)]:
            sys.stderr.write(f"headrace: {line}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(
            f"headrace: stopped by Ctrl-C{_finished(config if arguments.command in COMMANDS else None)}\n"
        )
        return 130


def _finished(config: Config | None) -> str:
    """Where to look for what an interrupted run left; nothing where there is no run (yet)."""
    if config is None:
        return ""
    r = config.run
    where = Path(r.dir) / (r.name or "")
    if not where.is_dir():
        return ""
    return f"; what is finished is in {where if r.name else f'the newest folder of {where}'}"


def _run(command: str, config: Config) -> int:
    set_up_logging()
    if "torch" not in sys.modules:  # takes seconds, in which nothing else would be seen
        logger.info("headrace %s: loading torch and transformers", __version__)
    if command in ("reward-model", "dpo"):
        from headrace.trainers import preference

        return int((preference.run_dpo if command == "dpo" else preference.run_reward_model)(config))
    from headrace.trainers import launch

    run = {"train": launch.run_train, "sft": launch.run_sft, "eval": launch.run_eval}[command]
    return int(run(config))


def _plan(config: Config, arguments: argparse.Namespace) -> int:
    # collections find nothing while libraries load and cost a fifth of the time; no bytecode of the user's files
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    gc.disable()
    try:
        set_up_logging()
        from headrace.trainers.plan_output import run_plan

        return _write(run_plan(config, arguments.planned, arguments.json, arguments.svg))
    finally:
        gc.freeze()  # nor at the end of the process
        gc.enable()
        sys.dont_write_bytecode = before


def _explain(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.items or rest:
        raise ConfigError(
            f"{(arguments.items + rest)[0]}: --explain takes at most one section and nothing else"
        )
    flags = {flag(alias): key for alias, key in ALIASES.items()}
    return _write(explain(None if arguments.explain == "all" else arguments.explain, flags))


def _write(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (such as `head`) has seen enough; keep Python from complaining again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _load(arguments: argparse.Namespace, rest: list[str]) -> Config:
    """The configuration named by the command line. Raises ConfigError with every problem found."""
    problems: list[str] = []
    given = {a: getattr(arguments, a) for a in (*ALIASES, *STRUCTURED) if getattr(arguments, a) is not None}
    items = [*arguments.items, *rest]
    for alias in _SWITCHES & given.keys():
        # argparse took the word after a bare switch (such as the YAML file) for its value
        if given[alias].lower() not in _SWITCH_VALUES:
            items.insert(0, given[alias])
            given[alias] = "true"
    if arguments.command == "plan":
        if arguments.json and not arguments.json.endswith(".json"):
            # as above: what follows a bare --json is no file to write
            items.insert(0, arguments.json)
            arguments.json = ""
        if arguments.svg is not None and not arguments.svg.endswith(".svg"):
            problems.append(f"--svg: {arguments.svg!r} must end with .svg")
    path, overrides = _sort_items(items, problems)
    settings: dict[str, dict[str, Any]] = {}
    try:
        settings = apply_aliases({a: _flag_value(a, text) for a, text in given.items()})
    except ConfigError as error:
        problems += error.violations
    planned: Command | None = getattr(arguments, "planned", None)
    command: Command | None = None if arguments.command == "config" else planned or arguments.command
    try:
        config = load_config(path, overrides, command, settings)
    except ConfigError as error:
        raise ConfigError([*problems, *error.violations]) from error
    if problems:
        raise ConfigError(problems)
    return config


def _sort_items(items: list[str], problems: list[str]) -> tuple[str | None, list[str]]:
    """The YAML file and the overrides among the words that are no known flag (`--section.key=value` is one)."""
    path: str | None = None
    overrides: list[str] = []
    value_of_unknown = False
    for item in items:
        is_flag = item.startswith("-")
        bare = item.lstrip("-") if "." in item.partition("=")[0] else item
        if _OVERRIDE.match(bare):
            overrides.append(bare)
        elif is_flag:
            problems.append(_unknown_flag(item))
        elif path is None and not value_of_unknown:
            path = item
        elif not value_of_unknown:
            problems.append(f"{item}: expected key=value; the configuration file is {path}")
        value_of_unknown = is_flag and "=" not in item
    return path, overrides


def _flag_value(alias: str, text: str) -> Any:
    if alias in STRUCTURED and not text.lstrip().startswith(("{", "[")):
        return text
    return parse_value(ALIASES.get(alias, alias), text)


def _unknown_flag(text: str) -> str:
    name = text.partition("=")[0]
    bare = name.lstrip("-").replace("-", "_")
    close = difflib.get_close_matches(bare, [*ALIASES, *STRUCTURED], n=1, cutoff=0.75)
    return f"{name}: unknown flag" + (f"; did you mean {flag(close[0])}?" if close else suggest(bare))
