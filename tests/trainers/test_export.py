"""`headrace export` against transformers' own loading, merges worked out in float64, and targets it must not touch."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.checkpoint.export import save_hf_folder
from headrace.checkpoint.source import find_source
from headrace.cli import main
from headrace.config import LoraConfig
from headrace.errors import ConfigError
from headrace.models.attention import PackedAttention
from headrace.models.causal_lm import CausalLM
from headrace.models.heads import critic_from
from headrace.models.lora import merge
from headrace.roles.role import adapt
from headrace.trainers.export import export

ARCHITECTURES = ["llama", "qwen2-tied", "qwen3", "gemma3", "gpt2"]
IDS = torch.tensor([[5, 80, 2, 41, 41, 7, 1, 9, 30, 31]])
TEMPLATE = "{% for m in messages %}{{ m['content'] }}={% endfor %}"


def logits(folder: Path | str, **more: Any) -> torch.Tensor:
    """What transformers, knowing nothing of headrace, makes of a folder: float64 [T, V]."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **more).eval()(IDS).logits[0].double()


def adapted(model: CausalLM, base: Path, spread: float = 0.2) -> CausalLM:
    torch.manual_seed(2)
    adapt(model, LoraConfig(rank=4, alpha=6), str(base))
    for parameter in model.trained_parameters().values():
        torch.nn.init.normal_(parameter, std=spread)
    return model


def merged_by_hand(base: Path, adapter: Path, scale: float = 1.5) -> Any:
    """transformers' model in float64 with W + scale x B A, from the numbers in the two folders alone."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
    saved = {k.removeprefix("base_model.model."): v.double() for k, v in load_file(adapter).items()}
    with torch.no_grad():
        for name in {n.rsplit(".lora_", 1)[0] for n in saved}:
            delta = scale * saved[f"{name}.lora_B.weight"] @ saved[f"{name}.lora_A.weight"]
            module = hf.get_submodule(name)
            module.weight += delta.T if type(module).__name__ == "Conv1D" else delta
    return hf


@pytest.fixture
def folders(build_model: Any, byte_tokenizer: Any, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """(base, adapter) of a tiny model, in a dtype."""

    def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
        tokenizer = copy.deepcopy(byte_tokenizer)
        tokenizer.chat_template = TEMPLATE
        model = build_model(name, tokenizer)
        model.to(dtype)
        base = save_hf_folder(model, tmp_path / "base")
        return base, save_hf_folder(adapted(model, base), tmp_path / "adapter")

    return make


# ---- whole models


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_folder_is_the_same_model(folders: Any, tmp_path: Path, name: str) -> None:
    base, _ = folders(name)
    generation = {"eos_token_id": [7, 3], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(generation))
    assert main(["export", str(base), str(tmp_path / "out")]) == 0
    out = tmp_path / "out"
    assert torch.equal(logits(out), logits(base))
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    kept = GenerationConfig.from_pretrained(out)
    assert kept.eos_token_id[:2] == generation.pop("eos_token_id")  # a tokenizer's own end id would follow
    assert {k: getattr(kept, k) for k in generation} == generation  # as they were
    (tmp_path / "ordinary").touch()
    assert {p.stat().st_mode for p in out.iterdir()} == {(tmp_path / "ordinary").stat().st_mode}
    stored = load_file(out / "model.safetensors")
    tied = name in ("qwen2-tied", "gemma3", "gpt2")
    assert ("lm_head.weight" in stored) == (not tied)
    assert "headrace" not in (out / "config.json").read_text()


def test_no_sampling_settings_where_the_source_has_none(folders: Any, tmp_path: Path) -> None:
    base, _ = folders("llama")
    (base / "generation_config.json").unlink()
    out = export(str(base), tmp_path / "out")
    kept = json.loads((out / "generation_config.json").read_text())
    assert not {"temperature", "top_k", "top_p", "do_sample"} & kept.keys()


@pytest.mark.parametrize("kind", ["critic", "critic with adapters"])
def test_scalar_models(build_model: Any, byte_tokenizer: Any, tmp_path: Path, kind: str) -> None:
    """A reward model or critic, whole or as adapters on a policy: transformers gives the same scores."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.pad_token = "<|done|>"
    model = build_model("qwen3", tokenizer)
    base = save_hf_folder(model, tmp_path / "base")
    critic = critic_from(adapted(model, base) if "adapters" in kind else model)
    torch.nn.init.normal_(critic.hf.score.weight)
    out = export(str(save_hf_folder(critic, tmp_path / "critic")), tmp_path / "out", merged=True)
    theirs = AutoModelForSequenceClassification.from_pretrained(out, pad_token_id=96).eval()
    with torch.no_grad():
        states = critic.hidden_states(IDS[0], torch.arange(10), PackedAttention([10], "cpu"))
        ours, score = critic.scalars(states)[-1], theirs(IDS).logits[0, 0]
    torch.testing.assert_close(score, ours, atol=1e-4, rtol=1e-4)
    assert not list(out.glob("adapter*"))


