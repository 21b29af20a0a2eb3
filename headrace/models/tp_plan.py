"""How each module of a model is cut over the `tp` axis: by transformers' own plan, or by names.

Only cuts that keep attention and MLP whole on a rank's own heads and columns are known; a model that needs others is
refused by name, with everything else that does not fit.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from headrace.errors import ConfigError

COLUMN, ROW, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
WHOLE = "replicate"

# For architectures without a plan of transformers: Megatron's cuts by the usual names.
USUAL = {
    "layers.*.self_attn.q_proj": COLUMN,
    "layers.*.self_attn.k_proj": COLUMN,
    "layers.*.self_attn.v_proj": COLUMN,
    "layers.*.self_attn.q_norm": PARTIAL,
    "layers.*.self_attn.k_norm": PARTIAL,
    "layers.*.self_attn.o_proj": ROW,
    "layers.*.mlp.gate_proj": COLUMN,
    "layers.*.mlp.up_proj": COLUMN,
    "layers.*.mlp.down_proj": ROW,
}


def tp_plan(hf: Any, tp: int) -> dict[str, str]:
    """Module name in `hf` → COLUMN, ROW or PARTIAL, below the embedding and head.

    Raises ConfigError with all that stands against cutting this model into `tp`.
    """
    plan, problems = read_plan(hf)
    layers = problems + _indivisible(hf.config.get_text_config(), tp)
    if layers:
        kind = type(hf).__name__
        raise ConfigError([f"parallelism.tp={tp} does not fit {kind}: {text}" for text in layers])
    return plan


def read_plan(hf: Any) -> tuple[dict[str, str], list[str]]:
    """The plan of `tp_plan`, and what stands against cutting this model in any number."""
    text = hf.config.get_text_config()
    patterns = getattr(text, "base_model_tp_plan", None) or USUAL
    base = hf.base_model
    prefix = next((f"{name}." for name, module in hf.named_modules() if module is base and name), "")
    plan: dict[str, str] = {}
    problems: list[str] = []
    for name, module in base.named_modules():
        if isinstance(module, nn.Embedding):
            continue  # cut by vocabulary, whatever transformers would do with it
        style = next((s for p, s in patterns.items() if _matches(p, name)), None)
        parameters = list(module.parameters(recurse=False))
        if style is None or style == WHOLE:
            if isinstance(module, nn.Linear) and style is None and parameters:
                problems.append(f"it has no plan for '{name}'")
            elif parameters and not isinstance(module, nn.Linear) and module_is_matrix(module):
                problems.append(f"'{name}' ({type(module).__name__}) is a matrix that it cannot cut")
            continue
        if style not in (COLUMN, ROW, PARTIAL):
            problems.append(f"'{name}' would need the cut '{style}', which is not built")
        elif style != PARTIAL and not isinstance(module, nn.Linear):
            problems.append(f"'{name}' is a {type(module).__name__}, not a linear layer")
        elif style == PARTIAL and any(p.numel() != _head_dim(text) for p in parameters):
            problems.append(f"'{name}' is normalised over more than one head")
        plan[prefix + name] = style
    return plan, _without_numbers(problems)


def _indivisible(text: Any, tp: int) -> list[str]:
    """Heads and widths that `tp` does not divide."""
    heads = int(text.num_attention_heads)
    counts = {
        "attention heads": heads,
        "key/value heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "MLP columns": int(getattr(text, "intermediate_size", None) or 0),
    }
    return [f"{n} {what} are not divisible by it" for what, n in counts.items() if n % tp]


def module_is_matrix(module: nn.Module) -> bool:
    return any(p.dim() >= 2 for p in module.parameters(recurse=False))


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _without_numbers(problems: list[str]) -> list[str]:
    """The same problem of every layer once."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", text) for text in problems))
