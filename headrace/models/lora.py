"""LoRA adapters inside a Hugging Face model, by `peft`: injecting, loading, switching off, merging.

LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685, equation 3): a frozen linear layer W [out, in] computes
W x + (alpha / r) B A x with A [r, in] and B [out, r] trained; B starts at 0, so training starts at exactly W. The
adapters sit in the model's own modules, so rollout, training and evaluation all compute base + adapters, and the base
is never written to.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.config import LoraConfig
from headrace.errors import ConfigError, MissingExtraError

logger = logging.getLogger(__name__)

ADAPTER = "default"  # the name peft files an adapter under unless told otherwise
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Adapters:
    """The adapters in a model. `names` are their parameters in `hf`, `settings` peft's own LoraConfig of them.

    `base` is the folder, file or hub id that holds the frozen weights.
    """

    names: tuple[str, ...]
    settings: Any
    base: str


def require_peft(what: str) -> None:
    """Raises MissingExtraError, naming the extra and what needs it, where peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(what, "peft", "lora")


def add_adapters(hf: Any, lora: LoraConfig, base: str) -> Adapters:
    """Injects fresh adapters into `hf`: A random, from torch's generator; B zero; no dropout.

    They take the dtype and device of the layers they belong to. Raises ConfigError naming lora.targets, with nothing
    changed, for a target that is no linear layer below the output head.
    """
    require_peft("lora.rank")
    import peft

    targets = resolve_targets(hf, lora.targets)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # peft writes whole ones
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=any(type(hf.get_submodule(name)).__name__ == "Conv1D" for name in linear_layers(hf)),
        task_type="SEQ_CLS" if is_scalar(hf) else "CAUSAL_LM",
    )
    adapters = inject(hf, settings, base)
    trained = sum(p.numel() for name, p in hf.named_parameters() if name in set(adapters.names))
    frozen = sum(p.numel() for p in hf.parameters()) - trained
    logger.info(
        "lora: rank %d on %d layers (%s); %.2f million parameters train beside %.2f million that stay",
        lora.rank,
        len(adapter_layers(hf)),
        ", ".join(targets),
        trained / 1e6,
        frozen / 1e6,
    )
    return adapters


def inject(hf: Any, settings: Any, base: str) -> Adapters:
    """Adapters as peft's `settings` describe them, put into `hf`; what was there before is frozen."""
    import peft

    before = {id(parameter) for parameter in hf.parameters()}
    peft.inject_adapter_in_model(settings, hf, adapter_name=ADAPTER)
    for layer in adapter_layers(hf).values():
        layer.eval()
    # a loaded adapter's names are patterns; these are the parameters they really became
    names = tuple(name for name, parameter in hf.named_parameters() if id(parameter) not in before)
    local = Path(base).expanduser()
    return Adapters(names, settings, str(local.resolve()) if local.exists() else base)


def check_same(adapters: Adapters, lora: LoraConfig, where: str) -> None:
    """Refuses settings that contradict the adapters a model came with. Raises ConfigError naming the key."""
    if lora.rank is None:
        return
    own = adapters.settings
    targets = own.target_modules
    said: dict[str, Any] = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
    have: dict[str, Any] = {
        "rank": own.r,
        "alpha": float(own.lora_alpha),
        "targets": [targets] if isinstance(targets, str) else sorted(targets),
    }
    if said["targets"] == [ALL_LINEAR]:
        del said["targets"]
    problems = [
        f"lora.{name}: {value} contradicts the adapter in '{where}', which has {have[name]}; leave the lora settings"
        " out to go on training it, or export it merged first and give it a new one"
        for name, value in said.items()
        if value != have[name]
    ]
    if problems:
        raise ConfigError(problems)


def linear_layers(hf: Any) -> list[str]:
    """The dotted names of the linear layers below the output head."""
    return [name for name, module in _below_head(hf).items() if is_linear(module)]


def resolve_targets(hf: Any, targets: list[str]) -> list[str]:
    """The ends of names that peft is to look for. Raises ConfigError naming lora.targets and what there is."""
    linear = linear_layers(hf)
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    if targets == [ALL_LINEAR]:
        return ends
    below = _below_head(hf)
    available = f"; the linear layers of {type(hf).__name__} are {', '.join(ends)}"
    problems = []
    for target in targets:
        found = [name for name in dict(hf.named_modules()) if matches(name, target)]
        wrong = next((name for name in found if name not in linear), None)
        if not found:
            problems.append(f"lora.targets: no layer is named '{target}'{available}")
        elif wrong is not None and wrong not in below:
            problems.append(f"lora.targets: '{target}' is the output head, which gets no adapter{available}")
        elif wrong is not None:
            kind = type(below[wrong]).__name__
            problems.append(f"lora.targets: '{target}' is a {kind}, not a linear layer{available}")
    if problems:
        raise ConfigError(problems)
    return list(dict.fromkeys(targets))


def matches(name: str, target: str) -> bool:
    """True for a module called `target`, or whose dotted name ends in it."""
    return name == target or name.endswith(f".{target}")


def is_linear(module: nn.Module) -> bool:
    """A plain matrix of weights, in torch's layout or in that of GPT-2."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def is_scalar(hf: Any) -> bool:
    return hf.get_output_embeddings() is None


def _below_head(hf: Any) -> dict[str, nn.Module]:
    prefix = f"{hf.base_model_prefix}."
    return {name: module for name, module in hf.named_modules() if name.startswith(prefix)}


def adapter_layers(hf: Any) -> dict[str, Any]:
    """The layers that carry an adapter, by their names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in hf.named_modules() if isinstance(module, BaseTunerLayer)}


def base_state(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module with adapters, without them, under the names they have in a plain one."""
    return {
        name.replace(".base_layer.", "."): value
        for name, value in module.state_dict().items()
        if ".lora_" not in name
    }


@contextlib.contextmanager
def adapters_off(hf: Any) -> Iterator[None]:
    """Inside, the model computes exactly what its base computes; afterwards all is as it was, errors or not."""
    layers = list(adapter_layers(hf).values())
    # peft changes requires_grad along with the switch
    flags = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextlib.contextmanager
def adapters_holding(hf: Any, values: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the named parameters hold `values`; afterwards they are what they were, errors or not."""
    parameters = dict(hf.named_parameters())
    own = {name: parameters[name].data for name in values}
    try:
        for name, value in values.items():
            parameters[name].data = value
        yield
    finally:
        for name, value in own.items():
            parameters[name].data = value


@torch.no_grad()
def merge(hf: Any) -> None:
    """Adds every adapter to its layer's weight, W + (alpha / r) B A in float32, and takes the adapters out.

    The sum is rounded once, to the dtype of W. Raises ConfigError, with nothing changed, for an adapter on a matrix
    that another layer uses as well, as a tied output head.
    """
    layers = adapter_layers(hf)
    owners: dict[int, int] = {}
    for module in hf.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, layer in layers.items():
        if owners[id(layer.get_base_layer().weight)] > 1:
            raise ConfigError(
                f"the adapter on '{name}' cannot be merged: its weight is tied to another layer's, which would change"
                " with it; use the adapter as it is, or train one without this target"
            )
    for name, layer in layers.items():
        plain = layer.get_base_layer()
        for child in layer.children():
            if child is not plain:
                child.float()
        delta = layer.get_delta_weight(ADAPTER)
        plain.weight.copy_(plain.weight.float() + delta)
        parent, _, own = name.rpartition(".")
        setattr(hf.get_submodule(parent), own, plain)
    del hf.peft_config  # peft's note on the model that it has adapters
