"""The three doors: command line, trainer, flow. Same seed, same numbers, same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headrace
from headrace import cli
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.roles.actor import Actor
from headrace.roles.critic import Critic
from headrace.roles.reference import Reference

YAML = """
run: {{name: cli, dir: {runs}, seed: 5, progress: "off", tensorboard: false}}
model: {model}
data: {data}
reward: reward.py:score
rollout: {{samples_per_prompt: 4, max_new_tokens: 5, max_concurrent_sequences: 6}}
algorithm: {{kl_coefficient: 0.05}}
train: {{prompts_per_step: 6, samples_per_update: 12, learning_rate: 2.0e-3, epochs: 0.3}}
"""


def score(completion: str, answer: str) -> float:
    """What reward.py:score of the fixture does."""
    return sum(c in "02468" for c in completion) / 5


def by_command_line(folder: Path, runs: Path) -> Path:
    (folder / "doors.yaml").write_text(
        YAML.format(runs=runs, model=folder / "model", data=folder / "train.jsonl")
    )
    assert cli.main(["train", str(folder / "doors.yaml")]) == 0
    return runs / "cli"


def by_trainer(folder: Path, runs: Path) -> Path:
    actor = headrace.get_hf_model(str(folder / "model"), parallel_config={"tp": 1, "dp": 1}, gpu_group="a")
    trainer = headrace.RLTrainer(
        actor=actor,
        reward_fn=score,
        algorithm="grpo",
        seed=5,
        run={"name": "trainer", "dir": str(runs), "progress": "off", "tensorboard": False},
        algorithm__kl_coefficient=0.05,
        hybrid_engine_mode="optimized",
        communication_backend="auto",
    )
    result = trainer.train(
        headrace.HFDataset(str(folder / "train.jsonl"), split="train"),
        num_epochs=0.3,
        rollout_batch_size=6,
        train_batch_size=12,
        rollout_max_batch_size=6,
        num_generations=4,
        max_new_tokens=5,
        learning_rate=2e-3,
    )
    return result.directory


def by_flow(folder: Path, runs: Path) -> Path:
    config = Config()
    config.run.seed, config.run.name, config.run.dir = 5, "flow", str(runs)
    config.run.progress, config.run.tensorboard = "off", False
    actor = headrace.get_hf_model(str(folder / "model"))
    reference = headrace.get_hf_model(str(folder / "model"), role="reference")
    flow = headrace.Flow("my_grpo", config)
    rollout = flow.add_stage(
        "rollout", actor.generate, samples_per_prompt=4, max_new_tokens=5, max_concurrent_sequences=6
    )
    reward = flow.add_stage("reward", score, depends_on=rollout)
    ref = flow.add_stage("reference", reference.logprobs, depends_on=rollout)
    adv = flow.add_stage("advantage", headrace.grpo_advantages, depends_on=[reward, ref])
    flow.add_stage(
        "update",
        actor.update,
        depends_on=adv,
        prompts_per_step=6,
        samples_per_update=12,
        learning_rate=2e-3,
        kl_coefficient=0.05,
    )
    result = flow.compile().run(headrace.HFDataset(str(folder / "train.jsonl")), steps=3)
    return result.directory


def numbers(run: Path) -> list[dict[str, float]]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    aside = ("time", "memory/")
    return [
        {k: v for k, v in step.items() if not k.startswith(aside) and not k.endswith("tokens_per_s")}
        for step in steps
    ]


def test_three_doors_one_result(arithmetic: Path, tmp_path: Path) -> None:
    runs = [door(arithmetic, tmp_path) for door in (by_command_line, by_trainer, by_flow)]
    first = numbers(runs[0])
    assert [step["step"] for step in first] == [1, 2, 3]  # 60 rows / 6 x 0.3 epochs
    assert first[2]["actor/kl"] > 0
    for other in runs[1:]:
        assert numbers(other) == first
    saved = [load_file(run / "model" / "model.safetensors") for run in runs]
    start = load_file(arithmetic / "model" / "model.safetensors")
    for name, tensor in saved[0].items():
        assert torch.equal(tensor, saved[1][name])
        assert torch.equal(tensor, saved[2][name])
        assert not torch.equal(tensor, start[name])
    samples = [(run / "samples.jsonl").read_text() for run in runs]
    assert samples[0] == samples[1] == samples[2]


def test_another_seed_is_another_run_even_on_the_same_prompts(arithmetic: Path, tmp_path: Path) -> None:
    (arithmetic / "doors.yaml").write_text(
        YAML.format(runs=tmp_path, model=arithmetic / "model", data=arithmetic / "train.jsonl")
    )
    for name, seed in (("a", 6), ("b", 7), ("c", 7)):
        more = [f"run.seed={seed}", f"run.name={name}", "data.shuffle=false", "train.steps=1"]
        assert cli.main(["train", str(arithmetic / "doors.yaml"), *more]) == 0
    assert numbers(tmp_path / "a") != numbers(tmp_path / "b")
    assert numbers(tmp_path / "b") == numbers(tmp_path / "c")


# ---- PPOTrainer


def test_ppo_trainer(arithmetic: Path, tmp_path: Path) -> None:
    trainer = headrace.PPOTrainer(
        model_name=str(arithmetic / "model"),
        reward_fn=score,
        num_gpus=0,
        batch_size=4,
        sequence_length=24,
        max_new_tokens=5,
        run={"dir": str(tmp_path), "progress": "off", "tensorboard": False},
        offload_optimizer=True,
        enable_gradient_checkpointing=True,
        gradient_accumulation_steps=2,
    )
    result = trainer.train(str(arithmetic / "train.jsonl"), steps=2)
    assert result.directory.name.startswith("ppo-")
    assert result.steps == 2
    assert {"critic/loss", "actor/loss", "reward/mean"} <= result.metrics.keys()
    c = trainer.resolve(steps=2)
    assert (c.train.prompts_per_step, c.rollout.max_sequence_tokens, c.train.steps) == (4, 24, 2)
    assert (c.algorithm.name, c.train.microbatches_per_update) == ("ppo", 2)


def test_ppo_trainer_without_data_and_reward_says_so() -> None:
    trainer = headrace.PPOTrainer(model_name="x/y", num_gpus=4, batch_size=32, sequence_length=512)
    with pytest.raises(ConfigError) as caught:
        trainer.train()
    text = str(caught.value)
    for part in ("data.path: not given", "reward.function: not given"):
        assert part in text


def test_a_trainer_evaluates(arithmetic: Path, tmp_path: Path) -> None:
    trainer = headrace.RLTrainer(
        str(arithmetic / "model"),
        score,
        eval_dataset=str(arithmetic / "heldout.jsonl"),
        run={"dir": str(tmp_path), "name": "r", "progress": "off", "tensorboard": False},
        eval={"limit_rows": 7},
        rollout={"samples_per_prompt": 2, "max_new_tokens": 3},
    )
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
    result = trainer.train(rows, rollout_batch_size=4, data__limit_rows=8)
    assert [m["eval/rows"] for m in result.evaluations.values()] == [7, 7]
    assert result.steps == 2  # 8 of the 9 rows, 4 a step


def test_train_checks_all_but_what_is_given(arithmetic: Path) -> None:
    trainer = headrace.RLTrainer(str(arithmetic / "model"), score)
    with pytest.raises(ConfigError, match=r"^data\.prompt: not used, because data\.template is given"):
        trainer.train([{"prompt": "1"}], data__template="{prompt}", data__prompt="prompt")


def test_a_config_object_is_a_start(arithmetic: Path) -> None:
    config = Config()
    config.train.prompts_per_step = 3
    trainer = headrace.RLTrainer("some/model", score, config=config, temperature=0.5)
    resolved = trainer.resolve(learning_rate=1e-4)
    assert resolved.train.prompts_per_step == 3
    assert (resolved.rollout.temperature, resolved.train.learning_rate) == (0.5, 1e-4)
    assert resolved.model.path == "some/model"


# ---- get_hf_model


def test_roles_are_described_not_loaded() -> None:
    assert type(headrace.get_hf_model("/nowhere")) is Actor
    assert type(headrace.get_hf_model("/nowhere", role="critic")) is Critic
    reference = headrace.get_hf_model("/nowhere", "reference", dtype="bfloat16", device="cpu")
    assert type(reference) is Reference
    assert (reference.model_config.dtype, reference.device_name) == ("bfloat16", "cpu")
    assert headrace.get_hf_model("/nowhere", device_map={"actor": "cpu"}).device_name == "cpu"


@pytest.mark.parametrize(
    "keywords, part",
    [
        ({"role": "judge"}, "role 'judge' is none of actor, reference, critic, reward_model"),
        ({"parallel_config": {"dp": 1, "ep": 2}}, "unknown degree ep"),
        ({"parallel_config": 2}, "parallel_config: expected degrees"),
        ({"device_map": "cuda:0-"}, "device_map: 'cuda:0-'"),
        ({"device": "tpu"}, "device_map: 'tpu'"),
        ({"device": "cpu", "device_map": "cpu"}, "device: is another name of device_map"),
        ({"dtpye": "float32"}, "dtpye"),
        ({"dtype": "float16"}, "model.dtype"),
    ],
)
def test_get_hf_model_refuses(keywords: Any, part: str) -> None:
    with pytest.raises(ConfigError, match=part.replace("(", r"\(")):
        headrace.get_hf_model("/nowhere", **keywords)
