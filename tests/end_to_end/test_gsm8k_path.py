"""The GSM8K example on a tiny Gemma 3 with random weights: SFT, then two GRPO steps, on problems of its form."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from headrace.cli import main
from headrace.observe.run_dir import RunDirectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"


def make_model(folder: Path) -> None:
    """Sliding and full attention, a byte-level tokenizer, a BOS: what the real one has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

    pieces = ["<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=None,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_problems(path: Path, start: int, count: int) -> None:
    rows = [
        {
            "question": f"Ann has {n} apples and buys {n + 1} more. How many has she?",
            "answer": f"She has {n}+{n + 1}=<<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1} apples.\n#### {2 * n + 1}",
        }
        for n in range(start, start + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_sft_then_grpo(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    write_problems(tmp_path / "train.jsonl", 0, 12)
    write_problems(tmp_path / "test.jsonl", 50, 3)
    common = [
        f"data.path={tmp_path / 'train.jsonl'}",
        "data.subset=null",
        f"eval.path={tmp_path / 'test.jsonl'}",
        "eval.subset=null",
        f"run.dir={tmp_path}",
        "rollout.max_new_tokens=24",
    ]
    assert (
        main(
            [
                "sft",
                str(EXAMPLE / "sft.yaml"),
                f"model={tmp_path / 'model'}",
                *common,
                "train.samples_per_update=4",
            ]
        )
        == 0
    )
    model = tmp_path / "gsm8k-sft" / "model"
    steps = [
        "train.steps=2",
        "train.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "eval.every_steps=1",
    ]
    assert main(["train", str(EXAMPLE / "grpo.yaml"), f"model={model}", *common, *steps]) == 0

    sft = [m for m in RunDirectory(tmp_path / "gsm8k-sft").read_metrics() if m["step"] > 0]
    assert len(sft) == 9  # three epochs of 12 rows, 4 an update
    assert sft[-1]["sft/loss"] < sft[0]["sft/loss"]
    grpo = RunDirectory(tmp_path / "gsm8k-grpo").read_metrics()
    assert [m["step"] for m in grpo] == [0, 1, 2]
    assert all(m["eval/rows"] == 3 for m in grpo)
    assert all(m["gap/abs_logprob_mean"] < 1e-5 for m in grpo[1:])
    assert all("reward/part/marked_answer" in m for m in grpo[1:])
    sample = json.loads(RunDirectory(tmp_path / "gsm8k-grpo").samples.read_text().splitlines()[0])
    assert sample["prompt"].startswith("Question: Ann has ")
    assert sample["prompt"].endswith("\nAnswer:")
