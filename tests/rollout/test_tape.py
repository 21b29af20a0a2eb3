"""Tapes: what they record and repeat, what they refuse, and where results lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.rollout.native.recorder import NotRepeatable, filler
from headrace.rollout.native.tape import ALIGNMENT, Arena, Tape, plan

ROWS = 6


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Nothing:
    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("nobody asked for attention")


class Halves:
    """An attention that is easy to compute: half of the query, plus the values of its group."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        return query * scale + value.repeat_interleave(query.shape[1] // value.shape[1], 1) + layer


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(x, alpha=3).clamp_(min=-1)
    y[:, 1].mul_(5)
    return y


def views(x: Tensor) -> Tensor:
    left, right = x.t().contiguous().t().chunk(2, -1)
    return torch.cat([right.neg(), left.unsqueeze(0).expand(1, -1, -1)[0]], -1)


def two_outputs(x: Tensor) -> Tensor:
    values, index = x.topk(3, -1)
    return values + index


def other_types(x: Tensor) -> Tensor:
    whole = x.to(torch.float64).cumsum(-1).to(torch.float32)
    return whole * (x > 0) + torch.arange(x.shape[-1]) + torch.tensor(2.0) + x.long()


def new_shape_in_place(x: Tensor) -> Tensor:
    """Of a tensor that is filled by a copy, which would not undo it."""
    y = x.clone()
    y.t_()
    z = x.clone()
    z.unsqueeze_(0)
    return (y * 2).t() + z[0]


def numbers_first(x: Tensor) -> Tensor:
    """Operators whose overloads differ in the types of their arguments alone."""
    return (1 - x) + (2.0 - x * 2) + (1 << x.long().abs())


def odd_storage(x: Tensor) -> Tensor:
    """A view as complex numbers of memory that holds half a number more."""
    whole = torch.cat([x.reshape(-1), x[0, :1]])
    turned = torch.view_as_complex(whole[: ROWS * 8].view(-1, 2)) * (1 + 1j)
    return torch.view_as_real(turned).reshape(ROWS, 8)


def no_output_given(x: Tensor) -> Tensor:
    return F.layer_norm(F.pad(x, (1, 1)), (x.shape[-1] + 2,)) + F.gelu(x, approximate="tanh").sum(
        -1, keepdim=True
    )


FORWARDS: list[Callable[[Tensor], Tensor]] = [
    in_place,
    views,
    two_outputs,
    other_types,
    new_shape_in_place,
    numbers_first,
    odd_storage,
    no_output_given,
    lambda x: F.rms_norm(x, (8,), torch.linspace(1, 2, 8)),
    lambda x: F.silu(x) @ torch.eye(8) + F.elu(x).amax(-1, keepdim=True),
    lambda x: torch.where(x > 0, x, x.exp()).softmax(-1).masked_fill(x < -1, 0.5),
    lambda x: torch.einsum("rd,ed->re", x, torch.ones(5, 8)),
    lambda x: x.unflatten(-1, (2, 4)).transpose(0, 1).reshape(2, -1).mean(0, keepdim=True).expand(ROWS, -1),
]


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_play_computes_what_the_function_does(forward: Callable[[Tensor], Tensor]) -> None:
    """Also for inputs that came later, and although everything has its fixed place."""
    x = torch.randn(ROWS, 8)
    tape = Tape(lambda attention: forward(x), Arena())
    for seed in range(3):
        x.copy_(torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(seed)))
        torch.testing.assert_close(tape.play(Nothing(), ROWS), forward(x), rtol=0, atol=0)


def test_attention_is_computed_at_each_play() -> None:
    """Of the rows in use alone, with what the play is given."""
    x, weight = torch.randn(ROWS, 8), torch.randn(8, 8)

    def forward(attention: Any) -> Tensor:
        hidden = x
        for layer in range(2):
            q = (hidden @ weight).view(ROWS, 4, 2)
            k, v = (hidden[:, :4] * 2).view(ROWS, 2, 2), hidden[:, 4:].view(ROWS, 2, 2)
            hidden = hidden + attention.attend(layer, q, k, v, scale=0.5, window=None).flatten(1)
        return hidden

    tape = Tape(forward, Arena())
    for used in (ROWS, 2, 5):
        x.copy_(torch.randn(ROWS, 8))
        torch.testing.assert_close(tape.play(Halves(), used)[:used], forward(Halves())[:used])


