"""The faster gated layers: which modules get them, and that they are the same function with the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.models.causal_lm import CausalLM
from headrace.models.gates import use_fast_gates
from headrace.models.norm import use_fast_norms


class Gated(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 10), nn.Linear(6, 10)
        self.down_proj, self.act_fn = nn.Linear(10, 6), activation or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Scaled(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Needing(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return Gated.forward(self, x) * self.factor


class Wider(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 6)


class Asking(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return Gated.forward(self, x) * getattr(self, "factor", 1)


class Clamped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=100)) * self.up_proj(x))


class Swish(nn.Module):
    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def is_fast(module: nn.Module) -> bool:
    return "forward" in vars(module)


@pytest.mark.usefixtures("kernels")
def test_values_and_gradients_are_those_of_float64() -> None:
    module = Gated()
    exact = copy.deepcopy(module).double()
    use_fast_gates(module)
    assert is_fast(module)
    x = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    reference = x.detach().double().requires_grad_()
    up = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(1))
    y, z = module(x), exact(reference)
    with torch.no_grad():
        plain = module(x)
    got = torch.autograd.grad(y, (x, *module.parameters()), up)
    wanted = torch.autograd.grad(z, (reference, *exact.parameters()), up.double())
    for a, b in zip((y, plain, *got), (z, z, *wanted), strict=True):
        assert (a.double() - b).abs().max() <= 3e-6 * b.abs().max()


@pytest.mark.parametrize(
    "module",
    [Gated(nn.GELU()), Swapped(), Scaled(), Wider(), Needing(), Asking(), Clamped(), nn.Linear(3, 3)],
    ids=lambda m: type(m).__name__,
)
def test_other_modules_stay_as_they_are(module: nn.Module) -> None:
    use_fast_gates(module)
    assert not is_fast(module)


def test_a_forward_that_somebody_replaced_stays() -> None:
    module, plain = Gated(), nn.RMSNorm(6, eps=1e-6)
    for one in (module, plain):
        one.forward = lambda x: x + 1  # type: ignore[method-assign]
    use_fast_gates(module)
    use_fast_norms(plain)
    assert torch.equal(module(torch.ones(2, 6)), torch.full((2, 6), 2.0))
    assert torch.equal(plain(torch.ones(2, 6)), torch.full((2, 6), 2.0))


def test_activations_with_numbers_of_their_own() -> None:
    """One instance being a silu does not make the next one such."""
    model = nn.ModuleList([Gated(Swish(1.0)), Gated(Swish(2.0))])
    use_fast_gates(model)
    assert [is_fast(m) for m in model] == [True, False]


def test_other_dtypes_and_copies() -> None:
    module = Gated()
    use_fast_gates(module)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.gate_proj.weight.zero_()
    x = torch.randn(2, 6)
    assert not torch.equal(module(x), twin(x))
    half = copy.deepcopy(module).to(torch.bfloat16)
    expected = Gated.forward(half, x.bfloat16())
    torch.testing.assert_close(half(x.bfloat16()), expected, atol=0, rtol=0)


def test_another_activation_is_used() -> None:
    for module in (Gated(), copy.deepcopy(Gated())):
        use_fast_gates(module)
        twin = copy.deepcopy(module)
        twin.act_fn = nn.GELU()
        x = torch.randn(2, 6)
        torch.testing.assert_close(twin(x), Gated.forward(twin, x), atol=0, rtol=0)
        assert not torch.allclose(twin(x), module(x))
        assert [name for name, _ in twin.named_children()] == ["gate_proj", "up_proj", "down_proj", "act_fn"]


@pytest.mark.parametrize(("name", "fast"), [("llama", 3), ("qwen3", 3), ("gemma3", 0), ("gpt2", 0)])
def test_which_architectures(tiny: Callable[[str], CausalLM], name: str, fast: int) -> None:
    modules: list[Any] = [m for m in tiny(name).hf.modules() if is_fast(m) and hasattr(m, "gate_proj")]
    assert len(modules) == fast
