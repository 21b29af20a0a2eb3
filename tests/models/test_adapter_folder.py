"""Adapter folders against peft: what peft writes is read, what headrace writes peft reads, the rest is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.checkpoint.export import save_hf_folder
from headrace.config import LoraConfig
from headrace.errors import ConfigError
from headrace.models.adapter_folder import adapter_folder
from headrace.models.attention import PackedAttention
from headrace.models.causal_lm import CausalLM, ScalarModel
from headrace.models.heads import critic_from, load_scalar_model
from headrace.models.hf import load_causal_lm, load_tokenizer
from headrace.roles.role import adapt

IDS = torch.tensor([2, 5, 12, 3, 13, 4, 7])
SCALAR: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}


def hidden(model: CausalLM | ScalarModel) -> torch.Tensor:
    with torch.no_grad():
        return model.hidden_states(IDS, torch.arange(len(IDS)), PackedAttention([len(IDS)], "cpu"))


def logits(model: CausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model.head().logits(hidden(model))


def trained(base: Path, lora: LoraConfig | None = None) -> CausalLM:
    """The folder's model with adapters that change it."""
    model = load_causal_lm(str(base))
    torch.manual_seed(3)
    adapt(model, lora or LoraConfig(rank=4, alpha=6), str(base))
    for parameter in model.trained_parameters().values():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def peft_adapter(base: Path, folder: Path, **settings: Any) -> Any:
    """An adapter folder written by peft alone, and its model."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(4)
    plain = AutoModelForCausalLM.from_pretrained(base)
    known = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(plain, peft.LoraConfig(**{**known, **settings}))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture
def adapter(arithmetic: Path, tmp_path: Path) -> Callable[..., Path]:
    """A folder as headrace writes it, with keys of adapter_config.json replaced."""

    def make(**changes: Any) -> Path:
        folder = save_hf_folder(trained(arithmetic / "model"), tmp_path / "adapter")
        raw = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**raw, **changes}))
        return folder

    return make


def test_peft_reads_what_is_written(arithmetic: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    model = trained(arithmetic / "model")
    folder = save_hf_folder(model, tmp_path / "adapter")
    assert {p.name for p in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not list(folder.glob("model*"))
    base = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    theirs = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(str(folder)).eval()
    for other in (theirs, auto):
        with torch.no_grad():
            torch.testing.assert_close(other(IDS[None]).logits[0], logits(model), atol=1e-5, rtol=1e-5)
    raw = json.loads((folder / "adapter_config.json").read_text())
    assert raw["base_model_name_or_path"] == str((arithmetic / "model").resolve())
    assert (raw["r"], raw["lora_alpha"], raw["lora_dropout"], raw["bias"]) == (4, 6, 0.0, "none")
    saved = load_file(folder / "adapter_model.safetensors")
    assert sum(v.numel() for v in saved.values()) == sum(
        p.numel() for p in model.trained_parameters().values()
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_dropout": 0.3},
        {"use_rslora": True},
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
        {"target_modules": r".*\.1\.self_attn\.(q|v)_proj"},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
    ],
    ids=["plain", "dropout", "rslora", "patterns", "expression", "one layer"],
)
def test_what_peft_writes_is_read(arithmetic: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    theirs = peft_adapter(arithmetic / "model", tmp_path / "theirs", **settings)
    model = load_causal_lm(str(tmp_path / "theirs"))
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS[None]).logits[0], logits(model), atol=1e-5, rtol=1e-5)
    again = load_causal_lm(str(save_hf_folder(model, tmp_path / "again")))  # and survives being written
    assert torch.equal(hidden(again), hidden(model))
    assert model.tokenizer.get_vocab() == again.tokenizer.get_vocab()  # the base's; theirs has none


def test_an_adapter_survives_a_round_trip(adapter: Callable[..., Path], arithmetic: Path) -> None:
    folder = adapter()
    model, again = trained(arithmetic / "model"), load_causal_lm(str(folder), dtype=torch.float32)
    assert torch.equal(hidden(again), hidden(model))
    assert again.trainable_state().keys() == model.trainable_state().keys()
    assert again.eos_token_ids == model.eos_token_ids
    adapt(again, LoraConfig(), str(folder))  # to be trained further
    again.set_trainable(True)
    assert sum(p.requires_grad for p in again.parameters()) == len(model.trained_parameters())


def test_a_template_beside_the_adapter_wins(adapter: Callable[..., Path]) -> None:
    folder = adapter()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(str(folder)).chat_template == "{{ messages }}"
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(folder)).chat_template is None  # the base's


def test_a_critic_with_adapters_survives_a_round_trip(arithmetic: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForSequenceClassification

    critic = critic_from(trained(arithmetic / "model"))
    torch.nn.init.normal_(critic.hf.score.weight)
    folder = save_hf_folder(critic, tmp_path / "critic")
    again = load_scalar_model(str(folder), key="reward.model", **SCALAR)
    assert torch.equal(hidden(again), hidden(critic))
    assert torch.equal(again.hf.score.weight, critic.hf.score.weight)
    assert set(again.trained_parameters()) == set(critic.trained_parameters())
    base = AutoModelForSequenceClassification.from_pretrained(
        arithmetic / "model", num_labels=1, pad_token_id=0
    )
    theirs = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    with torch.no_grad():
        score = theirs(IDS[None]).logits[0, 0]
    torch.testing.assert_close(score, critic.scalars(hidden(critic))[-1], atol=1e-5, rtol=1e-4)


def test_a_critic_can_start_from_a_policys_adapter(adapter: Callable[..., Path], tmp_path: Path) -> None:
    critic = load_scalar_model(str(adapter()), key="critic.path", needs_head=False, **SCALAR)
    assert not critic.hf.score.weight.any()
    torch.nn.init.normal_(critic.hf.score.weight)
    again = load_scalar_model(str(save_hf_folder(critic, tmp_path / "critic")), key="critic.path", **SCALAR)
    assert torch.equal(again.scalars(hidden(again)), critic.scalars(hidden(critic)))


def test_a_hub_id_that_is_not_there_is_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **keywords: Any) -> Any:
        raise OSError("owner/none is not a valid model identifier")

    monkeypatch.setattr("transformers.utils.cached_file", missing)
    monkeypatch.setattr("headrace.models.find.reachable", lambda url: True)
    assert adapter_folder("owner/none") is None


def test_a_policys_adapter_is_no_reward_model(adapter: Callable[..., Path]) -> None:
    folder = adapter()
    with pytest.raises(ConfigError, match=r"reward\.model: .* no trained scalar head"):
        load_scalar_model(str(folder), key="reward.model", **SCALAR)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "is an adapter of kind 'LOHA'; only LORA is supported"),
        ({"use_dora": True}, r"more than plain LoRA \(use_dora=True\)"),
        ({"bias": "all"}, r"\(bias='all'\)"),
        (
            {"lora_bias": True, "modules_to_save": ["lm_head"]},
            r"lora_bias=True, modules_to_save=\['lm_head'\]",
        ),
        ({"init_lora_weights": "pissa"}, r"\(init_lora_weights='pissa'\)"),
        ({"a_variant_of_tomorrow": {"x": 1}}, r"\(a_variant_of_tomorrow="),
        ({"base_model_name_or_path": None}, r"names no base \(base_model_name_or_path\)"),
        (
            {"base_model_name_or_path": "/no/such/model"},
            "belongs to the model '/no/such/model', which is not",
        ),
        ({"rank_pattern": [1]}, "does not fit Qwen3ForCausalLM: "),
        ({"r": 3}, "does not fit '.*model': model.layers.0.* and 27 more"),
        ({"target_modules": ["q_proj"]}, "does not fit '.*model': "),
        ({"target_modules": ["c_attn"]}, "does not fit Qwen3ForCausalLM: .*not found"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "changes 'model.embed_tokens'; only linear layers"),
        ({"target_modules": ["q_proj", "lm_head"]}, "changes 'lm_head'; only linear layers below the output"),
    ],
)
def test_adapters_that_will_not_do(adapter: Callable[..., Path], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.path: .*{said}"):
        load_causal_lm(str(adapter(**changes)))


def test_folders_that_will_not_do(adapter: Callable[..., Path], tmp_path: Path) -> None:
    folder = adapter()
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    raw = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**raw, "base_model_name_or_path": str(folder)}))
    with pytest.raises(
        ConfigError, match=r"model\.path: the base of '.*other', '.*adapter', is itself an ad"
    ):
        load_causal_lm(str(other))
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({**weights, "base_model.model.extra": torch.zeros(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"does not fit '.*': extra "):
        load_causal_lm(str(folder))
    (folder / "adapter_model.safetensors").write_text("garbage")
    with pytest.raises(ConfigError, match=r"model\.path: '.*adapter_model\.safetensors' cannot be read"):
        load_causal_lm(str(folder))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has adapter_config\.json and no adapter_model\.saf"):
        load_causal_lm(str(folder))
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"adapter_config\.json' cannot be read as JSON"):
        load_causal_lm(str(folder))