def test_big_models_are_cut_into_shards(build_model: Any, byte_tokenizer: Any, tmp_path: Path) -> None:
    model = build_model("llama", byte_tokenizer)
    out = save_hf_folder(model, tmp_path / "out", shard_size="50KB")
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 2
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].keys() == set(
        model.hf.state_dict()
    )
    whole = save_hf_folder(model, tmp_path / "whole")
    assert torch.equal(logits(out), logits(whole))
    assert torch.equal(logits(export(str(out), tmp_path / "again")), logits(whole))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_keep_their_dtype_unless_asked(folders: Any, tmp_path: Path, stored: torch.dtype) -> None:
    base, adapter = folders("qwen2-tied", stored)
    kept = load_file(export(str(base), tmp_path / "a") / "model.safetensors")
    original = load_file(base / "model.safetensors")
    assert kept.keys() == original.keys()
    assert all(torch.equal(v, original[k]) and v.dtype == stored for k, v in kept.items())
    for source, merged, file in (
        (base, True, "model"),
        (adapter, True, "model"),
        (adapter, False, "adapter_model"),
    ):
        out = export(str(source), tmp_path / "b", merged=merged, dtype="float32", overwrite=True)
        assert {v.dtype for v in load_file(out / f"{file}.safetensors").values()} == {torch.float32}
    assert json.loads((export(str(base), tmp_path / "c", dtype="bfloat16") / "config.json").read_text())[
        "dtype"
    ] == ("bfloat16")


