"""When a response ends because of its text: stop strings, found while tokens arrive one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer shows for bytes that are not (yet) a character
LONGEST_CHARACTER = 4  # bytes of a UTF-8 character, so tokens too
PATIENCE = 16  # tokens without a whole character after which the older ones are taken as they are


class StopText:
    """Looks for stop strings in the text of one growing response; only the tail is decoded and searched.

    The text is that of `tokenizer.decode(response ids)` with special tokens shown, so a stop string may name
    one. A string may span tokens, and a token may end inside a multi-byte character.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._overlap = max(len(s) for s in self._strings) - 1
        self._ids: list[int] = []
        self._context = (
            0  # settled ids from here on are decoded again, since decoding depends on the token before
        )
        self._settled = 0  # ids up to here are in `_tail`
        self._tail = ""  # the last settled characters a stop string could begin in
        self._seen = 0  # characters after the tail that earlier calls have looked at

    def push(self, token: int, look: bool = True) -> bool:
        """Adds a token; True when a stop string ends in the text it added. `look` False only adds."""
        self._ids.append(token)
        settled_text = self._decode(self._context, self._settled)
        text = self._decode(self._context, len(self._ids))[len(settled_text) :]
        shown = text.rstrip(UNFINISHED)
        found = look and self._found_in(self._tail + shown)
        self._seen = len(shown)
        if not text.endswith(UNFINISHED):
            self._settle(text, len(self._ids))
        elif len(self._ids) - self._settled > PATIENCE:
            cut = len(self._ids) - LONGEST_CHARACTER
            self._settle(self._decode(self._context, cut)[len(settled_text) :], cut)
        return found

    def _found_in(self, text: str) -> bool:
        old = len(self._tail) + self._seen
        return any(text.find(s, max(0, old - len(s) + 1)) >= 0 for s in self._strings)

    def _settle(self, text: str, upto: int) -> None:
        self._tail = (self._tail + text)[-self._overlap :] if self._overlap else ""
        self._seen = max(0, self._seen - len(text))
        self._context, self._settled = self._settled, upto

    def _decode(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        text: str = self._tokenizer.decode(
            self._ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
