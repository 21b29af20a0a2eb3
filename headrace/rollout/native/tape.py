"""The operators of one forward pass, recorded once and then run one after the other without the modules' Python code.

What a CUDA graph is to a GPU: shapes and addresses are those of the recording, every result has its place in one piece of
memory, and a view costs nothing, since it was taken when the tape was made. Attention is left open: it is computed at
each play by whoever plays the tape.

Shapes: R rows, A query heads, D head size of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.operators import bound
from headrace.models.attention import AttentionContext
from headrace.rollout.native.recorder import NoReading, NotRepeatable, Open, Place, Recorder, filler, kind_of
from headrace.rollout.native.rotary import fuse_rotations

ALIGNMENT = 64  # bytes, that of torch's own allocations: products may round in another way at other addresses
PLACEMENT = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}  # an output has them
COPIES = {"aten::_to_copy", "aten::clone"}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest value; 0.03 in half precision


class Arena:
    """Memory for the results of tapes of which one is played at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """At least `nbytes`, shared with all who asked for no more than those before them."""
        if nbytes > self._memory.numel():
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory


class _OpenAttend:
    """A layer's attention at each play."""

    def __init__(self, step: Open, tensors: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        self._step, self._tensors, self._output = step, tensors, output

    def __call__(self, attention: AttentionContext, used: int) -> None:
        step, output = self._step, self._output
        q, k, v = (x[:used] for x in self._tensors)
        output[:used].copy_(attention.attend(step.layer, q, k, v, scale=step.scale, window=step.window))
        if used < len(output):
            output[used:].zero_()


class Tape:
    """`forward(attention)` → [..., R, H], of which each play computes the same from what its inputs hold by then.

    Inputs and weights are read where they lay at the recording. Raises NotRepeatable where a forward pass looks at
    values, draws random numbers, has shapes that depend on values, or changes anything but its own results; and where
    a play does not give what the recording gave, or after `change` has given the inputs other values, not what the
    forward pass then gives: so state that no operator shows is found. Use under `torch.inference_mode()` only.
    """

    def __init__(
        self,
        forward: Callable[[AttentionContext], Tensor],
        arena: Arena,
        change: Callable[[], None] = lambda: None,
    ) -> None:
        recorder = Recorder()
        with NoReading(recorder), recorder:
            first = forward(Leaving(recorder))
        if recorder.refusal:
            raise NotRepeatable(recorder.refusal)
        result = recorder.place(first)
        if result is None:
            raise NotRepeatable("the forward pass computes nothing")
        fuse_rotations(recorder)
        offsets, nbytes = plan([(s.nbytes, s.first, s.last) for s in recorder.storages])
        memory = arena.take(nbytes)
        made: dict[Place, Tensor] = {}

        def real(value: Any) -> Any:
            if isinstance(value, Place):
                if value not in made:
                    at, size = offsets[value.storage], recorder.storages[value.storage].nbytes
                    whole = memory[at : at + aligned(size)].view(value.dtype)
                    start = int(whole.storage_offset()) + value.offset
                    made[value] = whole.as_strided(value.size, value.stride, start)
                return made[value]
            if isinstance(value, (list, tuple)):
                return type(value)(real(x) for x in value)
            return value

        self._pieces: list[tuple[list[Callable[[], Any]], _OpenAttend | None]] = [([], None)]
        for step in recorder.steps:
            if isinstance(step, Open):
                calls, _ = self._pieces.pop()
                attend = _OpenAttend(step, real(step.tensors), real(step.output))
                attend(_Filling(), step.output.size[0])
                self._pieces += [(calls, attend), ([], None)]
            elif step is not None:
                kwargs = {key: real(x) for key, x in step.kwargs.items()}
                outputs = [real(x) for x in step.outputs]
                call = _bind(step.function, real(step.args), kwargs, outputs)
                call()  # in order, so that no operator ever sees what no play would give it
                self._pieces[-1][0].append(call)
        self._result: Tensor = real(result)
        self._compare(first)
        change()
        again = forward(_Filling())
        self.play(_Filling(), again.shape[-2])
        self._compare(again)

    def _compare(self, wanted: Tensor) -> None:
        worst = float((self._result - wanted).abs().max())
        if not worst <= TOLERANCE.get(wanted.dtype, 0.03) * float(wanted.abs().max()):
            raise NotRepeatable(f"a play differs by {worst:g} from the recording")

    def play(self, attention: AttentionContext, used: int) -> Tensor:
        """The result for what the inputs hold, good until a tape of this arena is played again.

        `attention` sees the first `used` rows; what comes out for the others means nothing.
        """
        for calls, attend in self._pieces:
            for call in calls:
                call()
            if attend is not None:
                attend(attention, used)
        return self._result


class Leaving:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        return self._recorder.leave_open(layer, (query, key, value), scale, window)


class _Filling:
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        return filler(query, value)


def plan(storages: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Where to put storages of (bytes, first step, last step), in order of their first steps, and the bytes in all.

    Two that are in use at the same step do not overlap; offsets are multiples of ALIGNMENT. Each takes the lowest gap
    that is wide enough.
    """
    offsets: list[int] = []
    taken: list[tuple[int, int, int]] = []  # (offset, end, last step)
    total = 0
    for nbytes, first, last in storages:
        taken = sorted(x for x in taken if x[2] >= first)
        start = 0
        for offset, end, _ in taken:
            if start + nbytes <= offset:
                break
            start = max(start, end)
        end = start + aligned(nbytes)
        offsets.append(start)
        taken.append((start, end, last))
        total = max(total, end)
    return offsets, total


def aligned(nbytes: int) -> int:
    """The bytes of a storage up to where the next one may start."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def _bind(function: Any, args: Any, kwargs: dict[str, Any], outputs: list[Tensor]) -> Callable[[], Any]:
    """A call of `function` that writes into `outputs` (none: into its arguments, as it is)."""
    name = function._schema.name.partition("::")[2]
    if not outputs:
        # torch's own binding is found in a third of the time
        method = getattr(args[0], name, None) if name.endswith("_") and args else None
        return partial(function, *args, **kwargs) if method is None else partial(method, *args[1:], **kwargs)
    if len(outputs) == 1:
        kernel = bound(function, args, outputs[0])
        if kernel is not None:
            return kernel
        if function._schema.name in COPIES:
            return partial(outputs[0].copy_, args[0])
        public = getattr(torch, name, None)
        if public is not None and not set(kwargs) - PLACEMENT:
            call = partial(public, *args, out=outputs[0])
            try:
                call()  # not every operator has one with `out`
                return call
            except TypeError:
                pass
    return _with_out(function, args, kwargs, outputs)


def _with_out(function: Any, args: Any, kwargs: dict[str, Any], outputs: list[Tensor]) -> Callable[[], Any]:
    given = {*kind_of(function).names[: len(args)], *(set(kwargs) - PLACEMENT)}
    own = {a.name: str(a.type) for a in function._schema.arguments}
    packet = function.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        outs = [a.name for a in arguments if a.is_out]
        types = {a.name: str(a.type) for a in arguments if not a.is_out}
        names = types.keys()
        if len(outs) == len(outputs) and names >= given and types.items() <= own.items():
            kept = {key: x for key, x in kwargs.items() if key in names}
            return partial(overload, *args, **kept, **dict(zip(outs, outputs, strict=True)))

    def call() -> None:
        results = function(*args, **kwargs)
        for out, result in zip(outputs, results if len(outputs) > 1 else (results,), strict=True):
            out.copy_(result)

    return call
