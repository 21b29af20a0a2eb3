"""Writing a trained model as a Hugging Face folder that loads anywhere."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path

from headrace.models.causal_lm import Backbone, CausalLM


def save_hf_folder(model: Backbone, path: Path) -> Path:
    """Writes weights (safetensors), config, tokenizer and end ids to `path`, whole or not at all.

    The folder is written beside its target and renamed; an older folder at `path` is replaced only then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        os.chmod(temporary, 0o755)
        before = model.hf.config
        model.hf.config = copy.deepcopy(before)
        try:
            model.hf.config._attn_implementation_internal = None
            for name in ("quantization_config",):
                if name in model.hf.config.__dict__:
                    delattr(model.hf.config, name)
            if isinstance(model, CausalLM) and model.eos_token_ids and model.hf.generation_config is not None:
                ids = list(model.eos_token_ids)
                model.hf.generation_config.eos_token_id = ids if len(ids) > 1 else ids[0]
            model.hf.save_pretrained(temporary)
        finally:
            model.hf.config = before
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
