"""Loading a Hugging Face causal language model from a folder, a hub id or a GGUF file."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from headrace.errors import ConfigError, MissingExtraError
from headrace.models import attention
from headrace.models.adapter_folder import adapter_folder, load_adapters, tokenizer_source
from headrace.models.causal_lm import CausalLM, verify_against_hf
from headrace.models.find import find_model
from headrace.models.gguf_tokenizer import repair_gguf_tokenizer
from headrace.models.lora import Adapters

logger = logging.getLogger(__name__)

# What transformers, safetensors and torch raise for a model that cannot be read.
LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    ImportError,
    RuntimeError,
    AttributeError,
    TypeError,
    pickle.UnpicklingError,
    SafetensorError,
    StrictDataclassError,  # numbers of a config.json that contradict each other
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU. Raises ConfigError for a device this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"run.device: '{name}' was asked for, but torch finds no CUDA device here; use 'cpu' or 'auto'"
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on CUDA and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def _gguf_arguments(path: Path) -> tuple[str, dict[str, Any]]:
    """transformers' arguments for a GGUF file. Raises MissingExtraError, naming the extra."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(f"model.path '{path}'", package, "gguf")
    return str(path.parent), {"gguf_file": path.name}


def load_tokenizer(path: str, trust_remote_code: bool = False, key: str = "model.path") -> Any:
    """The tokenizer of a folder, hub id or GGUF file (checked against the file, see models/gguf_tokenizer.py).

    An adapter folder without one has its base's.

    Raises ConfigError naming `key` when it cannot be loaded.
    """
    from transformers import AutoTokenizer

    path = tokenizer_source(find_model(path, key), key)
    source, extra = _gguf_arguments(Path(path)) if path.endswith(".gguf") else (path, {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **extra)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"{key}: no tokenizer could be loaded from '{path}': {first_line(error)}"
        ) from error
    if len(tokenizer) < 16 and not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise ConfigError(
            f"{key}: no tokenizer is in '{path}'; name the folder or hub id of one (model.tokenizer)"
        )
    if extra:
        repair_gguf_tokenizer(tokenizer, Path(path), key)
    return tokenizer


def load_causal_lm(
    path: str,
    *,
    key: str = "model.path",
    tokenizer: Any = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    verify: bool = True,
) -> CausalLM:
    """Loads weights and tokenizer, in evaluation mode, and checks the forward pass against the model's own.

    `path` may be an adapter folder: its base is loaded and the adapter put into it. `tokenizer` is one already loaded,
    or the folder or hub id of one (default: `path`). `dtype` "auto" is the one the weights are stored in. Raises
    ConfigError naming `key` when the folder cannot be read or lacks weights, the architecture is not a causal language
    model, or headrace's forward disagrees with the model's own.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    path = find_model(path, key)
    logger.info("loading %s", path)
    adapter = adapter_folder(path, key)
    weights = adapter.base if adapter is not None else path
    source, extra = _gguf_arguments(Path(weights)) if weights.endswith(".gguf") else (weights, {})
    if extra:
        from transformers import GgufConfig

        extra["quantization_config"] = GgufConfig(dequantize=True)
    try:
        with no_progress_bars():
            hf, info = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation=attention.IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **extra,
            )
    except LOADING_ERRORS as error:
        raise ConfigError(f"{key}: '{weights}' cannot be loaded: {first_line(error)}") from error
    require_weights(info["missing_keys"], weights, key)
    adapters = load_adapters(hf, adapter, key) if adapter is not None else None
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer or path, trust_remote_code, key)
    try:
        return wrap(
            hf,
            tokenizer,
            device=device,
            gradient_checkpointing=gradient_checkpointing,
            verify=verify,
            adapters=adapters,
        )
    except ConfigError as error:
        raise ConfigError(f"{key}: '{path}': {error}") from error


def require_weights(missing: Iterable[str], path: str, key: str) -> None:
    """Refuses weights that transformers did not find in the folder and filled with random numbers."""
    names = sorted(missing)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigError(f"{key}: '{path}' lacks weights the model needs: {names[0]}{more}")


def wrap(
    hf: Any,
    tokenizer: Any,
    *,
    device: torch.device | str = "cpu",
    gradient_checkpointing: bool = False,
    verify: bool = True,
    adapters: Adapters | None = None,
) -> CausalLM:
    """A CausalLM around a transformers model already in memory. Its dtype is kept; dropout is off for good."""
    attention.register()
    hf.set_attn_implementation(attention.IMPLEMENTATION)
    hf.to(device).eval()
    if torch.device(device).type == "cuda":
        # cuDNN builds a plan for every new shape, and ragged batches have new shapes at every step
        torch.backends.cuda.enable_cudnn_sdp(False)
    model = CausalLM(hf, tokenizer, eos_token_ids(hf, tokenizer), adapters)
    if verify:
        verify_against_hf(model)
    if gradient_checkpointing:
        model.use_gradient_checkpointing()
    return model


def copy_causal_lm(model: CausalLM) -> CausalLM:
    """A second, independent copy of the weights (the frozen reference). Raises ConfigError for a model in parts."""
    if model.shards.is_cut:
        raise ConfigError(
            "parallelism: a model in parts cannot be copied; load the copy onto its mesh as well"
        )
    return CausalLM(copy.deepcopy(model.hf), model.tokenizer, model.eos_token_ids, model.adapters)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers' own bars out of ours while it reads or writes weights."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def no_loading_report() -> Iterator[None]:
    """Keeps transformers' table of missing weights back where the caller judges them itself."""
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)


def eos_token_ids(hf: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a response: generation_config's, the config's and the tokenizer's, in that order.

    Only the *ids* are taken from generation_config, never a sampling setting.
    """
    found: list[int] = []
    sources = [getattr(hf.generation_config, "eos_token_id", None), hf.config.get_text_config().eos_token_id]
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    for value in sources:
        for token in value if isinstance(value, list | tuple) else [value]:
            if token is not None and token not in found:
                found.append(int(token))
    return tuple(found)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
