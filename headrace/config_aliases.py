"""The keyword names people bring from tutorials, each mapped to one setting; shared by flags and trainers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.config import SHORTHAND
from headrace.config_explain import all_keys, sections
from headrace.config_places import PLACE_NAMES, cluster_settings, placed
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
    "parallel_config": "degrees such as {tp: 2, dp: 2}, which set cluster.parallelism, or degrees for each model"
    " ({actor: {tp: 2}, critic: {dp: 2}}), as in cluster.layout",
    "device_map": "a device such as cuda:0, which sets run.device; several (cuda:0-3), or those of each model ({actor:"
    " cuda:0-3, critic: cuda:4-5}), as in cluster.layout",
    "gpu_group": "name of the group of devices, or one for each model ({actor: a, critic: b}), as in cluster.layout",
}
"""Names that take a structure; together they say where the models run (config_places.py)."""


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
    different values, and for structures that mean nothing.
    """
    problems: list[str] = []
    given: dict[str, tuple[str, Any]] = {}
    places = {name: keywords[name] for name in PLACE_NAMES if name in keywords}
    settings: list[tuple[str, str, Any]] = []
    for keyword, value in keywords.items():
        try:
            if keyword not in places:
                settings += [(keyword, key, setting) for key, setting in _expand(keyword, value).items()]
            elif keyword == next(iter(places)):
                settings += [(name, key, setting) for key, (name, setting) in placed(places).items()]
        except ConfigError as error:
            problems += error.violations
    for keyword, key, setting in settings:
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
    if keyword in ALIASES:
        return {ALIASES[keyword]: value}
    dotted = keyword.replace("__", ".")
    if dotted in all_keys():
        return {dotted: value}
    if keyword in sections():
        layout = cluster_settings(value) if keyword == "cluster" else None
        value = value if layout is None else layout
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
