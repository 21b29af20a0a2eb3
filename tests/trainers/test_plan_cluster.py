"""`headrace plan` for clusters: its sections, files and picture, and every violation in one report."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import cli
from headrace.models.heads import load_scalar_model
from headrace.observe.machine import Memory

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="session")
def reward_model(arithmetic: Path) -> Path:
    folder = arithmetic / "scorer"
    model = load_scalar_model(
        str(arithmetic / "model"),
        key="model.path",
        needs_head=False,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config(arithmetic: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(tmp_path / "runs"), "name": "r", "device": "cpu", "progress": "off"},
        "model": {"path": str(arithmetic / "model")},
        "data": {"path": str(arithmetic / "train.jsonl")},
        "reward": {"function": f"{arithmetic}/reward.py:score"},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 5},
        "train": {"prompts_per_step": 4, "steps": 2},
    }


PPO = {"name": "ppo", "kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}


@pytest.fixture
def four_groups(config: dict[str, Any], reward_model: Path) -> dict[str, Any]:
    reward = {**config["reward"], "model": str(reward_model)}
    return {**config, "algorithm": PPO, "reward": reward, "cluster": {"layout": "cpu_4_split"}}


def plan(
    config: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *more: str,
    command: str = "plan",
) -> tuple[int, str, list[str]]:
    """(exit code, what was printed, the errors)."""
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config))
    code = cli.main([command, str(file), *more])
    said = capsys.readouterr()
    return (
        code,
        said.out,
        [x.removeprefix("headrace: ") for x in said.err.splitlines() if x.startswith("headrace: ")],
    )


def test_four_groups_in_words(
    four_groups: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = plan(four_groups, tmp_path, capsys)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for wanted in (
        f"ppo on 4 CPU processes in 4 groups, gloo: {four_groups['model']['path']}",
        "reference reference dp1 localhost:2",
        "values critic dp1 706 MiB a rank 1 micro-batch in a pass ∥ reference, logprobs, reward_model, reward",
        "values → advantage critic dp1 → actor dp1 to another group 832 B values",
        "reference ∥ values ∥ logprobs ∥ reward_model",
        "actor dp1: same storage, nothing moves",
        "memory of a rank of group 'critic' (1 rank)",
        "Nothing was started and nothing was written.",
    ):
        assert wanted in lines
    assert any("in this machine, for all processes together" in line for line in lines)


def test_files(four_groups: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text on the terminal, numbers and picture in files; a bare --json prints the same numbers."""
    files = [str(tmp_path / "plan.json"), str(tmp_path / "plan.svg")]
    code, out, _ = plan(four_groups, tmp_path, capsys, "--json", files[0], "--svg", files[1])
    assert code == 0
    assert f"Nothing was started; written: {files[0]}, {files[1]}." in out
    written = json.loads(Path(files[0]).read_text())
    cluster = written["cluster"]
    assert (cluster["world"], len(cluster["memory"]["groups"])) == (4, 4)
    assert cluster["weights"] == {
        "from_layout": "actor dp1",
        "to_layout": "actor dp1",
        "same_storage": True,
        "bytes": 0,
    }
    values = next(e for e in cluster["edges"] if e["from"] == "values" and e["to"] == "advantage")
    assert values == {
        "from": "values",
        "to": "advantage",
        "columns": ["values"],
        "from_layout": "critic dp1",
        "to_layout": "actor dp1",
        "transfer": "to another group",
        "bytes": 16 * 16 + 16 * 9 * 4,
    }
    code, out, _ = plan(four_groups, tmp_path, capsys, "--json")
    printed = json.loads(out)
    for part in (printed, written):
        part["cluster"]["memory"].pop("free_bytes")
    assert printed == written