# ---- adapters


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_merged_export_equals_the_merge_by_hand(folders: Any, tmp_path: Path, name: str) -> None:
    base, adapter = folders(name)
    assert main(["export", str(adapter), str(tmp_path / "out"), "--merged"]) == 0
    by_hand = merged_by_hand(base, adapter / "adapter_model.safetensors")
    with torch.no_grad():
        expected = by_hand(IDS).logits[0]
    out = tmp_path / "out"
    torch.testing.assert_close(logits(out), expected, atol=3e-4, rtol=1e-4)
    assert (logits(base) - expected).abs().max() > 0.1
    saved, known = load_file(out / "model.safetensors"), by_hand.state_dict()
    for key, value in saved.items():
        torch.testing.assert_close(value.double(), known[key], atol=1e-6, rtol=2e-7)
    assert not list(out.glob("adapter*"))
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_merge_of_half_precision_rounds_once(folders: Any, tmp_path: Path, stored: torch.dtype) -> None:
    """W + B A in float32 of what is stored, rounded to the stored dtype at the end; float32 keeps the sum."""
    base, adapter = folders("llama", stored)
    weights = load_file(adapter / "adapter_model.safetensors")
    torch.manual_seed(9)
    # finer than the base's dtype can hold, as peft writes adapters
    fine = {k: v.float() + 1e-4 * torch.randn_like(v.float()) for k, v in weights.items()}
    save_file(fine, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    known = merged_by_hand(base, adapter / "adapter_model.safetensors").state_dict()
    kept = load_file(export(str(adapter), tmp_path / "kept", merged=True) / "model.safetensors")
    wide = load_file(
        export(str(adapter), tmp_path / "wide", merged=True, dtype="float32") / "model.safetensors"
    )
    for key, exact in known.items():
        assert kept[key].dtype == stored
        step = exact.abs() * torch.finfo(stored).eps / 2  # half a unit in the last place
        assert ((kept[key].double() - exact).abs() <= 1.001 * step + 1e-6).all(), key
        torch.testing.assert_close(wide[key].double(), exact, atol=1e-6, rtol=2e-7)


def test_an_adapter_stays_an_adapter(folders: Any, tmp_path: Path) -> None:
    import peft

    base, adapter = folders("qwen3")
    moved = tmp_path / "elsewhere"
    base.rename(moved)
    with pytest.raises(ConfigError, match=r"belongs to the model '.*base', which is not there"):
        export(str(adapter), tmp_path / "out")
    out = export(str(adapter), tmp_path / "out", base=str(moved))
    model = peft.AutoPeftModelForCausalLM.from_pretrained(str(out)).eval()
    by_hand = merged_by_hand(moved, adapter / "adapter_model.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(
            model(IDS).logits[0].double(), by_hand(IDS).logits[0], atol=3e-4, rtol=1e-4
        )
    assert {p.name for p in out.iterdir()} >= {"adapter_config.json", "tokenizer.json", "chat_template.jinja"}
    assert (out / "adapter_model.safetensors").read_bytes() == (
        adapter / "adapter_model.safetensors"
    ).read_bytes()


def test_an_adapter_on_a_head_merges_untied_and_is_refused_tied(folders: Any, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    for name in ("llama", "qwen2-tied"):
        base, _ = folders(name)
        settings = peft.LoraConfig(
            r=2, lora_alpha=3, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM"
        )
        theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).eval()
        for key, parameter in theirs.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        theirs.save_pretrained(tmp_path / name, save_embedding_layers=False)
        if name == "llama":
            out = export(str(tmp_path / name), tmp_path / "out", merged=True)
            with torch.no_grad():
                expected = theirs(IDS).logits[0].double()
            torch.testing.assert_close(logits(out), expected, atol=1e-4, rtol=1e-4)
        else:
            with pytest.raises(ConfigError, match="'lm_head' cannot be merged: its weight is tied"):
                export(str(tmp_path / name), tmp_path / "tied", merged=True)
            assert not (tmp_path / "tied").exists()


def test_a_merge_leaves_a_plain_model(build_model: Any) -> None:
    model = adapted(build_model("llama"), Path("base"))
    names = set(build_model("llama").hf.state_dict())
    merge(model.hf)
    assert set(model.hf.state_dict()) == names


# ---- sources


def test_runs_with_and_without_adapters(arithmetic: Path, tmp_path: Path) -> None:
    """A run's directory stands for its model/; the merged export scores as the run's own adapter does."""
    common = [f"model={arithmetic / 'model'}", f"data={arithmetic / 'train.jsonl'}", f"run.dir={tmp_path}"]
    common += [f"reward={arithmetic / 'reward.py'}:score", "rollout.max_new_tokens=5", "run.progress=off"]
    small = ["train.prompts_per_step=4", "train.steps=1", "train.learning_rate=0.02"]
    assert main(["train", *common, *small, "run.name=whole"]) == 0
    assert main(["train", *common, *small, "run.name=lora", "lora.rank=4"]) == 0
    whole = export(str(tmp_path / "whole"), tmp_path / "a")
    saved, source = (load_file(f / "model.safetensors") for f in (whole, tmp_path / "whole" / "model"))
    assert all(torch.equal(v, source[k]) for k, v in saved.items())
    merged = export(str(tmp_path / "lora"), tmp_path / "b", merged=True)
    by_hand = merged_by_hand(
        arithmetic / "model", tmp_path / "lora" / "model" / "adapter_model.safetensors", scale=8.0
    ).state_dict()
    for key, value in load_file(merged / "model.safetensors").items():
        torch.testing.assert_close(value.double(), by_hand[key], atol=1e-6, rtol=2e-7)
    assert (export(str(tmp_path / "lora"), tmp_path / "c") / "adapter_config.json").is_file()
    assert main(["eval", *common, f"model={merged}"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere/at/all", "{out}"], r"export: 'nowhere/at/all' does not exist"),
        (["{empty}", "{out}"], r"neither a run \(config\.yaml\) nor a model"),
        (["{run}", "{out}"], "saved no model; it was killed, ended before its first step"),
        (["{base}/config.json", "{out}"], r"is a file; give the folder"),
        (["{base}", "{full}"], "'.*full' is not empty; choose another folder, or replace it by --overwrite"),
        (["{base}", "{full}", "--overwrite"], "--overwrite: '.*full' is not the folder of a model"),
        (["{base}", "{base}", "--overwrite"], r"lies inside '.*base', which is read"),
        (["{base}", "{base}/deep/out"], r"lies inside '.*base', which is read"),
        (["{adapter}", "{base}/out", "--merged"], r"lies inside '.*base', which is read"),
        (["{nested}/inner", "{nested}", "--overwrite"], r"'.*nested' holds '.*inner', which is read"),
        (["{base}", "{file}"], "file' is not a folder"),
        (["{base}", "{out}", "--base", "{base}"], "--base: '.*base' is a whole model, not an adapter"),
        (["{base}", "{out}", "--shard-size", "huge"], "--shard-size: expected a size such as 5GB"),
        (["{base}", "{out}", "--merge"], "--merge: unknown argument"),
        (["{base}", "{out}", "more"], "more: unknown argument"),
        (["{broken}", "{out}"], "export: '.*broken' cannot be loaded"),
    ],
)
def test_what_is_refused(folders: Any, tmp_path: Path, capsys: Any, words: list[str], said: str) -> None:
    base, adapter = folders("llama")
    places = {n: tmp_path / n for n in ("empty", "run", "full", "nested", "broken", "file", "out")}
    for name in ("empty", "run", "full", "broken"):
        places[name].mkdir()
    (places["full"] / "thesis.txt").write_text("years of work")
    (places["run"] / "config.yaml").write_text("")
    (places["broken"] / "config.json").write_text("{")
    places["file"].write_text("")
    shutil.copytree(base, places["nested"])
    shutil.copytree(base, places["nested"] / "inner")
    before = sorted(tmp_path.rglob("*"))
    given = [w.format(**places, base=base, adapter=adapter) for w in words]
    assert main(["export", *given]) == 2
    error = capsys.readouterr().err
    assert [line for line in error.splitlines() if line.startswith("headrace: ")], error
    assert "Traceback" not in error
    assert re.search(said, error), error
    assert sorted(tmp_path.rglob("*")) == before


def test_words_that_argparse_refuses(capsys: Any) -> None:
    assert main(["export", "only-one"]) == 2
    assert main(["export", "a", "b", "--dtype", "int3"]) == 2
    assert "usage: headrace export" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--dtype: expected one of float32"):
        export("a", "b", dtype="int3")


def test_overwriting_replaces_a_whole_folder_or_nothing(
    folders: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = folders("llama")
    out = export(str(base), tmp_path / "out")
    (out / "stale.safetensors").write_text("")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    from transformers import PreTrainedTokenizerFast

    def full(*args: Any, **keywords: Any) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    for source in (str(base), str(adapter)):
        assert main(["export", source, str(out), "--overwrite"]) == 1
        assert "No space left on device" in capsys.readouterr().err
        assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    monkeypatch.undo()
    assert main(["export", str(base), str(out), "--overwrite"]) == 0
    assert before.keys() - {p.name for p in out.iterdir()} == {"stale.safetensors"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_run_is_found_before_its_model(folders: Any, tmp_path: Path) -> None:
    base, _ = folders("llama")
    run = tmp_path / "run"
    shutil.copytree(base, run / "model")
    (run / "config.yaml").write_text("")
    assert find_source(str(run)).path == str(run / "model")
    with pytest.raises(ConfigError, match=r"lies inside '.*run', which is read"):
        export(str(run), run / "export")
