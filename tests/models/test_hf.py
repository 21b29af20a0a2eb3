"""Loading, checking, copying and saving models."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.checkpoint.export import save_hf_folder
from headrace.data.prompt_builder import use_chat_template
from headrace.errors import ConfigError, RunError
from headrace.models.attention import PackedAttention
from headrace.models.causal_lm import CausalLM, ScalarModel, verify_against_hf
from headrace.models.find import find_model, reachable
from headrace.models.heads import critic_from, load_scalar_model
from headrace.models.hf import (
    copy_causal_lm,
    load_causal_lm,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    wrap,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES = ["llama", "qwen2-tied", "qwen3", "gemma3", "gpt2"]


def hidden(model: CausalLM | ScalarModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.hidden_states(ids, torch.arange(len(ids)), PackedAttention([len(ids)], "cpu"))


def assert_same_weights(a: CausalLM | ScalarModel, b: CausalLM | ScalarModel) -> None:
    """To the bit; logits are not, since BLAS rounds by how a tensor happens to be aligned."""
    first, second = a.hf.state_dict(), b.hf.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)


def logits(model: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.head().logits(hidden(model, ids))


@pytest.fixture
def variant(arithmetic: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the demo's model folder with some files replaced."""

    def make(**files: Any) -> Path:
        folder = tmp_path / "variant"
        shutil.copytree(arithmetic / "model", folder)
        for name, content in files.items():
            file = folder / name.replace("__", ".")
            file.write_text(content if isinstance(content, str) else json.dumps(content))
        return folder

    return make


# ---- the check against the model's own forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_supported_architectures_pass(build_model: Any, name: str, dtype: torch.dtype) -> None:
    model = build_model(name)
    model.to(dtype)
    verify_against_hf(model)
    verify_against_hf(critic_from(model))
    assert model.hf.config._attn_implementation == "headrace"


@pytest.mark.parametrize("spread", [0.02, 0.3], ids=["flat", "peaked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Cohere", "Granite"])
def test_scaled_logits_are_refused_by_name(name: str, dtype: torch.dtype, spread: float) -> None:
    """Logits times 1/16 and divided by 8: headrace's forward knows neither."""
    import transformers as t

    torch.manual_seed(0)
    more = {"logits_scaling": 8.0} if name == "Granite" else {}
    config = getattr(t, f"{name}Config")(**SHAPE, initializer_range=spread, **more)
    with pytest.raises(ConfigError, match=f"headrace does not compute {name}ForCausalLM correctly"):
        wrap(getattr(t, f"{name}ForCausalLM")(config).to(dtype), None)


def test_soft_capped_attention_is_refused_by_name(tmp_path: Path, arithmetic: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    folder = tmp_path / "gemma2"
    shutil.copytree(arithmetic / "model", folder)
    Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8)).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"model\.path: .*gemma2': Gemma2Attention uses attention soft-cap"):
        load_causal_lm(str(folder))


