"""Runs with LoRA: train, sft, eval, going on from a saved adapter, and what is refused before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import Sections, configuration, even, go, lines

from headrace.cli import main
from headrace.errors import ConfigError, RewardError
from headrace.models.hf import load_causal_lm
from headrace.roles.actor import Actor
from headrace.trainers.launch import run_sft, train
from headrace.trainers.rl_trainer import RLTrainer, get_hf_model

LORA: Sections = {"lora": {"rank": 4, "alpha": 8}, "train": {"steps": 3, "learning_rate": 2e-2}}


def base_of(actor: Actor) -> dict[str, torch.Tensor]:
    """The frozen weights under the names of the plain model."""
    trained = set(actor.model.trained_parameters())
    state = actor.model.hf.state_dict()
    return {k.replace(".base_layer.", "."): v for k, v in state.items() if k not in trained}


def is_the_folders(actor: Actor, folder: Path) -> bool:
    saved = load_file(folder / "model.safetensors")
    base = base_of(actor)
    return saved.keys() <= base.keys() and all(torch.equal(base[k], v) for k, v in saved.items())


def test_grpo(arithmetic: Path, tmp_path: Path) -> None:
    result, steps, actor = go(
        arithmetic,
        tmp_path,
        **{**LORA, "algorithm": {"kl_coefficient": 0.05}, "model": {"gradient_checkpointing": True}},
    )
    assert result.model is not None
    assert {p.name for p in result.model.iterdir()} >= {"adapter_model.safetensors", "tokenizer.json"}
    assert not (result.model / "model.safetensors").exists()
    assert is_the_folders(actor, arithmetic / "model")
    kl = [s["actor/kl"] for s in steps]
    assert kl[0] == pytest.approx(0.0, abs=1e-7)  # the reference is the actor as it starts
    assert kl[1] > 1e-4
    assert kl[2] > kl[1]
    assert all(s["gap/abs_logprob_max"] < 1e-4 for s in steps)  # rollout and training compute the same
    # a first step samples what the base samples: adapters start as nothing
    _, plain, _ = go(arithmetic, tmp_path / "plain", train={"steps": 1})
    assert steps[0]["reward/mean"] == plain[0]["reward/mean"]
    one, other = (lines(p, "samples.jsonl") for p in (tmp_path / "r", tmp_path / "plain" / "r"))
    assert [s["completion"] for s in one if s["step"] == 1] == [s["completion"] for s in other]


def test_ppo(arithmetic: Path, tmp_path: Path) -> None:
    sections: Sections = {
        **LORA,
        "algorithm": {"name": "ppo", "kl_coefficient": 0.05, "kl_estimator": "k1", "kl_placement": "reward"},
        "critic": {"learning_rate": 1e-2},
        "train": {"steps": 4, "samples_per_update": 8, "passes_per_step": 2, "learning_rate": 1e-2},
    }
    _, steps, actor = go(arithmetic, tmp_path, **sections)
    assert is_the_folders(actor, arithmetic / "model")
    assert steps[0]["critic/value_mean"] == 0.0
    assert steps[0]["reward/kl_penalty"] == pytest.approx(0.0, abs=1e-7)
    assert abs(steps[-1]["reward/kl_penalty"]) > 1e-4
    short = [abs(s["critic/value_mean"] - s["reward/mean"]) for s in steps]
    assert short[-1] < 0.6 * short[0]  # values rise from 0 to the rewards
    assert all(s["gap/abs_logprob_max"] < 1e-4 for s in steps)


def test_a_critic_of_its_own_gets_adapters(arithmetic: Path, tmp_path: Path) -> None:
    sections: Sections = {
        **LORA,
        "algorithm": {"name": "ppo"},
        "critic": {"path": str(arithmetic / "model"), "learning_rate": 1e-2},
    }
    _, steps, _ = go(arithmetic, tmp_path, **sections)
    assert steps[-1]["critic/loss"] < steps[0]["critic/loss"]


def test_sft_then_going_on_then_eval(arithmetic: Path, tmp_path: Path, capsys: Any) -> None:
    """The second run starts where the first ended, and its base is the first one's base."""
    sections: Sections = {
        "run": {"name": "first"},
        "data": {"completion": "answer"},
        "lora": {"rank": 4},
        "train": {"steps": 10, "samples_per_update": 16, "learning_rate": 1e-2},
    }
    assert run_sft(configuration(arithmetic, tmp_path, sections)) == 0
    first = tmp_path / "first" / "model"
    sections = {**sections, "run": {"name": "second"}, "model": {"path": str(first)}, "lora": {}}
    assert run_sft(configuration(arithmetic, tmp_path, sections)) == 0
    losses = [[s["sft/loss"] for s in lines(tmp_path / name)] for name in ("first", "second")]
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert losses[1][0] < losses[0][0] - 0.5 * (losses[0][0] - losses[0][-1])
    second = tmp_path / "second" / "model"
    raws = [json.loads((folder / "adapter_config.json").read_text()) for folder in (first, second)]
    assert raws[0]["base_model_name_or_path"] == raws[1]["base_model_name_or_path"]
    assert raws[0]["target_modules"] == raws[1]["target_modules"] == sorted(raws[0]["target_modules"])
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[k], after[k]) for k in before)
    capsys.readouterr()
    arguments = [f"data={arithmetic / 'heldout.jsonl'}", f"reward={arithmetic / 'reward.py'}:score"]
    limits = ["rollout.max_new_tokens=5", f"run.dir={tmp_path}", "run.progress=off"]
    assert main(["eval", f"model={second}", *arguments, *limits]) == 0
    assert json.loads(capsys.readouterr().out)["eval/rows"] == 10


