"""`headrace reward-model` and `headrace dpo` on a tiny model: what they measure, save and refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from headrace.cli import main
from headrace.observe.run_dir import RunDirectory

COMMANDS = ["reward-model", "dpo"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(command: str, arithmetic: Path, data: Path, runs: Path, *more: str) -> int:
    return main(
        [
            command,
            f"model={arithmetic / 'model'}",
            f"data={data}",
            f"run.dir={runs}",
            "run.name=r",
            "run.progress=off",
            "train.learning_rate=1e-3",
            "train.samples_per_update=20",
            *more,
        ]
    )


def sequences(pairs: Path, name: str, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Prompt and response ids, chosen and rejected in turn."""
    out = []
    for line in (pairs / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        for side in ("chosen", "rejected"):
            response = [*tokenizer(row[side]).input_ids, tokenizer.eos_token_id]
            out.append((tokenizer(row["prompt"]).input_ids, response))
    return out


def test_the_saved_reward_model_scores_the_same_in_transformers(
    arithmetic: Path, pairs: Path, tmp_path: Path
) -> None:
    """The last evaluation, computed again from the saved folder: alone, and right-padded."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    held_out = f"eval={pairs / 'heldout.jsonl'}"
    assert run("reward-model", arithmetic, pairs / "train.jsonl", tmp_path, held_out, "train.steps=4") == 0
    folder = tmp_path / "r" / "model"
    hf = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert hf.config.num_labels == 1
    with torch.no_grad():
        scores = [float(hf(torch.tensor([p + r])).logits) for p, r in sequences(pairs, "heldout", tokenizer)]
    margins = torch.tensor(scores[0::2]) - torch.tensor(scores[1::2])
    lines = RunDirectory(tmp_path / "r").read_metrics()
    assert [m["step"] for m in lines] == [0, 1, 2, 3, 4]
    last = lines[-1]
    assert last["eval/rows"] == 10
    assert last["eval/margin"] == pytest.approx(float(margins.mean()), abs=1e-5)
    assert last["eval/loss"] == pytest.approx(float(-logsigmoid(margins).mean()), abs=1e-5)
    assert last["eval/accuracy"] == pytest.approx(float((margins > 0).float().mean()))
    assert last["eval/chosen_reward"] == pytest.approx(sum(scores[0::2]) / 10, abs=1e-5)
    assert float(margins.abs().max()) > 1e-3


def test_a_padding_id_that_ends_responses_is_not_saved(arithmetic: Path, pairs: Path, tmp_path: Path) -> None:
    """transformers would take the end token for padding and read the score one token too early."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    model = tmp_path / "model"
    AutoTokenizer.from_pretrained(arithmetic / "model").save_pretrained(model)
    hf = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    hf.config.pad_token_id = hf.config.eos_token_id
    hf.save_pretrained(model)
    assert AutoConfig.from_pretrained(model).pad_token_id == AutoConfig.from_pretrained(model).eos_token_id
    assert (
        run(
            "reward-model",
            arithmetic,
            pairs / "train.jsonl",
            tmp_path,
            f"model={model}",
            f"eval={pairs / 'heldout.jsonl'}",
            "train.steps=2",
        )
        == 0
    )
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "r" / "model")
    assert saved.config.pad_token_id is None
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        scores = [
            float(saved(torch.tensor([p + r])).logits) for p, r in sequences(pairs, "heldout", tokenizer)
        ]
    last = RunDirectory(tmp_path / "r").read_metrics()[-1]
    assert last["eval/chosen_reward"] == pytest.approx(sum(scores[0::2]) / 10, abs=1e-5)


def test_ppo_takes_the_reward_model_as_it_is(arithmetic: Path, pairs: Path, tmp_path: Path) -> None:
    assert run("reward-model", arithmetic, pairs / "train.jsonl", tmp_path, "train.steps=2") == 0
    code = main(
        [
            "train",
            f"model={arithmetic / 'model'}",
            f"data={arithmetic / 'train.jsonl'}",
            "algorithm=ppo",
            f"reward.model={tmp_path / 'r' / 'model'}",
            f"run.dir={tmp_path}",
            "run.name=ppo",
            "run.progress=off",
            "train.steps=2",
            "train.prompts_per_step=4",
            "rollout.samples_per_prompt=2",
            "rollout.max_new_tokens=3",
        ]
    )
    assert code == 0
    assert RunDirectory(tmp_path / "ppo").read_metrics()[0]["reward/std"] > 0


