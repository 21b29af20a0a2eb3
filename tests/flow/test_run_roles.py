"""Runs with the other models (critic, reference, reward model), the other commands, and what saves memory."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import Sections, configuration, even, go, lines, same, weights

from headrace.checkpoint.export import save_hf_folder
from headrace.errors import ConfigError
from headrace.flow.run import run_evaluation
from headrace.models.hf import load_causal_lm
from headrace.observe.summary import format_metric
from headrace.roles.actor import Actor
from headrace.roles.reward_model import RewardModel
from headrace.trainers.launch import finish, run_eval, run_sft, run_train, train
from headrace.trainers.recipes import evaluation_flow, sft_flow

# ---- KL and PPO


def test_kl_starts_at_zero_and_grows(arithmetic: Path, tmp_path: Path) -> None:
    _, steps, _ = go(
        arithmetic, tmp_path, algorithm={"kl_coefficient": 0.1}, train={"steps": 3, "learning_rate": 5e-3}
    )
    kl = [s["actor/kl"] for s in steps]
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert kl[1] > 1e-4
    assert kl[2] > kl[1]


PPO: Sections = {
    "algorithm": {"name": "ppo", "kl_coefficient": 0.05, "kl_estimator": "k1", "kl_placement": "reward"},
    "critic": {"learning_rate": 3e-3},
    "train": {"steps": 4, "samples_per_update": 8, "passes_per_step": 2, "learning_rate": 3e-3},
}


def test_ppo_trains_actor_and_critic(arithmetic: Path, tmp_path: Path) -> None:
    _, steps, _ = go(arithmetic, tmp_path, **PPO)
    assert [s["critic/updates"] for s in steps] == [4] * 4
    assert [s["actor/updates"] for s in steps] == [4] * 4
    assert steps[0]["critic/value_mean"] == 0.0  # values start at exactly 0
    assert steps[0]["reward/kl_penalty"] == pytest.approx(0.0, abs=1e-7)
    assert abs(steps[-1]["reward/kl_penalty"]) > 1e-4
    assert steps[-1]["critic/loss"] < steps[0]["critic/loss"]
    assert all(s["gap/abs_logprob_max"] < 1e-4 for s in steps)


def test_the_critic_warms_up_alone(arithmetic: Path, tmp_path: Path) -> None:
    changes = {**PPO, "critic": {"learning_rate": 1e-3, "warmup_steps": 2}, "train": {"steps": 2}}
    _, steps, actor = go(arithmetic, tmp_path, **changes)
    assert same(weights(actor), load_causal_lm(str(arithmetic / "model")).hf.state_dict())
    assert all(s["critic/updates"] == 1 and "actor/updates" not in s for s in steps)


def test_the_actors_schedule_starts_when_the_critic_is_warm(arithmetic: Path, tmp_path: Path) -> None:
    """Linear from 1e-3 to 0: over 3 steps for the actor, over all 5 for the critic."""
    changes = {
        **PPO,
        "critic": {"learning_rate": 1e-3, "warmup_steps": 2},
        "train": {"steps": 5, "learning_rate": 1e-3, "schedule": "linear"},
    }
    _, steps, _ = go(arithmetic, tmp_path, **changes)
    assert [s["actor/learning_rate"] for s in steps[2:]] == pytest.approx([1e-3, 5e-4, 0.0])
    assert [s["critic/learning_rate"] for s in steps] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0])


def test_the_penalty_lowers_the_return(arithmetic: Path, tmp_path: Path) -> None:
    """The KL in the reward changes the advantages (and so the weights) once policy and reference differ."""
    _, _, with_kl = go(arithmetic, tmp_path / "a", **PPO)
    changes = {**PPO, "algorithm": {**PPO["algorithm"], "kl_coefficient": 0.0}}
    _, steps, without = go(arithmetic, tmp_path / "b", **changes)
    assert "reward/kl_penalty" not in steps[0]
    assert not same(weights(with_kl), weights(without))


# ---- reward model


@pytest.fixture
def scorer(arithmetic: Path, tmp_path: Path) -> Path:
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(7)
    folder = tmp_path / "scorer"
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_labels=1,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=tokenizer.convert_tokens_to_ids("="),
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_reward_model_scores_the_last_token(
    arithmetic: Path,
    tmp_path: Path,
    scorer: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers import AutoModelForSequenceClassification

    seen: list[tuple[list[list[int]], list[float]]] = []
    before = RewardModel.score

    def score(self: RewardModel, batch: Any, context: Any) -> Any:
        out = before(self, batch, context)
        ids = [batch.row_values("input_ids", r).tolist() for r in range(batch.num_rows)]
        seen.append((ids, out["reward_model_score"].tolist()))
        return out

    score.__stage_spec__ = before.__stage_spec__  # type: ignore[attr-defined]
    loaded: list[str] = []
    prepare = RewardModel.prepare
    monkeypatch.setattr(RewardModel, "score", score)
    monkeypatch.setattr(
        RewardModel, "prepare", lambda self, *a, **k: (loaded.append(self.key), prepare(self, *a, **k))
    )
    result, steps, _ = go(
        arithmetic,
        tmp_path,
        held_out=str(arithmetic / "heldout.jsonl"),
        run={"samples_per_step": 16},
        reward={"model": str(scorer)},
        rollout={"max_concurrent_sequences": 1},  # an evaluation batch is 4 times as much
        train={"steps": 1, "tokens_per_microbatch": 40},
    )
    hf = AutoModelForSequenceClassification.from_pretrained(scorer, attn_implementation="eager")
    assert len(seen) == 1 + 3 + 3  # one step; 10 held-out rows in batches of 4, twice
    for ids, scores in seen:
        for row, value in zip(ids, scores, strict=True):
            with torch.no_grad():
                assert value == pytest.approx(float(hf(torch.tensor([row])).logits), abs=1e-4)
    samples = lines(tmp_path / "r", "samples.jsonl")
    ids, scores = seen[3]
    assert steps[1]["reward/mean"] == pytest.approx(
        sum(scores) / 16 + sum(even(s["completion"]) for s in samples) / 16
    )
    assert loaded == ["reward.model"]  # one copy serves training and evaluation
    assert result.steps == 1
    # a sum with a model's score in it is right at no particular value
    assert "eval/reward_mean" in steps[0]
    assert not [name for name in steps[0] if "accuracy" in name or "pass_at" in name]
    with caplog.at_level("INFO"):
        finish(result)
    first, last = (format_metric("eval/reward_mean", s["eval/reward_mean"]) for s in (steps[0], steps[1]))
    assert f"held-out reward: {first} before, {last} after step 1" in caplog.text


def test_a_reward_model_alone(arithmetic: Path, tmp_path: Path, scorer: Path) -> None:
    _, steps, _ = go(arithmetic, tmp_path, score=None, reward={"model": str(scorer)})
    assert steps[0]["reward/std"] > 0
    assert not any(name.startswith("reward/part") for name in steps[0])


def test_a_reward_model_of_another_vocabulary_is_refused(
    arithmetic: Path, tmp_path: Path, scorer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (scorer / "tokenizer.json").read_text()
    (scorer / "tokenizer.json").write_text(text.replace('"7"', '"x"'))
    monkeypatch.setattr("headrace.roles.role.load_causal_lm", None)  # a call would be a TypeError
    with pytest.raises(ConfigError, match=r"reward\.model: the vocabulary of .* use a model with the same"):
        go(arithmetic, tmp_path, reward={"model": str(scorer)})
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "key, sections",
    [
        ("reward.model", {"reward": {"model": "no/such/folder"}}),
        ("critic.path", {"algorithm": {"name": "ppo"}, "critic": {"path": "no/such/folder"}}),
        ("reference.path", {"algorithm": {"kl_coefficient": 0.1}, "reference": {"path": "no/such/folder"}}),
    ],
)
def test_the_other_models_are_looked_for_before_any_is_loaded(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, sections: Any
) -> None:
    monkeypatch.setattr("headrace.roles.role.load_causal_lm", None)
    with pytest.raises(ConfigError, match=rf"{key}: 'no/such/folder' does not exist"):
        go(arithmetic, tmp_path, **sections)
    assert not (tmp_path / "r").exists()


def test_critic_and_reference_from_folders(arithmetic: Path, tmp_path: Path, scorer: Path) -> None:
    """The reference starts 1/4 away from the actor's weights, so the KL is not 0 at the first step."""
    actor = load_causal_lm(str(arithmetic / "model"))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(0.75)
    save_hf_folder(actor, tmp_path / "reference")
    _, steps, _ = go(
        arithmetic,
        tmp_path,
        algorithm={**PPO["algorithm"], "kl_estimator": "k3"},
        reference={"path": str(tmp_path / "reference")},
        critic={"path": str(scorer)},
        train={"steps": 1},
    )
    assert steps[0]["reward/kl_penalty"] > 1e-4
    assert steps[0]["critic/value_mean"] != 0.0  # that folder's own head