def test_going_on_keeps_the_reference_at_the_saved_adapter(arithmetic: Path, tmp_path: Path) -> None:
    """The actor as it starts is base + adapter here, not the base."""
    first, _, _ = go(arithmetic, tmp_path / "a", **LORA)
    config = configuration(
        arithmetic,
        tmp_path,
        {"model": {"path": str(first.model)}, "algorithm": {"kl_coefficient": 0.1}, "train": LORA["train"]},
    )
    result = train(config, Actor(config.model), even, str(arithmetic / "train.jsonl"))
    kl = [s["actor/kl"] for s in lines(result.directory)]
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert kl[2] > 1e-5


def test_a_trainer_that_trains_twice_goes_on(arithmetic: Path, tmp_path: Path) -> None:
    actor = get_hf_model(str(arithmetic / "model"), device="cpu")
    settings = {"run": {"dir": str(tmp_path), "progress": "off"}, "rollout__max_new_tokens": 5}
    trainer = RLTrainer(actor, even, lora_rank=2, lora_alpha=4, algorithm__kl_coefficient=0.1, **settings)
    steps = {"samples_per_prompt": 4, "rollout_batch_size": 4, "steps": 2, "learning_rate": 1e-2}
    first = trainer.train(str(arithmetic / "train.jsonl"), **steps)
    before = {k: v.clone() for k, v in actor.model.trainable_state().items()}
    second = trainer.train(str(arithmetic / "train.jsonl"), **steps)
    assert lines(second.directory)[0]["actor/kl"] == pytest.approx(0.0, abs=1e-7)
    assert lines(first.directory)[1]["actor/kl"] > 1e-6
    assert not any(torch.equal(v, before[k]) for k, v in actor.model.trainable_state().items())
    with pytest.raises(ConfigError, match=r"lora\.rank: 8 contradicts the adapter in '.*model', which has 2"):
        trainer.train(str(arithmetic / "train.jsonl"), **steps, lora_rank=8)


def test_adapters_on_weights_that_changed_in_memory_are_refused(arithmetic: Path, tmp_path: Path) -> None:
    """The saved adapter would name a base that it does not belong to."""
    _, _, actor = go(arithmetic, tmp_path, train={"steps": 1})
    config = configuration(arithmetic, tmp_path, {"run": {"name": "again"}, "lora": {"rank": 2}})
    with pytest.raises(ConfigError, match=r"lora\.rank: this actor's weights were trained as a whole"):
        train(config, actor, even, str(arithmetic / "train.jsonl"))


