"""Writing a trained model as a Hugging Face folder that loads anywhere."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from headrace.errors import RunError
from headrace.models.causal_lm import Backbone, CausalLM
from headrace.models.hf import no_progress_bars


def save_hf_folder(model: Backbone, path: Path) -> Path:
    """Writes weights (safetensors), config, tokenizer and end ids to `path`, whole or not at all.

    The folder is written beside its target and renamed; an older folder at `path` is replaced only then.
    Raises RunError when that fails, as on a full disk.
    """
    try:
        return _save(model, path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: the model cannot be written ({error})") from error


def _save(model: Backbone, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        os.chmod(temporary, 0o755)
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
                hf.save_pretrained(temporary)
        finally:
            hf.config = config
            if generation is not None:
                hf.generation_config = generation
        if isinstance(model, CausalLM) and generation is not None:
            # written here, because save_pretrained refuses settings that it loads and that many folders have
            kept, ids = copy.deepcopy(generation), list(model.eos_token_ids)
            if ids:
                kept.eos_token_id = ids if len(ids) > 1 else ids[0]
            kept.to_json_file(temporary / "generation_config.json")
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(temporary)
        if path.exists():
            retired = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent))
            os.rename(path, retired / "model")
            os.rename(temporary, path)
            shutil.rmtree(retired)
        else:
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path
