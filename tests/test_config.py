"""Settings: the table, the file, overrides, keyword names, and every problem in one error (case 26)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Config, violations
from headrace.config_aliases import nearest_keys
from headrace.config_explain import all_keys, explain, sections
from headrace.config_load import PATH_KEYS, config_to_yaml, from_mapping, load_config, parse_value
from headrace.errors import ConfigError

NEEDED = ["model=Qwen/x", "data=d.jsonl", "reward=r.py:score"]


def problems(*overrides: str, path: Path | None = None, command: Any = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, command)
    return caught.value.violations


def yaml_file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "c.yaml"


# the table


def test_the_table_is_small_and_documented() -> None:
    assert len(all_keys()) < 120
    for info in all_keys().values():
        assert info.meaning, info.name
        assert info.expected, info.name
        # units in names, as the design has it
        if info.key.endswith("_tokens"):
            assert info.unit == "tokens", info.name


def test_explain_names_every_key_once() -> None:
    text = explain()
    for info in all_keys().values():
        assert text.count(f"\n{info.name} = ") == 1
    section = explain("rollout", {"--max-new-tokens": "rollout.max_new_tokens"})
    assert "rollout.max_new_tokens = 256 [tokens]   (a whole number of at least 1)" in section
    assert "flags: --max-new-tokens" in section
    assert "train.steps" not in section
    with pytest.raises(ConfigError, match="rolout: unknown section"):
        explain("rolout")


@pytest.mark.parametrize(
    "key, expected",
    [
        ("train.learning_rate", "a number above 0"),
        ("train.adam_beta1", "a number of at least 0 and below 1"),
        ("train.steps", "a whole number of at least 1, or null"),
        ("model.dtype", "one of auto, float32, bfloat16"),
        ("run.tensorboard", "true or false"),
        ("rollout.stop", "a list of texts"),
        ("rollout.stop_token_ids", "a list of whole numbers"),
        ("data.path", "text, or null"),
    ],
)
def test_expected(key: str, expected: str) -> None:
    assert all_keys()[key].expected == expected


# values


@pytest.mark.parametrize(
    "written, key, value",
    [
        ("1e-5", "train.learning_rate", 1e-5),
        ("1E-05", "train.learning_rate", 1e-5),
        ("2.5e-7", "train.learning_rate", 2.5e-7),
        (".5", "rollout.temperature", 0.5),
        ("1", "rollout.temperature", 1.0),
        ("1e3", "train.steps", 1000),
        ("1_000", "train.steps", 1000),
        ("null", "train.steps", None),
        ("~", "algorithm.gap_stop", None),
        ("off", "run.progress", "off"),
        ("no", "run.tensorboard", False),
        ("TRUE", "run.overwrite", True),
        ("[a, 'b c']", "rollout.stop", ["a", "b c"]),
        ("[1, 2]", "rollout.stop_token_ids", [1, 2]),
        ("007", "run.name", "007"),
        ("2024-01-02", "run.name", "2024-01-02"),
        ("12:30", "run.name", "12:30"),
    ],
)
def test_values_mean_the_same_in_file_and_override(
    tmp_path: Path, written: str, key: str, value: Any
) -> None:
    section, bare = key.split(".")
    path = yaml_file(tmp_path, f"{section}:\n  {bare}: {written}\n")
    for config in (load_config(path, [], None), load_config(None, [f"{key}={written}"], None)):
        found = getattr(getattr(config, section), bare)
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    "typed, value",
    [
        ("{question} # not a comment", "{question} # not a comment"),
        ("Q: {question}", "Q: {question}"),
        ("a=b", "a=b"),
        ("1e5", "1e5"),
        ("true", "true"),
        (r'"a\nb"', "a\nb"),
        ("'null'", "null"),
        ("null", None),
        ("", None),
    ],
)
def test_text_overrides_need_no_quotes(typed: str, value: Any) -> None:
    assert load_config(None, [f"data.template={typed}"], None).data.template == value
    assert parse_value("data.template", typed) == value


def test_a_minimal_run_needs_three_settings() -> None:
    config = load_config(None, NEEDED)
    assert (config.model.path, config.data.path, config.reward.function) == (
        "Qwen/x",
        "d.jsonl",
        "r.py:score",
    )
    assert config.algorithm.name == "grpo"


def test_overrides_win_over_the_file_and_shorthand_keeps_the_section(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "model: a/b\ntrain:\n  steps: 3\n  epochs: 2\nalgorithm: ppo\nrun:\n")
    config = load_config(path, ["model.dtype=float32", "train.steps=4", "train={passes_per_step: 2}"], None)
    assert (config.model.path, config.model.dtype) == ("a/b", "float32")
    assert (config.train.steps, config.train.epochs, config.train.passes_per_step) == (4, 2.0, 2)
    assert config.algorithm.name == "ppo"
    assert load_config(path, ["model=c/d"], None).model.path == "c/d"


# problems


def test_a_mistyped_key_in_file_and_override(tmp_path: Path) -> None:
    sentence = "train.learning_rte: unknown key; did you mean train.learning_rate?"
    assert problems("train.learning_rte=1e-5") == [sentence]
    assert problems(path=yaml_file(tmp_path, "train:\n  learning_rte: 1e-5\n")) == [sentence]


@pytest.mark.parametrize(
    "override, sentence",
    [
        (
            "train.adam_beta=1",
            "train.adam_beta: unknown key; did you mean train.adam_beta1 or train.adam_beta2?",
        ),
        ("learning_rate=1", "learning_rate: unknown key; did you mean train.learning_rate?"),
        ("learning_rte=1", "learning_rte: unknown key; did you mean train.learning_rate?"),
        ("tran.steps=1", "tran.steps: unknown key; did you mean train.steps?"),
        ("train.temperature=1", "train.temperature: unknown key; did you mean rollout.temperature?"),
        (
            "train.num_generations=1",
            "train.num_generations: unknown key; did you mean rollout.samples_per_prompt?",
        ),
        ("data.limit=3", "data.limit: unknown key; did you mean data.over_limit or data.limit_rows?"),
        ("modle=x", "modle: unknown section; did you mean model?"),
        ("train=5", "train: expected keys under it, such as train.steps, got 5"),
        ("train.steps", "train.steps: expected section.key=value, such as train.steps=100"),
        ("train.learning_rate=abc", "train.learning_rate: expected a number above 0, got 'abc'"),
        ("train.learning_rate=0", "train.learning_rate: expected a number above 0, got 0"),
        ("train.learning_rate=.inf", "train.learning_rate: expected a number above 0, got inf"),
        ("train.learning_rate=.nan", "train.learning_rate: expected a number above 0, got nan"),
        ("train.learning_rate=true", "train.learning_rate: expected a number above 0, got true"),
        ("train.steps=1.5", "train.steps: expected a whole number of at least 1, or null, got 1.5"),
        ("run.tensorboard=2", "run.tensorboard: expected true or false, got 2"),
        ("model.dtype=int8", "model.dtype: expected one of auto, float32, bfloat16, got 'int8'"),
        ("rollout.stop=[1]", "rollout.stop: expected a list of texts, got [1]"),
        ("rollout.top_p=1.01", "rollout.top_p: expected a number above 0 and up to 1, got 1.01"),
        (
            "run.seed=null",
            "run.seed: expected a whole number of at least 0 and up to 4294967295, got None",
        ),
        (
            "run.seed=99999999999",
            "run.seed: expected a whole number of at least 0 and up to 4294967295, got 99999999999",
        ),
        (
            "train.steps=!!int many",
            "train.steps: '!!int many' cannot be read: a value does not fit its type:"
            " \"invalid literal for int() with base 10: 'many'\"",
        ),
    ],
)
def test_one_sentence_each(override: str, sentence: str) -> None:
    assert problems(override) == [sentence]


def test_a_name_like_no_other_lists_the_sections() -> None:
    (sentence,) = problems("zzz.qqq=1")
    assert all(name in sentence for name in sections())
    (sentence,) = problems("zzz=1")
    assert all(name in sentence for name in sections())


def test_numbers_for_text_in_a_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "run:\n  name: 5\ndata:\n  template: {question}\n")
    assert problems(path=path) == [
        "run.name: expected text, or null, got 5 (put it in quotes)",
        "data.template: expected text, or null, got {'question': None} (put it in quotes)",
    ]


def test_all_problems_at_once(tmp_path: Path) -> None:
    path = yaml_file(
        tmp_path, "model: a\ntrain:\n  steps: -1\n  bogus: 2\nrollout:\n  samples_per_prompt: 1\n"
    )
    found = problems("run.device=gpu", "data.pth=x", path=path, command="train")
    starts = [
        "train.bogus",
        "data.pth",
        "run.device",
        "train.steps",
        "reward.function",
        "rollout.samples_per_prompt",
    ]
    assert sorted(v.split(":")[0] for v in found) == sorted(starts)


def test_what_a_command_needs() -> None:
    assert [v.split(":")[0] for v in problems(command="train")] == [
        "model.path",
        "data.path",
        "reward.function",
    ]
    assert [v.split(":")[0] for v in problems(command="sft")] == ["model.path", "data.path"]
    assert [v.split(":")[0] for v in problems(command="eval")] == [
        "model.path",
        "eval.path",
        "reward.function",
    ]
    load_config(None, [], None)


@pytest.mark.parametrize(
    "overrides, key",
    [
        (["train.samples_per_update=7"], "train.samples_per_update"),
        (["train.prompts_per_step=1", "train.microbatches_per_update=9"], "train.microbatches_per_update"),
        (["data.template={q}", "data.prompt=q"], "data.prompt"),
        (["rollout.stop=['']"], "rollout.stop"),
        (["rollout.stop_token_ids=[3,-1]"], "rollout.stop_token_ids"),
        (["rollout.min_new_tokens=300"], "rollout.min_new_tokens"),
        (["cluster.num_gpus=0", "run.device=cuda"], "cluster.num_gpus"),
        (["reference=r"], "reference.path"),
    ],
)
def test_contradictions(overrides: list[str], key: str) -> None:
    (sentence,) = problems(*NEEDED, *overrides, command="train")
    assert sentence.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "degrees, said", [("{ep: 3}", "unknown degree ep"), ("{tp: 0}", "tp is 0; expected")]
)
def test_degrees_say_what_is_wrong_with_them(degrees: str, said: str) -> None:
    (sentence,) = problems(*NEEDED, f"cluster.parallelism={degrees}", command="train")
    assert sentence.startswith(f"cluster.parallelism: {said}")


@pytest.mark.parametrize(
    "text, parts",
    [
        ("train:\n  steps: 1\n  steps: 2\n", ["line 3", "'steps' is given twice, first in line 2"]),
        ("model: a\nmodel: b\n", ["line 2", "'model' is given twice"]),
        ("train:\n  steps: [1\n", ["line 3"]),
        ("train:\n\tsteps: 1\n", ["line 2"]),
        ("- model\n", ["expected sections"]),
        ("x: !!python/object/apply:os.system ['true']\n", ["line 1", "python/object"]),
        ("train: {steps: !!int many}\n", ["does not fit its type", "many"]),
        ("run: {overwrite: !!bool many}\n", ["does not fit its type", "many"]),
        ("train: {steps: !!timestamp many}\n", ["does not fit its type"]),
        (f"train: {{steps: {'9' * 5000}}}\n", ["does not fit its type", "digits"]),
        ("x: " + "[" * 2000, ["nested too deeply"]),
    ],
)
def test_broken_files(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = yaml_file(tmp_path, text)
    (sentence,) = problems(path=path, command="train")
    for part in [str(path), *parts]:
        assert part in sentence


def test_a_missing_file_is_the_only_problem(tmp_path: Path) -> None:
    (sentence,) = problems(path=tmp_path / "none.yaml", command="train")
    assert "none.yaml: the configuration file does not exist" in sentence
    (sentence,) = problems(path=tmp_path, command="train")
    assert "is a folder" in sentence


def test_an_empty_file_is_an_empty_configuration(tmp_path: Path) -> None:
    assert load_config(yaml_file(tmp_path, "# nothing\n"), [], None) == Config()


def test_paths_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for name in ("d.jsonl", "r.py", "both.jsonl"):
        (there / name).write_text("")
    (here / "both.jsonl").write_text("")
    path = yaml_file(there, "model: Qwen/x\ndata: d.jsonl\nreward: r.py:score\neval: both.jsonl\n")
    monkeypatch.chdir(here)
    config = load_config(path)
    assert config.model.path == "Qwen/x"
    assert config.data.path == str(there / "d.jsonl")
    assert config.reward.function == f"{there / 'r.py'}:score"
    assert config.eval.path == "both.jsonl"
    # what is typed is meant from where it is typed
    assert load_config(path, ["data.path=d.jsonl"]).data.path == "d.jsonl"


# writing back


def values_of(key: str) -> st.SearchStrategy[Any]:
    info = all_keys()[key]
    options: list[st.SearchStrategy[Any]] = [st.none()] if info.optional else []
    if key == "run.device":
        options.append(st.sampled_from(["cpu", "cuda:3"]))
    elif isinstance(info.kinds[0], str):
        options.append(st.sampled_from(info.kinds))
    elif info.kinds[0] is str:
        # a path holds no NUL and no name of more than 255 bytes
        letters = (
            st.characters(exclude_characters="\0") if key in (*PATH_KEYS, "run.dir") else st.characters()
        )
        options.append(
            st.text(letters, max_size=60)
            | st.text("\x85\u2028\r\n \t:#'\"a", max_size=60)
            | st.sampled_from(["1e-5", "null", "off", "007", "1_0", "0x1", ".inf", "<<", "="])
        )
    elif info.kinds[0] is float:
        options.append(st.floats(1e-12, 0.999))
    return st.one_of(options) if options else st.just(info.default)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_yaml_round_trip(data: st.DataObject) -> None:
    raw: dict[str, dict[str, Any]] = {}
    for key in data.draw(st.lists(st.sampled_from(list(all_keys())), max_size=5, unique=True)):
        value = data.draw(values_of(key))
        section, bare = key.split(".")
        if key not in ("algorithm.dual_clip", "algorithm.importance_cap"):
            raw.setdefault(section, {})[bare] = value
    config = from_mapping(raw)
    text = config_to_yaml(config)
    import yaml

    from headrace.config_load import _Loader

    assert from_mapping(yaml.load(text, Loader=_Loader)) == config
    for section, values in raw.items():
        for bare, value in values.items():
            assert getattr(getattr(config, section), bare) == value


@pytest.mark.parametrize("key", [*PATH_KEYS, "run.dir"])
@pytest.mark.parametrize("value", ["a\0b", "x" * 256, "y/" * 1501])
def test_what_can_be_no_path_is_refused_by_name(key: str, value: str) -> None:
    section, bare = key.split(".")
    with pytest.raises(ConfigError, match=rf"{key}: .*too long or odd"):
        from_mapping({section: {bare: value}})


def test_resolved_file_loads_again(tmp_path: Path) -> None:
    config = load_config(
        None, [*NEEDED, "train.learning_rate=1e-5", "run.name=1e5", "rollout.stop=['\\n', off]"]
    )
    assert load_config(yaml_file(tmp_path, config_to_yaml(config))) == config


def test_flag_and_override_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"train\.steps: set to 3 and by a flag to 4"):
        load_config(None, ["train.steps=3"], None, {"train": {"steps": 4}})
    assert load_config(None, ["train.steps=3"], None, {"train": {"steps": 3}}).train.steps == 3


@settings(deadline=None)
@given(st.sampled_from(list(all_keys())), st.data())
def test_one_wrong_letter_finds_the_key(key: str, data: st.DataObject) -> None:
    section, bare = key.split(".")
    if len(bare) < 6:
        return
    at = data.draw(st.integers(1, len(bare) - 1))
    typo = f"{section}.{bare[:at]}{bare[at + 1 :]}"
    if typo not in all_keys():
        assert key in nearest_keys(typo)


def test_from_mapping_reports_all() -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({"train": {"steps": 0, "bogus": 1}, "model": "m", "nonsense": {}})
    assert len(caught.value.violations) == 3
    assert violations(from_mapping({"model": "m", "data": "d", "reward": "r.py:f"})) == []
    assert math.isclose(from_mapping({"train": {"learning_rate": "1e-5"}}).train.learning_rate, 1e-5)
