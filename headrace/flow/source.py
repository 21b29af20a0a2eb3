"""The data a flow starts from: rows turned into prompts or supervised sequences, checked before weights are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from headrace.agents.environment import role_of
from headrace.agents.turn_format import check_turns
from headrace.config import Config, DataConfig
from headrace.data.dataset import HFDataset, Rows, load_rows
from headrace.data.pairs import PairDataset
from headrace.data.prompts import PromptBuilder, PromptDataset, SFTDataset
from headrace.errors import ConfigError, DataError
from headrace.flow.compile import CheckedFlow
from headrace.models.adapter_folder import weights_source
from headrace.models.find import find_model
from headrace.models.hf import LOADING_ERRORS, first_line
from headrace.rewards.stage import RewardStage
from headrace.roles.actor import Actor
from headrace.roles.reward_model import RewardModel
from headrace.roles.role import ReaderRole
from headrace.rollout.native.kv_cache import BLOCK_TOKENS

logger = logging.getLogger(__name__)


@dataclass
class PreparedData:
    """`rows_key` is the setting behind `rows_per_step`."""

    dataset: PromptDataset | SFTDataset | PairDataset
    rows_per_step: int
    rows_key: str


def prepare_data(flow: CheckedFlow, dataset: Any, key: str = "data") -> PreparedData:
    """Tokenises the data set for the role that reads it. Raises ConfigError naming the key, file and row.

    `dataset` is an HFDataset, or anything HFDataset takes (a path, a list of rows, a callable). `key` is the section
    ("data" or "eval") that says which of its rows to take, where it is not an HFDataset.
    """
    config = flow.config
    role = flow.reader
    if role is None:
        raise ConfigError(f"flow '{flow.name}' has no language model to read the data with")
    rows, own = read_rows(config, dataset, key)
    problems = flow.check_data(set(rows.columns), rows.name)
    options = config.data.model_copy(update=own.model_dump(exclude_unset=True, exclude=SOURCE_KEYS))
    try:
        data = _tokenized(flow, role, rows, options, key)
    except ConfigError as error:
        problems += error.violations
    if problems:
        raise DataError(problems)
    if isinstance(data.dataset, PromptDataset):
        _warn_of_nulls(flow, data.dataset)
    return data


def _warn_of_nulls(flow: CheckedFlow, prompts: PromptDataset) -> None:
    """Says which columns that a reward function takes are null in some rows: what it does with None is its own."""
    rows = prompts.rows
    for stage in flow.stages:
        if not isinstance(stage.function, RewardStage) or stage.function.function is None:
            continue
        function = stage.function.function
        for column, empty in rows.where_null(function.columns_of(rows.columns), prompts.kept).items():
            if empty:
                logger.warning(
                    "%s: '%s', which '%s' takes, is null in %d of %d rows, first in %s; it gets None there",
                    rows.name, column, function.name, len(empty), len(prompts), rows.where(empty[0]),
                )  # fmt: skip


def read_rows(config: Config, dataset: Any, key: str) -> tuple[Rows, DataConfig]:
    """The rows of a data set and the settings given with it. Raises DataError."""
    part = config.eval if key == "eval" else config.data
    source = (
        dataset
        if isinstance(dataset, HFDataset)
        else HFDataset(dataset, split=part.split, subset=part.subset, limit_rows=part.limit_rows)
    )
    own = source.config
    rows = load_rows(
        source.source, subset=own.subset, split=own.split, limit_rows=own.limit_rows, key=f"{key}.path"
    )
    return rows, own


def source_problems(config: Config, dataset: Any, key: str) -> list[str]:
    """What is wrong with a data set itself, for a flow that cannot be compiled and so cannot read it further."""
    try:
        read_rows(config, dataset, key)
    except ConfigError as error:
        return error.violations
    return []


ROWS_READ = 512  # of each data set, where all of a large one would take too long


def first_rows(config: Config, dataset: Any, key: str) -> tuple[int, HFDataset]:
    """Rows of the whole data set, and the data set of its first `ROWS_READ`; a function that makes rows is read whole.

    Raises DataError.
    """
    rows, own = read_rows(config, dataset, key)
    source = dataset.source if isinstance(dataset, HFDataset) else dataset
    is_function = callable(source) or (isinstance(source, str) and ".py:" in source)
    settings: dict[str, Any] = own.model_dump(
        exclude_unset=True, exclude={"path", "limit_rows", "split", "subset"}
    )
    most = max(ROWS_READ, 2 * config.train.prompts_per_step, 2 * (config.train.samples_per_update or 0))
    limit = own.limit_rows if is_function or len(rows) <= ROWS_READ else min(len(rows), most)
    return len(rows), HFDataset(source, split=own.split, subset=own.subset, limit_rows=limit, **settings)


def data_problems(flow: CheckedFlow, dataset: Any, key: str) -> list[str]:
    """What is wrong with a data set, of a large one with its first rows, for a flow that cannot run for other reasons."""
    try:
        prepare_data(flow, first_rows(flow.config, dataset, key)[1], key)
    except ConfigError as error:
        return error.violations
    return []


def _tokenized(
    flow: CheckedFlow, role: ReaderRole, rows: Rows, options: DataConfig, key: str
) -> PreparedData:
    config = flow.config
    limit = sequence_limit(config, role)
    if flow.paired:
        builder = PromptBuilder(role.tokenizer, options)
        pairs = PairDataset.build(
            rows,
            builder,
            max_sequence_tokens=limit,
            needs_prompt=not isinstance(role, RewardModel),
            key=key,
        )
        return PreparedData(
            pairs, config.train.samples_per_update or SUPERVISED_ROWS, "train.samples_per_update"
        )
    if flow.supervised:
        builder = PromptBuilder(role.tokenizer, options)
        sequences = SFTDataset.build(rows, builder, max_sequence_tokens=limit, key=key)
        per_update = config.train.samples_per_update or SUPERVISED_ROWS
        return PreparedData(sequences, per_update, "train.samples_per_update")
    room = min(options.max_prompt_tokens, limit - config.rollout.max_new_tokens)
    if room < 1:
        raise ConfigError(
            f"rollout.max_new_tokens: {config.rollout.max_new_tokens} leaves no room for a prompt in the"
            f" {limit} tokens a sequence may have (rollout.max_sequence_tokens, or the model's positions)"
        )
    builder = PromptBuilder(role.tokenizer, options, room)
    make = role.find_environment(config) if isinstance(role, Actor) else None
    if make is not None:
        check_turns(role.tokenizer, role_of(make), config.data, options)
    prompts = PromptDataset.build(rows, builder, key=key)
    _check_cache(config, max(map(len, prompts.prompt_ids)))
    return PreparedData(prompts, config.train.prompts_per_step, "train.prompts_per_step")


def _check_cache(config: Config, longest_prompt: int) -> None:
    """Raises ConfigError where the KV cache that was asked for cannot hold the longest prompt and its response."""
    r = config.rollout
    need = longest_prompt + r.max_new_tokens - 1  # the last token sampled is never stored
    if r.kv_cache_tokens is not None and need > r.kv_cache_tokens // BLOCK_TOKENS * BLOCK_TOKENS:
        raise ConfigError(
            f"rollout.kv_cache_tokens: {r.kv_cache_tokens}, in blocks of {BLOCK_TOKENS}, do not hold the"
            f" {need} tokens that the longest prompt and its response may need; raise it or lower rollout.max_new_tokens"
        )


SOURCE_KEYS = {"path", "subset", "split", "limit_rows"}  # where rows come from, not how they become prompts
SUPERVISED_ROWS = 32  # sequences, or pairs, per update where train.samples_per_update is not given


def sequence_limit(config: Config, role: ReaderRole) -> int:
    """Tokens a whole sequence may have: rollout.max_sequence_tokens, or what the model's positions allow."""
    limits = [config.rollout.max_sequence_tokens, position_limit(role)]
    return min((n for n in limits if n is not None), default=1 << 30)


def position_limit(role: ReaderRole) -> int | None:
    """The model's longest sequence, read from its config.json without its weights (None: not stated)."""
    if role.loaded is not None:
        return role.loaded.max_positions
    path = weights_source(find_model(str(role.model_config.path), role.key), role.key)
    if path.endswith(".gguf"):
        return None
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(path, trust_remote_code=role.model_config.trust_remote_code)
    except LOADING_ERRORS as error:
        raise ConfigError(f"{role.key}: '{path}' cannot be read: {first_line(error)}") from error
    value = getattr(found.get_text_config(), "max_position_embeddings", None)
    return int(value) if value else None
