"""A model cut by its layers over the `pp` axis: each rank has some of them, the first the embedding, the last the head.

The modules of other ranks are replaced by ones that pass hidden states by, so that transformers' own forward runs what
is here, and every parameter keeps its name. Where embedding and head are one parameter, the first and the last rank have
a copy each; training keeps the two equal (training/gradients.py).

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.models.mesh import Mesh
from headrace.models.shards import Shards

Run = Callable[[int, Tensor | None], Tensor]
"""(chunk, hidden states of the layers before it [1, T, H] or None for the first) → its own hidden states."""


class Elsewhere(nn.Module):
    """Stands for a module that another rank has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(
            module, "attention_type", None
        )  # by which some models choose a layer's mask

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def split_layers(layers: int, stages: int) -> list[range]:
    """Consecutive layers for each stage, in numbers that differ by at most one; earlier stages have more."""
    least, more = divmod(layers, stages)
    starts = [stage * least + min(stage, more) for stage in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def cut_stages(hf: Any, mesh: Mesh, shards: Shards) -> tuple[nn.Module, ...]:
    """Leaves in `hf` what this rank has, in place; returns its chunks: transformers' base model with the layers of each.

    Notes in `shards` which ranks have what. Raises ConfigError for a model with more than layers between embedding and
    last norm, or with fewer layers than stages.
    """
    p, rank = mesh.parallelism, mesh.rank("pp")
    base, inputs = hf.base_model, hf.get_input_embeddings()
    layers_name, norm_name = _parts(hf)
    layers = base.get_submodule(layers_name)
    stages = p.pp * p.pp_chunks
    if len(layers) < stages:
        raise ConfigError(
            f"parallelism: pp={p.pp} x pp_chunks={p.pp_chunks} does not fit {type(hf).__name__}: it has {len(layers)}"
            " layers"
        )
    ranges = split_layers(len(layers), stages)
    owner = {layer: stage % p.pp for stage, own in enumerate(ranges) for layer in own}
    homes = dict.fromkeys(hf.modules(), p.pp - 1) | dict.fromkeys(inputs.modules(), 0)
    for number, layer in enumerate(layers):
        homes |= dict.fromkeys(layer.modules(), owner[number])
    ranks_of: dict[int, set[int]] = {}
    for module, home in homes.items():
        for parameter in module.parameters(recurse=False):
            ranks_of.setdefault(id(parameter), set()).add(home)
    shards.stages = {name: tuple(sorted(ranks_of[id(value)])) for name, value in hf.named_parameters()}
    for number in range(len(layers)):
        if owner[number] != rank:
            layers[number] = Elsewhere(layers[number])
    if not any(rank in ranks_of[id(value)] for value in inputs.parameters()):
        hf.set_input_embeddings(Elsewhere(inputs))
    if not mesh.is_last:
        setattr(base, norm_name, Elsewhere(base.get_submodule(norm_name)))
        for name, module in list(hf.named_children()):
            if module is not base and next(module.parameters(), None) is not None:
                setattr(hf, name, Elsewhere(module))
    if p.pp_chunks == 1:
        return (base,)
    own = [ranges[chunk * p.pp + rank] for chunk in range(p.pp_chunks)]
    without = [[], *[[norm_name]] * (p.pp_chunks - 1)][::-1]
    return tuple(_variant(base, layers_name, *of) for of in zip(own, without, strict=True))


def _parts(hf: Any) -> tuple[str, str]:
    """The names in the base model of its list of layers and of its last norm."""
    inputs, children = hf.get_input_embeddings(), dict(hf.base_model.named_children())
    lists = [name for name, module in children.items() if isinstance(module, nn.ModuleList)]
    others = [
        name
        for name, module in children.items()
        if module is not inputs and name not in lists and next(module.parameters(), None) is not None
    ]
    if len(lists) != 1 or len(others) != 1 or inputs not in children.values():
        raise ConfigError(
            f"parallelism.pp: {type(hf).__name__} is not an embedding, a list of layers and a norm, and cannot be cut"
        )
    return lists[0], others[0]


def _variant(base: Any, layers_name: str, own: range, without: list[str]) -> Any:
    """A base model over the same modules, of which it runs the layers `own` and all but `without`."""
    variant = copy.copy(base)
    variant._modules = dict(base._modules)
    layers = enumerate(base._modules[layers_name])
    variant._modules[layers_name] = nn.ModuleList(m if i in own else Elsewhere(m) for i, m in layers)
    for name in without:
        variant._modules[name] = Elsewhere(base._modules[name])
    return variant


def without_layers(hf: Any) -> Any:
    """A base model that gives the hidden states back that it is given. Raises ConfigError where it does not."""
    children = dict(hf.base_model.named_children())
    layers_name = next(name for name, module in children.items() if isinstance(module, nn.ModuleList))
    others = [
        name for name, m in children.items() if name != layers_name and any(True for _ in m.parameters())
    ]
    base = _variant(hf.base_model, layers_name, range(0), others)
    device = next(hf.parameters()).device
    width = int(hf.config.get_text_config().hidden_size)
    hidden = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(3, device=device).unsqueeze(0)
    with torch.no_grad():
        out = base(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
    if not torch.equal(out, hidden):
        raise ConfigError(
            f"parallelism.pp: {type(hf).__name__} does more than its layers to hidden states, and cannot be cut"
        )
    return base


def relay(mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, run: Run) -> Tensor:
    """One pass through all stages, one after the other and without gradients: what the last chunk here gave."""
    p, rank, group = mesh.parallelism, mesh.rank("pp"), mesh.group("pp")
    out = torch.empty(0)
    for stage in range(p.pp * p.pp_chunks):
        if stage % p.pp != rank:
            continue
        incoming = None
        if stage > 0:
            incoming = torch.empty(shape, dtype=dtype, device=mesh.device)
            dist.recv(incoming, group=group, group_src=(stage - 1) % p.pp)
        out = run(stage // p.pp, incoming)
        if stage + 1 < p.pp * p.pp_chunks:
            dist.send(out.contiguous(), group=group, group_dst=(stage + 1) % p.pp)
    return out
