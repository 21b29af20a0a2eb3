"""`headrace export RUN OUT --checkpoint`: of real short runs, against the run's own final model and hand work."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.cli import main
from headrace.errors import ConfigError
from headrace.trainers.export import export

IDS = torch.tensor([[5, 8, 2, 4, 4, 7, 1, 9, 3, 3]])
TEMPLATE = "{% for m in messages %}{{ m['content'] }}={% endfor %}"


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits[0].double()


def run(folder: Path, parent: Path, name: str, *more: str, steps: int = 3) -> Path:
    words = [
        f"model={folder / 'model'}",
        f"data={folder / 'train.jsonl'}",
        f"run.dir={parent}",
        f"run.name={name}",
    ]
    words += [f"reward={folder / 'reward.py'}:score", "rollout.max_new_tokens=5", "run.progress=off"]
    words += ["train.prompts_per_step=4", "rollout.samples_per_prompt=4", "train.learning_rate=0.01", *more]
    keep = ["checkpoint.every_steps=1", "checkpoint.keep=9", f"train.steps={steps}"]
    assert main(["train", *words, *keep]) == 0
    return parent / name


@pytest.fixture(scope="module")
def model(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `arithmetic` with two end ids and sampling settings, and a chat template in a file."""
    folder = tmp_path_factory.mktemp("export") / "arithmetic"
    shutil.copytree(arithmetic, folder)
    config = json.loads((folder / "model" / "config.json").read_text())
    generation = {"eos_token_id": [config["eos_token_id"], 3], "temperature": 0.6, "do_sample": True}
    (folder / "model" / "generation_config.json").write_text(json.dumps(generation))
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    held_out = [f"eval.path={model / 'heldout.jsonl'}", "eval.every_steps=1", "eval.limit_rows=4"]
    more = [*held_out, f"model.chat_template={model / 'template.jinja'}", "data.format=plain"]
    return run(model, tmp_path_factory.mktemp("runs"), "whole", *more)


@pytest.fixture(scope="module")
def lora(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(model, tmp_path_factory.mktemp("runs"), "lora", "lora.rank=4", "lora.alpha=6")


def same_tensors(a: Path, b: Path) -> bool:
    one, other = load_file(a), load_file(b)
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# ---- all weights


def test_the_last_checkpoint_is_the_final_model(whole: Path, tmp_path: Path) -> None:
    """What the run wrote as model/ by another way, file by file."""
    assert main(["export", str(whole), str(tmp_path / "out"), "--checkpoint", "latest"]) == 0
    out, final = tmp_path / "out", whole / "model"
    assert same_tensors(out / "model.safetensors", final / "model.safetensors")
    assert torch.equal(logits(out), logits(final))
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in final.iterdir())
    for name in ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (out / name).read_bytes() == (final / name).read_bytes(), name
    from transformers import AutoTokenizer, GenerationConfig

    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    generation = GenerationConfig.from_pretrained(out)
    config = json.loads((final / "config.json").read_text())
    assert generation.eos_token_id == [config["eos_token_id"], 3]
    assert generation.temperature == 0.6


def test_an_earlier_one_is_the_model_of_that_step(whole: Path, model: Path, tmp_path: Path) -> None:
    """Equal to the run's model when the run ends there, and other than that of every other step."""
    short = run(model, tmp_path, "short", steps=2) / "model"
    out = export(str(whole), tmp_path / "two", checkpoint=2)
    assert torch.equal(logits(out), logits(short))
    others = [logits(export(str(whole), tmp_path / str(n), checkpoint=n)) for n in (1, 3)]
    assert all(not torch.equal(logits(out), other) for other in others)
    assert torch.equal(logits(export(str(whole / "checkpoints" / "step_2"), tmp_path / "c")), logits(out))


def test_the_best_one(whole: Path, tmp_path: Path) -> None:
    named = (whole / "checkpoints" / "best").read_text().strip()
    best = export(str(whole), tmp_path / "best", checkpoint="best")
    saved = load_file(whole / "checkpoints" / named / "actor.safetensors")
    for name, value in load_file(best / "model.safetensors").items():
        assert torch.equal(saved[f"weight/{name}"], value)


