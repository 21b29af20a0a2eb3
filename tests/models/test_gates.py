"""The faster gated layers: which modules get them, and that they are the same function with the same gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from headrace.kernels import build, feed_forward
from headrace.models.causal_lm import CausalLM
from headrace.models.gates import use_fast_gates
from headrace.models.norm import use_fast_norms


class Gated(nn.Module):
    def __init__(self, activation: nn.Module | None = None, hidden: int = 6, *, bias: bool = True) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, 10, bias=bias) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(10, hidden, bias=bias), activation or nn.SiLU()

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


def one_product() -> Gated:
    """Such as runs as one kernel."""
    torch.manual_seed(0)
    module = Gated(hidden=16, bias=False)
    use_fast_gates(module)
    return module


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were called from here on."""
    if build.missing() is not None:
        pytest.skip(f"no kernels: {build.missing()}")
    seen: list[str] = []
    for name in ("feed_forward", "forward"):
        own = getattr(feed_forward, name)
        monkeypatch.setattr(feed_forward, name, lambda *a, n=name, own=own: (seen.append(n), own(*a))[1])
    return seen


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("hidden", "bias"), [(6, True), (16, True), (16, False)])
def test_values_and_gradients_are_those_of_float64(hidden: int, bias: bool) -> None:
    module = Gated(hidden=hidden, bias=bias)
    exact = copy.deepcopy(module).double()
    use_fast_gates(module)
    assert is_fast(module)
    x = torch.randn(3, 7, hidden, generator=torch.Generator().manual_seed(0)).requires_grad_()
    reference = x.detach().double().requires_grad_()
    up = torch.randn(3, 7, hidden, generator=torch.Generator().manual_seed(1))
    y, z = module(x), exact(reference)
    with torch.no_grad():
        plain = module(x)
    got = torch.autograd.grad(y, (x, *module.parameters()), up)
    wanted = torch.autograd.grad(z, (reference, *exact.parameters()), up.double())
    for a, b in zip((y, plain, *got), (z, z, *wanted), strict=True):
        assert (a.double() - b).abs().max() <= 3e-6 * b.abs().max()


def test_plain_layers_run_as_one_kernel(calls: list[str]) -> None:
    module, x = one_product(), torch.randn(2, 5, 16)
    module(x)
    with torch.no_grad():
        module(x)
    assert calls == ["forward", "feed_forward"]


def test_frozen_weights_and_inputs(calls: list[str]) -> None:
    module, x = one_product(), torch.randn(5, 16, requires_grad=True)
    up = torch.randn(5, 16)
    wanted = torch.autograd.grad(Gated.forward(module, x), [x, *module.parameters()], up)
    module.up_proj.weight.requires_grad_(False)
    module(x).backward(up)
    assert module.up_proj.weight.grad is None
    for mine, theirs in zip(
        (x.grad, module.gate_proj.weight.grad, module.down_proj.weight.grad),
        (wanted[0], wanted[1], wanted[3]),
        strict=True,
    ):
        assert mine is not None
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    module.requires_grad_(False)
    (alone,) = torch.autograd.grad(module(x), x, up)
    torch.testing.assert_close(alone, wanted[0], atol=1e-6, rtol=1e-5)
    module.requires_grad_(True)
    (of_down,) = torch.autograd.grad(module(x.detach()), module.down_proj.weight, up)
    torch.testing.assert_close(of_down, wanted[3], atol=1e-6, rtol=1e-5)
    assert calls == ["forward"] * 3