def test_a_saved_reward_model_can_be_trained_on(arithmetic: Path, pairs: Path, tmp_path: Path) -> None:
    """Its head goes on where it was: the evaluation before the second run is the one after the first."""
    held_out = f"eval={pairs / 'heldout.jsonl'}"
    data = pairs / "train.jsonl"
    assert run("reward-model", arithmetic, data, tmp_path, held_out, "train.steps=3") == 0
    again = [held_out, "train.steps=1", f"model={tmp_path / 'r' / 'model'}", "run.name=s"]
    assert run("reward-model", arithmetic, data, tmp_path, *again) == 0
    first = RunDirectory(tmp_path / "r").read_metrics()[-1]
    second = RunDirectory(tmp_path / "s").read_metrics()[0]
    assert second["eval/margin"] == pytest.approx(first["eval/margin"], abs=1e-6)


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_known_at_the_start(command: str, arithmetic: Path, pairs: Path, tmp_path: Path) -> None:
    """Loss log 2, margin 0; the evaluation before the first step sees the same, each of its 10 pairs once."""
    more = [f"eval={pairs / 'heldout.jsonl'}", "train.steps=3", "train.tokens_per_microbatch=64"]
    assert run(command, arithmetic, pairs / "train.jsonl", tmp_path, *more) == 0
    prefix = command.replace("-", "_")
    before, first, *_, last = RunDirectory(tmp_path / "r").read_metrics()
    for metrics, area in ((before, "eval"), (first, prefix)):
        assert metrics[f"{area}/loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert metrics[f"{area}/margin"] == pytest.approx(0.0, abs=1e-6)
    assert before["eval/rows"] == last["eval/rows"] == 10
    assert last[f"{prefix}/loss"] != pytest.approx(math.log(2), abs=1e-6)
    assert last[f"{prefix}/updates"] == 1
    assert last["data/epoch"] == 1.0  # samples_per_update counts pairs: 60 of them in 3 updates of 20
    assert not (tmp_path / "r" / "samples.jsonl").read_text()


def test_dpo_against_a_named_reference(arithmetic: Path, pairs: Path, tmp_path: Path) -> None:
    """Rafailov et al. eq. 7 from transformers alone, on all 60 pairs, with a reference that is not the start.

    The sampling temperature of the configuration has no part in it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    actor = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    reference = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.75)
    reference.save_pretrained(tmp_path / "reference")
    tokenizer.save_pretrained(tmp_path / "reference")
    beta = 0.3
    rewards = []
    for prompt, response in sequences(pairs, "train", tokenizer):
        sums = []
        for hf in (actor, reference):
            with torch.no_grad():
                logits = hf(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
            sums.append(logits.log_softmax(-1)[range(len(response)), response].sum())
        rewards.append(beta * (sums[0] - sums[1]))
    chosen, rejected = torch.stack(rewards[0::2]), torch.stack(rewards[1::2])
    assert (
        run(
            "dpo",
            arithmetic,
            pairs / "train.jsonl",
            tmp_path,
            f"reference={tmp_path / 'reference'}",
            f"preference.beta={beta}",
            "rollout.temperature=0.5",
            "train.steps=1",
            "train.samples_per_update=60",
            "train.tokens_per_microbatch=50",
        )
        == 0
    )
    (line,) = RunDirectory(tmp_path / "r").read_metrics()
    assert line["dpo/loss"] == pytest.approx(float(-logsigmoid(chosen - rejected).mean()), rel=1e-5)
    assert line["dpo/chosen_reward"] == pytest.approx(float(chosen.mean()), rel=1e-4)
    assert line["dpo/rejected_reward"] == pytest.approx(float(rejected.mean()), rel=1e-4)
    assert line["dpo/accuracy"] == pytest.approx(float((chosen > rejected).double().mean()))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_weights_do_not_depend_on_the_micro_batches(
    command: str, arithmetic: Path, pairs: Path, tmp_path: Path
) -> None:
    """Three updates, in one micro-batch each, in 7, or in as many as there are pairs."""
    from safetensors.torch import load_file

    found = []
    for number, cut in enumerate(
        ["tokens_per_microbatch=100000", "microbatches_per_update=7", "tokens_per_microbatch=1"]
    ):
        more = [f"train.{cut}", f"run.name=r{number}", "train.steps=3"]
        assert run(command, arithmetic, pairs / "train.jsonl", tmp_path, *more) == 0
        found.append(load_file(tmp_path / f"r{number}" / "model" / "model.safetensors"))
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, atol=2e-4, rtol=0)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "row, said",
    [
        ({"prompt": "1+1=", "chosen": None, "rejected": "2"}, "column 'chosen' is null (line 3; 1 row)"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": ""}, "column 'rejected' is empty (line 3; 1 row)"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "2"}, "hold the same response"),
        ({"prompt": "1+" * 600, "chosen": "2", "rejected": "3"}, "(data.max_prompt_tokens)"),
    ],
)
def test_bad_rows_end_the_run_before_it_starts(
    command: str,
    arithmetic: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any],
    said: str,
) -> None:
    for name in ("load_causal_lm", "load_scalar_model"):
        for module in ("role", "reward_model"):
            monkeypatch.setattr(f"headrace.roles.{module}.{name}", None, raising=False)
    good = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}
    data = write(tmp_path / "data.jsonl", [good, good, row])
    assert run(command, arithmetic, data, tmp_path) == 2
    err = capsys.readouterr().err
    assert "data.path: data.jsonl" in err or f"data.path: {data}" in err
    assert said in err
    assert "line 3" in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_all_that_is_wrong_is_said_at_once(
    command: str, arithmetic: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = write(tmp_path / "bad.jsonl", [{"prompt": "1", "chosen": "2"}])
    assert run(command, arithmetic, bad, tmp_path, f"eval={tmp_path / 'no.jsonl'}") == 2
    err = capsys.readouterr().err
    assert "data.rejected: " in err
    assert "has no column 'rejected'" in err
    assert "eval.path: " in err
    assert main([command, "preference.beta=0", "preference.betta=1"]) == 2
    err = capsys.readouterr().err
    assert "preference.beta: expected" in err
    assert "did you mean preference.beta" in err
    assert main([command]) == 2
    err = capsys.readouterr().err
    assert "model.path: not given" in err
    assert "data.path: not given" in err
    assert "reward" not in err


def test_fewer_pairs_than_an_update(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "data.jsonl", [{"prompt": "1+2=", "chosen": "3", "rejected": "4"}] * 19)
    assert run("dpo", arithmetic, data, tmp_path) == 2
    assert "19 usable rows, fewer than the 20 rows of one step (train.samples_per_update)" in (
        capsys.readouterr().err
    )
