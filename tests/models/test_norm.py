"""The faster normalisation: which modules get it, and that it is the same function with the same gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.models.norm import use_fast_norms


class Norm(nn.Module):
    """RMSNorm as models write it, in the dtype of its input."""

    def __init__(self, size: int, eps: float, *, plus_one: bool = False, power: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(3)))
        self.smallest, self.plus_one, self.power = eps, plus_one, power

    def forward(self, x: Tensor) -> Tensor:
        gain = 1 + self.weight if self.plus_one else self.weight
        return x * torch.rsqrt(x.abs().pow(self.power).mean(-1, keepdim=True) + self.smallest) * gain


class Centred(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Gated(Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x)


def is_fast(module: nn.Module) -> bool:
    return "forward" in vars(module)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("plus_one", [False, True])
def test_values_and_gradients_are_those_of_float64(plus_one: bool, eps: float) -> None:
    module = Norm(24, eps, plus_one=plus_one)
    exact = copy.deepcopy(module).double()
    use_fast_norms(module)
    assert is_fast(module)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 50.0):
        x = (scale * torch.randn(2, 5, 3, 24, generator=generator)).requires_grad_()
        up = torch.randn(2, 3, 5, 24, generator=generator).transpose(1, 2)
        reference = x.detach().double().requires_grad_()
        got = torch.autograd.grad(y := module(x), (x, module.weight), up)
        wanted = torch.autograd.grad(z := exact(reference), (reference, exact.weight), up.double())
        with torch.no_grad():
            plain = module(x)
        for a, b in zip((y, plain, *got), (z, z, *wanted), strict=True):
            assert (a.double() - b).abs().max() <= 3e-6 * b.abs().max()


def test_an_eps_that_was_changed_and_calls_by_name() -> None:
    module, x = nn.RMSNorm(8, eps=1e-6), torch.randn(3, 8)
    use_fast_norms(module)
    module.eps = 1.0
    wanted = torch.nn.functional.rms_norm(x, (8,), module.weight, 1.0)
    torch.testing.assert_close(module(x), wanted)
    torch.testing.assert_close(module(x=x), wanted)
    module.eps = None
    torch.testing.assert_close(module(x), torch.nn.functional.rms_norm(x, (8,), module.weight, None))


def test_a_module_is_known_before_it_has_weights() -> None:
    """Models of workers are made so; they must compute as those that were loaded whole."""
    with torch.device("meta"):
        module, other = nn.RMSNorm(8, eps=1e-5), nn.LayerNorm(8, bias=False)
        use_fast_norms(module)
        use_fast_norms(other)
    assert is_fast(module)
    assert not is_fast(other)
    module.to_empty(device="cpu")
    torch.nn.init.normal_(module.weight)
    x = torch.randn(3, 8)
    torch.testing.assert_close(module(x), torch.nn.functional.rms_norm(x, (8,), module.weight, 1e-5))


def test_only_what_needs_a_gradient_gets_one() -> None:
    module = Norm(8, 1e-5)
    use_fast_norms(module)
    x = torch.randn(3, 8)
    module(x).sum().backward()
    assert module.weight.grad is not None
    frozen = Norm(8, 1e-5).requires_grad_(False)
    use_fast_norms(frozen)
    assert not frozen(x).requires_grad
    leaf = x.clone().requires_grad_()
    frozen(leaf).sum().backward()
    assert leaf.grad is not None
    assert frozen.weight.grad is None


@pytest.mark.parametrize(
    "module",
    [
        Norm(8, 1e-5, power=1.0),
        Norm(8, 1e-5, power=2.001),
        Centred(8, 1e-5),
        Gated(8, 1e-5),
        nn.LayerNorm(8),
        nn.LayerNorm(8, bias=False),
        nn.Linear(8, 8, bias=False),
        nn.PReLU(8),
        Norm(8, 1e-5).double(),
        nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    ],
    ids=lambda m: type(m).__name__,
)
def test_other_modules_keep_their_forward(module: nn.Module) -> None:
    use_fast_norms(module)
    assert not any(is_fast(m) for m in module.modules())


def test_another_dtype_takes_the_modules_own_forward() -> None:
    module, own = Norm(8, 1e-5), Norm(8, 1e-5)
    use_fast_norms(module)
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(4, 8).to(dtype)
        assert torch.equal(module.to(dtype)(x), own.to(dtype)(x))


def test_a_deep_copy_uses_its_own_weights() -> None:
    module = Norm(8, 1e-5)
    use_fast_norms(module)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.mul_(2)
    x = torch.randn(4, 8)
    assert torch.allclose(other(x), 2 * module(x))


@pytest.mark.parametrize(
    "name, a_layer", [("llama", 2), ("qwen2-tied", 2), ("qwen3", 4), ("gemma3", 6), ("gpt2", 0)]
)
def test_a_model_gives_what_transformers_gives(build_model: Any, name: str, a_layer: int) -> None:
    """Logits and every gradient, beside the same weights in a model that headrace never saw."""
    model = build_model(name)
    fast = [m for m in model.hf.modules() if is_fast(m) and not list(m.children())]
    assert len(fast) == (a_layer * model.num_layers + 1 if a_layer else 0)
    config = copy.deepcopy(model.hf.config)
    config._attn_implementation = "eager"
    plain = type(model.hf)(config).eval()
    plain.load_state_dict(model.hf.state_dict())
    ids = torch.randint(0, plain.get_input_embeddings().num_embeddings, (1, 12))
    model.hf.set_attn_implementation("eager")
    logits = [m(input_ids=ids, use_cache=False).logits for m in (model.hf, plain)]
    assert (logits[0] - logits[1]).abs().max() <= 2e-5 * logits[1].abs().max()
    model.hf.requires_grad_(True)
    for m in (model.hf, plain):
        m(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :, 3].sum().backward()
    for (key, a), (_, b) in zip(model.hf.named_parameters(), plain.named_parameters(), strict=True):
        assert a.grad is not None, key
        assert b.grad is not None, key
        assert (a.grad - b.grad).abs().max() <= 1e-4 * b.grad.abs().max() + 1e-7, key


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_a_gpu(dtype: torch.dtype) -> None:
    """Values and gradients are those of float64 to the rounding of the dtype; other gains are computed as they were."""
    module = Norm(24, 1e-6).to("cuda", dtype)
    exact = copy.deepcopy(module).double()
    use_fast_norms(module)
    assert is_fast(module)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 24, generator=generator).to("cuda", dtype).transpose(1, 2).requires_grad_()
    up = torch.randn(2, 3, 5, 24, generator=generator).to("cuda", dtype)
    reference = x.detach().double().requires_grad_()
    got = torch.autograd.grad(y := module(x), (x, module.weight), up)
    wanted = torch.autograd.grad(z := exact(reference), (reference, exact.weight), up.double())
    for a, b in zip((y, *got), (z, *wanted), strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= 4 * torch.finfo(dtype).eps * b.abs().max()
    plus_one = Norm(24, 1e-6, plus_one=True).to("cuda", dtype)
    own = copy.deepcopy(plus_one)
    use_fast_norms(plus_one)
    torch.testing.assert_close(plus_one(x), own(x), rtol=0, atol=0)


def test_vectors_of_another_size_go_to_the_module_itself() -> None:
    """They would have been read as twice as many of half the size."""
    module = Norm(4, 1e-6)
    use_fast_norms(module)
    assert is_fast(module)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="must match"):
            module(torch.randn(3, 8))
