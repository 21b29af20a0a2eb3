"""How large the adapters of a model are, from its configuration or from an adapter file's header: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.config import LoraConfig
from headrace.errors import ConfigError
from headrace.models.adapter_folder import CONFIG, WEIGHTS, adapter_folder, cached_file
from headrace.models.find import find_model
from headrace.models.lora import linear_layers, matches, resolve_targets
from headrace.models.shape import tensor_shapes


@dataclass(frozen=True)
class AdapterSize:
    """`parameters` of A [rank, in] and B [out, rank] of every adapted layer; `inner`: the sum of their ranks.

    `loaded`: they come from a folder, so that they change what the base computes from the start.
    """

    parameters: int
    inner: int
    loaded: bool = False


def read_adapters(
    path: str, key: str, lora: LoraConfig, *, trains: bool, trust_remote_code: bool = False
) -> AdapterSize | None:
    """The adapters that a folder or hub id brings, or that a model that `trains` gets by `lora.rank`; None: neither.

    None also for a GGUF file and for what has no readable configuration. Raises ConfigError naming `key` for a path
    that does not exist or an adapter that cannot be used, and naming lora.targets for a target that is no linear layer.
    """
    found = find_model(path, key)
    adapter = adapter_folder(found, key)
    if adapter is not None:
        return _in_folder(adapter.path, key)
    if not trains or not lora.rank or found.endswith(".gguf"):
        return None
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(found, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError):
        return None
    targets = resolve_targets(hf, lora.targets)
    adapted = [name for name in linear_layers(hf) if any(matches(name, target) for target in targets)]
    ends = sum(sum(hf.get_submodule(name).weight.shape) for name in adapted)
    return AdapterSize(lora.rank * ends, lora.rank * len(adapted))


def _in_folder(path: str, key: str) -> AdapterSize:
    file = cached_file(path, WEIGHTS)
    try:
        shapes = tensor_shapes(file) if file is not None else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: '{file}' beside {CONFIG} cannot be read ({error})") from error
    sizes = {name: shape for name, shape in shapes.items() if ".lora_" in name}
    inner = sum(shape[0] for name, shape in sizes.items() if ".lora_A" in name)
    return AdapterSize(sum(a * b for a, b in sizes.values()), inner, loaded=True)
