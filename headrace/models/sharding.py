"""Puts a model onto a mesh: tensor parallel layers, then the layers of this process's pipeline stage, then FSDP2
(https://arxiv.org/abs/2304.11277) over `zero3`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from headrace.errors import ConfigError
from headrace.models.causal_lm import Backbone, CausalLM
from headrace.models.mesh import Mesh
from headrace.models.sequence_parallel import sp_problems
from headrace.models.shards import Shards
from headrace.models.stage import cut_stages, without_layers
from headrace.models.tensor_parallel import ColumnLinear, RowLinear, VocabEmbedding, cut
from headrace.models.tp_plan import COLUMN, PARTIAL, tp_plan


def shard_model(model: Backbone, mesh: Mesh) -> None:
    """Lays `model`, whole and equal on every rank (or on the meta device), onto the mesh, in place.

    Engines made of it afterwards train it over the mesh. Under zero3 a model that computes in bfloat16 keeps float32
    shards and gathers them in bfloat16: masters and weights are one set, and rollout reads the same gathered tensors as
    training. Raises ConfigError with all violations.
    """
    p = mesh.parallelism
    if model.shards.mesh.parallelism.size > 1:
        raise ConfigError(f"parallelism: {type(model.hf).__name__} is already laid onto a mesh")
    if model.adapters is not None and p.tp * p.zero3 * p.pp > 1:
        raise ConfigError(
            "parallelism: a model with LoRA adapters runs on dp_replicate and sp alone; tp, zero3 and pp are not built"
        )
    problems = sp_problems(model.hf, p.sp, p.tp)
    if problems:
        raise ConfigError(problems)
    shapes = {name: parameter.shape for name, parameter in model.hf.named_parameters()}
    model.shards = Shards(mesh, shapes)
    tp = mesh.group("tp")
    if tp is not None:
        _cut_layers(model, tp, model.shards)
    if p.pp > 1:
        model.chunks = cut_stages(model.hf, mesh, model.shards)
        if model.device.type != "meta":
            without_layers(model.hf)
    if p.zero3 > 1:
        _shard_rows(model, mesh)


def _cut_layers(model: Backbone, group: dist.ProcessGroup, shards: Shards) -> None:
    hf = model.hf
    plan = tp_plan(hf, group.size())
    partial: set[str] = set()
    for name, style in plan.items():
        module = hf.get_submodule(name)
        if style == PARTIAL:
            partial |= {f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)}
            continue
        _replace(hf, name, (ColumnLinear if style == COLUMN else RowLinear)(module, group))
        shards.dims[f"{name}.weight"] = 0 if style == COLUMN else 1
        if style == COLUMN and module.bias is not None:
            shards.dims[f"{name}.bias"] = 0
    shards.partial = frozenset(partial)
    inputs = hf.get_input_embeddings()
    output = hf.get_output_embeddings()
    name = _name_of(hf, inputs)
    embedding = VocabEmbedding(inputs, group, _embedding_scale(inputs))
    _replace(hf, name, embedding)
    shards.dims[f"{name}.weight"] = 0
    if isinstance(model, CausalLM) and output is not None:
        tied = output.weight is inputs.weight
        head = _name_of(hf, output)
        output.weight = embedding.weight if tied else cut(output.weight, 0, group)
        if not tied:
            shards.dims[f"{head}.weight"] = 0
        if output.bias is not None:
            output.bias = cut(output.bias, 0, group)
            shards.dims[f"{head}.bias"] = 0
        model.vocab_shard = embedding.shard


def _embedding_scale(module: nn.Embedding) -> float | None:
    """What a scaled embedding multiplies by. Raises ConfigError for an embedding that does something else."""
    if type(module) is nn.Embedding:
        return None
    scale = getattr(module, "scalar_embed_scale", None)
    if not isinstance(scale, int | float):
        raise ConfigError(f"parallelism.tp: the embedding {type(module).__name__} is not known")
    return float(scale)


def _name_of(hf: nn.Module, module: nn.Module) -> str:
    return next(name for name, other in hf.named_modules() if other is module)


def _replace(hf: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    module.train(hf.get_submodule(name).training)
    setattr(hf.get_submodule(parent), own, module)


def _shard_rows(model: Backbone, mesh: Mesh) -> None:
    """FSDP over `zero3`: a group for each layer, and one for embedding, last norm and head."""
    if mesh.device_mesh is None:
        return
    dtype = model.dtype
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32 and dtype != torch.float64:
        model.shards.compute_dtype = dtype
        model.hf.float()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh.device_mesh["zero3"], "mp_policy": policy}
    for layer in decoder_layers(model.hf):
        fully_shard(layer, **options)
    # the head is read after the forward pass, so the outermost group stays gathered until `settle`
    fully_shard(model, reshard_after_forward=False, **options)
    register_fsdp_forward_method(model, "run_layers")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is a sum over ranks, so gradients are summed and never averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def decoder_layers(hf: Any) -> list[nn.Module]:
    """The repeated blocks of a transformer, in order. Raises ConfigError for a model that names none."""
    kinds = set(hf._no_split_modules or ())
    layers = [module for module in hf.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ConfigError(f"parallelism.zero3: {type(hf).__name__} does not say what its layers are")
    return layers


def settle(model: Backbone) -> None:
    """Frees what a pass has gathered and left for the head, so that the parameters are the shards again."""
    if isinstance(model, FSDPModule):
        model.reshard()