def test_recomputed_in_the_backward_pass(calls: list[str]) -> None:
    module, x = one_product(), torch.randn(5, 16, requires_grad=True)
    up = torch.randn(5, 16)
    plain = torch.autograd.grad(module(x), [x, *module.parameters()], up)
    again = torch.autograd.grad(checkpoint(module, x, use_reentrant=False), [x, *module.parameters()], up)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert calls == ["forward"] * 3


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "act_fn"])
@pytest.mark.parametrize(
    "kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_who_watches_a_layer_sees_it(calls: list[str], name: str, kind: str) -> None:
    module, seen = one_product(), []
    handle = getattr(getattr(module, name), kind)(lambda *a: seen.append(1))
    x = torch.randn(5, 16, requires_grad=True)
    module(x).sum().backward()
    assert seen == [1]
    assert calls == []
    handle.remove()
    module(x)
    assert calls == ["forward"]


def test_who_watches_every_module_sees_these_too(calls: list[str]) -> None:
    module, seen = one_product(), []
    handle = nn_module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    try:
        module(torch.randn(5, 16))
    finally:
        handle.remove()
    assert seen == ["Linear", "SiLU", "Linear", "Linear", "Gated"]
    assert calls == []


def test_a_weight_that_was_changed_is_not_taken_for_that_of_the_forward_pass(calls: list[str]) -> None:
    module, x = one_product(), torch.randn(5, 16)
    out = module(x)
    with torch.no_grad():
        module.up_proj.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert calls == ["forward"]


def test_frozen_layers_do_not_keep_their_input(calls: list[str]) -> None:
    """As with torch's own: only gradients of weights need it."""
    module, x, up = one_product(), torch.randn(5, 16, requires_grad=True), torch.randn(5, 16)
    module.requires_grad_(False)
    shapes: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (shapes.append(tuple(t.shape)), t)[1], lambda t: t
    ):
        module(x)
    assert (5, 16) not in shapes
    assert calls == ["forward"]
    (wanted,) = torch.autograd.grad(Gated.forward(module, x), x, up)
    (got,) = torch.autograd.grad(module(x), x, up)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_who_counts_or_traces_sees_every_product(calls: list[str]) -> None:
    module, x = one_product(), torch.randn(5, 16)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    # three products of 5 x 16 x 10, and twice that for gradients, of x none
    assert counter.get_total_flops() == 2 * 5 * 16 * 10 * (3 + 3 + 1)
    assert calls == []


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_other_layers_are_called(calls: list[str]) -> None:
    x = torch.randn(5, 16)
    for change in ("class", "forward", "activation", "sparse", "dtype", "autocast", "bias", "large"):
        module, autocast = one_product(), False
        if change == "class":
            module.up_proj = Doubled(16, 10, bias=False)
        elif change == "forward":
            module.up_proj.forward = lambda x: 3 * x[..., :10]  # type: ignore[method-assign]
        elif change == "activation":
            module.act_fn.forward = torch.tanh  # type: ignore[method-assign, assignment]
        elif change == "sparse":
            module.up_proj.weight = nn.Parameter(module.up_proj.weight.detach().to_sparse())
        elif change == "dtype":
            module, x = module.double(), x.double()
        elif change == "autocast":
            autocast, x = True, x.float()
        elif change == "bias":
            module.down_proj.bias = nn.Parameter(torch.ones(16))
        else:
            module.gate_proj, module.up_proj = (nn.Linear(16, 1 << 16, bias=False) for _ in range(2))
            module.down_proj = nn.Linear(1 << 16, 16, bias=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.testing.assert_close(module(x), Gated.forward(module, x), atol=1e-5, rtol=1e-5)
        assert calls == [], change


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


def test_a_model_can_be_pickled() -> None:
    module, plain = Gated(), nn.RMSNorm(6, eps=1e-6)
    x = torch.randn(2, 6)
    for one, use in ((module, use_fast_gates), (plain, use_fast_norms)):
        use(one)
        twin = pickle.loads(pickle.dumps(one))
        assert is_fast(twin)
        assert torch.equal(twin(x), one(x))
        with torch.no_grad():
            for weight in one.parameters():
                weight.zero_()
        assert not torch.equal(twin(x), one(x))


class Taking(Gated):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_calls_by_name() -> None:
    module, x = Taking(), torch.randn(2, 6)
    use_fast_gates(module)
    assert is_fast(module)
    torch.testing.assert_close(module(x=x), module(x))
    torch.testing.assert_close(module(x, scale=2.0), 2 * module(x))


def test_numbers_that_are_not_there() -> None:
    """FakeTensorMode knows shapes alone; and a layer of width 0 has none."""
    module, x = one_product(), torch.randn(5, 16)
    plain = nn.RMSNorm(16, eps=1e-6)
    use_fast_norms(plain)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        assert plain(module(x)).shape == (5, 16)
    empty = Gated(hidden=0, bias=False)
    use_fast_gates(empty)
    assert empty(torch.randn(2, 0)).shape == (2, 0)


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