# ---- SFT


def test_the_sft_loss_is_cross_entropy(arithmetic: Path, tmp_path: Path) -> None:
    """One update over all 60 rows; padded, and computed by the model's own forward."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = configuration(
        arithmetic,
        tmp_path,
        {
            "data": {"completion": "answer"},
            "train": {"steps": 1, "samples_per_update": 60, "tokens_per_microbatch": 64},
        },
    )
    actor = Actor(config.model)
    result = sft_flow(config, actor).compile().run(str(arithmetic / "train.jsonl"))
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    hf = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    total, count = 0.0, 0
    for row in lines(arithmetic, "train.jsonl"):
        prompt = tokenizer(row["prompt"]).input_ids
        response = [*tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            logits = hf(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(response), reduction="sum"))
        count += len(response)
    (line,) = lines(result.directory)
    assert line["sft/loss"] == pytest.approx(total / count, rel=1e-5)
    assert line["sft/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert line["sft/tokens"] == count
    assert line["sft/updates"] == 1


def test_sft_command_with_an_evaluation(arithmetic: Path, tmp_path: Path) -> None:
    config = configuration(
        arithmetic,
        tmp_path,
        {
            "data": {"completion": "answer"},
            "train": {"steps": 4, "samples_per_update": 20, "learning_rate": 3e-3},
            "eval": {"path": str(arithmetic / "heldout.jsonl")},
            "reward": {"function": str(arithmetic / "reward.py") + ":score"},
        },
    )
    assert run_sft(config) == 0
    steps = lines(tmp_path / "r")
    assert [s["step"] for s in steps] == [0, 1, 2, 3, 4]
    assert steps[4]["sft/loss"] < steps[1]["sft/loss"]
    assert (steps[0]["eval/rows"], steps[4]["eval/rows"]) == (10, 10)


def test_eval_command(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = configuration(
        arithmetic,
        tmp_path,
        {
            "eval": {"path": str(arithmetic / "heldout.jsonl"), "samples_per_prompt": 2},
            "reward": {"function": str(arithmetic / "reward.py") + ":score"},
        },
    )
    assert run_eval(config) == 0
    printed = json.loads(capsys.readouterr().out)
    (scored,) = tmp_path.glob("*-eval-*")
    samples = lines(scored, "samples.jsonl")
    assert printed["eval/rows"] == len(samples) == 20
    assert sorted(s["prompt_id"] for s in samples) == sorted([*range(10)] * 2)
    assert printed["eval/reward_mean"] == pytest.approx(sum(s["reward"] for s in samples) / 20, abs=1e-5)
    # greedy: both samples of a prompt are the same
    texts = {(s["prompt_id"], s["completion"]) for s in samples}
    assert len(texts) == 10
    assert not (scored / "model").exists()


def finished_run(arithmetic: Path, tmp_path: Path) -> None:
    """What the run "r" would have left: its marks and its model."""
    shutil.copytree(arithmetic / "model", tmp_path / "r" / "model")
    (tmp_path / "r" / "config.yaml").write_text("")
    (tmp_path / "r" / "metrics.jsonl").write_text("")


def test_eval_never_touches_the_run_it_scores(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even when its name and run.overwrite are those of the run whose model is scored."""
    finished_run(arithmetic, tmp_path)
    config = configuration(
        arithmetic,
        tmp_path,
        {
            "model": {"path": str(tmp_path / "r" / "model")},
            "eval": {"path": str(arithmetic / "heldout.jsonl")},
            "reward": {"function": str(arithmetic / "reward.py") + ":score"},
            "run": {"overwrite": True},
        },
    )
    assert run_eval(config) == 0
    assert (tmp_path / "r" / "model" / "config.json").is_file()


