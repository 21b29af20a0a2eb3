"""A tokenizer of one token a character, with the special tokens of several chat templates, for the tests beside it."""

from __future__ import annotations

from typing import Any

SPECIAL = ["<eos>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>", "<turn>", "<end_turn>"]


def make_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, "<unk>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
