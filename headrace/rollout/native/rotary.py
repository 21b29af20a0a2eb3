"""Rotary embeddings in a recording: five operators become one kernel.

Transformers computes them in a function of each model's file, `x * cos + cat(-x2, x1) * sin` for the halves of x,
which no module owns; in a recording it is found by what its operators read and write.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.kernels import pointwise
from headrace.kernels.operators import takes
from headrace.rollout.native.recorder import Call, Place, Recorder

_OPERATORS = [
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.neg.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.add.Tensor,
]


def fuse_rotations(recorder: Recorder) -> None:
    """Puts the kernel in place of the last operator of each rotation, and nothing in place of the others."""
    if not takes():  # there are no kernels
        return
    for at in range(len(recorder.steps) - len(_OPERATORS) + 1):
        found = _rotation(recorder, at)
        if found is None:
            continue
        last = at + len(_OPERATORS) - 1
        for place in found.args:
            recorder.storages[place.storage].last = max(recorder.storages[place.storage].last, last)
        for step in recorder.steps[at:last]:
            if isinstance(step, Call):
                recorder.storages[step.outputs[0].storage].nbytes = 0
        recorder.steps[at : last + 1] = [None] * (len(_OPERATORS) - 1) + [found]


def _rotation(recorder: Recorder, at: int) -> Call | None:
    steps: list[Call] = []
    for step, operator in zip(recorder.steps[at:], _OPERATORS, strict=False):
        if (
            not isinstance(step, Call)
            or step.function is not operator
            or step.kwargs
            or len(step.outputs) != 1
        ):
            return None
        steps.append(step)
    straight, turned, joined, crossed, total = steps
    x, cos = straight.args
    pieces, sin = joined.args[0], crossed.args[1]
    if not all(
        isinstance(y, Place) and y.dtype == torch.float32 and y.stride[-1] == 1 for y in (x, cos, sin)
    ):
        return None
    if len(x.size) != 4 or x.size[0] != 1 or x.size[-1] % 2:
        return None
    half = x.size[-1] // 2
    first = replace(x, size=(*x.size[:-1], half))
    if not (
        {cos.size, sin.size} == {(1, 1, *x.size[2:])}
        and turned.args == (replace(first, offset=x.offset + half),)
        and list(pieces) == [turned.outputs[0], first]
        and joined.args[1:] in ((-1,), (3,))
        and crossed.args == (joined.outputs[0], sin)
        and total.args == (straight.outputs[0], crossed.outputs[0])
    ):
        return None
    # nobody else reads what comes between
    if any(
        recorder.storages[step.outputs[0].storage].last != at + reader
        for step, reader in zip(steps, (4, 2, 3, 4), strict=False)
    ):
        return None
    out = total.outputs[0]
    return Call(pointwise.rotate, (x, cos, sin), {}, [out]) if out.stride[-1] == 1 else None
