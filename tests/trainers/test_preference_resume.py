"""Runs over pairs that are stopped and resumed, that train adapters, or whose data are bad from end to end."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_preference import COMMANDS, run, sequences, write
from torch.nn.functional import logsigmoid

from headrace.cli import main
from headrace.flow.evaluate import best_step
from headrace.observe.run_dir import RunDirectory

LORA = ["lora.rank=4", "lora.alpha=8", "train.learning_rate=2e-2"]


def measured(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock or the operating system says."""
    lines = RunDirectory(folder).read_metrics()
    return [
        {k: v for k, v in m.items() if k != "time" and not k.startswith(("time/", "memory/"))} for m in lines
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = (folder / "model").glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("adapters", [[], LORA], ids=["whole", "lora"])
def test_resumed_from_any_step_it_is_the_same_run(
    command: str, adapters: list[str], arithmetic: Path, pairs: Path, tmp_path: Path
) -> None:
    """60 pairs in updates of 20: the run starts its second epoch after step 3."""
    settings = [
        f"eval={pairs / 'heldout.jsonl'}",
        "eval.every_steps=2",
        "train.steps=5",
        "train.schedule=linear",
        "checkpoint.every_steps=1",
        "checkpoint.keep=99",
        *adapters,
    ]
    data = pairs / "train.jsonl"
    for name in ("whole", "again"):
        assert run(command, arithmetic, data, tmp_path, *settings, f"run.name={name}") == 0
    whole, again = tmp_path / "whole", tmp_path / "again"
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())
    for step in (3, 1):
        (again / "checkpoints" / "latest").write_text(f"step_{step}\n")
        assert run(command, arithmetic, data, tmp_path, *settings, "run.name=again", "run.resume=true") == 0
        assert measured(again) == measured(whole)
        found = weights(again)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [m["step"] for m in measured(whole) if "eval/accuracy" in m] == [0, 2, 4, 5]


