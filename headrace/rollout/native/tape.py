"""The operators of one forward pass, recorded once and then run one after the other without the modules' Python code.

What a CUDA graph is to a GPU: shapes and addresses are those of the recording, every result has its place in one piece of
memory, and a view costs nothing, since it was taken when the tape was made. Attention is left open: it is computed at
each play by whoever plays the tape.

Shapes: R rows, A query heads, D head size of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.models.attention import AttentionContext

ALIGNMENT = 64  # bytes, that of torch's own allocations: products may round in another way at other addresses
UNREPEATABLE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
READERS = {
    getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "data_ptr")
}  # they read memory without an operator
PLACEMENT = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}  # an output has them
COPIES = {"aten::_to_copy", "aten::clone"}
WITHOUT_EFFECT = {"aten::detach_"}  # where no gradients are; torch.tensor() calls it
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest value; 0.03 in half precision


class NotRepeatable(Exception):
    """The forward pass does something that a recording cannot repeat; the text says what."""


@dataclass(frozen=True)
class _Place:
    """A tensor made while recording: a view of the numbered storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Storage:
    """Memory made by one step of the recording, and the last step that uses it."""

    nbytes: int
    first: int
    last: int


@dataclass
class _Call:
    """One operator; tensors made while recording are given as places."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[_Place] = field(default_factory=list)  # none: it writes into one of its arguments


@dataclass
class _Open:
    """A layer's attention, which is not recorded."""

    layer: int
    tensors: tuple[Any, Any, Any]  # query, key, value
    scale: float
    window: int | None
    output: _Place


@dataclass(frozen=True)
class _Kind:
    """What is known of an operator before it is called."""

    unrepeatable: bool
    names: tuple[str, ...]  # of its arguments
    written: tuple[str, ...]  # those that it writes into
    only_view: bool  # it changes not what is written there, but the shape


@cache
def _kind(function: Any) -> _Kind:
    arguments = function._schema.arguments
    return _Kind(
        any(tag in function.tags for tag in UNREPEATABLE),
        tuple(a.name for a in arguments),
        tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        torch.Tag.inplace_view in function.tags,
    )


