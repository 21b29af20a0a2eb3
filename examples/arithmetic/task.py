"""Makes the demo's ingredients from nothing: a small Qwen3 model, its tokenizer, and addition problems."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

DIGITS = "0123456789"
END, UNKNOWN = "<eos>", "<unk>"


WORKSHEETS = 8  # times the pupil works every problem, slipping anew
SLIP_FRACTION = 0.6  # answers in the worked sums that are one too high


def make(folder: Path, *, seed: int = 0, largest: int = 49, held_out: int = 256) -> None:
    """Writes `folder`/model (random weights), /worksheets.jsonl, /train.jsonl and /heldout.jsonl.

    train and heldout hold problems with the right answer, none in both. worksheets holds the training problems
    as a careless pupil worked them: `SLIP_FRACTION` of the sums are one too high.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", seed)
    chance = random.Random(seed)
    problems = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    chance.shuffle(problems)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in problems]
    write_rows(folder / "heldout.jsonl", rows[:held_out])
    write_rows(folder / "train.jsonl", rows[held_out:])
    worked = [(a, b, a + b + (chance.random() < SLIP_FRACTION)) for a, b in problems[held_out:] * WORKSHEETS]
    chance.shuffle(worked)
    write_rows(folder / "worksheets.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(c)} for a, b, c in worked])


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(folder: Path, seed: int, characters: str = "+=", words: Sequence[str] = ()) -> None:
    """A 0.5M-parameter Qwen3 and a tokenizer with one token a character, as an ordinary Hugging Face folder.

    Its characters are the digits and `characters`; each of `words` is one token, too.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    vocabulary = {token: i for i, token in enumerate([END, UNKNOWN, *DIGITS, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, unk_token=UNKNOWN, model_max_length=64
    )
    tokenizer.add_tokens(list(words))

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    logging.disable_progress_bar()
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
