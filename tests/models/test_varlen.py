"""The variable-length CUDA kernel against per-sequence attention in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.models.attention import PackedAttention

LENGTHS = [5, 1, 130, 33, 64]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """float32, one sequence at a time, with an explicit mask and repeated key/value heads."""
    out, start = [], 0
    for n in LENGTHS:
        rows = slice(start, start + n)
        heads = q.shape[1] // k.shape[1]
        a, b, c = (x[rows].float().transpose(0, 1) for x in (q, k, v))
        b, c = b.repeat_interleave(heads, 0), c.repeat_interleave(heads, 0)
        distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        seen = (distance >= 0) & (distance < (window or n))
        out.append(
            F.scaled_dot_product_attention(a, b, c, attn_mask=seen.to(q.device), scale=0.2).transpose(0, 1)
        )
        start += n
    return torch.cat(out)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (4, 1, 256), (8, 2, 128)])
def test_values_and_gradients(window: int | None, heads: int, kv_heads: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)

    def tensor(h: int) -> torch.Tensor:
        return torch.randn(tokens, h, size, generator=generator).to("cuda", torch.bfloat16).requires_grad_()

    q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)
    ours = PackedAttention(LENGTHS, "cuda").attend(0, q, k, v, scale=0.2, window=window)
    weight = torch.randn(ours.shape, generator=generator).to("cuda")
    got = torch.autograd.grad((ours.float() * weight).sum(), (q, k, v))
    theirs = plain(q, k, v, window)
    wanted = torch.autograd.grad((theirs * weight).sum(), (q, k, v))
    torch.testing.assert_close(ours.float(), theirs, atol=3e-2, rtol=3e-2)
    for a, b in zip(got, wanted, strict=True):
        assert (a.float() - b.float()).abs().max() < 0.03 * b.float().abs().max()


@pytest.mark.gpu
def test_shared_tokens() -> None:
    """Sequences that share their first three tokens equal the same sequences written out."""
    generator = torch.Generator().manual_seed(0)
    expand = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 2, 6, 7, 8, 9])
    lengths = [5, 4, 7]
    q, k, v = (
        torch.randn(10, 4, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    first = torch.tensor([0, 1, 2, 3, 4, 8, 12, 13, 14, 15])
    ours = PackedAttention(lengths, "cuda", expand=expand).attend(0, q, k, v, scale=0.2, window=None)
    whole = PackedAttention(lengths, "cuda").attend(
        0, q[expand], k[expand], v[expand], scale=0.2, window=None
    )
    torch.testing.assert_close(ours, whole[first])
    weight = torch.randn(ours.shape, generator=generator).to("cuda")
    got = torch.autograd.grad((ours.float() * weight).sum(), (q, k, v), retain_graph=True)
    wanted = torch.autograd.grad((whole[first].float() * weight).sum(), (q, k, v))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
