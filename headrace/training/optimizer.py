"""AdamW over float32 master weights, with gradients accumulated in float32.

Model parameters hold the dtype that training and rollout compute in. Where that is not float32, the optimizer
keeps float32 masters and float32 gradient sums beside them and writes the parameters back after each update, so a
change smaller than the parameters' precision is not lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


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
    """AdamW (Loshchilov & Hutter 2019) whose state is float32 whatever the parameters' dtype."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> None:
        self.settings = settings
        self.updates = 0
        self.skipped = 0
        self._parameters = [p for p in parameters if p.requires_grad]
        self._masters: list[Tensor] = []
        self._grad_sums: list[Tensor | None] = []
        self._hooks: list[Any] = []
        for index, p in enumerate(self._parameters):
            if p.dtype == torch.float32:
                self._masters.append(p)
            else:
                self._masters.append(p.detach().to(torch.float32).clone())
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

    def _summing_hook(self, index: int) -> Any:
        def add(parameter: Tensor) -> None:
            grad = parameter.grad
            if grad is None:
                return
            total = self._grad_sums[index]
            self._grad_sums[index] = grad.to(torch.float32) if total is None else total.add_(grad)
            parameter.grad = None

        return add

    def _gradients(self) -> list[Tensor]:
        sums = (
            p.grad if m is p else s
            for p, m, s in zip(self._parameters, self._masters, self._grad_sums, strict=True)
        )
        return [g for g in sums if g is not None]

    def zero_grad(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.grad = None
            self._grad_sums[index] = None

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clips, applies and clears the accumulated gradients; a non-finite gradient skips the update."""
        gradients = self._gradients()
        if not gradients:
            return StepResult(False, 0.0, 0.0)
        norm = torch.nn.utils.get_total_norm(gradients)
        rate = learning_rate_at(self.updates, self.settings)
        norm_value = float(norm)
        if not math.isfinite(norm_value):
            self.skipped += 1
            self.zero_grad()
            return StepResult(False, norm_value, rate)
        limit = self.settings.max_grad_norm
        if limit is not None and norm_value > limit:
            torch._foreach_mul_(gradients, limit / (norm_value + 1e-6))
        for parameter, master, total in zip(self._parameters, self._masters, self._grad_sums, strict=True):
            if master is not parameter:
                master.grad = total
        for group in self._adamw.param_groups:
            group["lr"] = rate
        if self.settings.offload:
            self._move_state(self._home)
        self._adamw.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None
        if self.settings.offload:
            self._move_state(torch.device("cpu"))
        self.updates += 1
        self.zero_grad()
        return StepResult(True, norm_value, rate)

    def _move_state(self, device: torch.device) -> None:
        """Moves Adam's moments, and the masters that are not the parameters themselves, to `device`."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            for name, value in self._adamw.state.get(master, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    self._adamw.state[master][name] = value.to(device)
            if master is not parameter:
                master.data = master.data.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Live tensors, in the order of the parameters: `masters` (None where the parameter is its own master) and
        `adam`, each parameter's `step`, `exp_avg` and `exp_avg_sq` (empty before its first update)."""
        own = [None if m is p else m for p, m in zip(self._parameters, self._masters, strict=True)]
        adam = [dict(self._adamw.state.get(m, {})) for m in self._masters]
        return {"updates": self.updates, "skipped": self.skipped, "masters": own, "adam": adam}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict()`; parameters that are their own masters must have been loaded apart."""
        self.updates, self.skipped = int(state["updates"]), int(state["skipped"])
        for parameter, master, saved in zip(self._parameters, self._masters, state["masters"], strict=True):
            if saved is not None:
                master.copy_(saved)
                parameter.copy_(master)
        # torch numbers the parameters group by group, and moves what it loads to the parameter's device
        adam = {id(m): values for m, values in zip(self._masters, state["adam"], strict=True)}
        plain = self._adamw.state_dict()
        numbers = [i for group in plain["param_groups"] for i in group["params"]]
        tensors = [m for group in self._adamw.param_groups for m in group["params"]]
        by_number = {i: adam[id(m)] for i, m in zip(numbers, tensors, strict=True) if adam[id(m)]}
        self._adamw.load_state_dict({"state": by_number, "param_groups": plain["param_groups"]})
