"""Models that take turns on a device (train.offload_parameters): one has its weights there, the others in CPU memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from headrace.models.causal_lm import Backbone
from headrace.models.sharding import settle
from headrace.training.torch_engine import TorchEngine

AWAY = torch.device("cpu")


def has_memory_of_its_own(device: torch.device) -> bool:
    """Whether weights that leave a device make room on it."""
    return device.type != "cpu"


def home_of(tensor: Tensor) -> torch.device:
    return tensor.device


def move(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)


@dataclass
class _Piece:
    """Parameters over the same memory: one, or those of models that share it."""

    home: torch.device
    parameters: list[nn.Parameter]
    is_away: bool = False

    def go(self, device: torch.device) -> None:
        moved = move(_part(self.parameters[0]), device)
        for parameter in self.parameters:
            _part(parameter).data = moved


@dataclass
class _Entry:
    engine: weakref.ref[TorchEngine]
    pieces: list[_Piece] = field(default_factory=list)


class Turns:
    """The models of a process, of which one at a time has its weights on the device.

    `bring` is called before a stage of a role, and before what else needs its weights on the device: those of all others
    are then in CPU memory, but what it shares with them (the base of adapters). They stay until another's turn, so stages
    of one role that follow each other move nothing. Models on a CPU, which has no other memory, take no part.
    """

    def __init__(self) -> None:
        self.active = False
        self._entries: weakref.WeakKeyDictionary[Backbone, _Entry] = weakref.WeakKeyDictionary()

    def begin(self, active: bool) -> None:
        """Before models are loaded. Where they do not take turns (any more), all come back."""
        self.active = active
        if not active:
            for model, entry in list(self._entries.items()):
                self._go(entry.pieces, away=False)
                _moved(model, entry)
            self._entries.clear()

    def add(self, engine: TorchEngine) -> None:
        """A model that is on its device, where it stays until another is brought. A later engine of it takes over."""
        model = engine.model
        if not self.active or not has_memory_of_its_own(model.device):
            return
        self._entries.pop(model, None)
        settle(model)
        there = {
            _part(parameter).data_ptr(): piece
            for entry in self._entries.values()
            for piece in entry.pieces
            if not piece.is_away
            for parameter in piece.parameters
        }
        entry = _Entry(weakref.ref(engine))
        for parameter in model.parameters():
            part = _part(parameter)
            if not part.numel():
                continue
            piece = there.get(part.data_ptr())
            if piece is None or _part(piece.parameters[0]).shape != part.shape:
                piece = _Piece(home_of(part), [])
            if all(parameter is not other for other in piece.parameters):
                piece.parameters.append(parameter)
            entry.pieces.append(piece)
        self._entries[model] = entry

    def bring(self, engine: TorchEngine | None) -> None:
        """Has the weights of `engine` on its device and those of all others away (None: all)."""
        if not self.active:
            return
        own = self._entries.get(engine.model) if engine is not None else None
        kept = {id(piece) for piece in own.pieces} if own is not None else set()
        # others first: there may be no room for both
        for model, entry in self._entries.items():
            if entry is not own and self._go([p for p in entry.pieces if id(p) not in kept], away=True):
                _moved(model, entry)
        if own is not None and engine is not None and self._go(own.pieces, away=False):
            for model, entry in self._entries.items():
                if any(id(piece) in kept for piece in entry.pieces):
                    _moved(model, entry)

    def _go(self, pieces: list[_Piece], *, away: bool) -> bool:
        """Whether there was anything to move."""
        going = [piece for piece in pieces if piece.is_away != away]
        with torch.no_grad():
            for piece in going:
                piece.go(AWAY if away else piece.home)
                piece.is_away = away
        return bool(going)


def _part(parameter: nn.Parameter) -> Tensor:
    """The tensor that has the memory: of a DTensor the very one inside, which to_local() does not give."""
    part: Tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return part


def _moved(model: Backbone, entry: _Entry) -> None:
    """Has whoever looks at the memory of a model's parameters look at where it is now."""
    if isinstance(model, FSDPModule):
        model._apply(lambda tensor: tensor)  # FSDP looks for its shards after whatever is applied
    engine = entry.engine()
    if engine is not None and engine.optimizer is not None:
        engine.optimizer.follow()


TURNS = Turns()
"""Of this process."""
