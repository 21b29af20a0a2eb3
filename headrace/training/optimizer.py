"""AdamW over float32 master weights, with gradients accumulated in float32.

Model parameters hold the dtype that training and rollout compute in. Where that is not float32, the optimizer
keeps float32 masters and float32 gradient sums beside them and writes the parameters back after each update, so a
change smaller than the parameters' precision is not lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headrace.models.shards import Shards, local
from headrace.training.gradients import exchange_gradients, global_norm


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_learning_rate_fraction: float = 0.0
    warmup_updates: int = 0
    total_updates: int = 1
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    offload: bool = False


def learning_rate_at(update: int, s: OptimizerSettings) -> float:
    """Learning rate of optimizer update number `update` (from 0).

    Warm-up rises linearly so that update `warmup_updates` is the first at the peak; linear and cosine then fall to
    `min_learning_rate_fraction` of the peak at the last update.
    """
    if update < s.warmup_updates:
        return s.learning_rate * (update + 1) / (s.warmup_updates + 1)
    if s.schedule == "constant":
        return s.learning_rate
    span = max(1, s.total_updates - 1 - s.warmup_updates)
    progress = min(1.0, (update - s.warmup_updates) / span)
    shape = 1 - progress if s.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return s.learning_rate * (s.min_learning_rate_fraction + (1 - s.min_learning_rate_fraction) * shape)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `grad_norm` is the global L2 norm before clipping."""

    applied: bool
    grad_norm: float
    learning_rate: float


class MasterAdamW:
    """AdamW (Loshchilov & Hutter 2019) whose state is float32 whatever the parameters' dtype.

    On a mesh each process has the state of its own shards alone, and all steps are taken together.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter] | Iterable[nn.Parameter],
        settings: OptimizerSettings,
        shards: Shards | None = None,
    ) -> None:
        """`parameters` by the names that `shards` knows them by (default: this process has all of each)."""
        self.settings = settings
        self.shards = shards or Shards()
        self.updates = 0
        self.skipped = 0
        if not isinstance(parameters, Mapping):
            parameters = {str(index): p for index, p in enumerate(parameters)}
        self._names = [name for name, p in parameters.items() if p.requires_grad]
        self._parameters = [parameters[name] for name in self._names]
        # AdamW works element by element, so each process's part is a plain tensor to it
        self._weights = [local(p) for p in self._parameters]
        self._masters: list[Tensor] = []
        self._grad_sums: list[Tensor | None] = []
        self._hooks: list[Any] = []
        for index, (p, weight) in enumerate(zip(self._parameters, self._weights, strict=True)):
            if p.dtype == torch.float32:
                self._masters.append(weight)
            else:
                self._masters.append(weight.detach().to(torch.float32).clone())
                self._hooks.append(p.register_post_accumulate_grad_hook(self._summing_hook(index)))
            self._grad_sums.append(None)
        self._home = self._parameters[0].device
        decay = [m for m in self._masters if m.dim() >= 2]
        plain = [m for m in self._masters if m.dim() < 2]
        groups = [
            {"params": g, "weight_decay": w} for g, w in ((decay, settings.weight_decay), (plain, 0.0)) if g
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            fused=self._home.type == "cuda",
        )

    def release(self) -> None:
        """Lets go of the parameters, so that another optimizer can take them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.zero_grad()

    def follow(self) -> None:
        """Takes up parameters whose memory has been moved (training/turns.py)."""
        for parameter, weight in zip(self._parameters, self._weights, strict=True):
            if weight is not parameter:
                weight.data = local(parameter)

    def _summing_hook(self, index: int) -> Any:
        def add(parameter: Tensor) -> None:
            grad = parameter.grad
            if grad is None:
                return
            total, own = self._grad_sums[index], local(grad)
            self._grad_sums[index] = own.to(torch.float32) if total is None else total.add_(own)
            parameter.grad = None

        return add

    def _gradients(self) -> list[Tensor | None]:
        """Of this process's shards and rows, in the order of the parameters."""
        found: list[Tensor | None] = []
        rows = zip(self._parameters, self._weights, self._masters, self._grad_sums, strict=True)
        for parameter, weight, master, total in rows:
            grad = parameter.grad if master is weight else total
            found.append(None if grad is None else local(grad))
        return found

    def zero_grad(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.grad = None
            self._grad_sums[index] = None

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clips, applies and clears the accumulated gradients; a non-finite gradient skips the update."""
        own = dict(zip(self._names, self._gradients(), strict=True))
        gradients = exchange_gradients(own, self._weights, self.shards)
        if not gradients:
            return StepResult(False, 0.0, 0.0)
        rate = learning_rate_at(self.updates, self.settings)
        norm_value = global_norm(gradients, self.shards)
        if not math.isfinite(norm_value):
            self.skipped += 1
            self.zero_grad()
            return StepResult(False, norm_value, rate)
        limit = self.settings.max_grad_norm
        if limit is not None and norm_value > limit:
            torch._foreach_mul_(list(gradients.values()), limit / (norm_value + 1e-6))
        for name, master in zip(self._names, self._masters, strict=True):
            master.grad = gradients.get(name)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        if self.settings.offload:
            self._move_state(self._home)
        self._adamw.step()
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None
            if master is not weight:
                weight.copy_(master)
        if self.settings.offload:
            self._move_state(torch.device("cpu"))
        self.updates += 1
        self.zero_grad()
        return StepResult(True, norm_value, rate)

    def _move_state(self, device: torch.device) -> None:
        """Moves Adam's moments, and the masters that are not the parameters themselves, to `device`."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            for name, value in self._adamw.state.get(master, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    self._adamw.state[master][name] = value.to(device)
            if master is not weight:
                master.data = master.data.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Live tensors, in the order of the parameters: `masters` (None where the parameter is its own master) and
        `adam`, each parameter's `step`, `exp_avg` and `exp_avg_sq` (empty before its first update)."""
        own = [None if m is w else m for w, m in zip(self._weights, self._masters, strict=True)]
        adam = [dict(self._adamw.state.get(m, {})) for m in self._masters]
        return {"updates": self.updates, "skipped": self.skipped, "masters": own, "adam": adam}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict()`; parameters that are their own masters must have been loaded apart."""
        self.updates, self.skipped = int(state["updates"]), int(state["skipped"])
        for weight, master, saved in zip(self._weights, self._masters, state["masters"], strict=True):
            if saved is not None:
                master.copy_(saved)
                weight.copy_(master)
        # torch numbers the parameters group by group, and moves what it loads to the parameter's device
        adam = {id(m): values for m, values in zip(self._masters, state["adam"], strict=True)}
        plain = self._adamw.state_dict()
        numbers = [i for group in plain["param_groups"] for i in group["params"]]
        tensors = [m for group in self._adamw.param_groups for m in group["params"]]
        by_number = {i: adam[id(m)] for i, m in zip(numbers, tensors, strict=True) if adam[id(m)]}
        self._adamw.load_state_dict({"state": by_number, "param_groups": plain["param_groups"]})
