"""One row to one prompt: chat messages, plain text or a template become the text and the ids a model gets."""

from __future__ import annotations

import difflib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.config import DataConfig
from headrace.data.dataset import Rows
from headrace.data.special_tokens import text_prefix, with_prefix
from headrace.errors import ConfigError, DataError

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "messages")

TOKENIZE_ROWS = 2048
SHOWN_ROWS = 5


class RowProblem(Exception):
    """One row cannot become a prompt; `kind` is what rows of this kind have in common."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class Problems:
    """Problems of a data set by kind: the first few rows and the count of each."""

    name: str
    found: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, where: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= SHOWN_ROWS:
            self.found.setdefault(kind, []).append(where)

    def raise_any(self, key: str) -> None:
        """Raises DataError with one sentence a kind, if there are any."""
        if self.counts:
            raise DataError([f"{key}: {self.name}: {self._sentence(kind)}" for kind in self.counts])

    def _sentence(self, kind: str) -> str:
        count = self.counts[kind]
        more = ", ..." if count > SHOWN_ROWS else ""
        return f"{kind} ({', '.join(self.found[kind])}{more}; {count} {'row' if count == 1 else 'rows'})"


def use_chat_template(tokenizer: Any, path: str | Path) -> None:
    """Replaces the tokenizer's chat template by the Jinja file `path`. Raises ConfigError naming the key."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"model.chat_template: the file {path} does not exist (looked in {Path.cwd()})")
    try:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"model.chat_template: {path} is not UTF-8: {error}") from error


class PromptBuilder:
    """Turns a row into the text and the ids of its prompt.

    `prefix` (usually the BOS) stands exactly once before the ids; data/special_tokens.py has the rule.
    `format` is "chat" or "plain". `max_prompt_tokens` is the longest prompt in tokens, the prefix included.
    """

    def __init__(self, tokenizer: Any, data: DataConfig, max_prompt_tokens: int | None = None) -> None:
        """Raises ConfigError for a chat format without a usable template, and for a malformed data.template."""
        self.tokenizer = tokenizer
        self.data = data
        self.max_prompt_tokens = data.max_prompt_tokens if max_prompt_tokens is None else max_prompt_tokens
        has_template = bool(tokenizer.chat_template)
        self.format: Literal["chat", "plain"]
        if data.format == "auto":
            self.format = "chat" if has_template else "plain"
        else:
            self.format = data.format
        if self.format == "chat" and not has_template:
            raise ConfigError(
                "data.format: 'chat' needs a chat template and the tokenizer has none; use data.format 'plain', or"
                " give a template file as model.chat_template"
            )
        if self.format == "plain" and data.system_prompt is not None:
            raise ConfigError(
                "data.system_prompt: only used by chat prompts, but the prompts are plain text; put it into"
                " data.template, or give a chat template as model.chat_template"
            )
        self.template: list[tuple[str, str | None]] | None = (
            None if data.template is None else parse_template(data.template)
        )
        self.prefix = text_prefix(tokenizer, self._chat_probe() if has_template else None)
        if len(self.prefix) >= self.max_prompt_tokens:
            raise ConfigError(f"data.max_prompt_tokens: {self.max_prompt_tokens} leaves no room for a prompt")

    def column(self, rows: Rows, key: str = "data") -> str | None:
        """The prompt column of `rows`; None where a template is used. Raises DataError for a missing column."""
        have = ", ".join(rows.columns)
        if self.template is not None:
            missing = [f for _, f in self.template if f is not None and f not in rows.columns]
            if missing:
                raise DataError(
                    [
                        f"data.template: {rows.name} has no column '{m}'{_nearest(m, rows.columns)};"
                        f" the columns are {have}"
                        for m in dict.fromkeys(missing)
                    ]
                )
            return None
        if self.data.prompt is not None:
            return require_column(self.data.prompt, rows, "data.prompt")
        found = next((c for c in PROMPT_COLUMNS if c in rows.columns), None)
        if found is None:
            raise DataError(
                f"data.prompt: {rows.name} ({key}.path) has none of the columns {', '.join(PROMPT_COLUMNS)};"
                f" set data.prompt to one of {have}"
            )
        return found

    def text(self, row: Mapping[str, Any], column: str | None) -> str:
        """The prompt as given to the model, without the prefix. Raises RowProblem."""
        if self.template is not None:
            return self.render(fill_template(self.template, row))
        value = row[column] if column is not None else None
        if value is None:
            raise RowProblem(f"column '{column}' is null")
        return self.render(value)

    def render(self, value: Any) -> str:
        """Text or chat messages as the text the model gets. Raises RowProblem."""
        return require_characters(self._render(value), "the prompt")

    def _render(self, value: Any) -> str:
        if isinstance(value, str):
            if not value.strip():
                raise RowProblem("the prompt is empty")
            if self.format == "plain":
                return value
            messages: list[Any] = [{"role": "user", "content": value}]
        elif isinstance(value, list | tuple):
            messages = _check_messages(value)
            if self.format == "plain":
                raise RowProblem(
                    "the prompt is chat messages, but the prompts are plain text (see data.format)"
                )
        else:
            raise RowProblem(f"the prompt is a {type(value).__name__}; expected text or chat messages")
        if self.data.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise RowProblem("has a system message of its own besides data.system_prompt; drop one")
            messages = [{"role": "system", "content": self.data.system_prompt}, *messages]
        return self._apply_chat_template(messages)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text of `text()`, the prefix exactly once."""
        return self.with_prefix(self.plain_ids(texts))

    def with_prefix(self, ids: Sequence[list[int]]) -> list[list[int]]:
        """Each row of ids with the prefix before it exactly once."""
        return [with_prefix(row, self.prefix) for row in ids]

    def plain_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text and nothing around them."""
        out: list[list[int]] = []
        for start in range(0, len(texts), TOKENIZE_ROWS):
            part = list(texts[start : start + TOKENIZE_ROWS])
            out += self.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        return out

    def truncate_left(self, ids: list[int], limit: int) -> list[int]:
        """The prefix and the last ids, `limit` in all."""
        keep = limit - len(self.prefix)
        return [*self.prefix, *ids[len(ids) - keep :]]

    def _chat_probe(self) -> list[int]:
        try:
            text = self._apply_chat_template([{"role": "user", "content": "a"}])
        except RowProblem:
            # a template may refuse this conversation; the rows will tell
            return []
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _apply_chat_template(self, messages: list[Any]) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"model.chat_template: line {error.lineno} of the chat template: {error.message}"
            ) from error
        except (TemplateError, TypeError) as error:
            raise RowProblem(f"the chat template refuses the messages: {error}") from error
        return text