def test_another_beta_or_other_pairs_are_another_run(
    arithmetic: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("dpo", arithmetic, pairs / "train.jsonl", tmp_path, "train.steps=1") == 0
    capsys.readouterr()
    changed = ["train.steps=2", "run.resume=true", "preference.beta=0.2"]
    assert run("dpo", arithmetic, pairs / "train.jsonl", tmp_path, *changed) == 2
    assert (
        "preference.beta: was 0.1 when the checkpoint was written and is 0.2 now" in capsys.readouterr().err
    )
    swapped = ["train.steps=2", "run.resume=true", "data.chosen=rejected", "data.rejected=chosen"]
    assert run("dpo", arithmetic, pairs / "train.jsonl", tmp_path, *swapped) == 2
    assert "data.chosen: was None" in capsys.readouterr().err
    assert run("reward-model", arithmetic, pairs / "train.jsonl", tmp_path, *swapped[:2]) == 2
    assert "flow: was " in capsys.readouterr().err


def test_the_best_checkpoint_is_that_of_the_best_held_out_pairs(
    arithmetic: Path, pairs: Path, tmp_path: Path
) -> None:
    """By accuracy, then by loss; kept beside the newest one."""
    more = [f"eval={pairs / 'heldout.jsonl'}", "eval.every_steps=1", "train.steps=6", "checkpoint.keep=1"]
    assert (
        run("reward-model", arithmetic, pairs / "train.jsonl", tmp_path, *more, "train.learning_rate=1e-2")
        == 0
    )
    scores = {m["step"]: (m["eval/accuracy"], -m["eval/loss"]) for m in measured(tmp_path / "r") if m["step"]}
    best = max(scores, key=lambda step: scores[step])
    kept = {p.name for p in (tmp_path / "r" / "checkpoints").glob("step_*")}
    assert kept == {f"step_{best}", "step_6"}


def test_the_best_of_equal_accuracies_has_the_least_loss() -> None:
    found = {
        0: {"eval/accuracy": 1.0, "eval/loss": 0.1},  # before training
        1: {"eval/accuracy": 0.7, "eval/loss": 0.2},
        2: {"eval/accuracy": 0.8, "eval/loss": 0.9},
        3: {"eval/accuracy": 0.8, "eval/loss": 0.4},
        4: {"eval/accuracy": 0.8, "eval/loss": 0.4},
    }
    assert best_step(found) == 3


def test_dpo_with_adapters_measures_against_their_base(arithmetic: Path, pairs: Path, tmp_path: Path) -> None:
    """The last evaluation again from the saved adapter by peft: policy with it, reference without."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more = [f"eval={pairs / 'heldout.jsonl'}", "train.steps=4", "preference.beta=0.3", *LORA]
    assert run("dpo", arithmetic, pairs / "train.jsonl", tmp_path, *more) == 0
    lines = measured(tmp_path / "r")
    assert lines[1]["dpo/margin"] == pytest.approx(0.0, abs=1e-6)
    assert not (tmp_path / "r" / "model" / "model.safetensors").exists()
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    base = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    policy = PeftModel.from_pretrained(base, tmp_path / "r" / "model").eval()
    rewards = []
    for prompt, response in sequences(pairs, "heldout", tokenizer):

        def logprob(p: list[int] = prompt, r: list[int] = response) -> torch.Tensor:
            logits = policy(torch.tensor([p + r])).logits[0, len(p) - 1 : -1].double()
            return logits.log_softmax(-1)[range(len(r)), r].sum()

        with torch.no_grad(), policy.disable_adapter():
            reference = logprob()
        with torch.no_grad():
            rewards.append(0.3 * (logprob() - reference))
    margins = torch.stack(rewards[0::2]) - torch.stack(rewards[1::2])
    assert float(margins.abs().max()) > 1e-2
    assert lines[-1]["eval/margin"] == pytest.approx(float(margins.mean()), rel=1e-4)
    assert lines[-1]["eval/loss"] == pytest.approx(float(-logsigmoid(margins).mean()), rel=1e-4)


def test_a_reward_model_of_adapters_is_one_for_peft_and_for_ppo(
    arithmetic: Path, pairs: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    more = [f"eval={pairs / 'heldout.jsonl'}", "train.steps=4", *LORA]
    assert run("reward-model", arithmetic, pairs / "train.jsonl", tmp_path, *more) == 0
    folder = tmp_path / "r" / "model"
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    base = AutoModelForSequenceClassification.from_pretrained(arithmetic / "model", num_labels=1)
    model = PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        scores = [
            float(model(torch.tensor([p + r])).logits) for p, r in sequences(pairs, "heldout", tokenizer)
        ]
    margins = torch.tensor(scores[0::2]) - torch.tensor(scores[1::2])
    assert float(margins.abs().max()) > 1e-3
    assert measured(tmp_path / "r")[-1]["eval/margin"] == pytest.approx(
        float(margins.mean()), rel=1e-3, abs=1e-5
    )
    ppo = [
        f"model={arithmetic / 'model'}",
        f"data={arithmetic / 'train.jsonl'}",
        "algorithm=ppo",
        f"reward.model={folder}",
        f"run.dir={tmp_path}",
        "run.name=ppo",
        "run.progress=off",
        "train.steps=1",
        "train.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=3",
    ]
    assert main(["train", *ppo]) == 0
    assert measured(tmp_path / "ppo")[0]["reward/std"] > 0


def human(question: str, answer: str) -> str:
    return f"\n\nHuman: {question}\n\nAssistant: {answer}"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "rows, said",
    [
        ([], "has no rows"),
        (
            [{"chosen": human("1+1", "2"), "rejected": human("1+1", "3")}] * 2
            + [{"chosen": human("1+1", "2"), "rejected": human("2+2", "3")}],
            "a pair has one prompt (line 3; 1 row)",
        ),
        ([{"chosen": "1 2"}] * 2, "has no column 'rejected'"),
        ([{"chosen": human("1", "2"), "rejected": None}], "column 'rejected' is null (line 1; 1 row)"),
    ],
    ids=["empty", "no common prompt", "no column", "null"],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_bad_files_end_the_run_before_a_model_is_loaded(
    command: str,
    arithmetic: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]],
    said: str,
    compressed: bool,
) -> None:
    for name in ("load_causal_lm", "load_scalar_model"):
        for module in ("role", "reward_model"):
            monkeypatch.setattr(f"headrace.roles.{module}.{name}", None, raising=False)
    data = write(tmp_path / "bad.jsonl", rows)
    if compressed:
        data = tmp_path / "bad.jsonl.gz"
        data.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    assert run(command, arithmetic, data, tmp_path) == 2
    err = capsys.readouterr().err
    assert said in err
    assert data.name in err
    assert not (tmp_path / "r").exists()
