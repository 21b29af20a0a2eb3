"""Tokenizers read from GGUF files, held against what the file itself says.

Versions of transformers differ in how well they rebuild these: some lose the BOS flag, some the order of merges, and
a model that is fed other pieces than it was trained on answers nonsense without any error.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.data.special_tokens import text_prefix
from headrace.errors import ConfigError

logger = logging.getLogger(__name__)

SPACE = "▁"  # how SentencePiece writes a space
PROBE = "The weather in Natalia's town was surprisingly warm.  Nobody had expected it yesterday,\n\nalthough"
CONTROL, USER_DEFINED = 3, 4  # kinds of token in the file that are found before the text is split


def repair_gguf_tokenizer(tokenizer: Any, path: Path, key: str = "model.path") -> None:
    """Makes `tokenizer` split text and add BOS as the GGUF file at `path` says. Can be repeated safely.

    Raises ConfigError naming `key` when its pieces cannot be made right. Needs the package gguf.
    """
    from gguf import GGUFReader

    fields = GGUFReader(path).fields

    def value(name: str, default: Any = None) -> Any:
        field = fields.get(f"tokenizer.ggml.{name}")
        return default if field is None else field.contents()

    if value("model") == "llama" and value("scores") is not None:
        tokens = value("tokens")
        vocabulary = Vocabulary(
            scores=dict(zip(tokens, value("scores"), strict=True)),
            kinds=dict(zip(tokens, value("token_type", [0] * len(tokens)), strict=True)),
            space_prefix=bool(value("add_space_prefix", True)),
        )
        _repair_pieces(tokenizer, vocabulary, path, key)
    _repair_bos(tokenizer, value("model", ""), value("add_bos_token"))


def _repair_bos(tokenizer: Any, model: str, flag: bool | None) -> None:
    """A file without the flag adds BOS when its vocabulary is SentencePiece's ("llama"), as llama.cpp does; for
    "gemma4" the chat template writes it."""
    adds = model == "llama" if flag is None else bool(flag)
    if not adds or model == "gemma4" or tokenizer.bos_token_id is None:
        return
    if not text_prefix(tokenizer) or getattr(tokenizer, "add_bos_token", False) is not True:
        tokenizer.add_bos_token = True


def _repair_pieces(tokenizer: Any, vocabulary: Vocabulary, path: Path, key: str) -> None:
    expected = vocabulary.encode(PROBE)
    if _ids(tokenizer) == expected:
        return
    from tokenizers import AddedToken, models

    logger.info("%s: rebuilding the tokenizer's merges from the scores in the file", path.name)
    tokenizer.backend_tokenizer.model = models.BPE(
        vocab={token: i for i, token in enumerate(vocabulary.scores)},
        merges=vocabulary.merges(),
        unk_token=tokenizer.unk_token,
        byte_fallback=True,
        fuse_unk=True,
    )
    whole = [t for t, kind in vocabulary.kinds.items() if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=vocabulary.kinds[t] == CONTROL) for t in whole]
    )
    if _ids(tokenizer) != expected:
        raise ConfigError(
            f"{key}: the tokenizer in '{path}' is not read correctly by this version of transformers;"
            " set model.tokenizer to a folder or hub id with the same model's tokenizer"
        )


def _ids(tokenizer: Any) -> list[int]:
    return list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a SentencePiece BPE vocabulary, in the order of their ids, with scores and kinds."""

    scores: Mapping[str, float]
    kinds: Mapping[str, int]
    space_prefix: bool

    def encode(self, text: str) -> list[int]:
        """Ids of `text`: user-defined tokens first (the longest at each place), BPE between them.

        A character without a piece becomes its bytes (Kudo & Richardson 2018, BPE mode).
        """
        whole = sorted((t for t, k in self.kinds.items() if k == USER_DEFINED), key=len, reverse=True)
        cuts = re.split("(" + "|".join(map(re.escape, whole)) + ")", text) if whole else [text]
        cuts[0] = (" " if self.space_prefix else "") + cuts[0]
        pieces: list[str] = []
        for number, cut in enumerate(cuts):
            pieces += [cut] if number % 2 else self._bpe(cut.replace(" ", SPACE))
        numbers = {token: i for i, token in enumerate(self.scores)}
        return [
            numbers[part] for piece in pieces for part in ([piece] if piece in numbers else _bytes(piece))
        ]

    def _bpe(self, text: str) -> list[str]:
        """Joins the adjacent pair whose piece scores highest (the leftmost of equals) until none is left."""
        pieces = list(text)
        while True:
            pairs = enumerate(itertools.pairwise(pieces))
            best, at = max(
                ((self.scores.get(a + b, -math.inf), -i) for i, (a, b) in pairs), default=(-math.inf, 0)
            )
            if best == -math.inf:
                return pieces
            pieces[-at : -at + 2] = [pieces[-at] + pieces[-at + 1]]

    def merges(self) -> list[tuple[str, str]]:
        """Every way to make a piece of two others, best-scored piece first: the ranks of a BPE model."""
        found = [
            (score, token[:cut], token[cut:])
            for token, score in self.scores.items()
            for cut in range(1, len(token))
            if token[:cut] in self.scores and token[cut:] in self.scores
        ]
        found.sort(key=lambda merge: -merge[0])
        return [(left, right) for _, left, right in found]


def _bytes(piece: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in piece.encode()]
