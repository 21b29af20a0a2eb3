"""Models with a scalar head: the critic and the reward model."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch

from headrace.errors import ConfigError
from headrace.models import attention
from headrace.models.adapter_folder import adapter_folder, load_adapters
from headrace.models.causal_lm import CausalLM, ScalarModel, verify_against_hf
from headrace.models.find import find_model
from headrace.models.hf import (
    LOADING_ERRORS,
    first_line,
    load_tokenizer,
    no_loading_report,
    no_progress_bars,
    require_weights,
)
from headrace.models.lora import base_state, inject


def critic_from(
    actor: CausalLM, gradient_checkpointing: bool = False, key: str = "critic.path"
) -> ScalarModel:
    """A critic whose transformer starts as the actor's and whose values start at exactly 0.

    Of an actor with adapters it shares the frozen weights, and gets adapters of its own that start as the actor's;
    otherwise it is a copy. Raises ConfigError naming `key` when transformers has no scalar-head class for the
    architecture.
    """
    from transformers import AutoModelForSequenceClassification

    config = type(actor.hf.config).from_dict(actor.hf.config.to_dict())
    config.num_labels = 1
    try:
        hf = AutoModelForSequenceClassification.from_config(
            config, attn_implementation=attention.IMPLEMENTATION
        )
    except ValueError as error:
        raise ConfigError(
            f"{key}: transformers has no scalar head for {type(actor.hf).__name__}: {first_line(error)}"
        ) from error
    _one_linear_head(hf, key)
    hf.to(device=actor.device, dtype=actor.dtype).eval()
    own = actor.adapters
    adapters = None
    if own is None:
        hf.base_model.load_state_dict(actor.hf.base_model.state_dict())
    else:
        shared = base_state(actor.hf.base_model)
        hf.base_model.load_state_dict(shared, assign=True)
        adapters = inject(hf, copy.deepcopy(own.settings), own.base)
        trained = {name: p.detach() for name, p in actor.hf.named_parameters() if name in set(own.names)}
        hf.load_state_dict(trained, strict=False)
    torch.nn.init.zeros_(hf.score.weight)
    critic = ScalarModel(hf, actor.tokenizer, adapters)
    verify_against_hf(critic)
    if gradient_checkpointing:
        critic.use_gradient_checkpointing()
    return critic


def load_scalar_model(
    path: str,
    *,
    key: str,
    device: torch.device | str,
    dtype: torch.dtype | Literal["auto"],
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    needs_head: bool = True,
    tokenizer: Any = None,
) -> ScalarModel:
    """Loads a folder or hub id with a one-label sequence-classification head.

    An adapter folder gives its base, its adapters and its head. With `needs_head` (a reward model) a folder without a
    trained `score` is refused; otherwise (a critic, or a reward model to be trained) the missing head starts at 0.
    `tokenizer`: default that of the folder. Raises ConfigError naming `key`.
    """
    from transformers import AutoModelForSequenceClassification

    attention.register()
    path = find_model(path, key)
    adapter = adapter_folder(path, key)
    weights = adapter.base if adapter is not None else path
    try:
        with no_loading_report(), no_progress_bars():
            hf, info = AutoModelForSequenceClassification.from_pretrained(
                weights,
                num_labels=1,
                dtype=dtype,
                attn_implementation=attention.IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"{key}: '{weights}' cannot be loaded with one scalar output: {first_line(error)}"
        ) from error
    _one_linear_head(hf, key)
    missing = {name for name in info["missing_keys"] if name.startswith("score.")}
    require_weights(set(info["missing_keys"]) - missing, weights, key)
    adapters = None
    if adapter is not None:
        adapters = load_adapters(hf, adapter, key)
        missing -= adapter.head_names(key)
    if missing and needs_head:
        raise ConfigError(
            f"{key}: '{path}' has no trained scalar head (missing {', '.join(sorted(missing))})"
        )
    hf.to(device).eval()
    if missing:
        torch.nn.init.zeros_(hf.score.weight)
    if tokenizer is None:
        tokenizer = load_tokenizer(path, trust_remote_code, key)
    model = ScalarModel(hf, tokenizer, adapters)
    try:
        verify_against_hf(model)
    except ConfigError as error:
        raise ConfigError(f"{key}: '{path}': {error}") from error
    if gradient_checkpointing:
        model.use_gradient_checkpointing()
    return model


def _one_linear_head(hf: Any, key: str) -> None:
    """Refuses architectures whose classifier is not a plain linear `score` on the last hidden state."""
    if not isinstance(getattr(hf, "score", None), torch.nn.Linear):
        raise ConfigError(
            f"{key}: the scalar head of {type(hf).__name__} is not a linear layer 'score' on the last hidden state,"
            " so it is not supported"
        )
