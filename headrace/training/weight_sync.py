"""The weights of a model that trains, brought into a model of another layout that generates.

After HybridFlow (https://arxiv.org/abs/2409.19256), section 5: the two may lie on the same ranks, on other ones, or on
some of each. Only what a rank lacks moves; what it holds in one piece is used where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from headrace.errors import ConfigError
from headrace.models.causal_lm import Backbone
from headrace.models.sharding import settle
from headrace.models.shards import local
from headrace.reshard.among import Among
from headrace.reshard.layout import Layout
from headrace.reshard.model_layout import ModelOutline, ModelRanks
from headrace.reshard.plan import Entry, Plan, plan
from headrace.reshard.transfer import DEFAULT_BUCKET_BYTES, Report, run


class WeightSync:
    """Made once by all ranks of `source` and `target` together, and by no others; `run` and `free` are then repeated.

    A rank gives the models that it has a part of. The target model needs no memory of its own (`empty_on_mesh`): `run`
    makes its parameters views of the source's where a rank holds in one piece and in the same dtype what it needs, and
    gives memory to the others; `free` takes that memory back. A source's float32 shards are rounded to the target's
    dtype before they travel.
    """

    def __init__(
        self,
        source: ModelRanks,
        target: ModelRanks,
        source_model: Backbone | None,
        target_model: Backbone | None,
        *,
        hosts: Sequence[int | str] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group`: a process group with these ranks and maybe others (default: all); see Among for NCCL.

        hosts: [W] a name or number of each global rank's host; parts come from the same host where they can.
        bucket_bytes: staging memory on a rank, for both directions together. Raises ConfigError on all ranks when one of
        them has a model that does not lie as `source` or `target` says, and RunError when one does not come.
        """
        self.source, self.target = source, target
        self.source_model, self.target_model = source_model, target_model
        self.bucket_bytes = bucket_bytes
        self.group = group
        self.among = Among([*source.ranks, *target.ranks], group)
        self.rank = self.among.rank
        world = dist.get_world_size() if dist.is_initialized() else 1
        self._together(self._missing_models())
        of_source, of_target = self._outline(source, source_model), self._outline(target, target_model)
        self._together(_differences(of_source, of_target))
        self.plan: Plan = plan(of_source.layout(source, world), of_target.layout(target, world), hosts)
        self._together(
            self._misplaced("source", self.plan.source, source_model)
            + self._misplaced("target", self.plan.target, target_model)
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes that every `run` sends, over all ranks; 0 where each has what it needs."""
        return self.plan.bytes_moved

    def run(self) -> Report:
        """The source's weights of now, in the target. All ranks call; the source must not be in a pass.

        Every rank raises ConfigError when one has parameters of the wrong shape or dtype. RunError names the peers of a
        rank that fails or does not come in time; the target is then incomplete.
        """
        if self.source_model is not None:
            settle(self.source_model)
        held, filled = _parameters(self.source_model), _parameters(self.target_model)
        for entry in self.plan.entries:
            needed, has = entry.target.box(self.rank), entry.source.box(self.rank)
            if needed is None:
                continue
            parameter, own = filled[entry.name], held.get(entry.name)
            if own is not None and has is not None and self._is_view(entry, own, parameter):
                # made anew each time: the source may have got other memory since
                parameter.data = local(own)[needed.within(has)]
            elif tuple(parameter.shape) != needed.shape:
                parameter.data = parameter.data.new_empty(needed.shape)
        return run(self.plan, self.rank, held, filled, self.bucket_bytes, self.group, self.among.ranks)

    def free(self, views: bool = False) -> None:
        """Gives up the target's own memory until the next `run`; views of the source stay, unless `views` says that they
        go as well. Needs no other rank."""
        held, filled = _parameters(self.source_model), _parameters(self.target_model)
        for entry in self.plan.entries:
            parameter, own = filled.get(entry.name), held.get(entry.name)
            if parameter is not None and (views or own is None or not self._is_view(entry, own, parameter)):
                parameter.data = parameter.data.new_empty(0)

    def _is_view(self, entry: Entry, own: nn.Parameter, parameter: nn.Parameter) -> bool:
        return entry.view(self.rank) and own.device == parameter.device

    def _missing_models(self) -> list[str]:
        found = []
        for side, where, model in (
            ("source", self.source, self.source_model),
            ("target", self.target, self.target_model),
        ):
            if (model is not None) != (self.rank in where.ranks):
                given = "was given no" if model is None else "was given a"
                found.append(f"rank {self.rank} {given} {side} model; it lies on ranks {list(where.ranks)}")
            if model is not None and model.adapters is not None:
                found.append("a model with LoRA adapters generates in the layout that it trains in")
        if self.target.parallelism.zero3 > 1:
            found.append("a model that generates cannot be cut by zero3")
        return [f"weight sync: {text}" for text in found]

    def _outline(self, where: ModelRanks, model: Backbone | None) -> ModelOutline:
        """Of a model that other ranks may have, from the first that does."""
        first = where.ranks[0]
        own = ModelOutline.of(model).plain() if model is not None and self.rank == first else None
        return ModelOutline.from_plain(self.among.tell(own, first))

    def _misplaced(self, side: str, layout: Layout, model: Backbone | None) -> list[str]:
        """Where the layout and the model do not say the same about this rank."""
        if model is None:
            return []
        here = _parameters(model)
        for name, parameter in layout.parameters.items():
            box = parameter.pieces.box(self.rank)
            given = [] if box is None else [range(a, b) for a, b in zip(box.start, box.stop, strict=True)]
            own = model.shards.ranges(name, torch.Size(parameter.shape)) if name in here else []
            if own != given and any(prod(len(r) for r in part) for part in (own, given)):
                return [
                    f"weight sync: rank {self.rank} has {own} of {side} parameter {name}, and by the given ranks and"
                    f" parallelism it would have {given}"
                ]
        return []

    def _together(self, problems: list[str]) -> None:
        """Raises ConfigError on all ranks when one has problems."""
        (worst,) = self.among.largest([len(problems)])
        if problems:
            raise ConfigError(problems)
        if worst:
            raise ConfigError("weight sync: another rank's model does not fit; its message says how")


def _parameters(model: Backbone | None) -> dict[str, nn.Parameter]:
    return {} if model is None else dict(model.hf.named_parameters())


def _differences(source: ModelOutline, target: ModelOutline) -> list[str]:
    odd = sorted(source.parameters.keys() ^ target.parameters.keys())
    if odd:
        return [f"weight sync: the two models are not the same: only one has a parameter '{odd[0]}'"]
    return []