def test_bfloat16_runs_and_their_float32_masters(model: Path, tmp_path: Path) -> None:
    folder = run(model, tmp_path, "half", "model.dtype=bfloat16", steps=1)
    kept = export(str(folder), tmp_path / "kept", checkpoint="latest")
    assert same_tensors(kept / "model.safetensors", folder / "model" / "model.safetensors")
    assert json.loads((kept / "config.json").read_text())["dtype"] == "bfloat16"
    wide = load_file(
        export(str(folder), tmp_path / "wide", checkpoint="1", dtype="float32") / "model.safetensors"
    )
    masters = load_file(folder / "checkpoints" / "step_1" / "actor.safetensors")
    assert all(torch.equal(value, masters[f"weight/{name}"]) for name, value in wide.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in wide.values())


def test_tied_heads_stay_tied(byte_tokenizer: Any, build_model: Any, model: Path, tmp_path: Path) -> None:
    from headrace.checkpoint.export import save_hf_folder

    folder = tmp_path / "tied"
    folder.mkdir()
    for name in ("train.jsonl", "reward.py"):
        shutil.copy(model / name, folder)
    save_hf_folder(build_model("qwen2-tied", byte_tokenizer), folder / "model")
    result = run(folder, tmp_path, "run", "data.format=plain", steps=1)
    out = export(str(result), tmp_path / "out", checkpoint="latest")
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert torch.equal(logits(out), logits(result / "model"))


# ---- adapters


def test_adapters_as_they_are_and_merged(lora: Path, model: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    adapter = export(str(lora), tmp_path / "adapter", checkpoint="latest")
    assert same_tensors(adapter / "adapter_model.safetensors", lora / "model" / "adapter_model.safetensors")
    name = "adapter_config.json"
    assert json.loads((adapter / name).read_text()) == json.loads((lora / "model" / name).read_text())

    first = export(str(lora), tmp_path / "first", checkpoint=1)
    merged = tmp_path / "merged"
    assert main(["export", str(lora), str(merged), "--checkpoint", "1", "--merged"]) == 0
    base = AutoModelForCausalLM.from_pretrained(model / "model")
    theirs = peft.PeftModel.from_pretrained(base, str(first)).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits[0].double(), logits(merged), atol=1e-4, rtol=1e-4)
    assert (logits(merged) - logits(model / "model")).abs().max() > 1e-4

    saved = load_file(lora / "checkpoints" / "step_1" / "actor.safetensors")
    plain = load_file(model / "model" / "model.safetensors")
    for key, value in load_file(merged / "model.safetensors").items():
        stem = f"weight/{key.removesuffix('.weight')}"
        expected = plain[key].double()
        if f"{stem}.lora_A.default.weight" in saved:
            a, b = (saved[f"{stem}.lora_{x}.default.weight"].double() for x in "AB")
            expected = expected + 6 / 4 * b @ a
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=2e-7)
    half = export(str(lora), tmp_path / "half", checkpoint=1, dtype="bfloat16")
    assert {v.dtype for v in load_file(half / "adapter_model.safetensors").values()} == {torch.bfloat16}


def test_a_run_that_went_on_with_an_adapter(lora: Path, model: Path, tmp_path: Path) -> None:
    changed = tmp_path / "on"
    shutil.copytree(model, changed)
    shutil.rmtree(changed / "model")
    shutil.copytree(lora / "model", changed / "model")
    result = run(changed, tmp_path, "second", steps=1)
    out = export(str(result), tmp_path / "out", checkpoint="latest")
    assert same_tensors(out / "adapter_model.safetensors", result / "model" / "adapter_model.safetensors")
    merged = export(str(result), tmp_path / "merged", checkpoint="latest", merged=True)
    expected = export(str(result), tmp_path / "expected", merged=True)
    torch.testing.assert_close(logits(merged), logits(expected), atol=1e-5, rtol=1e-5)


