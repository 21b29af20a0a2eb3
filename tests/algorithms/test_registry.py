"""Names of advantages and losses: registering, finding, refusing."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.algorithms.find import algorithm_problems, find_advantage, find_loss
from headrace.algorithms.registry import ADVANTAGES, LOSSES
from headrace.config import AlgorithmConfig
from headrace.config_load import config_to_yaml, load_config
from headrace.config_presets import PRESETS
from headrace.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers, and the folders its plugins add to the path, are gone after it."""
    monkeypatch.setattr("sys.path", list(sys.path))
    tables: list[dict[str, Any]] = [ADVANTAGES, LOSSES]
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


def test_registered_from_outside() -> None:
    @headrace.register_advantage("constant", grouped=True)
    def constant(scored: headrace.Scored, settings: headrace.AlgorithmConfig) -> torch.Tensor:
        return torch.ones_like(scored.rewards)

    found = find_advantage("constant")
    assert found.function is constant
    assert (found.grouped, found.needs_critic, found.needs_greedy_baseline) == (True, False, False)
    assert headrace.advantage_stage("constant").__name__ == "constant_advantages"

    @headrace.register_loss("nothing")
    def nothing(inputs: headrace.LossInputs, settings: headrace.AlgorithmConfig) -> headrace.LossTerms:
        zero = 0.0 * inputs.logprobs
        return headrace.LossTerms(zero, zero.detach(), zero > 1)

    assert find_loss("nothing") is nothing


def test_every_preset_names_what_exists() -> None:
    for name, keys in PRESETS.items():
        settings = AlgorithmConfig(name=name)
        assert algorithm_problems(settings) == []
        assert AlgorithmConfig(**keys, name=name) == settings  # the values pass the checks of their keys


@pytest.mark.parametrize(
    "kind, register", [("advantage", headrace.register_advantage), ("loss", headrace.register_loss)]
)
def test_a_name_is_given_once(kind: str, register: Any) -> None:
    def first(a: Any, b: Any) -> None: ...
    def second(a: Any, b: Any) -> None: ...

    register("mine")(first)
    register("mine")(first)
    with pytest.raises(ConfigError) as caught:
        register("mine")(second)
    text = str(caught.value)
    assert text.startswith(f"@register_{kind}('mine'): the {kind} 'mine' is already registered, by ")
    assert "first" in text
    assert "test_registry.py, line" in text
    built_in = "grpo" if kind == "advantage" else "gspo"
    with pytest.raises(ConfigError, match=f"'{built_in}' is already registered, by headrace"):
        register(built_in)(second)


def test_running_a_file_again_is_not_a_second_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = (
        "from headrace import register_advantage\n"
        "@register_advantage('again')\ndef again(scored, settings):\n    return scored.rewards * {}\n"
    )
    file.write_text(text.format(1))
    runpy.run_path(str(file))
    file.write_text(text.format(2))
    runpy.run_path(str(file), run_name="other")
    assert 2 in find_advantage("again").function.__code__.co_consts


@pytest.mark.parametrize("name", ["", " ", None, 3])
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"@register_loss: give it a name"):
        headrace.register_loss(name)(lambda inputs, settings: None)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"no advantage 'rlo'; did you mean 'rloo'\?"):
        headrace.advantage_stage("rlo")
    with pytest.raises(ConfigError, match="no loss 'xyz'; there are cispo, gspo, policy_gradient, ppo_clip"):
        find_loss("xyz")
    problems = algorithm_problems(AlgorithmConfig(advantage="rlo", loss="ppo_clipp"))
    assert [p.split(":")[0] for p in problems] == ["algorithm.advantage", "algorithm.loss"]
    assert "did you mean 'ppo_clip'?" in problems[1]


# ---- plugins


PLUGIN = """
from headrace import register_advantage
LOADED = []

@register_advantage("from_a_file")
def from_a_file(scored, settings):
    return scored.rewards
"""


def test_a_plugin_file_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plugin_of_a_test.py"
    file.write_text(PLUGIN + f"open({str(tmp_path / 'log')!r}, 'a').write('x')\n")
    settings = AlgorithmConfig(plugin=str(file), advantage="from_a_file")
    assert algorithm_problems(settings) == algorithm_problems(settings) == []
    assert (tmp_path / "log").read_text() == "x"
    assert find_advantage("from_a_file").name == "from_a_file"


