"""Rotary embeddings of taped steps: which operators become the kernel, and that it computes what they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from headrace.kernels import build, pointwise
from headrace.models.causal_lm import CausalLM
from headrace.rollout.native.recorder import Call, NoReading, Recorder
from headrace.rollout.native.rotary import fuse_rotations
from headrace.rollout.native.tape import Arena, Leaving, Tape

ROWS, HEADS, SIZE = 5, 3, 8
pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"no kernels: {build.missing()}")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """As transformers computes it, x [1, heads, rows, size] and angles [rows, size]."""
    cos, sin = angles.cos()[None, None], angles.sin()[None, None]
    return (x * cos) + (turned(x) * sin)


def heads_of(rows: Tensor) -> Tensor:
    """Of a projection [rows, heads * size], heads before rows, as modules lay them out."""
    return (rows * 2).view(1, len(rows), HEADS, -1).transpose(1, 2)


def fused(compute: Callable[[Recorder], Tensor]) -> int:
    recorder = Recorder()
    with NoReading(recorder), recorder:
        compute(recorder)
    fuse_rotations(recorder)
    return sum(isinstance(s, Call) and s.function is pointwise.rotate for s in recorder.steps)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(ROWS, HEADS * SIZE, generator=generator).to(dtype),
        torch.randn(ROWS, SIZE, generator=generator).to(dtype) * 9,
    )


def test_pairs_are_turned_by_their_angles() -> None:
    """Each pair (x[d], x[d + size / 2]) of a head, as a complex number times e^(i angle), in float64."""
    rows, angles = inputs()
    angles = torch.cat([angles[:, : SIZE // 2]] * 2, -1)  # both of a pair have one angle
    assert fused(lambda _: rotate(heads_of(rows), angles)) == 1
    tape = Tape(lambda _: rotate(heads_of(rows), angles)[0].transpose(0, 1).flatten(1), Arena())
    for seed in range(3):
        rows.normal_(generator=torch.Generator().manual_seed(seed))
        angles[:, : SIZE // 2] = angles[:, SIZE // 2 :] = torch.rand(ROWS, SIZE // 2) * 7
        got = tape.play(None, ROWS).view(ROWS, HEADS, SIZE)  # type: ignore[arg-type]
        for row in range(ROWS):
            for head in range(HEADS):
                x = [2 * v for v in rows.view(ROWS, HEADS, SIZE)[row, head].tolist()]
                for d in range(SIZE // 2):
                    angle = angles[row, d].item()
                    pair = complex(x[d], x[d + SIZE // 2]) * complex(math.cos(angle), math.sin(angle))
                    assert got[row, head, d].item() == pytest.approx(pair.real, abs=1e-5)
                    assert got[row, head, d + SIZE // 2].item() == pytest.approx(pair.imag, abs=1e-5)


def test_a_part_of_the_size_may_be_turned() -> None:
    rows, angles = inputs()

    def partly() -> Tensor:
        x = heads_of(rows)
        return torch.cat((rotate(x[..., : SIZE // 2], angles[:, : SIZE // 2]), x[..., SIZE // 2 :]), -1)

    assert fused(lambda _: partly()) == 1
    wanted = partly()[0].transpose(0, 1).flatten(1)
    tape = Tape(lambda _: partly()[0].transpose(0, 1).flatten(1), Arena())
    torch.testing.assert_close(tape.play(None, ROWS), wanted)  # type: ignore[arg-type]


def other_order(x: Tensor, angles: Tensor) -> Tensor:
    half, (cos, sin) = SIZE // 2, (angles.cos()[None, None], angles.sin()[None, None])
    return (x * cos) + (torch.cat((x[..., half:], -x[..., :half]), dim=-1) * sin)


def of_another(x: Tensor, angles: Tensor) -> Tensor:
    y = x + 1
    return (x * angles.cos()[None, None]) + (turned(y) * angles.sin()[None, None])


def added_twice(x: Tensor, angles: Tensor) -> Tensor:
    part = x * angles.cos()[None, None]
    return (part + turned(x) * angles.sin()[None, None]) + part


def an_angle_a_head(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = (f(angles).expand(HEADS, -1, -1)[None] * 1 for f in (torch.cos, torch.sin))
    return (x * cos) + (turned(x) * sin)


def scaled_sum(x: Tensor, angles: Tensor) -> Tensor:
    return torch.add(x * angles.cos()[None, None], turned(x) * angles.sin()[None, None], alpha=2)


@pytest.mark.parametrize("other", [other_order, of_another, added_twice, an_angle_a_head, scaled_sum])
def test_what_only_looks_like_one_stays(other: Callable[[Tensor, Tensor], Tensor]) -> None:
    rows, angles = inputs()
    assert fused(lambda _: other(heads_of(rows), angles)) == 0
    wanted = other(heads_of(rows), angles)[0].transpose(0, 1).flatten(1)
    tape = Tape(lambda _: other(heads_of(rows), angles)[0].transpose(0, 1).flatten(1), Arena())
    torch.testing.assert_close(tape.play(None, ROWS), wanted)  # type: ignore[arg-type]


def test_other_numbers_and_shapes_stay() -> None:
    rows, angles = inputs(torch.float64)
    assert fused(lambda _: rotate(heads_of(rows), angles)) == 0
    rows, angles = inputs()
    assert fused(lambda _: rotate((rows * 2).view(ROWS, HEADS, SIZE).transpose(0, 1), angles)) == 0
    two = torch.cat([rows, rows])
    assert fused(lambda _: rotate((two * 2).view(2, ROWS, HEADS, SIZE).transpose(1, 2), angles)) == 0
    assert fused(lambda _: rotate(heads_of(rows).transpose(2, 3).contiguous().transpose(2, 3), angles)) == 0


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_nothing_changes() -> None:
    rows, angles = inputs()
    assert fused(lambda _: rotate(heads_of(rows), angles)) == 0


@pytest.mark.parametrize(("name", "a_layer"), [("llama", 2), ("qwen3", 2), ("gemma3", 2), ("gpt2", 0)])
def test_which_architectures(tiny: Callable[[str], CausalLM], name: str, a_layer: int) -> None:
    model, ids = tiny(name), torch.arange(4)
    assert fused(lambda recorder: model.run_layers(ids, ids, Leaving(recorder))) == a_layer * model.num_layers