def test_the_base_must_be_the_one_trained_on(lora: Path, whole: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the base that the adapters in .*step_1 were trained on"):
        export(str(lora), tmp_path / "out", checkpoint=1, base=str(whole / "model"))
    with pytest.raises(ConfigError, match=r"^--base: '/nowhere' does not exist"):
        export(str(lora), tmp_path / "out", checkpoint=1, base="/nowhere")
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    result = run(moved, tmp_path, "run", "lora.rank=2", steps=1)
    before = logits(export(str(result), tmp_path / "before", checkpoint=1, merged=True))
    (moved / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ConfigError, match=r"began with the model '.*', which is not there; name it by --base"
    ):
        export(str(result), tmp_path / "out", checkpoint=1)
    out = export(str(result), tmp_path / "out", checkpoint=1, base=str(tmp_path / "elsewhere"), merged=True)
    assert torch.equal(logits(out), before)


# ---- what is refused


def copy_of(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("7", r"has no checkpoint step_7; there are 1, 2, 3$"),
        ("newest", r"expected the number of a step, latest or best, got 'newest'; there are 1, 2, 3$"),
        ("-1", r"got '-1'"),
        (
            "best",
            r"recorded no best checkpoint \(held-out data were never evaluated in training\); there are 1, 2, 3$",
        ),
    ],
)
def test_checkpoints_that_are_not_there(
    lora: Path, tmp_path: Path, capsys: Any, which: str, said: str
) -> None:
    assert main(["export", str(lora), str(tmp_path / "out"), f"--checkpoint={which}"]) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(f"headrace: --checkpoint: .*{said}", error, re.MULTILINE), error
    assert not (tmp_path / "out").exists()


def test_damaged_and_missing_ones(lora: Path, model: Path, tmp_path: Path) -> None:
    run, out = copy_of(lora, tmp_path), tmp_path / "out"
    store = run / "checkpoints"
    tensors = store / "step_3" / "actor.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    for which in ("3", "latest"):
        with pytest.raises(
            ConfigError, match=r"step_3: the checkpoint is damaged .*bytes.*; others there are: 1, 2"
        ):
            export(str(run), out, checkpoint=which)
    (store / "step_2" / "state.json").unlink()
    with pytest.raises(ConfigError, match=r"step_2: the checkpoint is damaged .*state\.json"):
        export(str(run), out, checkpoint=2)
    (store / "latest").unlink()
    with pytest.raises(ConfigError, match="recorded no latest checkpoint; there are 1, 2, 3"):
        export(str(run), out, checkpoint="latest")
    shutil.rmtree(run / "model")
    with pytest.raises(
        ConfigError, match=r"saved no model; .*checkpoints to choose by --checkpoint: 1, 2, 3"
    ):
        export(str(run), out)
    shutil.rmtree(store)
    with pytest.raises(ConfigError, match="has no checkpoint; without --checkpoint its final model"):
        export(str(run), out, checkpoint="latest")
    with pytest.raises(ConfigError, match=r"--checkpoint: '.*' is not the directory of a run"):
        export(str(model / "model"), out, checkpoint=1)
    with pytest.raises(ConfigError, match="is a checkpoint itself; leave --checkpoint out"):
        export(str(lora / "checkpoints" / "step_1"), out, checkpoint=1)
    for inside in (lora / "out", lora / "checkpoints" / "step_1" / "out", model / "model" / "out"):
        with pytest.raises(ConfigError, match="which is read; choose a folder elsewhere"):
            export(str(lora), inside, checkpoint=1)
    assert not out.exists()


def test_a_checkpoint_or_run_as_a_model(lora: Path, model: Path, tmp_path: Path, capsys: Any) -> None:
    """Named with the command that makes a model of it, before anything is loaded."""
    words = [f"data={model / 'heldout.jsonl'}", f"reward={model / 'reward.py'}:score", f"run.dir={tmp_path}"]
    step = lora / "checkpoints" / "step_1"
    for command in ("eval", "train", "sft"):
        assert main([command, *words, f"model={step}"]) == 2
        error = capsys.readouterr().err
        assert f"model.path: '{step}' is a checkpoint of a run" in error
        assert f"headrace export {lora} MODEL --checkpoint 1" in error
    assert main(["eval", *words, f"model={lora}"]) == 2
    assert f"'{lora}' is the directory of a run; its model is '{lora / 'model'}'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
