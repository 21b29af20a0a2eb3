"""What `headrace export` is given: a run, a checkpoint, a model or adapter folder, a .gguf file or a hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.checkpoint.save import CheckpointStore
from headrace.checkpoint.trained import TrainedPolicy, find_policy, is_checkpoint
from headrace.errors import ConfigError
from headrace.models.adapter_folder import CONFIG, AdapterFolder, adapter_folder, load_adapters
from headrace.models.causal_lm import Backbone
from headrace.models.find import find_model
from headrace.models.heads import load_scalar_model
from headrace.models.hf import LOADING_ERRORS, first_line, load_causal_lm, load_tokenizer
from headrace.models.lora import merge
from headrace.observe.run_dir import RunDirectory

KEY = "export"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Source:
    """Where the weights are. `adapter` is set for an adapter folder, `policy` for a checkpoint; `reads` is everything
    that must not be replaced."""

    path: str
    adapter: AdapterFolder | None
    reads: tuple[Path, ...]
    policy: TrainedPolicy | None = None


def find_source(given: str, base: str | None = None, checkpoint: str | None = None) -> Source:
    """Decides what `given` is, reading no weights. `base` stands in for the base that an adapter or run names,
    `checkpoint` chooses one of a run's: the number of its step, "latest" or "best".

    Raises ConfigError for what is none of the kinds.
    """
    if checkpoint is not None or is_checkpoint(Path(given).expanduser()):
        policy = find_policy(given, checkpoint, base)
        return Source(str(policy.checkpoint.path), None, tuple(p for p in policy.reads if p.exists()), policy)
    path = find_model(given, KEY)
    local, reads = Path(path), [Path(path)]
    if local.is_file() and local.suffix != ".gguf":
        raise ConfigError(f"{KEY}: '{given}' is a file; give the folder of a run or model, or a .gguf file")
    if local.is_dir():
        local = _model_folder(local)
        path = str(local)
    adapter = adapter_folder(path, KEY, base)
    if adapter is None and base is not None:
        raise ConfigError(
            f"--base: '{given}' is a whole model, not an adapter, so it has no base; leave it out"
        )
    if adapter is not None:
        reads.append(Path(adapter.base))
    return Source(path, adapter, tuple(p for p in reads if p.exists()))


def _model_folder(folder: Path) -> Path:
    """`folder`, or the model/ of a run."""
    run = RunDirectory(folder)
    if (folder / "config.json").is_file() or (folder / CONFIG).is_file():
        return folder
    if not run.config.is_file():
        raise ConfigError(
            f"{KEY}: '{folder}' is neither a run (config.yaml) nor a model (config.json) nor an adapter ({CONFIG})"
        )
    if not run.model.is_dir():
        raise ConfigError(
            f"{KEY}: the run '{folder}' saved no model; it was killed, ended before its first step, or had"
            f" run.save_final=false{_checkpoints(run)}"
        )
    return run.model


def _checkpoints(run: RunDirectory) -> str:
    steps = CheckpointStore(run.checkpoints, keep=0).steps().values()
    return f"; it has checkpoints to choose by --checkpoint: {', '.join(map(str, steps))}" if steps else ""


def load_source(source: Source, *, dtype: str | None, merged: bool, trust_remote_code: bool) -> Backbone:
    """The model to be written, on the CPU, in `dtype` (None: each tensor as it is stored).

    An adapter is added to its base when `merged`, computed in float32 whatever is stored. Of a checkpoint whose run
    trained adapters and that is not `merged`, only these are cast. Raises ConfigError.
    """
    model: Backbone
    if source.policy is not None:
        model = source.policy.load(masters=dtype is not None, trust_remote_code=trust_remote_code)
        if model.adapters is not None and not merged:
            if dtype is not None:
                for parameter in model.trained_parameters().values():
                    parameter.data = parameter.data.to(DTYPES[dtype])
            return model
    elif source.adapter is not None and merged:
        model = _load(
            source.adapter.base, source.adapter.is_scalar, trust_remote_code, source.adapter.tokenizer
        )
        model.adapters = load_adapters(model.hf, source.adapter, KEY, exact=True)
    else:
        model = _load(source.path, _is_scalar(source.path, trust_remote_code), trust_remote_code)
    if model.adapters is not None and merged:
        if dtype is not None:
            model.hf.to(DTYPES["float32"])  # rounded once, below
        merge(model.hf)
        model.adapters = None
    if dtype is not None:
        model.hf.to(DTYPES[dtype])
    return model


def _load(path: str, scalar: bool, trust_remote_code: bool, tokenizer: str | None = None) -> Backbone:
    keywords: dict[str, Any] = {"key": KEY, "device": "cpu", "trust_remote_code": trust_remote_code}
    # what a .gguf file holds becomes float32; everything else says itself what it is
    dtype: torch.dtype | Literal["auto"] = torch.float32 if path.endswith(".gguf") else "auto"
    if not scalar:
        return load_causal_lm(path, dtype=dtype, tokenizer=tokenizer, verify=False, **keywords)
    model = load_scalar_model(path, dtype=dtype, needs_head=tokenizer is None, **keywords)
    if tokenizer is not None:
        model.tokenizer = load_tokenizer(tokenizer, trust_remote_code, KEY)
    return model


def _is_scalar(path: str, trust_remote_code: bool) -> bool:
    """True for a sequence-classification model (a critic or reward model), by its config."""
    from transformers import AutoConfig

    if path.endswith(".gguf"):
        return False
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ConfigError(f"{KEY}: '{path}' cannot be loaded: {first_line(error)}") from error
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
