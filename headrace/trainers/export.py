"""`headrace export`: a trained model as a folder that loads anywhere."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from headrace.checkpoint.export import SHARD_SIZE, save_hf_folder, write_whole
from headrace.checkpoint.source import DTYPES, KEY, Source, find_source, load_source
from headrace.errors import ConfigError
from headrace.models.adapter_folder import CONFIG, WEIGHTS, AdapterFolder, cached_file
from headrace.models.hf import load_tokenizer

logger = logging.getLogger(__name__)

ADAPTER_WRITTEN = "the adapter is in %s; its base is %s (--merged would add it)"


def export(
    source: str,
    out: str | Path,
    *,
    merged: bool = False,
    base: str | None = None,
    dtype: str | None = None,
    shard_size: str = SHARD_SIZE,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    checkpoint: str | int | None = None,
) -> Path:
    """Writes `source` (a run, a model or adapter folder, a .gguf file, a hub id) to the folder `out`.

    `checkpoint` takes the policy of a run's checkpoint instead of its final model: a step, "latest" or "best". An
    adapter stays one, in peft's format, unless `merged` adds it to its base. `dtype` is that of the written
    weights (None: as stored). Raises ConfigError before anything is written when source or target will not do,
    RunError when writing fails; a folder at `out` is replaced only by a complete one.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}, got '{dtype}'")
    if not re.fullmatch(r"[1-9]\d*[MG]B", shard_size):
        raise ConfigError(f"--shard-size: expected a size such as 5GB or 500MB, got '{shard_size}'")
    target = Path(out).expanduser()
    check_target(target, overwrite=overwrite)
    found = find_source(source, base, None if checkpoint is None else str(checkpoint))
    check_apart(found, target)
    if found.adapter is not None and not merged:
        _copy_adapter(found.adapter, target, dtype)
        logger.info(ADAPTER_WRITTEN, target, found.adapter.base)
        return target
    model = load_source(found, dtype=dtype, merged=merged, trust_remote_code=trust_remote_code)
    save_hf_folder(model, target, shard_size=shard_size)
    if model.adapters is not None:
        logger.info(ADAPTER_WRITTEN, target, model.adapters.base)
        return target
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    logger.info("the model is in %s (%.1f MB of weights)", target, size / 1e6)
    return target


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raises ConfigError unless `target` is free, empty, or, with `overwrite`, a model folder."""
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{KEY}: '{target}' is not a folder; name one that does not exist yet")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise ConfigError(
            f"{KEY}: '{target}' is not empty; choose another folder, or replace it by --overwrite"
        )
    if not (target / "config.json").is_file() and not (target / CONFIG).is_file():
        raise ConfigError(
            f"--overwrite: '{target}' is not the folder of a model (no config.json or {CONFIG} in it), so it is not"
            " replaced; choose another one"
        )


def check_apart(source: Source, target: Path) -> None:
    """Raises ConfigError for a target inside what is read, or around it."""
    own = target.resolve()
    for read in (path.resolve() for path in source.reads):
        if own.is_relative_to(read):
            raise ConfigError(
                f"{KEY}: '{target}' lies inside '{read}', which is read; choose a folder elsewhere"
            )
        if read.is_relative_to(own):
            raise ConfigError(f"{KEY}: '{target}' holds '{read}', which is read; choose a folder elsewhere")


def _copy_adapter(adapter: AdapterFolder, target: Path, dtype: str | None) -> None:
    weights = cached_file(adapter.path, WEIGHTS)
    tokenizer = load_tokenizer(adapter.tokenizer, key=KEY)

    def write(folder: Path) -> None:
        if dtype is None:
            shutil.copyfile(str(weights), folder / WEIGHTS)
        else:
            state = {name: value.to(DTYPES[dtype]) for name, value in load_file(str(weights)).items()}
            save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
        raw = {**adapter.raw, "base_model_name_or_path": adapter.base}
        (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(folder)

    write_whole(target, write)
