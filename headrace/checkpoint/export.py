"""Writing a trained model as a Hugging Face folder that loads anywhere, or its adapters in peft's format."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import RunError
from headrace.models.adapter_folder import WEIGHTS, saved_name
from headrace.models.causal_lm import Backbone, CausalLM, ScalarModel
from headrace.models.hf import no_progress_bars
from headrace.models.shards import local
from headrace.training.gathered import GatheredTensors

SHARD_SIZE = "5GB"


def save_hf_folder(model: Backbone, path: Path, *, shard_size: str = SHARD_SIZE, writes: bool = True) -> Path:
    """Writes weights (safetensors), config, tokenizer and end ids to `path`, whole or not at all.

    Of a model with adapters: the adapters, as peft's `PeftModel.from_pretrained(base, path)` reads them, and the
    tokenizer. The folder is written beside its target and renamed; an older folder at `path` is replaced only then.
    Weights above `shard_size` are cut into several files. Every process of the model's mesh has to call, and one of them
    `writes`: it gets the parts of all, one tensor after the other. Raises RunError when that fails, as on a full disk.
    """
    state = _whole_state(model, writes) if model.shards.is_cut else None
    if not writes:
        return path
    if model.adapters is not None:
        return write_whole(path, lambda folder: _write_adapters(model, folder))
    return write_whole(path, lambda folder: _write_model(model, folder, shard_size, state))


def _whole_state(model: Backbone, writes: bool) -> dict[str, Tensor]:
    """Every parameter of a model that is cut, whole and on the CPU, where this process `writes`; else nothing."""
    own = {f"weight/{name}": local(parameter) for name, parameter in model.hf.named_parameters()}
    state: dict[str, Tensor] = {}
    for key, whole in GatheredTensors(own, model.shards).items():
        if writes:
            state[key.removeprefix("weight/")] = whole.to("cpu", model.dtype)
    return state


def write_whole(path: Path, write: Callable[[Path], None]) -> Path:
    """Lets `write` fill a folder that becomes `path` only when it is complete. Raises RunError when it fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            os.chmod(temporary, 0o755)
            write(temporary)
            _share(temporary)
            _replace(path, temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: the model cannot be written ({error})") from error
    return path


def _share(folder: Path) -> None:
    """Gives every file the permissions of an ordinary new one; safetensors lets only the owner read its own."""
    ordinary = folder / ".ordinary"
    ordinary.touch()
    mode = ordinary.stat().st_mode & 0o777
    ordinary.unlink()
    for file in folder.iterdir():
        os.chmod(file, mode)


def _replace(path: Path, temporary: Path) -> None:
    if not path.exists():
        os.rename(temporary, path)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent))
    os.rename(path, retired / "model")
    os.rename(temporary, path)
    shutil.rmtree(retired)


def _write_model(model: Backbone, folder: Path, shard_size: str, state: dict[str, Tensor] | None) -> None:
    hf, config = model.hf, model.hf.config
    generation = hf.generation_config if isinstance(model, CausalLM) else None
    hf.config = copy.deepcopy(config)
    try:
        hf.config._attn_implementation_internal = None
        if "quantization_config" in hf.config.__dict__:
            delattr(hf.config, "quantization_config")
        if generation is not None:
            hf.generation_config = type(generation)()
        with no_progress_bars():
            hf.save_pretrained(folder, max_shard_size=shard_size, state_dict=state)
    finally:
        hf.config = config
        if generation is not None:
            hf.generation_config = generation
    if isinstance(model, CausalLM) and generation is not None:
        # written here, because save_pretrained refuses settings that it loads and that many folders have
        kept, ids = copy.deepcopy(generation), list(model.eos_token_ids)
        if ids:
            kept.eos_token_id = ids if len(ids) > 1 else ids[0]
        kept.to_json_file(folder / "generation_config.json")
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def _write_adapters(model: Backbone, folder: Path) -> None:
    if model.adapters is None:
        raise RunError("this model has no adapters to write")
    settings = copy.deepcopy(model.adapters.settings)
    settings.base_model_name_or_path = model.adapters.base
    settings.inference_mode = True
    if isinstance(settings.target_modules, set):  # peft would write it in the order of this process's hashes
        settings.target_modules = sorted(settings.target_modules)
    if isinstance(model, ScalarModel):
        settings.task_type, settings.modules_to_save = "SEQ_CLS", ["score"]
    settings.save_pretrained(folder)
    state = {saved_name(name): value.contiguous() for name, value in model.trainable_state().items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)
