"""Loading a model straight onto a mesh: each rank reads its own slices of the safetensors files and nothing else."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from headrace.errors import ConfigError
from headrace.models import attention
from headrace.models.adapter_folder import adapter_folder, cached_file
from headrace.models.causal_lm import Backbone, CausalLM, ScalarModel, verify_against_hf
from headrace.models.find import find_model
from headrace.models.heads import load_scalar_model
from headrace.models.hf import LOADING_ERRORS, eos_token_ids, first_line, load_causal_lm, load_tokenizer
from headrace.models.mesh import Mesh
from headrace.models.sharding import settle, shard_model
from headrace.models.shards import local

logger = logging.getLogger(__name__)

Head = Literal["vocabulary", "scalar", "new scalar"]
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_onto_mesh(
    path: str,
    mesh: Mesh,
    *,
    key: str = "model.path",
    head: Head = "vocabulary",
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
) -> CausalLM | ScalarModel:
    """A policy ("vocabulary"), a reward model ("scalar") or a critic ("new scalar": a missing head starts at 0).

    The model is made without memory, cut, and then filled from a folder or hub id of safetensors. What is stored
    otherwise (GGUF, adapters, names that are not the model's own) is loaded whole by every rank, and cut then. Every
    process of the mesh has to call. Raises ConfigError naming `key` as load_causal_lm and shard_model do.
    """
    found = find_model(path, key)
    model = None
    if not found.endswith(".gguf") and adapter_folder(found, key) is None:
        model = _empty(found, key, head, tokenizer, dtype, trust_remote_code)
    with contextlib.ExitStack() as files:
        slices = None if model is None else _open(found, key, model, files, head)
        if model is None or slices is None:
            logger.warning("%s: '%s' is loaded whole by every process", key, found)
            whole = _whole(found, key, head, tokenizer, dtype, trust_remote_code, mesh.device)
            shard_model(whole, mesh)
            model = whole
        else:
            shard_model(model, mesh)
            _give_memory(model, mesh.device)
            _fill(model, slices, key, found, dtype)
            _verify(model, key, found)
    if gradient_checkpointing:
        model.use_gradient_checkpointing()
    return model


def load_policy_onto_mesh(path: str, mesh: Mesh, **options: Any) -> CausalLM:
    """A policy by `load_onto_mesh`."""
    model = load_onto_mesh(path, mesh, **options)
    if not isinstance(model, CausalLM):
        raise TypeError(f"{path} was loaded as a {type(model).__name__}")
    return model


def load_scalar_onto_mesh(path: str, mesh: Mesh, *, needs_head: bool, **options: Any) -> ScalarModel:
    """A reward model, or with `needs_head` false a critic, by `load_onto_mesh`."""
    model = load_onto_mesh(path, mesh, head="scalar" if needs_head else "new scalar", **options)
    if not isinstance(model, ScalarModel):
        raise TypeError(f"{path} was loaded as a {type(model).__name__}")
    return model


def _whole(
    path: str, key: str, head: Head, tokenizer: Any, dtype: torch.dtype, trust: bool, device: torch.device
) -> CausalLM | ScalarModel:
    options: dict[str, Any] = {"key": key, "device": device, "dtype": dtype, "trust_remote_code": trust}
    if head == "vocabulary":
        return load_causal_lm(path, tokenizer=tokenizer, **options)
    return load_scalar_model(path, tokenizer=tokenizer, needs_head=head == "scalar", **options)


def _empty(
    path: str, key: str, head: Head, tokenizer: Any, dtype: torch.dtype, trust: bool
) -> CausalLM | ScalarModel | None:
    """The model on the meta device; None where transformers cannot make it of the configuration alone."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        GenerationConfig,
    )

    attention.register()
    kind = AutoModelForCausalLM if head == "vocabulary" else AutoModelForSequenceClassification
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        if head != "vocabulary":
            config.num_labels = 1
        with torch.device("meta"):
            hf = kind.from_config(
                config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION, trust_remote_code=trust
            )
    except LOADING_ERRORS as error:
        raise ConfigError(f"{key}: '{path}' cannot be loaded: {first_line(error)}") from error
    hf.eval()
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer or path, trust, key)
    if head != "vocabulary":
        return ScalarModel(hf, tokenizer) if isinstance(getattr(hf, "score", None), nn.Linear) else None
    if cached_file(path, "generation_config.json") is not None:
        hf.generation_config = GenerationConfig.from_pretrained(path)
    return CausalLM(hf, tokenizer, eos_token_ids(hf, tokenizer))


