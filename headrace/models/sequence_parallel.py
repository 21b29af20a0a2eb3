"""The tokens of a pack shared out over the `sp` axis: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509, section 3.

Each rank has one slice of the pack's tokens and takes it through every layer by itself. In attention the ranks exchange
slices of all heads for all tokens of some heads, so that each sequence is whole there, and exchange the results back.
Positions were applied to a slice before that, each token with its own. Weights are those of one process on every rank,
and each has the part of their gradients that comes from its slice: summed over `sp`, they are the whole.

Shapes: C tokens of a pack, P of them on each rank, S ranks, A query heads, K key/value heads, D head size, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.errors import ConfigError
from headrace.models.attention import AttentionContext, PackedAttention
from headrace.models.mesh import Mesh


class PackSlice:
    """This rank's tokens of a pack: every rank has `count` in a row, the last ones some that are none of the pack's.

    Those are a sequence of their own behind the others, whose outputs nobody wants. Without `sp` it is the whole pack.
    """

    def __init__(self, tokens: int, mesh: Mesh) -> None:
        self.tokens, self._group = tokens, mesh.group("sp")
        ranks = mesh.size("sp")
        self.count = -(-tokens // ranks)
        self.start = mesh.rank("sp") * self.count
        self._empty = ranks * self.count - tokens

    def of(self, flat: Tensor) -> Tensor:
        """flat [C, …] → [P, …]; 0 where there is no token."""
        if self._empty:
            flat = torch.cat([flat, flat.new_zeros(self._empty, *flat.shape[1:])])
        return flat[self.start : self.start + self.count]

    def find(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the `places` [W] in the pack are here, as numbers below W, and where in this rank's [P]."""
        here = ((places >= self.start) & (places < self.start + self.count)).nonzero().flatten()
        return here, places[here] - self.start

    def attention(
        self, lengths: Sequence[int], device: torch.device, expand: Tensor | None = None
    ) -> AttentionContext:
        """For a pass over this slice; the arguments are PackedAttention's, for the whole pack."""
        if self._group is None:
            return PackedAttention(lengths, device, expand=expand)
        if self._empty:
            lengths = [*lengths, self._empty]
            if expand is not None:
                expand = torch.cat([expand, torch.arange(self.tokens, self.tokens + self._empty)])
        return SlicedAttention(PackedAttention(lengths, device, expand=expand), self._group)

    def join(self, own: Tensor) -> Tensor:
        """own [P, H] → [C, H] of all ranks, without gradients."""
        if self._group is None:
            return own
        every = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(every, own.contiguous(), self._group)
        return torch.cat(every)[: self.tokens]


class SlicedAttention:
    """Attention over whole sequences, of which each rank gives and gets a slice of P tokens, of all heads."""

    def __init__(self, whole: AttentionContext, group: dist.ProcessGroup) -> None:
        self._whole, self._group = whole, group

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """query [P, A, D], key and value [P, K, D] → [P, A, D]. Raises ConfigError unless S divides A."""
        ranks, tokens = self._group.size(), len(query)
        if query.shape[1] % ranks:
            raise ConfigError(
                f"parallelism.sp={ranks} does not divide the {query.shape[1]} heads of layer {layer}"
            )
        repeats = kv_copies(key.shape[1], ranks)
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        given = [x.reshape(tokens, ranks, -1) for x in (query, key, value)]  # [P, S, own heads x D]
        got = _exchange(torch.cat(given, -1).transpose(0, 1), self._group).flatten(0, 1)  # [S x P, all three]
        whole = [
            part.unflatten(-1, (-1, x.shape[-1]))
            for part, x in zip(got.split([g.shape[-1] for g in given], -1), (query, key, value), strict=True)
        ]
        out = self._whole.attend(layer, *whole, scale=scale, window=window)  # [S x P, A / S, D]
        back = _exchange(out.reshape(ranks, tokens, -1), self._group)  # [S, P, A / S x D]: blocks of heads
        return back.transpose(0, 1).reshape(tokens, query.shape[1], -1)


def kv_copies(heads: int, ranks: int) -> int:
    """How often key/value heads are repeated for every rank to get equally many, and with them those of its queries.

    Query head h of A reads key/value head h // (A / heads), so a whole number of them to each rank is enough; and where
    both `ranks` and `heads` divide A, this number divides A / heads.
    """
    return ranks // math.gcd(ranks, heads)


class _Exchange(torch.autograd.Function):
    """x [S, …]: part i goes to rank i, and part i of the result came from rank i. Backward it is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _Exchange.apply(x, group)
    return out


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def sp_problems(hf: Any, sp: int, tp: int = 1) -> list[str]:
    """What stands against sharing out the tokens of a transformers model over `sp` ranks."""
    if sp == 1:
        return []
    heads = int(hf.config.get_text_config().num_attention_heads)
    if heads % tp or heads // tp % sp == 0:
        return []
    return [
        f"parallelism.sp={sp} does not fit {type(hf).__name__}: {heads // tp} attention heads of a rank are not"
        " divisible by it"
    ]
