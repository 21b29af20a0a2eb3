"""A page taken apart with the standard library's parser, and run directories made by hand, for the tests beside it."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """`tags`: (name, attributes) in order; `texts`: text; `raw`: what scripts and styles hold."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self.unclosed: list[str] = []
        self.feed(html.replace("<wbr>", ""))  # a place for a break is no part of the text
        self.close()
        assert self.unclosed == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.raw.append((tag, dict(attrs), ""))
        if tag not in VOID:
            self.unclosed.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if self.unclosed and self.unclosed[-1] in ("script", "style"):
            tag, attributes, text = self.raw.pop()
            self.raw.append((tag, attributes, text + data))
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        [text] = [text for _, attributes, text in self.raw if attributes.get("id") == "data"]
        loaded: dict[str, Any] = json.loads(text)
        return loaded

    def code(self, tag: str) -> str:
        """The page's one style, or its one script that runs."""
        [text] = [t for name, attributes, t in self.raw if name == tag and "type" not in attributes]
        return text

    def charts(self) -> dict[str, dict[str, Any]]:
        return {c["metric"]: c for section in self.data["sections"] for c in section["charts"]}


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def make_run(
    folder: Path,
    lines: list[dict[str, Any]] | str,
    *,
    config: str = "model: {path: some/model}\ntrain: {steps: 3}\n",
    samples: list[dict[str, Any]] | None = None,
    eval_samples: list[dict[str, Any]] | None = None,
    timeline: list[dict[str, Any]] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    text = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    files = {"samples.jsonl": samples, "eval_samples.jsonl": eval_samples, "timeline.jsonl": timeline}
    for name, records in files.items():
        if records is not None:
            (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def sample(step: int, prompt_id: int = 0, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_id": prompt_id,
        "sample_index": 0,
        "prompt": f"question {prompt_id}",
        "completion": f"answer {prompt_id} at {step}",
        "reward": 0.5,
        "finish_reason": "stop",
        "num_tokens": 7,
        **values,
    }
