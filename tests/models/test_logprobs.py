"""Chunked log-probabilities against the plain log_softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.models.causal_lm import OutputHead
from headrace.models.logprobs import token_logprobs

T, H, V = 7, 5, 11


def naive(hidden, weight, bias, softcap, targets, temperature):
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def make(dtype, with_bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if with_bias else None
    targets = torch.randint(0, V, (T,), generator=g)
    return hidden, weight, bias, targets


CASES = [(b, c, t) for b in (False, True) for c in (None, 3.0) for t in (1.0, 0.7)]
ONE_ROW = V * 8  # chunk_bytes of one float64 row of logits


@pytest.mark.parametrize("with_bias, softcap, temperature", CASES)
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_values_and_gradients_equal_the_naive_form(with_bias, softcap, temperature, rows_per_chunk):
    hidden, weight, bias, targets = make(torch.float64, with_bias)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(T, generator=g, dtype=torch.float64) for _ in range(2))

    logp, entropy = token_logprobs(
        hidden, OutputHead(weight, bias, softcap), targets, temperature, chunk_bytes=rows_per_chunk * ONE_ROW
    )
    expected_logp, expected_entropy = naive(hidden, weight, bias, softcap, targets, temperature)
    torch.testing.assert_close(logp, expected_logp, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    for scale_a, scale_b in [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)]:
        ours = torch.autograd.grad(
            (scale_a * a * logp + scale_b * b * entropy).sum(), inputs, retain_graph=True
        )
        theirs = torch.autograd.grad(
            (scale_a * a * expected_logp + scale_b * b * expected_entropy).sum(), inputs, retain_graph=True
        )
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_bias, softcap, temperature", CASES)
def test_gradcheck_in_float64(with_bias, softcap, temperature):
    hidden, weight, bias, targets = make(torch.float64, with_bias, seed=3)

    def both(h: Tensor, w: Tensor, *b: Tensor):
        head = OutputHead(w, b[0] if b else None, softcap)
        return token_logprobs(h, head, targets, temperature, chunk_bytes=2 * ONE_ROW)

    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    assert torch.autograd.gradcheck(both, inputs)


def test_hand_worked_two_word_vocabulary():
    # logits (ln 3, 0): p = (3/4, 1/4), H = ln 4 - 3/4 ln 3; dH/dz_0 = -p0 (ln p0 + H) = -(3/16) ln 3
    log3 = torch.log(torch.tensor(3.0, dtype=torch.float64))
    hidden = torch.ones(1, 1, dtype=torch.float64)
    bias = torch.stack([log3, torch.zeros_like(log3)]).requires_grad_()
    head = OutputHead(torch.zeros(2, 1, dtype=torch.float64), bias, None)
    logp, entropy = token_logprobs(hidden, head, torch.tensor([1]))
    assert logp.item() == pytest.approx(-1.3862943611198906)
    assert entropy.item() == pytest.approx(1.3862943611198906 - 0.75 * 1.0986122886681098)
    (of_logp,) = torch.autograd.grad(logp.sum(), bias, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(entropy.sum(), bias)
    assert of_logp.tolist() == pytest.approx([-0.75, 0.75])
    assert of_entropy.tolist() == pytest.approx([-0.20598980412527059, 0.20598980412527059])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_give_float32_softmax(dtype):
    hidden, weight, bias, targets = make(dtype)
    logp, entropy = token_logprobs(hidden, OutputHead(weight, bias, None), targets, chunk_bytes=2 * V * 4)
    assert logp.dtype == entropy.dtype == torch.float32
    # the logits are rounded to the model's dtype; from there on everything is float32
    logits = torch.nn.functional.linear(hidden, weight, bias).double()
    expected = torch.log_softmax(logits, -1)
    torch.testing.assert_close(
        logp.double(), expected.gather(1, targets[:, None]).squeeze(1), rtol=0, atol=2e-6
    )
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=0, atol=4e-6)

    (logp.sum() + entropy.sum()).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    e_logp, e_entropy = naive(*exact, None, targets, 1.0)
    (e_logp.sum() + e_entropy.sum()).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for x, y in zip((hidden, weight, bias), exact, strict=True):
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=tolerance, atol=tolerance)


def test_weight_gradient_of_many_chunks_is_summed_in_float32():
    # every token adds exactly 2^-9 to one weight; a bfloat16 running sum would stall at 1
    tokens = 4096
    hidden = torch.full((tokens, 1), 2.0**-8, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp, _ = token_logprobs(
        hidden,
        OutputHead(weight, None, None),
        torch.zeros(tokens, dtype=torch.int64),
        chunk_bytes=8,
        with_entropy=False,
    )
    logp.sum().backward()
    assert weight.grad.flatten().tolist() == [8.0, -8.0]  # 4096 * 2^-8 * (1 - 1/2)


def test_tokens_without_gradient_are_skipped_and_their_nan_stays_out():
    hidden, weight, bias, targets = make(torch.float64)
    poisoned = hidden.detach().clone()
    poisoned[2] = torch.nan
    poisoned.requires_grad_()
    keep = torch.arange(T) != 2
    logp, entropy = token_logprobs(poisoned, OutputHead(weight, bias, None), targets, chunk_bytes=2 * ONE_ROW)
    (torch.where(keep, logp + entropy, 0.0)).sum().backward()
    exact = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    e_logp, e_entropy = naive(*exact, None, targets, 1.0)
    (e_logp + e_entropy)[keep].sum().backward()
    assert poisoned.grad[2].tolist() == [0.0] * H
    torch.testing.assert_close(poisoned.grad[keep], exact[0].grad[keep])
    torch.testing.assert_close(weight.grad, exact[1].grad)
    torch.testing.assert_close(bias.grad, exact[2].grad)


def test_a_nan_gradient_is_not_lost():
    hidden, weight, bias, targets = make(torch.float64)
    logp, _ = token_logprobs(hidden, OutputHead(weight, bias, None), targets)
    logp.backward(torch.full((T,), torch.nan, dtype=torch.float64))
    assert weight.grad.isnan().all()


def test_impossible_words_do_not_make_the_entropy_nan():
    hidden, weight, _, targets = make(torch.float64)
    bias = torch.zeros(V, dtype=torch.float64)
    bias[-1] = -torch.inf
    targets = targets.clamp(max=V - 2)
    logp, entropy = token_logprobs(hidden, OutputHead(weight, bias, None), targets)
    expected, expected_entropy = naive(hidden, weight[:-1], None, None, targets, 1.0)
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    (logp + entropy).sum().backward()
    assert hidden.grad.isfinite().all()


def test_without_entropy_and_without_tokens():
    hidden, weight, bias, targets = make(torch.float64)
    head = OutputHead(weight, bias, None)
    logp, entropy = token_logprobs(hidden, head, targets, with_entropy=False)
    assert entropy is None
    torch.testing.assert_close(logp, naive(hidden, weight, bias, None, targets, 1.0)[0])
    empty, empty_entropy = token_logprobs(hidden[:0], head, targets[:0])
    assert empty.shape == empty_entropy.shape == (0,)
    empty.sum().backward()
    assert weight.grad.abs().sum() == 0


def test_frozen_head_and_frozen_hidden():
    hidden, weight, bias, targets = make(torch.float64)
    logp, _ = token_logprobs(hidden.detach(), OutputHead(weight, bias.detach(), None), targets)
    logp.sum().backward()
    assert hidden.grad is None
    assert bias.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"temperature": 0.0}, "temperature"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"targets": torch.zeros(T - 1, dtype=torch.int64)}, "targets"),
    ],
)
def test_bad_arguments(change, words):
    hidden, weight, bias, targets = make(torch.float64)
    arguments = {"hidden": hidden, "head": OutputHead(weight, bias, None), "targets": targets} | change
    with pytest.raises(ValueError, match=words):
        token_logprobs(**arguments)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor any operation returns, in elements, but for those of the weight's shape."""

    def __init__(self, leave_out: tuple[int, ...]) -> None:
        super().__init__()
        self.leave_out = leave_out
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and tuple(x.shape) not in (self.leave_out, self.leave_out[::-1]):
                self.elements = max(self.elements, x.numel())
        return out


