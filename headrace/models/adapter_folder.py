"""Adapter folders as peft writes them: adapter_config.json with the base's name, and the adapter's weights.

Weights are read from safetensors only. Plain LoRA is supported; variants that train or change more than A and B are
refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.find import find_model
from headrace.models.lora import ADAPTER, Adapters, adapter_layers, inject, is_linear, require_peft

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER = "tokenizer_config.json"
PREFIX = "base_model.model."  # peft's wrapper around the model, part of every saved name

# Keys of adapter_config.json that may have any value: what plain LoRA is made of, and notes that change nothing.
UNDERSTOOD = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_dropout",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "modules_to_save", "init_lora_weights",
}  # fmt: skip
# Ways to start that leave the base alone; others write into it.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class AdapterFolder:
    """A folder (or hub id) with an adapter. `base` is the model it belongs to, `raw` its adapter_config.json."""

    path: str
    base: str
    raw: dict[str, Any]

    @property
    def is_scalar(self) -> bool:
        return self.raw.get("task_type") == "SEQ_CLS"

    @property
    def tokenizer(self) -> str:
        """Where its tokenizer is: beside it, or with its base."""
        return self.path if cached_file(self.path, TOKENIZER) is not None else self.base

    def head_names(self, key: str = "model.path") -> set[str]:
        """The parameters of a scalar head that the folder holds."""
        return (
            {name for name in read_weights(self, key) if name.startswith("score.")}
            if self.is_scalar
            else set()
        )


def cached_file(path: str, name: str) -> Path | None:
    """The file `name` of a local folder or hub repository, None where it has none."""
    if Path(path).exists():
        file = Path(path) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file as from_hub

    quiet = ("gated_repo", "missing_entries", "connection_errors")
    try:
        found = from_hub(path, name, **{f"_raise_exceptions_for_{what}": False for what in quiet})
    except OSError:
        return None  # no such repository: loading the model itself will say so, naming the key
    return Path(found) if found else None


def adapter_folder(path: str, key: str = "model.path", base: str | None = None) -> AdapterFolder | None:
    """What kind of adapter `path` (as found by find_model) holds, or None for anything else.

    `base` stands in for the base that the folder names. Raises ConfigError naming `key` for an adapter that cannot be
    used, MissingExtraError without peft.
    """
    file = None if path.endswith(".gguf") else cached_file(path, CONFIG)
    if file is None:
        return None
    require_peft(f"{key} '{path}' (an adapter)")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: '{file}' cannot be read as JSON ({error})") from error
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else None
        raise ConfigError(f"{key}: '{path}' is an adapter of kind {kind!r}; only LORA is supported")
    odd = _beyond_plain_lora(raw)
    if odd:
        raise ConfigError(
            f"{key}: the adapter in '{path}' is more than plain LoRA ({', '.join(odd)}), which is not supported; merge it"
            " into its base with the tool that made it"
        )
    if cached_file(path, WEIGHTS) is None:
        raise ConfigError(f"{key}: '{path}' has {CONFIG} and no {WEIGHTS}; older formats are not read")
    named = base or raw.get("base_model_name_or_path")
    if not named:
        raise ConfigError(f"{key}: '{path}/{CONFIG}' names no base (base_model_name_or_path)")
    try:
        found = find_model(str(named), key)
    except ConfigError as error:
        raise ConfigError(
            f"{key}: the adapter in '{path}' belongs to the model '{named}', which is not there; correct"
            f" base_model_name_or_path in its {CONFIG}"
        ) from error
    if Path(found).is_dir() and (Path(found) / CONFIG).is_file():
        raise ConfigError(
            f"{key}: the base of '{path}', '{found}', is itself an adapter; merge that one first"
        )
    return AdapterFolder(path, found, raw)


def _beyond_plain_lora(raw: dict[str, Any]) -> list[str]:
    """The settings under which more than A and B would be trained, or the base changed."""
    import peft

    plain = {name: _plain_json(value) for name, value in peft.LoraConfig().to_dict().items()}
    odd = [k for k, value in raw.items() if k not in UNDERSTOOD and value and value != plain.get(k)]
    heads = ["score"] if raw.get("task_type") == "SEQ_CLS" else []
    if (raw.get("modules_to_save") or []) not in ([], heads):
        odd.append("modules_to_save")
    if raw.get("init_lora_weights", True) not in PLAIN_STARTS:
        odd.append("init_lora_weights")
    return [f"{name}={raw[name]!r}" for name in odd]


def _plain_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def weights_source(path: str, key: str = "model.path") -> str:
    """Where a whole model is: `path` (as found by find_model), or the base of the adapter there."""
    adapter = adapter_folder(path, key)
    return path if adapter is None else adapter.base


def tokenizer_source(path: str, key: str = "model.path") -> str:
    """`path`, or the base of an adapter folder that holds no tokenizer."""
    if cached_file(path, TOKENIZER) is not None:
        return path
    adapter = adapter_folder(path, key)
    return path if adapter is None else adapter.tokenizer


def read_weights(adapter: AdapterFolder, key: str = "model.path") -> dict[str, Tensor]:
    """The saved tensors by peft's names, less its prefix. Raises ConfigError for a file that cannot be read."""
    file = cached_file(adapter.path, WEIGHTS)
    try:
        saved = load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{key}: '{file}' cannot be read ({error})") from error
    return {name.removeprefix(PREFIX): value for name, value in saved.items()}


