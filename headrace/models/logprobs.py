"""Log-probabilities and entropy of tokens without ever holding the logits of all of them.

Where the vocabulary is cut over ranks, each computes the logits of its own ids, and only one number a token and sum
(normaliser, target, entropy) is exchanged; the logits are never gathered.

Shapes: T tokens, H hidden size, V vocabulary, C tokens of a chunk, A tokens with a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.models.causal_lm import OutputHead
from headrace.models.tensor_parallel import VocabShard


def token_logprobs(
    hidden: Tensor,
    head: OutputHead,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_bytes: int = 64 << 20,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Natural-log probability of each target token, and the entropy (nats) of the distribution it came from.

    With z = softcap(hidden @ weight.T + bias) / temperature:  logprob = z[target] - logsumexp(z)  and
    H = -sum_i p_i log p_i.  Both outputs are differentiable once in hidden, head.weight and head.bias:
    d logprob / dz_i = 1[i = target] - p_i  and  dH / dz_i = -p_i (log p_i + H).

    hidden [T, H]; targets [T] int64 in [0, V), on the same device; returns (logprobs [T], entropy [T] or
    None). The logits have hidden's dtype, as in `OutputHead.logits`; the softmax and both outputs are
    float32, or float64 where hidden is float64. Forward and backward walk over chunks whose logits take about
    `chunk_bytes` (at least one token a chunk; a handful of tensors of that size are alive at once) and the
    backward pass computes them again. The gradients of weight and bias are summed over chunks in float32 and
    cast at the end. A token whose incoming gradients are both 0 costs nothing in the backward pass.

    With `head.shard` every rank along `tp` has to call, with equal hidden states and targets; both outputs and the
    gradient of hidden are whole and equal on each.

    Raises ValueError when shapes do not fit or `temperature` or `chunk_bytes` is not positive.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or head.weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            "token_logprobs wants hidden [T, H], targets [T] and head.weight [V, H]; got"
            f" {tuple(hidden.shape)}, {tuple(targets.shape)} and {tuple(head.weight.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be above 0, not {chunk_bytes}")
    logprobs, entropy = _ChunkedLogprobs.apply(
        hidden,
        head.weight,
        head.bias,
        targets,
        head.softcap,
        temperature,
        chunk_bytes,
        with_entropy,
        head.shard,
    )
    return logprobs, entropy


def _softmax_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _chunk_tokens(vocab: int, dtype: torch.dtype, chunk_bytes: int) -> int:
    return max(1, chunk_bytes // (vocab * dtype.itemsize))


def _most_logits(weight: Tensor, shard: VocabShard | None) -> int:
    """Logits of a token on any rank: the same number, and so the same chunks, on each."""
    return weight.shape[0] if shard is None else shard.most


def _capped_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """[C, H] → [C, V], before temperature, in the softmax dtype. A fresh tensor: callers overwrite it."""
    logits = F.linear(hidden, weight, bias).to(_softmax_dtype(hidden))
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _normalise(z: Tensor, shard: VocabShard | None) -> Tensor:
    """log softmax of z [C, V] over the whole vocabulary, in place."""
    return z.sub_(z.logsumexp(-1, keepdim=True) if shard is None else shard.logsumexp(z))


def _at_targets(logp: Tensor, targets: Tensor, shard: VocabShard | None) -> Tensor:
    """[C] the values at the targets; 0 for those of other ranks."""
    if shard is None:
        return logp.gather(1, targets[:, None]).squeeze(1)
    here, index = shard.find(targets)
    return torch.where(here, logp.gather(1, index[:, None]).squeeze(1), 0.0)


def _negative_entropy_terms(logp: Tensor) -> Tensor:
    """p log p [C, V] from log p [C, V]; a logit of -inf contributes 0, not NaN. Clamps `logp` in place."""
    logp.clamp_(min=torch.finfo(logp.dtype).min)
    return logp.exp().mul_(logp)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        temperature: float,
        chunk_bytes: int,
        with_entropy: bool,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.shard = shard
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.softcap, ctx.temperature, ctx.chunk_bytes = softcap, temperature, chunk_bytes
        ctx.set_materialize_grads(False)
        tokens = hidden.shape[0]
        dtype = _softmax_dtype(hidden)
        logprobs = torch.empty(tokens, dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        step = _chunk_tokens(_most_logits(weight, shard), dtype, chunk_bytes)
        for start in range(0, tokens, step):
            chunk = slice(start, start + step)
            z = _capped_logits(hidden[chunk], weight, bias, softcap).div_(temperature)
            _normalise(z, shard)
            logprobs[chunk] = _at_targets(z, targets[chunk], shard)
            if entropy is not None:
                entropy[chunk] = -_negative_entropy_terms(z).sum(-1)
        if shard is not None:
            logprobs = shard.sum(logprobs)
            entropy = None if entropy is None else shard.sum(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype = _softmax_dtype(hidden)
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wants_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=dtype, device=weight.device) if wants_bias else None

        incoming = [g for g in (grad_logprobs, grad_entropy) if g is not None]
        step = _chunk_tokens(_most_logits(weight, ctx.shard), dtype, ctx.chunk_bytes)
        for active in _tokens_with_gradient(incoming).split(step):
            own_hidden = hidden[active]
            grad_logits = _grad_logits(
                _capped_logits(own_hidden, weight, bias, ctx.softcap),
                targets[active],
                None if grad_logprobs is None else grad_logprobs[active],
                None if grad_entropy is None else grad_entropy[active],
                ctx.softcap,
                ctx.temperature,
                ctx.shard,
            )
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[active] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ own_hidden
        if grad_hidden is not None and ctx.shard is not None:
            grad_hidden = ctx.shard.sum(grad_hidden)

        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 6,
        )


def _tokens_with_gradient(incoming: list[Tensor]) -> Tensor:
    """[A] int64: tokens with a gradient other than 0 (NaN counts, so that it is not lost)."""
    if not incoming:
        return torch.empty(0, dtype=torch.int64)
    nonzero = torch.stack([g != 0 for g in incoming]).any(0)
    return nonzero.nonzero().flatten()


def _grad_logits(
    capped: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    softcap: float | None,
    temperature: float,
    shard: VocabShard | None,
) -> Tensor:
    """Gradient [C, V] with respect to the raw logits, from softcapped logits [C, V] (overwritten)."""
    # d softcap(x) / dx = 1 - tanh(x / softcap)^2
    slope = None if softcap is None else 1 - (capped / softcap).square_()
    logp = _normalise(capped.div_(temperature), shard)
    if grad_entropy is None:
        grad = torch.zeros_like(logp)
    else:
        grad = _negative_entropy_terms(logp)
        entropy = -grad.sum(-1, keepdim=True)
        if shard is not None:
            entropy = shard.sum(entropy)
        grad.add_(logp.exp().mul_(entropy)).mul_(-grad_entropy[:, None])
    if grad_logprobs is not None:
        grad.sub_(logp.exp_().mul_(grad_logprobs[:, None]))
        rows = torch.arange(len(targets), device=targets.device)
        if shard is not None:
            here, targets = shard.find(targets)
            rows, targets, grad_logprobs = rows[here], targets[here], grad_logprobs[here]
        grad[rows, targets] += grad_logprobs
    grad.div_(temperature)
    return grad if slope is None else grad.mul_(slope)
