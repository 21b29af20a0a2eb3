"""What must be the same for a run to be continued: settings, data, frozen weights. And what may change freely."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.config import Config
from headrace.config_aliases import suggest
from headrace.config_explain import all_keys
from headrace.config_load import PATH_KEYS

FREE_SECTIONS = ("run", "eval", "cluster", "checkpoint")
FREE = frozenset(
    {
        "model.trust_remote_code",
        "model.gradient_checkpointing",
        "rollout.max_concurrent_sequences",
        "rollout.replay_steps",
        "rollout.kv_cache_tokens",
        "reward.max_concurrency",
        "algorithm.gap_warn",
        "algorithm.gap_stop",
        "train.steps",
        "train.epochs",
        "train.tokens_per_microbatch",
        "train.microbatches_per_update",
        "train.offload_optimizer",
        "train.offload_parameters",
        "train.max_skipped_updates",
    }
)
"""Keys that may change: they bear on speed, memory, display or the end of the run, not on what is computed."""
NOT_FREE = frozenset({"run.seed"})  # in a free section
IN_THE_ROWS = "data."  # these settings matter through the rows they lead to, which are compared themselves
NOT_IN_THE_ROWS = frozenset({"data.shuffle"})
FLOW = "flow"  # what allows changed stages, which no key stands for
SAMPLED = 256  # elements of each frozen parameter that its fingerprint looks at


def run_fingerprint(config: Config, flow: str, total_steps: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run, as plain values for JSON.

    `flow` describes the stages, `data` is {"rows": count, "hash": text} (data/fingerprint.py).
    """
    sections = config.model_dump()
    settings = {
        name: resolved_path(name, sections[name.partition(".")[0]][name.partition(".")[2]])
        for name in all_keys()
    }
    return {"settings": settings, "flow": flow, "total_steps": total_steps, "data": dict(data)}


def refused_changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str] = ()
) -> list[str]:
    """One sentence for each change that would continue another run; `allowed` names keys that may change.

    `saved` and `now` are fingerprints. A key that did not exist when `saved` was written had its default then.
    """
    out = [
        f"checkpoint.allow_changed: '{name}' is no setting{suggest(name)}"
        for name in allowed
        if name not in all_keys() and name != FLOW
    ]
    same_rows = saved["data"] == now["data"]
    data_changes = 0
    for name, info in all_keys().items():
        if (name.startswith(tuple(f"{s}." for s in FREE_SECTIONS)) and name not in NOT_FREE) or name in FREE:
            continue
        in_rows = name.startswith(IN_THE_ROWS) and name not in NOT_IN_THE_ROWS
        before, after = saved["settings"].get(name, info.default), now["settings"][name]
        if before == after or (in_rows and same_rows):
            continue
        data_changes += in_rows
        if name not in allowed:
            out.append(change(name, before, after))
    if not same_rows and not data_changes and "data.path" not in allowed:
        before, after = (f"{d['rows']} rows with hash {d['hash']}" for d in (saved["data"], now["data"]))
        out.append(change("data.path", before, after, quoted=False))
    if saved["flow"] != now["flow"] and FLOW not in allowed:
        out.append(change(FLOW, saved["flow"], now["flow"], quoted=False))
    name = "train.epochs" if now["settings"]["train.steps"] is None else "train.steps"
    schedule = now["settings"]["train.schedule"]
    if schedule != "constant" and saved["total_steps"] != now["total_steps"] and name not in allowed:
        out.append(
            f"{name}: the learning rate falls ({schedule}) over all steps of the run, which were"
            f" {saved['total_steps']} and are {now['total_steps']} now; resume with as many, or add '{name}' to"
            " checkpoint.allow_changed to go on under the new schedule"
        )
    return out


def change(name: str, before: Any, after: Any, *, quoted: bool = True) -> str:
    """The sentence that refuses a change of setting `name`."""
    old, new = (repr(before), repr(after)) if quoted else (before, after)
    return (
        f"{name}: was {old} when the checkpoint was written and is {new} now; put it back, or add '{name}' to"
        " checkpoint.allow_changed"
    )


def weights_hash(parameters: Iterable[tuple[str, Tensor]]) -> str | None:
    """A hash over names, shapes and some elements of every tensor; None for no tensors.

    Training changes nearly every element, so a sample of them tells trained weights from others at little cost.
    """
    digest, empty = hashlib.blake2b(digest_size=16), True
    for name, tensor in parameters:
        empty = False
        flat = tensor.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // SAMPLED)].cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(picked.view(torch.uint8).numpy().tobytes())
    return None if empty else digest.hexdigest()


def resolved_path(name: str, value: Any) -> Any:
    """Paths that exist are made absolute, so that the folder a command is started in makes no difference."""
    if name not in PATH_KEYS or not isinstance(value, str):
        return value
    file, colon, function = value.rpartition(":") if ".py:" in value else (value, "", "")
    path = Path(file).expanduser()
    return f"{path.resolve()}{colon}{function}" if path.exists() else value