def empty_on_mesh(
    path: str,
    mesh: Mesh,
    *,
    key: str = "model.path",
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> CausalLM:
    """A policy on the mesh, frozen and without memory for its parameters, which training/weight_sync.py gives it.

    No weights are read. Every process of the mesh has to call. Raises ConfigError naming `key` as load_onto_mesh does,
    and for what has no configuration of a whole model (GGUF, adapters).
    """
    found = find_model(path, key)
    if found.endswith(".gguf") or adapter_folder(found, key) is not None:
        raise ConfigError(
            f"{key}: '{path}' generates in the layout that it trains in; another one needs a folder or hub id of"
            " safetensors of the whole model"
        )
    model = _empty(found, key, "vocabulary", tokenizer, dtype, trust_remote_code)
    if not isinstance(model, CausalLM):
        raise ConfigError(f"{key}: '{path}' is not a causal language model")
    shard_model(model, mesh)
    # what gives buffers their starting values gives them to the parameters beside them as well, which must be there
    needed = {id(p) for module in _with_buffers(model.hf) for p in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) not in needed:
            parameter.data = parameter.data.new_empty(0)
    _give_memory(model, mesh.device)
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)
    model.set_trainable(False)
    return model


def _open(
    path: str, key: str, model: Backbone, files: contextlib.ExitStack, head: Head
) -> dict[str, Any] | None:
    """Parameter → the slice of its file (a missing new head: None); None where the files do not have them by name."""
    index = cached_file(path, _INDEX)
    try:
        names = [_ONE] if index is None else sorted(set(json.loads(index.read_text())["weight_map"].values()))
        stored: dict[str, Any] = {}
        for name in names:
            file = cached_file(path, name)
            if file is None:
                return None
            opened = files.enter_context(safe_open(file, framework="pt", device="cpu"))
            stored |= {tensor: opened.get_slice(tensor) for tensor in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{key}: '{path}' cannot be read ({first_line(error)})") from error
    prefix = f"{model.hf.base_model_prefix}."
    slices: dict[str, Any] = {}
    for name, parameter in model.hf.named_parameters():
        other = name.removeprefix(prefix)
        found = stored.get(name, stored.get(other))
        if found is None and head == "new scalar" and name.startswith("score."):
            slices[name] = None
        elif found is None or tuple(found.get_shape()) != tuple(parameter.shape):
            logger.info("%s: '%s' has no tensor '%s' of shape %s", key, path, name, tuple(parameter.shape))
            return None
        else:
            slices[name] = found
    return slices


def _give_memory(model: Backbone, device: torch.device) -> None:
    """Memory on `device` for this rank's parts. Tied parameters stay tied, buffers get their starting values."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            homes.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, own), *others in homes.values():
        for module, name in others:
            setattr(module, name, getattr(first, own))
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
        for module in _with_buffers(model.hf):
            model.hf._init_weights(module)
    odd = [n for n, b in model.hf.named_buffers() if b.is_floating_point() and bool(b.isnan().any())]
    if odd:
        raise ConfigError(f"parallelism: {type(model.hf).__name__} does not say how '{odd[0]}' starts")


def _with_buffers(hf: nn.Module) -> Iterable[nn.Module]:
    return [module for module in hf.modules() if next(module.buffers(recurse=False), None) is not None]


@torch.no_grad()
def _fill(model: Backbone, slices: dict[str, Any], key: str, path: str, dtype: torch.dtype) -> None:
    """Reads this rank's rows and columns of every parameter, rounded to `dtype` as one process would."""
    for name, parameter in model.hf.named_parameters():
        part, source = local(parameter), slices[name]
        if source is None:
            part.zero_()
            continue
        ranges = model.shards.ranges(name, model.shards.shape(name, parameter))
        try:
            read: Tensor = source[tuple(slice(own.start, own.stop) for own in ranges)]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{key}: '{path}' cannot be read ({first_line(error)})") from error
        part.copy_(read.to(dtype))


def _verify(model: CausalLM | ScalarModel, key: str, path: str) -> None:
    """Compares headrace's forward with the model's own, all ranks together."""
    with _gathered_head(model):
        try:
            verify_against_hf(model)
        except ConfigError as error:
            raise ConfigError(f"{key}: '{path}': {error}") from error


@contextlib.contextmanager
def _gathered_head(model: Backbone) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.unshard()
    try:
        yield
    finally:
        settle(model)
