"""What a forward pass does, noted operator by operator: the recording that a tape is made of.

Refused is what cannot be repeated: a look at values, random numbers, shapes that depend on values, changes of anything
but the results of the forward pass itself.

Shapes: R rows, A query heads, D head size of the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

UNREPEATABLE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
READERS = {
    getattr(Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "data_ptr")
}  # they read memory without an operator
WITHOUT_EFFECT = {"aten::detach_"}  # where no gradients are; torch.tensor() calls it


class NotRepeatable(Exception):
    """The forward pass does something that a recording cannot repeat; the text says what."""


@dataclass(frozen=True)
class Place:
    """A tensor made while recording: a view of the numbered storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Storage:
    """Memory made by one step of the recording, and the last step that uses it."""

    nbytes: int
    first: int
    last: int


@dataclass
class Call:
    """One operator; tensors made while recording are given as places."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Place] = field(default_factory=list)  # none: it writes into one of its arguments


@dataclass
class Open:
    """A layer's attention, which is not recorded."""

    layer: int
    tensors: tuple[Any, Any, Any]  # query, key, value
    scale: float
    window: int | None
    output: Place


@dataclass(frozen=True)
class Kind:
    """What is known of an operator before it is called."""

    unrepeatable: bool
    names: tuple[str, ...]  # of its arguments
    written: tuple[str, ...]  # those that it writes into
    only_view: bool  # it changes not what is written there, but the shape


@cache
def kind_of(function: Any) -> Kind:
    arguments = function._schema.arguments
    return Kind(
        any(tag in function.tags for tag in UNREPEATABLE),
        tuple(a.name for a in arguments),
        tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        torch.Tag.inplace_view in function.tags,
    )


class Recorder(TorchDispatchMode):
    """Runs every operator and notes it. Memory that no step made (weights, inputs) stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Call | Open | None] = []  # None: what another step does too
        self.storages: list[Storage] = []
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
        kind = kind_of(func)
        if kind.unrepeatable:
            self.refuse(f"{func} depends on the values that it is given, or on chance")
        call = Call(func, self._note(args), self._note(kwargs))
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
        self.steps.append(Open(layer, (q, k, v), scale, window, self._new(out, len(self.steps))))
        self._use((q, k, v))
        return out

    def place(self, x: Tensor) -> Place | None:
        """Where a tensor lies that was made while recording, to be read after the last step."""
        found = self._find(x)
        if found is not None:
            self.storages[found.storage].last = len(self.steps)
        return found

    def _add(self, call: Call) -> None:
        self.steps.append(call)
        self._use((call.args, tuple(call.kwargs.values())))

    def _use(self, places: Any) -> None:
        for place in _leaves(places):
            if isinstance(place, Place):
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

    def _find(self, x: Tensor) -> Place | None:
        number = self._numbers.get(_address(x))
        if number is None:
            return None
        if x.is_conj() or x.is_neg():
            self.refuse("a view of conjugate or negative numbers is taken")
        return Place(number, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def _new(self, x: Tensor, step: int) -> Place:
        if type(x) is not Tensor or x.layout is not torch.strided or x.device.type != "cpu":
            self.refuse(f"a {type(x).__name__} of layout {x.layout} on {x.device} is made")
        storage = StorageWeakRef(x.untyped_storage())
        self._alive.append(storage)
        self._numbers[_address(x)] = len(self.storages)
        self.storages.append(Storage(x.untyped_storage().nbytes(), step, step))
        found = self._find(x)
        if found is None:
            self.refuse("a result was lost")
        return found


class NoReading(TorchFunctionMode):
    """Refuses where Python code looks at the numbers in a tensor: what it does with them is not recorded."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READERS:
            self._recorder.refuse(f"the forward pass calls Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def filler(query: Tensor, value: Tensor) -> Tensor:
    """Some numbers [R, A, D] in place of attention's output."""
    shape = (*query.shape[:2], value.shape[2])
    return torch.linspace(-1, 1, query.shape[0] * query.shape[1] * value.shape[2]).view(shape).to(query.dtype)


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
