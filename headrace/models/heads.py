"""Models with a scalar head: the critic and the reward model."""

from __future__ import annotations

from typing import Any

import torch

from headrace.errors import ConfigError
from headrace.models import attention
from headrace.models.causal_lm import CausalLM, ScalarModel
from headrace.models.hf import first_line, load_tokenizer


def critic_from(actor: CausalLM, gradient_checkpointing: bool = False) -> ScalarModel:
    """A critic whose transformer starts as a copy of the actor's and whose values start at exactly 0.

    Raises ConfigError when transformers has no scalar-head class for the architecture.
    """
    from transformers import AutoModelForSequenceClassification

    config = type(actor.hf.config).from_dict(actor.hf.config.to_dict())
    config.num_labels = 1
    try:
        hf = AutoModelForSequenceClassification.from_config(
            config, attn_implementation=attention.IMPLEMENTATION
        )
    except ValueError as error:
        raise ConfigError(f"critic: no value head for this architecture: {first_line(error)}") from error
    hf.to(device=actor.device, dtype=actor.dtype).eval()
    hf.base_model.load_state_dict(actor.hf.base_model.state_dict())
    torch.nn.init.zeros_(hf.score.weight)
    critic = ScalarModel(hf, actor.tokenizer)
    if gradient_checkpointing:
        critic.use_gradient_checkpointing()
    return critic


def load_scalar_model(
    path: str,
    *,
    key: str,
    device: torch.device | str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    needs_head: bool = True,
) -> ScalarModel:
    """Loads a folder or hub id with a one-label sequence-classification head.

    With `needs_head` (a reward model) a folder without a trained `score` is refused; otherwise (a critic) the
    missing head starts at 0. Raises ConfigError naming `key`.
    """
    from transformers import AutoModelForSequenceClassification

    attention.register()
    try:
        hf, info = AutoModelForSequenceClassification.from_pretrained(
            path,
            num_labels=1,
            dtype=dtype,
            attn_implementation=attention.IMPLEMENTATION,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{key}: '{path}' cannot be loaded with one scalar output: {first_line(error)}"
        ) from error
    missing = [name for name in info["missing_keys"] if name.startswith("score.")]
    if missing and needs_head:
        raise ConfigError(f"{key}: '{path}' has no trained scalar head (missing {', '.join(missing)})")
    hf.to(device).eval()
    if missing:
        torch.nn.init.zeros_(hf.score.weight)
    tokenizer: Any = load_tokenizer(path, trust_remote_code)
    model = ScalarModel(hf, tokenizer)
    if gradient_checkpointing:
        model.use_gradient_checkpointing()
    return model
