"""Episodes on a real model, through the trainer and the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.agents.environment import Environment, Step
from headrace.cli import main
from headrace.config_load import from_mapping, load_config
from headrace.data.batch import Batch
from headrace.data.dataset import HFDataset
from headrace.errors import ConfigError
from headrace.observe.metrics import MetricSums
from headrace.roles.actor import Actor
from headrace.stages import StageContext
from headrace.trainers.rl_trainer import RLTrainer


class Counts(Environment):
    """Tells how many characters were said, and rewards even digits."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.answer = row["answer"]

    def step(self, response: str) -> Step:
        even = sum(c in "02468" for c in response) / 5
        return Step(f"{len(response)}=", reward=even, metrics={"said": len(response)})


SECTIONS: dict[str, dict[str, Any]] = {
    "agent": {"max_turns": 3},
    "rollout": {"samples_per_prompt": 3, "max_new_tokens": 16, "stop": ["1", "="], "temperature": 0.8},
    "train": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
}


def prepared(folder: Path, **sections: dict[str, Any]) -> tuple[Actor, StageContext]:
    values = {**SECTIONS, "model": {"path": str(folder / "model")}}
    for name, given in sections.items():
        values[name] = {**values.get(name, {}), **given}
    config = from_mapping(values)
    actor = Actor(config.model)
    actor.environment = Counts
    actor.prepare(config, total_updates=1, trains=False)
    return actor, StageContext(config, 1, 1, MetricSums())


def prompts(actor: Actor, which: list[int]) -> Batch:
    texts = ["1+2=", "34+5=", "6=", "7+7="]
    return Batch(
        [0] * len(which),
        rows={
            "prompt": [texts[i] for i in which],
            "prompt_ids": [tuple(actor.tokenizer(texts[i])["input_ids"]) for i in which],
            "prompt_id": torch.tensor(which),
            "answer": ["" for _ in which],
        },
    )


@pytest.mark.parametrize("rollout", [{}, {"top_k": 6}], ids=["full softmax", "top-k"])
def test_sampled_logprobs_are_the_trainers_and_the_model_s_own(
    arithmetic: Path, rollout: dict[str, Any]
) -> None:
    actor, context = prepared(arithmetic, rollout=rollout)
    rows = actor.generate(prompts(actor, [0, 1, 2, 3]), context)
    mask = rows["response_mask"]
    assert (rows["num_turns"] > 1).any()
    assert rows["finish_reason"].count("stop") == 0
    name = "rollout_untruncated_logprobs" if rollout else "rollout_logprobs"
    trained = actor.engine.outputs(rows).logprobs
    assert (rows[name] - trained)[mask].abs().max() < 1e-5
    hf = actor.model.hf
    hf.set_attn_implementation("eager")
    for row in range(rows.num_rows):
        ids = rows.row_values("input_ids", row)
        with torch.no_grad():
            logits = hf(input_ids=ids[None], use_cache=False).logits[0].double() / 0.8
        own = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        where = rows.row_values("response_mask", row)[1:]
        ours = rows.row_values(name, row)[1:][where].double()
        torch.testing.assert_close(own[where], ours, atol=1e-5, rtol=0)


def episodes(rows: Batch) -> dict[tuple[int, int], list[int]]:
    return {
        (int(rows["prompt_id"][r]), int(rows["sample_index"][r])): rows.row_values("input_ids", r).tolist()
        for r in range(rows.num_rows)
    }


def test_what_an_episode_becomes_does_not_depend_on_its_company(arithmetic: Path) -> None:
    actor, context = prepared(arithmetic)
    together = episodes(actor.generate(prompts(actor, [0, 1, 2, 3]), context))
    alone = {}
    for which in ([3], [2, 1], [0]):
        alone |= episodes(actor.generate(prompts(actor, which), context))
    assert alone == together
    assert len({tuple(ids) for ids in together.values()}) == 12
    crowded, context = prepared(arithmetic, rollout={"max_concurrent_sequences": 1})
    assert episodes(crowded.generate(prompts(crowded, [0, 1, 2, 3]), context)) == together