def test_a_yaml_file_after_json_is_not_written_to(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config))
    assert cli.main(["plan", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["flow"] == "grpo"
    assert json.loads(file.read_text()) == config


def test_files_that_cannot_be_written(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = plan(config, tmp_path, capsys, "--svg", str(tmp_path / "none" / "plan.svg"))
    assert (code, errors[0].partition(":")[0]) == (2, "--svg")
    code, _, errors = plan(config, tmp_path, capsys, "--svg", str(tmp_path / "plan.png"))
    assert code == 2
    assert "must end with .svg" in errors[0]


Rectangle = tuple[float, float, float, float]


def rectangle(element: ElementTree.Element) -> Rectangle:
    x, y, width, height = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("layout", [None, "cpu_2", "cpu_4_split"])
def test_the_picture(
    layout: str | None, four_groups: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A box for each stage, in its group's band, none over another; edges as the stages depend on each other."""
    four_groups["cluster"] = {"layout": layout}
    four_groups["train"]["prompts_per_step"] = 4
    file = tmp_path / "plan.svg"
    assert plan(four_groups, tmp_path, capsys, "--svg", str(file), "--json")[0] == 0
    root = ElementTree.fromstring(file.read_text())
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    assert width == 1280
    boxes = {g.attrib["data-stage"]: rectangle(g[0]) for g in root.iter(f"{SVG}g")}
    stages = [
        "rollout",
        "reference",
        "values",
        "logprobs",
        "reward_model",
        "reward",
        "advantage",
        "critic",
        "update",
    ]
    assert list(boxes) == stages
    assert not any(overlap(a, b) for a, b in itertools.combinations(boxes.values(), 2))
    bands = {
        r.attrib["data-group"]: rectangle(r) for r in root.iter(f"{SVG}rect") if "data-group" in r.attrib
    }
    assert not any(overlap(a, b) for a, b in itertools.combinations(bands.values(), 2))
    home = {
        "cpu_4_split": {
            "reference": "reference",
            "values": "critic",
            "critic": "critic",
            "reward_model": "reward_model",
        }
    }.get(layout or "", {})
    first = next(iter(bands))
    for name, box in boxes.items():
        band = bands[home.get(name, first)]
        assert band[0] <= box[0]
        assert band[1] <= box[1]
        assert box[2] <= band[2] <= width
        assert box[3] <= band[3] <= height
    drawn = {
        (p.attrib["data-from"], p.attrib["data-to"])
        for p in root.iter(f"{SVG}path")
        if "data-from" in p.attrib
    }
    assert drawn == {
        *(("rollout", name) for name in ("reward_model", "reference", "values", "logprobs")),
        ("reward_model", "reward"),
        *((name, "advantage") for name in ("reward", "reference", "values", "logprobs")),
        ("advantage", "critic"),
        ("advantage", "update"),
    }
    sizes = [t for t in root.iter(f"{SVG}text") if t.attrib.get("class") == "size"]
    assert len(sizes) == (8 if layout == "cpu_4_split" else 0)


def split(**roles: dict[str, int]) -> dict[str, Any]:
    """CPU groups of the size that each role's parallelism needs."""
    return {"device": "cpu", "roles": {n: {"gpu_group": n, "parallelism": p} for n, p in roles.items()}}


ACTOR, REFERENCE = ("cluster.layout.roles.actor.parallelism", "cluster.layout.roles.reference.parallelism")
OVERLAPPING = {
    "device": "cpu",
    "groups": {"a": "0-1", "b": "1-2"},
    "roles": {"actor": {"gpu_group": "a"}, "reference": {"gpu_group": "b"}},
}
TOO_MANY = {"device": "cpu", "nodes": [{"name": "n", "devices_per_node": 2}], "groups": {"a": 3}}
VIOLATIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "heads": (split(actor={"tp": 8}), ACTOR, "tp 8 does not divide the model's 4 attention heads; use tp 2"),
    "key/value heads": (
        split(actor={"tp": 4}),
        ACTOR,
        "tp 4 does not divide the model's 2 key/value heads; use tp 2",
    ),
    "sp": (split(actor={"sp": 8}), ACTOR, "sp 8 does not divide the model's 4 attention heads; use sp 4"),
    "layers": (
        split(actor={}, reference={"pp": 4}),
        REFERENCE,
        "pp 4 does not divide the model's 2 layers; use pp 2",
    ),
    "batch": (split(actor={"dp": 3}), "train.prompts_per_step", "evenly by the rollout's 3"),
    "overlapping": (OVERLAPPING, "cluster.layout.groups.b", "overlaps group 'a' on device 1"),
    "devices": (TOO_MANY, "cluster.layout.groups", "need 3 devices, but the nodes have 2"),
    "GPUs": ({"device": "cuda", "groups": {"a": 4}}, "cluster.layout", "needs 4 GPUs; there are 0"),
    "memory": (split(actor={"dp": 2}), "memory", "in the processes together, and this machine has 1.00 MiB"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_every_violation_comes_with_those_of_data_reward_and_models(
    name: str,
    command: str,
    config: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, key, text = VIOLATIONS[name]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    if name == "memory":
        monkeypatch.setattr("headrace.flow.memory_ranks.host_memory", lambda: Memory(1 << 20, 1 << 20))
    wrong = {
        **config,
        "cluster": {"layout": layout},
        "data": {**config["data"], "prompt": "nothing"},
        "algorithm": {"kl_coefficient": 0.1},
    }
    code, out, errors = plan(wrong, tmp_path, capsys, command=command)
    assert (code, out) == (2, "")
    assert any(e.startswith(f"{key}: ") and text in e for e in errors), errors
    assert any(e.startswith("data.prompt: ") for e in errors), errors
    wrong["reward"] = {"function": "numeric_mach"}
    wrong["data"] = {"path": str(tmp_path / "none.jsonl")}
    _, _, errors = plan(wrong, tmp_path, capsys, command=command)
    assert any(e.startswith(f"{key}: ") and text in e for e in errors), errors
    assert any(e.startswith("reward.function: ") for e in errors), errors
    assert any(e.startswith("data.path: ") for e in errors), errors
    assert not (tmp_path / "runs").exists()


def test_sp_with_adapters(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused where the actor has to generate."""
    wrong = {**config, "cluster": {"layout": split(actor={"sp": 2})}, "lora": {"rank": 2}}
    code, _, errors = plan(wrong, tmp_path, capsys)
    assert code == 2
    assert errors == [
        "lora.rank: an actor with adapters generates in the layout that it trains in so far, and by"
        f" {ACTOR} it would train in sp2 and generate in dp2"
    ]


def test_sp_in_a_plan(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config["cluster"] = {"parallelism": {"sp": 2, "dp": 2}}
    code, out, _ = plan(config, tmp_path, capsys, "--json", str(tmp_path / "plan.json"))
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "grpo on 4 CPU processes in 1 group, gloo: " + config["model"]["path"] in lines
    assert "actor all dp2×sp2 localhost:0-3" in lines
    assert "rollout all dp4 localhost:0-3" in lines
    assert "all dp2×sp2 → all dp4: 0 B move after each step's updates" in lines
    cluster = json.loads((tmp_path / "plan.json").read_text())["cluster"]
    degrees = {"dp": 2, "sp": 2, "tp": 1, "pp": 1, "zero3": 1}
    assert {s["name"]: s["parallelism"] for s in cluster["stages"]}["update"] == degrees


def test_many_violations_at_once(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two roles, the batch, another model's vocabulary and the memory of a flow: one report, each with its key."""
    wrong = {
        **config,
        "algorithm": {"kl_coefficient": 0.1},
        "cluster": {"layout": split(actor={"tp": 4, "dp": 3}, reference={"pp": 4})},
        "lora": {"rank": 2},
    }
    _, _, errors = plan(wrong, tmp_path, capsys)
    keys = [e.partition(":")[0] for e in errors]
    assert keys == [
        "cluster.layout.roles.actor.parallelism",
        "cluster.layout.roles.actor.parallelism",
        "cluster.layout.roles.reference.parallelism",
        "train.prompts_per_step",
    ]
    assert "lora.rank gives adapters; use dp alone" in errors[0]


def test_columns_circles_and_heads_in_one_error(arithmetic: Path, config: dict[str, Any]) -> None:
    """A flow of one's own that reads what nobody writes, goes in a circle, and does not fit its layout."""
    from headrace.config_load import from_mapping
    from headrace.errors import ConfigError
    from headrace.flow.flow import Flow
    from headrace.roles.actor import Actor

    settings = from_mapping({**config, "cluster": {"layout": split(actor={"tp": 4})}})
    actor = Actor(settings.model, "cpu")
    flow = Flow("mine", settings)
    rollout = flow.add_stage("rollout", actor.generate)
    flow.add_stage("update", actor.update, depends_on=rollout)
    with pytest.raises(ConfigError) as error:
        flow.compile()
    told = error.value.violations
    assert any("reads column 'advantages'" in text for text in told)
    assert any(text.startswith("cluster.layout.roles.actor.parallelism: tp 4") for text in told)
    flow.add_stage("a", lambda completion: 1.0, depends_on="b")
    flow.add_stage("b", lambda completion: 1.0, depends_on="a")
    with pytest.raises(ConfigError) as error:
        flow.compile()
    told = error.value.violations
    assert any("depend on each other in a circle" in text for text in told)
    assert any(text.startswith("cluster.layout.roles.actor.parallelism: tp 4") for text in told)