def test_a_plugin_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_a_test.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    settings = AlgorithmConfig(plugin="module_of_a_test", advantage="from_a_file")
    assert algorithm_problems(settings) == []


@pytest.mark.parametrize(
    "plugin, text, part",
    [
        ("no_such_file.py", None, "'no_such_file.py': there is no file"),
        (
            "no_such_module_at_all",
            None,
            "there is no module 'no_such_module_at_all'; for a file write path/to/file.py",
        ),
        ("broken.py", "import missing_of_a_test", "importing '.*broken.py' failed: ModuleNotFoundError"),
        (
            "raising.py",
            "\nraise RuntimeError('no key')",
            r"failed: RuntimeError: no key \(.*raising.py, line 2\)",
        ),
        (
            "taken.py",
            "from headrace import register_loss\nregister_loss('gspo')(lambda i, s: i)",
            "'gspo' is already registered",
        ),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_the_only_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str, text: str | None, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / plugin).write_text(text)
    (problem,) = algorithm_problems(AlgorithmConfig(plugin=plugin, advantage="its_own"))
    assert problem.startswith("algorithm.plugin: ")
    assert re.search(part, problem), problem


def test_a_plugin_is_found_beside_the_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "run.yaml").write_text("algorithm: {plugin: mine.py, advantage: from_a_file}\n")
    config = load_config(tmp_path / "run.yaml", [], None)
    assert config.algorithm.plugin == str(tmp_path / "mine.py")


# ---- presets in the configuration


def test_what_is_set_wins_over_the_preset() -> None:
    config = load_config(None, ["algorithm=gspo", "algorithm.clip_low=0.1"], None)
    a = config.algorithm
    assert (a.advantage, a.loss, a.reduction, a.clip_low, a.clip_high) == (
        "grpo",
        "gspo",
        "sequence_mean",
        0.1,
        4e-4,
    )
    assert a.model_dump(exclude_unset=True) == {"name": "gspo", "clip_low": 0.1}


def test_the_page_says_what_the_presets_set() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    table = page[page.index("## The presets") : page.index("## Advantages")]
    for name, keys in PRESETS.items():
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}`")]
        loss, sets = row.split("|")[3], row.split("|")[5]
        values = AlgorithmConfig(name=name)
        assert loss.strip() == f"`{values.loss}`"
        said = {key: canonical(text) for key, text in re.findall(r"`(\w+)` ([^\s,;]+)", sets)}
        kl = {"kl_placement", "kl_estimator"}
        assert said == {k: v for k, v in keys.items() if k not in {"advantage", "loss", *kl}}
        assert (f"KL in the {values.kl_placement}, {values.kl_estimator}" in sets) == bool(kl & keys.keys())


def canonical(text: str) -> Any:
    words = {"true": True, "false": False}
    return words[text] if text in words else float(text) if text[0].isdigit() else text


def test_another_name_brings_its_own_defaults() -> None:
    a = AlgorithmConfig(name="dapo", gamma=0.9)
    a.name = "rloo"
    assert a == AlgorithmConfig(name="rloo", gamma=0.9)
    assert (a.clip_high, a.filter_groups, a.gamma) == (0.2, False, 0.9)


def test_a_runs_own_file_under_another_name(tmp_path: Path) -> None:
    """It has every key; only what the run's user had set differently from its preset stays."""
    file = tmp_path / "config.yaml"
    file.write_text(config_to_yaml(load_config(None, ["algorithm=gspo", "algorithm.gamma=0.9"], None)))
    assert load_config(file, [], None).algorithm == AlgorithmConfig(name="gspo", gamma=0.9)
    assert load_config(file, ["algorithm=rloo"], None).algorithm == AlgorithmConfig(name="rloo", gamma=0.9)
    file.write_text("algorithm: {name: gspo, reduction: sequence_mean}\n")
    assert load_config(file, ["algorithm=rloo"], None).algorithm.reduction == "sequence_mean"


def test_a_mistyped_algorithm() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm.name: expected one of .*, got 'rlo'; did you mean 'rloo'\?"
    ):
        load_config(None, ["algorithm=rlo"], None)