@torch.no_grad()
def load_adapters(
    hf: Any, adapter: AdapterFolder, key: str = "model.path", *, exact: bool = False
) -> Adapters:
    """Puts the folder's adapter into its base `hf`, without dropout; a scalar head in the folder replaces hf's.

    `exact` keeps the saved dtype instead of that of the layers (for a merge). Raises ConfigError naming `key`
    when the weights do not fit the model.
    """
    import peft

    known = peft.LoraConfig.from_peft_type(**adapter.raw)
    known.lora_dropout, known.init_lora_weights, known.inference_mode = 0.0, True, False
    known.modules_to_save = None  # a scalar head is loaded and trained as it is
    try:
        adapters = inject(hf, known, adapter.base)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{key}: the adapter in '{adapter.path}' does not fit {type(hf).__name__}: {error}"
        ) from error
    _only_linear(hf, adapter, key, head=exact)
    state = {runtime_name(name): value for name, value in read_weights(adapter, key).items()}
    own = dict(hf.named_parameters())
    heads = {name for name in state if name.startswith("score.")} if adapter.is_scalar else set()
    odd = sorted((state.keys() - heads) ^ set(adapters.names)) + sorted(heads - own.keys())
    odd = odd or [name for name, value in state.items() if own[name].shape != value.shape]
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise ConfigError(
            f"{key}: the adapter in '{adapter.path}' does not fit '{adapter.base}': {odd[0]}{more} (missing, unknown or"
            " of another shape)"
        )
    for name, value in state.items():
        if exact and name not in heads:
            own[name].data = value.to(own[name].device)
        else:
            own[name].copy_(value)
    return adapters


def _only_linear(hf: Any, adapter: AdapterFolder, key: str, *, head: bool) -> None:
    """Refuses adapters on embeddings and, unless `head`, on the output head, whose weight is used without them."""
    for name, layer in adapter_layers(hf).items():
        is_head = not name.startswith(f"{hf.base_model_prefix}.")
        if not is_linear(layer.base_layer) or (is_head and not head):
            raise ConfigError(
                f"{key}: the adapter in '{adapter.path}' changes '{name}'; only linear layers below the output head are"
                " supported"
            )


def runtime_name(saved: str) -> str:
    """`….lora_A.weight` as saved → `….lora_A.default.weight` as in the model."""
    module, _, leaf = saved.rpartition(".")
    return f"{module}.{ADAPTER}.{leaf}" if module.rpartition(".")[2].startswith("lora_") else saved


def saved_name(runtime: str) -> str:
    """The inverse of `runtime_name`, with peft's prefix."""
    return PREFIX + runtime.replace(f".{ADAPTER}.", ".")