def test_vocabulary_of_152k_never_holds_all_logits():
    vocab, hidden_size, tokens = 152_064, 4, 12
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=g).requires_grad_()
    weight = torch.randn(vocab, hidden_size, generator=g).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=g)

    with LargestTensor((vocab, hidden_size)) as naive_peak:
        # in float64: naive sums of 152k numbers in float32 are off by 1.5e-5 on some processors
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        expected, expected_entropy = naive(*exact, None, None, targets, 1.0)
        (expected + expected_entropy).sum().backward()
    assert naive_peak.elements == tokens * vocab  # the measure sees what it must see
    expected_grads = [x.grad for x in exact]

    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x)
    with LargestTensor((vocab, hidden_size)) as peak, hooks:
        logp, entropy = token_logprobs(
            hidden, OutputHead(weight, None, None), targets, chunk_bytes=2 * vocab * 4
        )
        (logp + entropy).sum().backward()
    assert peak.elements == 2 * vocab
    assert max(saved) <= vocab * hidden_size
    torch.testing.assert_close(logp.double(), expected, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=2e-6, atol=1e-5)
    # a product of float32 over 152k numbers, as torch computes it
    assert (hidden.grad - expected_grads[0]).abs().max() <= 5e-4 * expected_grads[0].abs().max()
    torch.testing.assert_close(weight.grad.double(), expected_grads[1], rtol=1e-5, atol=5e-6)