def test_overwriting_refuses_to_delete_what_it_reads(arithmetic: Path, tmp_path: Path) -> None:
    finished_run(arithmetic, tmp_path)
    config = configuration(
        arithmetic,
        tmp_path,
        {
            "model": {"path": str(tmp_path / "r" / "model")},
            "run": {"overwrite": True},
            "reward": {"function": "exact_match"},
        },
    )
    with pytest.raises(ConfigError, match=r"model\.path: .* lies in .*/r, which run\.overwrite would delete"):
        run_train(config)
    assert (tmp_path / "r" / "model" / "config.json").is_file()


def test_eval_of_the_training_data_names_its_key(arithmetic: Path, tmp_path: Path) -> None:
    config = configuration(
        arithmetic,
        tmp_path,
        {"data": {"path": str(tmp_path / "no.jsonl")}, "reward": {"function": "exact_match"}},
    )
    with pytest.raises(ConfigError, match=r"^data\.path: .*no\.jsonl does not exist"):
        run_eval(config)


# ---- memory and precision


def test_bfloat16_runs_and_is_saved_as_such(arithmetic: Path, tmp_path: Path) -> None:
    result, steps, actor = go(arithmetic, tmp_path, model={"dtype": "bfloat16"})
    assert all(p.dtype == torch.bfloat16 for p in actor.model.parameters())
    assert all(s["actor/grad_norm"] > 0 for s in steps)
    assert steps[0]["gap/abs_logprob_mean"] < 0.05
    assert result.model is not None
    saved = load_file(result.model / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    assert json.loads((result.model / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_actor_can_be_trained_again(arithmetic: Path, tmp_path: Path, dtype: str) -> None:
    """After an evaluation froze it, and after another optimizer held its gradients."""
    config = configuration(arithmetic, tmp_path, {"model": {"dtype": dtype}, "run": {"save_final": False}})
    actor = Actor(config.model)
    data = str(arithmetic / "train.jsonl")
    config.run.name = "eval"
    run_evaluation(evaluation_flow(config, actor, even).compile(), str(arithmetic / "heldout.jsonl"))
    for name in ("first", "second"):
        before = weights(actor)
        config.run.name = name
        train(config, actor, even, data)
        assert not same(weights(actor), before)
        assert [s["actor/updates"] for s in lines(tmp_path / name)] == [1, 1]


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"offload_optimizer": True}},
        {"model": {"gradient_checkpointing": True}},
        {"rollout": {"max_concurrent_sequences": 3}},
    ],
    ids=lambda s: str(s),
)
def test_settings_that_only_save_memory_change_nothing(
    arithmetic: Path, tmp_path: Path, sections: Sections
) -> None:
    _, steps, actor = go(arithmetic, tmp_path / "a")
    _, others, other = go(arithmetic, tmp_path / "b", **sections)
    assert [s["actor/loss"] for s in steps] == [s["actor/loss"] for s in others]
    assert same(weights(actor), weights(other))