def test_weights_are_read_where_they_lie() -> None:
    x, weight = torch.ones(ROWS, 2), torch.ones(2, 2)
    tape = Tape(lambda attention: x @ weight, Arena())
    weight.fill_(3)
    assert tape.play(Nothing(), ROWS).tolist() == [[6.0, 6.0]] * ROWS


def test_tapes_of_one_arena_share_its_memory() -> None:
    arena, x = Arena(), torch.ones(ROWS, 32)
    first = Tape(lambda attention: x * 2 + 1, arena)
    second = Tape(lambda attention: x[:3] * 3 + 1, arena)
    a, b = first.play(Nothing(), ROWS), second.play(Nothing(), 3)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert b.tolist() == [[4.0] * 32] * 3
    assert first.play(Nothing(), ROWS).tolist() == [[3.0] * 32] * ROWS


COUNTER = torch.zeros(1)


def caught(x: Tensor) -> Tensor:
    """Whose own code takes care of what is raised in it."""
    try:
        return x * float(x.max())
    except Exception:  # noqa: BLE001
        return x


def grown_output(x: Tensor) -> Tensor:
    out = torch.empty(0)
    torch.matmul(x, torch.eye(8), out=out)
    return out + out * 3


def conjugate(x: Tensor) -> Tensor:
    turned = torch.view_as_complex((x * 2).view(ROWS, 4, 2)).conj()
    return torch.view_as_real((turned * turned.sum()).resolve_conj()).flatten(1)


def another_thread(x: Tensor) -> Tensor:
    """Whose operators no recording sees."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x * 2).result() + 1


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x * float(x[0, 0]),
        lambda x: x + max(x.sum(-1).tolist()),
        lambda x: x + torch.from_numpy(x.numpy().copy()),
        lambda x: x + len(str(x)),
        lambda x: x[x > 0],
        lambda x: x[:, x[0].nonzero()[:, 0]],
        lambda x: x + torch.rand(8),
        lambda x: F.dropout(x, 0.5),
        lambda x: x + COUNTER.add_(1),
        lambda x: x.mul_(2) + 1,
        lambda x: x + float(np.random.default_rng().random()),
        caught,
        grown_output,
        conjugate,
        another_thread,
    ],
)
def test_what_looks_at_values_or_changes_things_is_refused(forward: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(ROWS, 8)
    with pytest.raises(NotRepeatable):
        Tape(lambda attention: forward(x), Arena(), lambda: x.mul_(-3).add_(1))


def test_a_forward_that_is_never_the_same_is_refused() -> None:
    """What it depends on is known to no operator, so only a play can tell: here a constant that was overwritten."""
    x, other = torch.ones(ROWS, 2), np.ones(2, dtype=np.float32)

    def forward(attention: Any) -> Tensor:
        out = x + torch.from_numpy(other)
        other.fill(5.0)
        return out

    with pytest.raises(NotRepeatable, match="differs"):
        Tape(forward, Arena())


def test_the_filling_is_finite_and_of_the_values_size() -> None:
    out = filler(torch.ones(3, 4, 6), torch.ones(3, 2, 5))
    assert out.shape == (3, 4, 5)
    assert out.isfinite().all()
    assert len(out.unique()) > 50


@st.composite
def lifetimes(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    firsts = sorted(draw(st.lists(st.integers(0, 20), max_size=25)))
    return [(draw(st.integers(0, 300)), first, first + draw(st.integers(0, 8))) for first in firsts]


@settings(max_examples=200, deadline=None)
@given(lifetimes())
def test_what_is_in_use_at_once_does_not_overlap(storages: list[tuple[int, int, int]]) -> None:
    offsets, total = plan(storages)
    for i, (size, first, last) in enumerate(storages):
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] + size <= total
        for j in range(i):
            other, begin, end = storages[j]
            if begin <= last and first <= end and size and other:
                assert offsets[i] + size <= offsets[j] or offsets[j] + other <= offsets[i]
    assert total <= sum(-(-max(size, 1) // ALIGNMENT) * ALIGNMENT for size, _, _ in storages)


def test_memory_is_used_again() -> None:
    """Ten results one after the other, each read by the next alone, take the places of two."""
    offsets, total = plan([(64, step, step + 1) for step in range(10)])
    assert total == 128
    assert offsets == [0, 64] * 5
