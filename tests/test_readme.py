"""Runs every snippet of the README and the docs against a tiny model, so that none of them can rot.

A fenced block is `python`, `yaml`, `bash`, `jsonl` or `text`. A first line `# name.py` (or a name after the language)
saves it under that name, where later blocks of the page find it. Python runs as a script, yaml is checked as a
configuration, every line of bash is run or checked, text is left alone.
"""

import json
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

from headrace.cli import main
from headrace.config_explain import all_keys, sections
from headrace.config_load import load_config
from headrace.config_page import markdown

ROOT = Path(__file__).parents[1]
PAGES = {
    str(p.relative_to(ROOT)): p.read_text() for p in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
}
FENCE = re.compile(r"^( *)```(\w+)?(?: +(\S+))?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

# What stands in the pages and what is run instead: the same commands, on a tiny model and a few samples.
SMALLER = {
    "Qwen/Qwen2.5-0.5B-Instruct": "{work}/model",
    "openai/gsm8k": "{work}/gsm8k.jsonl",
    "train.steps=200": "train.steps=1 train.prompts_per_step=2 rollout.samples_per_prompt=2",
    "steps=200": "steps=1",
    "steps: 50": "steps: 1",
    "steps: 100": "steps: 1",
    "../demo_run/sft/model": "{work}/model",
    "max_new_tokens=512": "max_new_tokens=3",
    "max_new_tokens: 32": "max_new_tokens: 3",
    "rollout_batch_size=32": "rollout_batch_size=2",
    "train_batch_size=128": "train_batch_size=8",
    "prompts_per_step=32": "prompts_per_step=2",
    "benchmarks/rollout_cpu.py": f"{ROOT}/benchmarks/rollout_cpu.py --prompts 2 --samples 2"
    " --max-new-tokens 4 --repeats 1",
    "benchmarks/memory_slope.py": f"{ROOT}/benchmarks/memory_slope.py --steps 6 --warm-up 2 --every 2",
}
# Links to files that runs make and a checkout need not have.
MADE_BY_RUNS = {"docs/images/demo_curve.png", "docs/results.md"}


def blocks(page):
    """(language, file name or None, text) of each fenced block."""
    for indent, language, name, text in FENCE.findall(PAGES[page]):
        text = textwrap.dedent(text) if indent else text
        first = re.match(r"# (\S+\.\w+)\n", text)
        yield language, name or (first[1] if first else None), text


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with the demo's tiny model, given a chat template and more positions, and sums in GSM8K's columns."""
    folder = tmp_path_factory.mktemp("work")
    task = runpy.run_path(str(ROOT / "examples/arithmetic/task.py"))
    task["make_model"](folder / "model", seed=0)
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    (folder / "model/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"question": f"{a}+{b}=", "answer": f"#### {a + b}"} for a in range(6) for b in range(6)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(language != "text" for language, *_ in blocks(page))]
)
def test_the_snippets_run(page, work, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as `python file.py` has it
    for language, name, text in blocks(page):
        for written, run in SMALLER.items():
            text = text.replace(written, run.format(work=work))
        file = tmp_path / (name or f"snippet.{language}")
        file.write_text(text)
        if language == "python":
            runpy.run_path(str(file), run_name="__main__")
        elif language == "yaml":
            load_config(
                file, command="dpo" if "pairs.jsonl" in text else "sft" if "completion" in text else "train"
            )
        elif language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                check_command(shlex.split(line, comments=True), monkeypatch)
        else:
            assert language in ("jsonl", "text"), f"{page}: a fenced block needs a language"
    assert "Traceback" not in capfd.readouterr().err


def check_command(words, monkeypatch):
    match words:
        case []:
            pass
        case ["headrace", *arguments]:
            assert main(arguments) == 0, words
        case ["python", script, *arguments]:
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            runpy.run_path(script, run_name="__main__")
        case ["make", target, *_]:
            phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert target in phony[1].split(), target
        case ["pip", "install", "torch", *_] | ["pip", "install", "-e", "."] | ["tensorboard", *_]:
            pass
        case ["pip", "install", "-e", what]:
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(re.fullmatch(r"\.\[([\w,]+)\]", what)[1].split(",")) <= known.keys()
        case ["tail", "-n", _, file]:
            assert Path(file).stat().st_size > 0
        case _:
            pytest.fail(f"teach this test to check: {shlex.join(words)}")


def test_the_first_thing_to_type():
    first = next(text for language, _, text in blocks("README.md"))
    assert first == "make demo\nmake test\n"


def test_every_replaced_text_is_still_written():
    assert [text for text in SMALLER if not any(text in page for page in PAGES.values())] == []


def test_links_lead_somewhere():
    broken = []
    for page, text in {
        **PAGES,
        **{n: (ROOT / n).read_text() for n in ("CHANGELOG.md", "CONTRIBUTING.md")},
    }.items():
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            path = (ROOT / page).parent / target if target else ROOT / page
            if not path.exists():
                if path.resolve().relative_to(ROOT).as_posix() not in MADE_BY_RUNS:
                    broken.append(f"{page}: {target}")
            elif anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                if anchor not in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]:
                    broken.append(f"{page}: {target}#{anchor}")
    assert broken == []


def test_every_key_that_is_named_exists():
    named = re.compile(rf"(?<![\w./-])({'|'.join(sections())})\.([a-z_0-9]+)")
    files = {"py", "yaml", "jsonl", "json", "csv", "parquet"}
    unknown = [
        f"{page}: {section}.{key}"
        for page, text in PAGES.items()
        for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        for section, key in named.findall(code)
        if key not in files and f"{section}.{key}" not in all_keys()
    ]
    assert unknown == []


def test_docs_configuration_is_current():
    assert PAGES["docs/configuration.md"] == markdown(), "run `make docs`"
    assert all(f"| `{key}` |" in PAGES["docs/configuration.md"] for key in all_keys())


def test_the_examples_of_the_readme_are_configurations():
    """Guards the extraction: the README's two files are found under their names."""
    names = {name: yaml.safe_load(text) for language, name, text in blocks("README.md") if language == "yaml"}
    assert names.keys() == {"grpo.yaml", "capitals.yaml"}
    assert names["grpo.yaml"].keys() == {"model", "data", "reward"}