def require_characters(text: str, where: str) -> str:
    """The text itself. Raises RowProblem for halves of surrogate pairs, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowProblem(f"{where} holds half a character (a lone surrogate, such as \\ud800)") from error
    return text


def _check_messages(value: Sequence[Any]) -> list[Any]:
    """Messages that end where the model is to answer. Raises RowProblem."""
    if not value:
        raise RowProblem("the prompt is empty")
    for message in value:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise RowProblem("the prompt is a list whose items are no messages with role and content")
    if not any(m["content"].strip() if isinstance(m["content"], str) else m["content"] for m in value):
        raise RowProblem("the prompt is empty")
    if value[-1]["role"] == "assistant":
        raise RowProblem(
            "the messages end with the assistant's answer, so there is nothing to answer; leave it out"
        )
    return list(value)


def parse_template(template: str) -> list[tuple[str, str | None]]:
    """(text, column after it or None) pieces of a text with {column} fields; {{ and }} stand for braces.

    Only bare column names may stand in braces: no attributes, indices, conversions or format specifications.
    Raises ConfigError naming data.template.
    """
    pieces: list[tuple[str, str | None]] = []
    try:
        for text, name, spec, conversion in string.Formatter().parse(template):
            if name is not None and (not name or spec or conversion or any(c in name for c in ".[]{}")):
                shown = (
                    "{" + name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
                )
                raise ConfigError(
                    f"data.template: {shown}: only a column name may stand in braces; write {{{{ and }}}} for braces"
                )
            pieces.append((text, name))
    except ValueError as error:
        raise ConfigError(f"data.template: {error}; write {{{{ and }}}} for braces that are text") from error
    if all(name is None for _, name in pieces):
        raise ConfigError("data.template: has no {column} field, so every prompt would be the same")
    return pieces


def fill_template(pieces: Sequence[tuple[str, str | None]], row: Mapping[str, Any]) -> str:
    """The template with the row's values put in as text. Raises RowProblem for a null or when all are empty."""
    out: list[str] = []
    filled = False
    for text, name in pieces:
        out.append(text)
        if name is not None:
            if row[name] is None:
                raise RowProblem(f"column '{name}' is null")
            value = str(row[name])
            filled = filled or bool(value.strip())
            out.append(value)
    if not filled:
        raise RowProblem("the prompt is empty")
    return "".join(out)


def require_column(column: str, rows: Rows, key: str) -> str:
    if column not in rows.columns:
        raise DataError(
            f"{key}: {rows.name} has no column '{column}'{_nearest(column, rows.columns)};"
            f" the columns are {', '.join(rows.columns)}"
        )
    return column


def _nearest(name: str, columns: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, columns, n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