@pytest.mark.parametrize("broken", ["positions", "scale", "window", "one weight"])
def test_a_wrong_forward_is_noticed(build_model: Any, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    model = build_model("gemma3")
    attend = PackedAttention.attend
    run = CausalLM.run_layers
    if broken == "positions":
        monkeypatch.setattr(
            CausalLM, "run_layers", lambda self, ids, pos, *more: run(self, ids, pos.flip(0), *more)
        )
    elif broken == "scale":
        monkeypatch.setattr(
            PackedAttention,
            "attend",
            lambda self, *a, scale, window: attend(self, *a, scale=1.3 * scale, window=window),
        )
    elif broken == "window":
        monkeypatch.setattr(
            PackedAttention,
            "attend",
            lambda self, *a, scale, window: attend(self, *a, scale=scale, window=None),
        )
    else:
        head = model.head

        def off() -> Any:
            found = head()
            weight = found.weight.clone()
            weight[3] *= 1.5
            return type(found)(weight, found.bias, found.softcap)

        monkeypatch.setattr(model, "head", off)
    with pytest.raises(ConfigError, match="headrace does not compute Gemma3ForCausalLM"):
        verify_against_hf(model)


# ---- ids that end a response


@pytest.mark.parametrize(
    "generation, expected",
    [({"eos_token_id": [5, 0, 3]}, (5, 0, 3)), ({"eos_token_id": 4}, (4, 0)), ({}, (0,))],
)
def test_every_end_id_is_known_and_no_sampling_setting(
    variant: Any, generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    folder = variant(generation_config__json={**generation, "temperature": 0.1, "top_k": 20})
    assert load_causal_lm(str(folder)).eos_token_ids == expected


# ---- saving


def test_a_saved_folder_is_the_same_model(variant: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = variant(generation_config__json={"eos_token_id": 3, "do_sample": False, "temperature": 0.6})
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }}={% endfor %}")
    model = load_causal_lm(str(folder))
    use_chat_template(model.tokenizer, tmp_path / "chat.jinja")
    out = save_hf_folder(model, tmp_path / "deep" / "out")
    assert GenerationConfig.from_pretrained(out).eos_token_id == [3, 0]  # the tokenizer's as well
    assert AutoTokenizer.from_pretrained(out).chat_template == (tmp_path / "chat.jinja").read_text()
    assert "headrace" not in (out / "config.json").read_text()
    again = load_causal_lm(str(out))
    assert model.eos_token_ids == again.eos_token_ids == (3, 0)
    ids = torch.tensor([1, 2, 11, 3, 12])
    assert_same_weights(again, model)
    assert torch.allclose(logits(again, ids), logits(model, ids), atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(out)  # without headrace's attention
    with torch.no_grad():
        assert torch.allclose(plain(ids[None]).logits[0], logits(model, ids), atol=1e-5)
    assert model.hf.config._attn_implementation == "headrace"  # saving changed nothing live


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_survives_a_round_trip(
    build_model: Any, byte_tokenizer: Any, tmp_path: Path, name: str
) -> None:
    model = build_model(name, byte_tokenizer)
    again = load_causal_lm(str(save_hf_folder(model, tmp_path / "out")))
    ids = torch.tensor([5, 80, 2, 41, 41, 7, 1, 9, 30, 31])
    assert_same_weights(again, model)
    assert torch.allclose(logits(again, ids), logits(model, ids), atol=1e-5)
    heads = [
        m.hf.get_output_embeddings().weight is m.hf.get_input_embeddings().weight for m in (model, again)
    ]
    assert heads == [name in ("qwen2-tied", "gemma3", "gpt2")] * 2  # tied stays tied


def test_a_critic_survives_a_round_trip(build_model: Any, byte_tokenizer: Any, tmp_path: Path) -> None:
    critic = critic_from(build_model("llama", byte_tokenizer))
    with torch.no_grad():
        critic.hf.score.weight.normal_()
    out = save_hf_folder(critic, tmp_path / "out")
    again = load_scalar_model(str(out), key="critic.path", device="cpu", dtype=torch.float32)
    ids = torch.tensor([5, 80, 2, 41, 9])
    assert again.scalars(hidden(again, ids)).tolist() == pytest.approx(
        critic.scalars(hidden(critic, ids)).tolist(), abs=1e-5
    )
    assert_same_weights(again, critic)


def test_saving_replaces_whole_folders_only(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_causal_lm(str(arithmetic / "model"))
    out = save_hf_folder(model, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with torch.no_grad():
        next(model.parameters()).add_(1.0)

    def full(*args: Any, **keywords: Any) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(type(model.tokenizer), "save_pretrained", full)
    with pytest.raises(RunError, match=r"out: the model cannot be written \(No space"):
        save_hf_folder(model, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    save_hf_folder(model, out)
    assert (out / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# ---- copies and heads


def test_a_copy_is_independent(build_model: Any) -> None:
    model = build_model("qwen2-tied")
    copied = copy_causal_lm(model)
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in copied.parameters()}
    ids = torch.tensor([5, 80, 2, 41])
    before = logits(copied, ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(copied, ids), before)
    assert copied.hf.get_output_embeddings().weight is copied.hf.get_input_embeddings().weight
    assert not copied.hf.training


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_critic_starts_at_zero_on_the_actors_transformer(build_model: Any, name: str) -> None:
    actor = build_model(name)
    critic = critic_from(actor)
    ids = torch.tensor([5, 80, 2, 41, 9])
    assert torch.allclose(hidden(critic, ids), hidden(actor, ids), atol=1e-5)
    assert critic.scalars(hidden(critic, ids)).tolist() == [0.0] * 5
    assert not {p.data_ptr() for p in actor.parameters()} & {p.data_ptr() for p in critic.parameters()}


def test_a_policy_is_no_reward_model(arithmetic: Path) -> None:
    keywords: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    with pytest.raises(
        ConfigError, match=r"reward\.model: .* no trained scalar head \(missing score\.weight"
    ):
        load_scalar_model(str(arithmetic / "model"), key="reward.model", **keywords)
    critic = load_scalar_model(str(arithmetic / "model"), key="critic.path", needs_head=False, **keywords)
    assert not critic.hf.score.weight.any()


# ---- folders that cannot or must not be loaded


def test_missing_weights_are_not_made_up(variant: Any) -> None:
    folder = variant()
    kept = load_file(folder / "model.safetensors")
    del kept["model.layers.1.mlp.up_proj.weight"]
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights the model needs: model\.layers\.1\.mlp\.up_proj"):
        load_causal_lm(str(folder))


def test_weights_of_another_shape(variant: Any) -> None:
    folder = variant()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ConfigError, match=r"model\.path: '.*variant' cannot be loaded"):
        load_causal_lm(str(folder))


def test_garbage_weights(variant: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: '.*variant' cannot be loaded: .*header"):
        load_causal_lm(str(variant(model__safetensors="garbage")))


def test_numbers_that_contradict_each_other(variant: Any) -> None:
    folder = variant()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with pytest.raises(ConfigError, match=r"model\.path: '.*variant' cannot be loaded: .*num_hidden_layers"):
        load_causal_lm(str(folder))


@pytest.mark.parametrize("load", ["policy", "scalar"])
def test_weights_that_are_not_finite(variant: Any, load: str) -> None:
    folder = variant()
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_scalar = partial(
        load_scalar_model, key="model.path", device="cpu", dtype=torch.float32, needs_head=False
    )
    with pytest.raises(ConfigError, match=r"model\.path: '.*variant': the outputs .* are not finite"):
        (load_causal_lm if load == "policy" else load_scalar)(str(folder))


def test_a_folder_without_a_tokenizer(variant: Any) -> None:
    folder = variant()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"model\.path: no tokenizer"):
        load_tokenizer(str(folder))


class Evil:
    """Runs a command when it is unpickled without care."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("load", ["policy", "scalar"])
def test_pickled_code_in_weights_is_not_run(variant: Any, tmp_path: Path, load: str) -> None:
    """A checkpoint whose pickle would run code is not executed."""
    folder = variant()
    (folder / "model.safetensors").unlink()
    torch.save({"x": Evil(f"touch {tmp_path / 'executed'}")}, folder / "pytorch_model.bin")
    load_scalar = partial(load_scalar_model, key="critic.path", device="cpu", dtype=torch.float32)
    with pytest.raises(ConfigError, match="Weights only load failed"):
        (load_causal_lm if load == "policy" else load_scalar)(str(folder))
    assert not (tmp_path / "executed").exists()


def test_code_of_a_model_folder_is_not_run(variant: Any, tmp_path: Path) -> None:
    """Without the flag: neither for an unknown architecture nor in place of a known one, and never for a tokenizer."""
    folder = variant()
    config = json.loads((folder / "config.json").read_text())
    remote = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": remote, "model_type": "evil"}))
    with pytest.raises(ConfigError, match=r"model\.path: '.*variant' cannot be loaded"):
        load_causal_lm(str(folder))
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": remote}))
    assert type(load_causal_lm(str(folder)).hf).__name__ == "Qwen3ForCausalLM"
    own = json.loads((folder / "tokenizer_config.json").read_text())
    own["auto_map"] = {"AutoTokenizer": ["evil.T", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    assert load_tokenizer(str(folder)).eos_token_id == 0
    assert not (tmp_path / "executed").exists()


# ---- where a model is


def test_finding_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert find_model("runs/a") == "runs/a"
    assert find_model("~/runs/a") == str(tmp_path / "runs" / "a")
    for path in ("runs/b", "runs/a/model", "./b", "/b", "b.gguf"):
        with pytest.raises(ConfigError, match=rf"^critic\.path: '{path}' does not exist"):
            find_model(path, "critic.path")
    for path in ("my model", "owner/my model", "a@b"):
        with pytest.raises(
            ConfigError, match=rf"^model\.path: there is no folder '{path}' here .* no hub id"
        ):
            find_model(path)
    monkeypatch.setattr("headrace.models.find.reachable", lambda url: True)
    assert find_model("owner/name") == "owner/name"
    assert find_model("gpt2-0f3a") == "gpt2-0f3a"
    monkeypatch.setattr("headrace.models.find.reachable", lambda url: False)
    with pytest.raises(ConfigError, match="cannot be reached"):
        find_model("owner/name")


def test_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert reachable(f"http://127.0.0.1:{port}")
    assert not reachable(f"http://127.0.0.1:{port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert reachable(f"http://127.0.0.1:{port}")


def test_devices_and_dtypes() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_device("cpu") == cpu
    assert [resolve_dtype("auto", d) for d in (cpu, cuda)] == [torch.float32, torch.bfloat16]
    assert resolve_dtype("bfloat16", cpu) is torch.bfloat16
    if not torch.cuda.is_available():
        assert resolve_device("auto") == cpu
        with pytest.raises(ConfigError, match=r"run\.device: 'cuda:1'"):
            resolve_device("cuda:1")


def test_a_model_that_computes_attention_by_itself_is_refused_by_name() -> None:
    """It gets packs right, and would generate without the tokens before."""
    import transformers as t

    falcon = t.FalconForCausalLM(
        t.FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    )
    with pytest.raises(ConfigError, match="FalconForCausalLM computes attention by itself"):
        wrap(falcon, None)