class _Recorder(TorchDispatchMode):
    """Runs every operator and notes it. Memory that no step made (weights, inputs) stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Call | _Open] = []
        self.storages: list[_Storage] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[StorageWeakRef] = []  # so that no address is given twice; the memory itself may go
        self._noting = True
        self.refusal = ""  # the model's own code may catch what was raised for it
        self._plain: set[Any] = set()  # operators that are not made of others; only these are recorded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._noting:
            return func(*args, **kwargs)
        if func not in self._plain:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            self._plain.add(func)
        kind = _kind(func)
        if kind.unrepeatable:
            self.refuse(f"{func} depends on the values that it is given, or on chance")
        call = _Call(func, self._note(args), self._note(kwargs))
        result = func(*args, **kwargs)
        if kind.written and func._schema.name in WITHOUT_EFFECT:
            return result
        if kind.written:
            given = dict(zip(kind.names, args, strict=False)) | kwargs
            for x in (given[name] for name in kind.written):
                place = self._find(x) if isinstance(x, Tensor) else None
                if place is None:
                    self.refuse(f"{func} changes something that outlives the forward pass")
                if x.untyped_storage().nbytes() != self.storages[place.storage].nbytes:
                    self.refuse(f"{func} changes the size of its output")
            if not kind.only_view:  # else whoever is given it from now on notes its new shape
                self._add(call)
            return result
        outputs = result if isinstance(result, (list, tuple)) else (result,)
        if not all(isinstance(x, Tensor) for x in outputs):
            self.refuse(f"{func} returns more than tensors")
        given_memory = {_address(x) for x in _tensors((args, kwargs))}
        views = sum(_address(x) in given_memory for x in outputs)
        if views == len(outputs):
            return result
        if views:
            self.refuse(f"{func} returns a view beside something new")
        call.outputs = [self._new(x, len(self.steps)) for x in outputs]
        self._add(call)
        return result

    def refuse(self, reason: str) -> NoReturn:
        self.refusal = reason
        raise NotRepeatable(reason)

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        self._noting = False
        try:
            yield
        finally:
            self._noting = True

    def leave_open(self, layer: int, tensors: Sequence[Tensor], scale: float, window: int | None) -> Tensor:
        """The output of a layer's attention, filled with numbers, from query, key and value."""
        query, _, value = tensors
        if not isinstance(scale, (int, float)):
            self.refuse("the scale of attention is a tensor")
        with self.unnoted():
            out = filler(query, value)
        q, k, v = (self._note(x) for x in tensors)
        self.steps.append(_Open(layer, (q, k, v), scale, window, self._new(out, len(self.steps))))
        self._use((q, k, v))
        return out

    def place(self, x: Tensor) -> _Place | None:
        """Where a tensor lies that was made while recording, to be read after the last step."""
        found = self._find(x)
        if found is not None:
            self.storages[found.storage].last = len(self.steps)
        return found

    def _add(self, call: _Call) -> None:
        self.steps.append(call)
        self._use((call.args, tuple(call.kwargs.values())))

    def _use(self, places: Any) -> None:
        for place in _leaves(places):
            if isinstance(place, _Place):
                self.storages[place.storage].last = len(self.steps) - 1

    def _note(self, value: Any) -> Any:
        """`value` with a place for each tensor made while recording."""
        if isinstance(value, Tensor):
            return self._find(value) or value
        if isinstance(value, (list, tuple)):
            return type(value)(self._note(x) for x in value)
        if isinstance(value, dict):
            return {key: self._note(x) for key, x in value.items()}
        return value

    def _find(self, x: Tensor) -> _Place | None:
        number = self._numbers.get(_address(x))
        if number is None:
            return None
        if x.is_conj() or x.is_neg():
            self.refuse("a view of conjugate or negative numbers is taken")
        return _Place(number, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def _new(self, x: Tensor, step: int) -> _Place:
        if type(x) is not Tensor or x.layout is not torch.strided or x.device.type != "cpu":
            self.refuse(f"a {type(x).__name__} of layout {x.layout} on {x.device} is made")
        storage = StorageWeakRef(x.untyped_storage())
        self._alive.append(storage)
        self._numbers[_address(x)] = len(self.storages)
        self.storages.append(_Storage(x.untyped_storage().nbytes(), step, step))
        found = self._find(x)
        if found is None:
            self.refuse("a result was lost")
        return found


class _NoReading(TorchFunctionMode):
    """Refuses where Python code looks at the numbers in a tensor: what it does with them is not recorded."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READERS:
            self._recorder.refuse(f"the forward pass calls Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


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

    def __init__(self, step: _Open, tensors: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
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
        recorder = _Recorder()
        with _NoReading(recorder), recorder:
            first = forward(_Leaving(recorder))
        if recorder.refusal:
            raise NotRepeatable(recorder.refusal)
        result = recorder.place(first)
        if result is None:
            raise NotRepeatable("the forward pass computes nothing")
        offsets, nbytes = plan([(s.nbytes, s.first, s.last) for s in recorder.storages])
        memory = arena.take(nbytes)
        made: dict[_Place, Tensor] = {}

        def real(value: Any) -> Any:
            if isinstance(value, _Place):
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
            if isinstance(step, _Open):
                calls, _ = self._pieces.pop()
                attend = _OpenAttend(step, real(step.tensors), real(step.output))
                attend(_Filling(), step.output.size[0])
                self._pieces += [(calls, attend), ([], None)]
            else:
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


class _Leaving:
    def __init__(self, recorder: _Recorder) -> None:
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


def filler(query: Tensor, value: Tensor) -> Tensor:
    """Some numbers [R, A, D] in place of attention's output."""
    shape = (*query.shape[:2], value.shape[2])
    return torch.linspace(-1, 1, query.shape[0] * query.shape[1] * value.shape[2]).view(shape).to(query.dtype)


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


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for x in value:
            yield from _leaves(x)
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    return (x for x in _leaves(value) if isinstance(x, Tensor))


def _bind(function: Any, args: Any, kwargs: dict[str, Any], outputs: list[Tensor]) -> Callable[[], Any]:
    """A call of `function` that writes into `outputs` (none: into its arguments, as it is)."""
    name = function._schema.name.partition("::")[2]
    if not outputs:
        # torch's own binding is found in a third of the time
        method = getattr(args[0], name, None) if name.endswith("_") and args else None
        return partial(function, *args, **kwargs) if method is None else partial(method, *args[1:], **kwargs)
    if len(outputs) == 1:
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
    given = {*_kind(function).names[: len(args)], *(set(kwargs) - PLACEMENT)}
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