def test_an_interrupted_run_saves_the_adapter(arithmetic: Path, tmp_path: Path) -> None:
    calls = []

    def score(completion: str) -> float:
        calls.append(1)
        if len(calls) > 20:
            raise ValueError("no more")
        return even(completion)

    with pytest.raises(RewardError, match="no more"):
        go(arithmetic, tmp_path, score=score, **LORA)
    model = load_causal_lm(str(tmp_path / "r" / "model"))
    assert model.adapters is not None
    assert any(v.any() for k, v in model.trainable_state().items() if ".lora_B." in k)


def test_overwriting_the_run_that_holds_the_base_is_refused(arithmetic: Path, tmp_path: Path) -> None:
    go(arithmetic, tmp_path, run={"name": "base"}, train={"steps": 1})
    go(arithmetic, tmp_path, model={"path": str(tmp_path / "base" / "model")}, **LORA)
    again = {"run": {"name": "base", "overwrite": True}, "model": {"path": str(tmp_path / "r" / "model")}}
    with pytest.raises(ConfigError, match=r"model\.path \(the adapter's base\): '.*base/model' lies in"):
        go(arithmetic, tmp_path, **again, train={"steps": 1})
    assert (tmp_path / "base" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lora.targets=q_prj", r"lora\.targets: no layer is named 'q_prj'; the linear layers of Qwen3"),
        ("lora.targets=[q_proj, lm_head]", r"lora\.targets: 'lm_head' is the output head"),
        ("lora.targets=[]", r"lora\.targets: names no layer"),
        ("lora.rank=-1", r"lora\.rank: expected a whole number of at least 0, or null, got -1"),
        ("lora.rank=0", r"lora\.alpha: not used without lora\.rank"),
        ("lora.alpha=0", r"lora\.alpha: expected a number above 0"),
        ("lora.dropout=0.1", r"lora\.dropout: unknown key"),
    ],
)
def test_bad_settings_end_before_a_run_exists(
    arithmetic: Path, tmp_path: Path, capsys: Any, override: str, said: str
) -> None:
    good = [f"model={arithmetic / 'model'}", f"data={arithmetic / 'train.jsonl'}"]
    good += [f"reward={arithmetic / 'reward.py'}:score", f"run.dir={tmp_path / 'runs'}"]
    good += ["rollout.max_new_tokens=5", "train.prompts_per_step=4"]
    given = [o for o in ("lora.rank=4", "lora.alpha=7") if o.split("=")[0] != override.split("=")[0]]
    assert main(["train", *good, *given, override]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert [line for line in error.splitlines() if line.startswith("headrace: lora.")]
    assert re.search(said, error), error
    assert not (tmp_path / "runs").exists()


def test_resumed_it_is_the_same_run(arithmetic: Path, tmp_path: Path) -> None:
    """With several updates a step and the reference that shares the base."""
    sections: Sections = {
        **LORA,
        "train": {"steps": 4, "learning_rate": 2e-2, "samples_per_update": 8},
        "algorithm": {"kl_coefficient": 0.05},
        "checkpoint": {"every_steps": 1, "keep": 99},
    }
    whole, steps, _ = go(arithmetic, tmp_path / "whole", **sections)
    again, _, _ = go(arithmetic, tmp_path / "again", **sections)
    (again.directory / "checkpoints" / "latest").write_text("step_2\n")
    resumed, repeated, _ = go(arithmetic, tmp_path / "again", **{**sections, "run": {"resume": True}})
    for name in ("actor/loss", "actor/kl", "actor/grad_norm", "reward/mean"):
        assert [s[name] for s in repeated] == [s[name] for s in steps]
    assert whole.model is not None
    assert resumed.model is not None
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (whole.model, resumed.model))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)
    held = load_file(again.directory / "checkpoints" / "step_4" / "actor.safetensors")
    assert all("lora_" in name for name in held)  # the frozen base is not saved again
