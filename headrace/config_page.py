"""The page docs/configuration.md, written from the settings themselves: `python -m headrace.config_page`."""

from __future__ import annotations

import json
import sys
from typing import Any

from headrace.config import SHORTHAND
from headrace.config_aliases import ALIASES, STRUCTURED
from headrace.config_explain import KeyInfo, all_keys, sections

INTRODUCTION = """\
# Configuration

Every setting of a run. The same text, from the same source, is printed by `headrace config --explain` (or
`headrace config --explain rollout` for one section). This page is written by `make docs`; do not edit it.

## How settings are given

A YAML file with sections, then overrides. Only `model`, `data` and `reward` are needed for a GRPO run:

```yaml
# grpo.yaml
model: Qwen/Qwen2.5-0.5B-Instruct
data: {path: openai/gsm8k, subset: main}
reward: numeric_match
```

```bash
headrace config grpo.yaml train.learning_rate=2e-6 rollout.stop='["\\n\\n"]' --seed 1   # prints the whole configuration
```

- **Shorthand.** A section given as a single text sets one key: SHORTHAND_LIST.
- **Order.** Defaults, then the file, then overrides `section.key=value` and flags. One key given twice with different
  values, by an override and by a flag, is an error.
- **Presets.** `algorithm.name` sets further keys of its section, unless you do ([presets](algorithms.md#the-presets)).
  The defaults below are those under `grpo`.
- **Paths.** A relative path is looked for in the current folder, then beside the YAML file.
- **Types.** YAML 1.2: `1e-5` is a number; `yes`, `no`, `on` and `off` are texts; `true` and `false` are the booleans. On
  the command line a text setting takes what you type as it is; other values are read as YAML. `null` unsets.
- **Errors.** Unknown keys, wrong types and contradictions are reported all at once, each with its key and, where one is
  near, the name that was probably meant. Nothing is loaded before the configuration is right; the exit code is 2.
- **Units** stand in the names: `prompts_per_step`, `samples_per_update`, `tokens_per_microbatch`, `updates`. With
  `prompts_per_step` P and `samples_per_prompt` n, a step has P x n samples; `samples_per_update` must divide that.
"""

NAMES = """\
## Names from tutorials

These names are accepted as keyword arguments of `RLTrainer` and `PPOTrainer` (and of their `train`) and as flags of the
command line (`--rollout-batch-size 64`, or with underscores). Each sets exactly one key. The trainers also take every
key under its own name, with two underscores or a dot (`train__max_grad_norm=0.5`, `**{"train.max_grad_norm": 0.5}`), and
a section as a dict (`rollout={"top_p": 0.95}`).
"""


def markdown() -> str:
    """The text of docs/configuration.md."""
    shorthand = ", ".join(f"`{section}` → `{section}.{key}`" for section, key in SHORTHAND.items())
    lines = [INTRODUCTION.replace("SHORTHAND_LIST", shorthand)]
    for section in sections():
        lines += [f"## {section}", "", "| key | default | values | meaning |", "|---|---|---|---|"]
        lines += [_row(info) for info in all_keys().values() if info.section == section]
        lines.append("")
    lines += [NAMES, "| name | sets | meaning of the key |", "|---|---|---|"]
    lines += [
        f"| `{alias}` | `{key}` | {_cell(_with_unit(all_keys()[key]))} |" for alias, key in ALIASES.items()
    ]
    lines += [f"| `{name}` | | {_cell(meaning)} |" for name, meaning in STRUCTURED.items()]
    return "\n".join(lines) + "\n"


def _row(info: KeyInfo) -> str:
    shown = info.expected.removesuffix(", or null").removeprefix("text such as ")
    values = shown if shown != info.meaning else "text"
    return f"| `{info.name}` | {_default(info.default)} | {_cell(values)} | {_cell(_with_unit(info))} |"


def _with_unit(info: KeyInfo) -> str:
    return f"{info.meaning} [{info.unit}]" if info.unit else info.meaning


def _default(value: Any) -> str:
    """As it would stand in YAML; nothing where the setting is not set."""
    if value is None:
        return ""
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(markdown())
