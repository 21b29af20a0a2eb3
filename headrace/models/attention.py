"""The one seam between Hugging Face model code and headrace: who computes attention.

Every model is loaded with `attn_implementation="headrace"`. Its forward then receives one flat row of tokens
`[1, T]` and hands each layer's queries, keys and values to the `AttentionContext` passed along the call. Training
gives a `PackedAttention`; the native rollout engine gives contexts that write and read the paged KV cache.

Shapes: T tokens of a pack, A query heads, K key/value heads, D head size, B rows of a bucket, L their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.errors import ConfigError, HeadraceError
from headrace.kernels.attention import CompiledAttention, takes
from headrace.kernels.attention import is_available as kernels_are_available
from headrace.models.varlen import KERNEL_DTYPES, VarlenAttention
from headrace.models.varlen import is_available as varlen_is_available

IMPLEMENTATION = "headrace"


class AttentionContext(Protocol):
    """Computes attention for the tokens of one forward pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """query [T, A, D], key and value [T, K, D] (positions already applied) → output [T, A, D].

        `window` w: token t sees tokens t - w + 1 … t (None: all before it). `layer` counts from 0.
        """
        ...


class CountedAttention:
    """Another context, and how often it was asked: never by a model that computes attention by itself."""

    def __init__(self, own: AttentionContext) -> None:
        self._own = own
        self.calls = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        self.calls += 1
        return self._own.attend(layer, query, key, value, scale=scale, window=window)


class PackedAttention:
    """Causal attention inside each sequence of a pack, for training and prefill.

    Sequences are gathered into buckets of like length and each bucket runs one causal SDPA call: a shorter
    sequence's tail is only ever *after* its own tokens, so causality alone keeps it out and no mask is needed.
    `waste` bounds the share of a bucket's slots that hold no token. On CUDA, half precision takes one
    variable-length kernel instead (models/varlen.py); on a CPU, float32 takes compiled kernels where there are any
    (kernels/attention.py).

    `expand` [sum(lengths)] (CPU, int64) says that sequences share beginnings: token i of the sequences end to end is
    token `expand[i]` of the pack, and every token of the pack is some sequence's (data/prefixes.py).
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str,
        waste: float = 0.15,
        expand: Tensor | None = None,
    ) -> None:
        device = torch.device(device)
        self.num_tokens = sum(lengths) if expand is None else int(expand.max()) + 1
        self._expand: Tensor | None = None
        self._first: Tensor | None = None  # [pack] one place of each token among the sequences' tokens
        if expand is not None:
            self._expand, self._first = expand.to(device), _first_places(expand).to(device)
        self._varlen: VarlenAttention | None = None
        if device.type == "cuda" and varlen_is_available():
            self._varlen = VarlenAttention(lengths, device)
        self._compiled: CompiledAttention | None = None
        if device.type == "cpu" and kernels_are_available():
            self._compiled = CompiledAttention(lengths, self._expand, self._first)
        self._lengths, self._device, self._waste = lengths, device, waste
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._buckets: list[tuple[Tensor, int, int]] | None = None  # token index [B * L], B, L

    def _make_buckets(self) -> list[tuple[Tensor, int, int]]:
        lengths, device = self._lengths, self._device
        buckets: list[tuple[Tensor, int, int]] = []
        scatter = torch.zeros(sum(lengths), dtype=torch.int64)
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        slot = 0
        for rows in bucket_by_length(lengths, self._waste):
            longest = lengths[rows[0]]
            index = torch.zeros(len(rows), longest, dtype=torch.int64)
            for b, row in enumerate(rows):
                n = lengths[row]
                index[b, :n] = torch.arange(starts[row], starts[row] + n)
                scatter[starts[row] : starts[row] + n] = torch.arange(
                    slot + b * longest, slot + b * longest + n
                )
            slot += len(rows) * longest
            flat = index.flatten().to(device)
            buckets.append((flat if self._expand is None else self._expand[flat], len(rows), longest))
        self._scatter = scatter.to(device) if self._first is None else scatter.to(device)[self._first]
        shared = self._expand is not None
        self._trivial = not shared and len(buckets) == 1 and buckets[0][1] * buckets[0][2] == self.num_tokens
        return buckets

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        if self._compiled is not None and takes(query, key, value):
            return self._compiled.attend(query, key, value, scale=scale, window=window)
        if self._varlen is not None and query.dtype in KERNEL_DTYPES:
            if self._expand is None or self._first is None:
                return self._varlen.attend(query, key, value, scale=scale, window=window)
            whole = (x[self._expand] for x in (query, key, value))
            return self._varlen.attend(*whole, scale=scale, window=window)[self._first]
        if self._buckets is None:
            self._buckets = self._make_buckets()
        gqa = query.shape[1] != key.shape[1]
        outputs = []
        for index, rows, length in self._buckets:
            q, k, v = (
                (x if self._trivial else take(x, index)).unflatten(0, (rows, length)).transpose(1, 2)
                for x in (query, key, value)
            )
            if window is not None and length > window:
                mask = self._window_mask(length, window, query.device)
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
            else:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat if self._trivial else take(flat, self._scatter)

    def _window_mask(self, length: int, window: int, device: torch.device) -> Tensor:
        if (length, window) not in self._masks:
            ahead = torch.arange(length, device=device)
            distance = ahead[:, None] - ahead[None, :]
            self._masks[length, window] = (distance >= 0) & (distance < window)
        return self._masks[length, window]


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[index] along the first dimension, whichever way is fastest and adds gradients in a fixed order."""
    return x.index_select(0, index) if x.device.type == "cpu" else x[index]


def _first_places(expand: Tensor) -> Tensor:
    """[max + 1] the first place of each value of `expand`, which holds all values from 0 on."""
    values = expand.numpy()
    first = np.empty(int(values.max()) + 1, dtype=np.int64)
    first[values[::-1]] = np.arange(len(values) - 1, -1, -1)  # of several, numpy keeps the last written
    return torch.from_numpy(first)


def bucket_by_length(lengths: Sequence[int], waste: float) -> list[list[int]]:
    """Rows sorted by falling length and cut so that at most `waste` of a bucket's slots are empty.

    Rows of no tokens are left out.
    """
    buckets: list[list[int]] = []
    used = 0
    for row in sorted((r for r in range(len(lengths)) if lengths[r] > 0), key=lambda r: -lengths[r]):
        if buckets:
            slots = lengths[buckets[-1][0]] * (len(buckets[-1]) + 1)
            if used + lengths[row] >= (1 - waste) * slots:
                buckets[-1].append(row)
                used += lengths[row]
                continue
        buckets.append([row])
        used = lengths[row]
    return buckets


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    headrace_attention: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: [1, heads, T, D] in, ([1, T, heads, D], None) out.

    Dropout is left out on purpose: every log-probability headrace computes is without dropout.
    """
    if headrace_attention is None:
        raise HeadraceError(
            f"{type(module).__name__} was called without headrace's attention context;"
            " use CausalLM.hidden_states instead of calling the Hugging Face model"
        )
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise ConfigError(
            f"{type(module).__name__} uses attention soft-capping or sinks, which are not supported"
        )
    layer = module.layer_idx
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = headrace_attention.attend(
        int(layer),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scale,
        window=sliding_window,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Makes `attn_implementation="headrace"` known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention_function)
