"""The keyword names people bring from tutorials, each mapped to one setting; shared by flags and trainers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.config import SHORTHAND
from headrace.config_explain import all_keys, sections
from headrace.errors import ConfigError

ALIASES: dict[str, str] = {
    "model_name": "model.path",
    "enable_gradient_checkpointing": "model.gradient_checkpointing",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    "rollout_batch_size": "train.prompts_per_step",
    "batch_size": "train.prompts_per_step",
    "train_batch_size": "train.samples_per_update",
    "gradient_accumulation_steps": "train.microbatches_per_update",
    "num_epochs": "train.epochs",
    "steps": "train.steps",
    "learning_rate": "train.learning_rate",
    "offload_optimizer": "train.offload_optimizer",
    "rollout_max_batch_size": "rollout.max_concurrent_sequences",
    "sequence_length": "rollout.max_sequence_tokens",
    "samples_per_prompt": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "seed": "run.seed",
    "num_gpus": "cluster.num_gpus",
    "communication_backend": "cluster.communication_backend",
    "hybrid_engine_mode": "cluster.hybrid_engine_mode",
}

STRUCTURED: dict[str, str] = {
    "parallel_config": "degrees such as {tp: 1, pp: 1, dp: 1}; sets cluster.parallelism",
    "device_map": "a device such as cuda:0, or one per model ({actor: cuda:0}); sets run.device",
    "gpu_group": "name of a group of devices; no effect on one device",
}
"""Names that take a structure; `gpu_group` is accepted for files and scripts that are to grow to many devices."""

# A device index, not followed by a range or a list of further devices.
_ONE_DEVICE = re.compile(r"(auto|cpu|cuda(:\d+)?)")


def suggest(name: str) -> str:
    """ "; did you mean …?" for a name that is no setting, or the empty string where nothing comes near."""
    close = nearest_keys(name)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def nearest_keys(name: str) -> list[str]:
    """The dotted settings that `name` (dotted or bare) most likely stands for; none where nothing comes near."""
    keys = all_keys()
    section, _, bare = name.replace("__", ".").rpartition(".")
    if bare in ALIASES:
        return [ALIASES[bare]]
    named = [k for k, info in keys.items() if info.key == bare]
    if named:
        return named
    own = {info.key: k for k, info in keys.items() if info.section == section}
    part = [k for key, k in own.items() if key.startswith(f"{bare}_") or key.endswith(f"_{bare}")]
    if 1 <= len(part) <= 2:
        return part
    close = _closest(bare, own, 0.6)
    if close:
        return [own[c] for c in close]
    dotted = difflib.get_close_matches(name, keys, n=1, cutoff=0.8)
    if dotted:
        return dotted
    every = {**ALIASES, **{info.key: k for k, info in keys.items()}}
    return [every[c] for c in difflib.get_close_matches(bare, every, n=1, cutoff=0.7)]


def _closest(name: str, candidates: Iterable[str], cutoff: float) -> list[str]:
    """The most similar candidate, or those that share the first place."""
    ratios = {c: difflib.SequenceMatcher(None, c, name).ratio() for c in candidates}
    best = max(ratios.values(), default=0.0)
    return [c for c, ratio in ratios.items() if ratio == best >= cutoff]


def apply_aliases(keywords: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by section from keyword arguments.

    Accepts the names of ALIASES and STRUCTURED, dotted keys (`"train.steps"`), keys with two underscores
    (`train__steps`), and section names with a mapping or, where the section has a shorthand, a single value.
    Raises ConfigError, with all problems at once, for an unknown name, for one key given by two names with
    different values, and for structures this version cannot serve.
    """
    problems: list[str] = []
    given: dict[str, tuple[str, Any]] = {}
    for keyword, value in keywords.items():
        try:
            settings = _expand(keyword, value)
        except ConfigError as error:
            problems += error.violations
            continue
        for key, setting in settings.items():
            before = given.setdefault(key, (keyword, setting))
            if before[1] != setting:
                problems.append(
                    f"{keyword}: sets {key} to {setting!r}, but {before[0]} sets it to {before[1]!r}; give one of them"
                )
    if problems:
        raise ConfigError(problems)
    out: dict[str, dict[str, Any]] = {}
    for key, (_, setting) in given.items():
        section, _, bare = key.partition(".")
        out.setdefault(section, {})[bare] = setting
    return out


def _expand(keyword: str, value: Any) -> dict[str, Any]:
    """Dotted settings that one keyword stands for."""
    if keyword == "parallel_config":
        return _parallel_config(value)
    if keyword == "device_map":
        return {"run.device": _one_device(value)}
    if keyword == "gpu_group":
        _one_of("gpu_group", value, "group")
        return {}
    if keyword in ALIASES:
        return {ALIASES[keyword]: value}
    dotted = keyword.replace("__", ".")
    if dotted in all_keys():
        return {dotted: value}
    if keyword in sections():
        if isinstance(value, Mapping):
            return {
                k: v for bare, inner in value.items() for k, v in _expand(f"{keyword}.{bare}", inner).items()
            }
        if keyword in SHORTHAND:
            return {f"{keyword}.{SHORTHAND[keyword]}": value}
        raise ConfigError(f"{keyword}: expected a mapping of its keys, got {value!r}")
    names = [*ALIASES, *STRUCTURED, *sections()]
    close = [] if "." in dotted else difflib.get_close_matches(keyword, names, n=1, cutoff=0.75)
    hint = f"; did you mean {close[0]}?" if close else suggest(keyword)
    raise ConfigError(f"{keyword}: unknown name{hint}")


def _parallel_config(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"parallel_config: expected degrees such as {{'tp': 1, 'dp': 1}}, got {value!r}")
    unknown = [str(k) for k in value if k not in ("tp", "pp", "dp", "zero3")]
    if unknown:
        raise ConfigError(
            f"parallel_config: unknown degree {', '.join(unknown)}; the degrees are dp, tp, pp and zero3"
        )
    return {"cluster.parallelism": dict(value)}


def _one_device(value: Any) -> str:
    device = _one_of("device_map", value, "device")
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    if not isinstance(device, str) or not _ONE_DEVICE.fullmatch(device):
        raise ConfigError(
            f"device_map: {device!r} is not one device; this version runs on one (cpu, cuda or cuda:0)"
        )
    return device


def _one_of(keyword: str, value: Any, noun: str) -> Any:
    """The one value of a scalar, or of a mapping or list over models. Raises ConfigError when they differ."""
    if isinstance(value, Mapping):
        named = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        named = [(f"entry {i + 1}", v) for i, v in enumerate(value)]
    else:
        return value
    if not named:
        raise ConfigError(f"{keyword}: empty; give one {noun}")
    for name, other in named[1:]:
        if other != named[0][1]:
            raise ConfigError(
                f"{keyword}: {named[0][0]} on {named[0][1]!r} and {name} on {other!r} need two {noun}s;"
                f" this version runs on one device, so give all models the same"
            )
    return named[0][1]
