"""The ids a model expects before every text: one rule for plain prompts and chat prompts alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Texts whose ids show what a tokenizer puts around any text; the first that has ids of its own is used.
_PROBES = ("a", "1", "the", ".")


def text_prefix(tokenizer: Any, chat_probe: Sequence[int] | None = None) -> tuple[int, ...]:
    """The ids that go before every prompt, usually `(bos,)` or `()`.

    In this order: the ids the tokenizer itself puts before a plain text; else its BOS where `add_bos_token` is
    True, or where `chat_probe`, the ids of a rendered chat template, starts with it; else none. So a model that
    has a BOS token and never uses it (GPT-2, Qwen) gets none.
    """
    bos = tokenizer.bos_token_id
    for probe in _PROBES:
        bare = _ids(tokenizer, probe, False)
        full = _ids(tokenizer, probe, True)
        if not bare:
            continue
        starts = [i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare]
        if starts:
            if starts[0]:
                return tuple(full[: starts[0]])
            break
    if bos is None:
        return ()
    declared = getattr(tokenizer, "add_bos_token", False) is True
    in_template = bool(chat_probe) and chat_probe is not None and chat_probe[0] == bos
    return (bos,) if declared or in_template else ()


def with_prefix(ids: Sequence[int], prefix: tuple[int, ...]) -> list[int]:
    """`ids` starting with `prefix` exactly once, whether they had it no time, once or several times."""
    rest = list(ids)
    n = len(prefix)
    while n and tuple(rest[:n]) == prefix:
        rest = rest[n:]
    return [*prefix, *rest]


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])
