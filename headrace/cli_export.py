"""The command line of `headrace export`."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.errors import ConfigError

MEANING = "write a trained model as a Hugging Face folder that loads anywhere"


def add_export(commands: Any) -> None:
    """Adds the command to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "export", help=MEANING, description=MEANING, allow_abbrev=False
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a run's directory (its model/, or --checkpoint), a model or adapter folder, a .gguf file, or a hub id",
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write; must not exist yet, or be empty")
    parser.add_argument(
        "--checkpoint",
        metavar="STEP|latest|best",
        help="of a run: the policy of this checkpoint, instead of the final model",
    )
    parser.add_argument(
        "--merged", action="store_true", help="add LoRA adapters to their base and write the whole model"
    )
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="the base of adapters, or the model a run began with, when it is not where they say",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the written weights (default: as they are stored; .gguf: float32)",
    )
    parser.add_argument(
        "--shard-size", metavar="SIZE", default="5GB", help="largest weight file (default: 5GB)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model folder at OUT")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the model folder"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run_export(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Raises ConfigError for words that are no argument of it."""
    if rest:
        raise ConfigError(f"{rest[0]}: unknown argument; see headrace export --help")
    from headrace.trainers.export import export

    export(
        arguments.source,
        arguments.out,
        merged=arguments.merged,
        base=arguments.base,
        dtype=arguments.dtype,
        shard_size=arguments.shard_size,
        overwrite=arguments.overwrite,
        trust_remote_code=arguments.trust_remote_code,
        checkpoint=arguments.checkpoint,
    )
    return 0