def test_the_first_turn_is_that_of_a_rollout_without_an_environment(arithmetic: Path) -> None:
    actor, context = prepared(arithmetic)
    rows = actor.generate(prompts(actor, [0, 1]), context)
    actor.environment = None
    actor.prepare(context.config, total_updates=1, trains=False)
    single = actor.generate(prompts(actor, [0, 1]), context)
    assert "turn_rewards" not in single
    for r in range(single.num_rows):
        ids = single.row_values("input_ids", r).tolist()
        assert rows.row_values("input_ids", r).tolist()[: len(ids)] == ids


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_trainer_trains_on_the_environment_s_rewards_alone(arithmetic: Path, tmp_path: Path) -> None:
    trainer = RLTrainer(
        str(arithmetic / "model"),
        environment=Counts,
        eval_dataset=str(arithmetic / "heldout.jsonl"),
        run={"dir": str(tmp_path), "name": "r", "progress": "off", "tensorboard": False},
        **SECTIONS,
    )
    result = trainer.train(str(arithmetic / "train.jsonl"))
    steps = lines(tmp_path / "r" / "metrics.jsonl")
    assert steps[1]["reward/mean"] == pytest.approx(steps[1]["agent/reward_mean"])
    assert steps[1]["reward/mean"] > 0
    assert steps[1]["actor/updates"] == 1
    assert 1 < steps[1]["agent/turns_mean"] <= 3
    assert steps[1]["gap/abs_logprob_mean"] < 1e-5
    assert steps[1]["rollout/tokens"] > steps[1]["rollout/samples"]
    assert result.evaluations[0]["eval/agent/turns_mean"] > 1
    assert result.evaluations[0]["eval/agent/part/said"] > 1
    sample = lines(tmp_path / "r" / "samples.jsonl")[0]
    roles = [message["role"] for message in sample["episode"]]
    assert roles == ["assistant", "environment"] * (len(roles) // 2) + ["assistant"]
    assert sample["episode"][-1]["content"] == sample["completion"]
    assert load_config(tmp_path / "r" / "config.yaml", command=None).agent.environment == f"{__name__}:Counts"


def test_a_reward_function_is_added_and_sees_the_episode(arithmetic: Path, tmp_path: Path) -> None:
    def longer(completion: str, episode: list[dict[str, str]], num_turns: int) -> float:
        assert episode[-1]["content"] == completion
        return 10.0 * num_turns

    trainer = RLTrainer(
        str(arithmetic / "model"),
        longer,
        environment=Counts,
        run={"dir": str(tmp_path), "name": "r", "progress": "off", "tensorboard": False, "save_final": False},
        **SECTIONS,
    )
    metrics = trainer.train(str(arithmetic / "train.jsonl")).metrics
    expected = 10 * metrics["agent/turns_mean"] + metrics["agent/reward_mean"]
    assert metrics["reward/mean"] == pytest.approx(expected)


FILE = """
import time
from headrace.agents import Environment, Step

class Hangs(Environment):
    def reset(self, row):
        self.slow = row["prompt_id"] % 2
    def step(self, response):
        if self.slow:
            time.sleep(0.3)
        return Step("=", reward=len(response), done=len(response) > 2)

class Raises(Environment):
    def step(self, response):
        raise KeyError("page")

class NoStep(Environment):
    pass

class Needs(Environment):
    def __init__(self, size): ...
    def step(self, response): ...

class Other:
    def step(self, response): ...

def make():
    return Hangs()
"""

YAML = """
run: {{dir: {runs}, name: r, progress: "off", tensorboard: false, save_final: false}}
model: {model}
data: {data}
agent: {{environment: "environments.py:Hangs", timeout_s: 0.1}}
algorithm: {{name: ppo}}
rollout: {{samples_per_prompt: 1, max_new_tokens: 8}}
train: {{steps: 1, prompts_per_step: 4}}
"""


@pytest.fixture
def yaml_file(arithmetic: Path, tmp_path: Path) -> Path:
    (tmp_path / "environments.py").write_text(FILE)
    file = tmp_path / "agent.yaml"
    data = arithmetic / "train.jsonl"
    file.write_text(YAML.format(runs=tmp_path / "runs", model=arithmetic / "model", data=data))
    return file


def test_ppo_from_a_file_beside_the_yaml_with_episodes_that_time_out(yaml_file: Path, tmp_path: Path) -> None:
    assert main(["train", str(yaml_file)]) == 0
    (metrics,) = lines(tmp_path / "runs" / "r" / "metrics.jsonl")
    late = metrics["agent/timeout_fraction"]
    assert 0 < late < 1
    assert metrics["reward/excluded_fraction"] == late
    assert metrics["actor/updates"] == 1
    ends = {s["finish_reason"] for s in lines(tmp_path / "runs" / "r" / "samples.jsonl")}
    assert "timeout" in ends


def test_an_environment_that_raises_ends_the_run(yaml_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(yaml_file), f"agent={yaml_file.parent}/environments.py:Raises"]) == 1
    error = capsys.readouterr().err
    assert "environments.py:Raises': step raised KeyError: 'page'" in error
    assert "environments.py, line 15" in error


def test_a_function_that_makes_the_environment(yaml_file: Path) -> None:
    assert (
        main(["eval", str(yaml_file), f"agent={yaml_file.parent}/environments.py:make", "data.limit_rows=2"])
        == 0
    )


def test_episodes_have_no_greedy_baseline(yaml_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = f"agent={yaml_file.parent}/environments.py:make"
    assert main(["train", str(yaml_file), environment, "algorithm.name=remax"]) == 2
    assert "algorithm.advantage: 'remax' compares with a greedy response" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoStep", "must define step(self, response)"),
        ("Needs", "needs the argument 'size'"),
        ("Other", "must be a subclass of headrace.agents.Environment"),
        ("Hang", "has no 'Hang'; did you mean 'Hangs'?"),
    ],
)
def test_what_cannot_be_an_environment_is_refused_before_anything_starts(
    yaml_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert main(["train", str(yaml_file), f"agent={tmp_path}/environments.py:{name}"]) == 2
    error = capsys.readouterr().err
    assert "headrace: agent.environment: " in error
    assert said in error
    assert not (tmp_path / "runs").exists()


def test_a_template_for_one_turn_is_refused_before_anything_starts(
    yaml_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert main(["train", str(yaml_file), f"model.chat_template={template}"]) == 2
    assert "the template is not append-only" in capsys.readouterr().err


def test_data_settings_of_a_data_set_that_the_turns_would_not_follow(
    arithmetic: Path, tmp_path: Path
) -> None:
    trainer = RLTrainer(str(arithmetic / "model"), environment=Counts, run={"dir": str(tmp_path)}, **SECTIONS)
    with pytest.raises(ConfigError, match=r"data\.format: with agent\.environment"):
        trainer.train(HFDataset(str(arithmetic / "train.jsonl"), format="plain"), steps=1)
