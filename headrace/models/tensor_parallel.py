"""Layers cut over the `tp` axis, Megatron's way: https://arxiv.org/abs/1909.08053, section 3.

Hidden states are whole and equal on every rank. A column-cut layer gives each rank its own features of them; the
row-cut layer behind it adds up what the ranks made of theirs. Parameters are plain tensors of this rank's part.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.models.shards import part_of


class _Copy(torch.autograd.Function):
    """The same tensor forward; backward, the sum of the ranks' gradients (f in the paper)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over ranks forward; backward, the same gradient for each (g in the paper)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' `x` on each; backward, each gets the gradient of its own, which is the same on all."""
    out: Tensor = _Sum.apply(x, group)
    return out


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class ColumnLinear(nn.Linear):
    """A linear layer of which each rank has some of the outputs."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        weight = cut(whole.weight, 0, group)
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.bias = None if whole.bias is None else cut(whole.bias, 0, group)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Copy.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Linear):
    """A linear layer of which each rank has some of the inputs; its bias is whole and added once."""

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup) -> None:
        weight = cut(whole.weight, 1, group)
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight, self.bias = weight, whole.bias
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sum.apply(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


class VocabEmbedding(nn.Module):
    """An embedding of which each rank has some of the ids; `scale` multiplies its output (Gemma)."""

    def __init__(self, whole: nn.Embedding, group: dist.ProcessGroup, scale: float | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.shard = VocabShard(whole.num_embeddings, group)
        self.weight = cut(whole.weight, 0, group)
        self.scale = scale
        ids = self.shard.ids
        known = whole.padding_idx is not None and whole.padding_idx in ids
        self.padding_idx = whole.padding_idx - ids.start if known and whole.padding_idx is not None else None

    def forward(self, input_ids: Tensor) -> Tensor:
        here, index = self.shard.find(input_ids)
        own = F.embedding(index, self.weight, self.padding_idx).masked_fill(~here.unsqueeze(-1), 0.0)
        out: Tensor = _Sum.apply(own, self.shard.group)
        return (
            out if self.scale is None else out * torch.tensor(self.scale, dtype=out.dtype, device=out.device)
        )


def cut(whole: Tensor, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    """This rank's part of a parameter, in memory of its own."""
    own = part_of(whole.shape[dim], group.size(), group.rank())
    part = whole.detach().narrow(dim, own.start, len(own))
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), whole.requires_grad)


class VocabShard:
    """The ids of a vocabulary of which this rank has the logits, and sums over the whole of it."""

    def __init__(self, vocab: int, group: dist.ProcessGroup) -> None:
        self.vocab, self.group = vocab, group
        self.ids = part_of(vocab, group.size(), group.rank())
        self.most = len(part_of(vocab, group.size(), 0))  # ids of any rank

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of `ids` are here (bool), and their places here (0 for the others)."""
        here = (ids >= self.ids.start) & (ids < self.ids.stop)
        return here, torch.where(here, ids - self.ids.start, 0)

    def logsumexp(self, z: Tensor) -> Tensor:
        """z [T, own ids] → [T, 1] over the whole vocabulary; the same bits on every rank."""
        own = z.logsumexp(-1)
        every = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(every, own, self.group)
        return torch.stack(every, -1).logsumexp(-1, keepdim=True)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, in a new tensor."""
        return _summed(x, self.group)

    def join(self, logits: Tensor) -> Tensor:
        """logits [T, own ids] → [T, V]."""
        whole = logits.new_zeros(*logits.shape[:-1], self.vocab)
        whole[..., self.ids.start : self.ids.stop] = logits
        return self.sum(whole)
