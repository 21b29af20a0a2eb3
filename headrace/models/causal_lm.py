"""A decoder-only Hugging Face model as headrace uses it: flat tokens in, hidden states and an output head out.

The trainer and the native rollout engine hold the *same* `CausalLM`; there is no second copy of the weights.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError, RunError
from headrace.models.attention import AttentionContext, CountedAttention
from headrace.models.gates import use_fast_gates
from headrace.models.lora import Adapters
from headrace.models.norm import use_fast_norms
from headrace.models.sequence_parallel import PackSlice
from headrace.models.shards import Shards
from headrace.models.stage import Run, relay, without_layers
from headrace.models.tensor_parallel import VocabShard


@dataclass(frozen=True)
class OutputHead:
    """The map from hidden states to logits: `softcap(hidden @ weight.T + bias)`.

    With a `shard`, weight and bias are those of this rank's ids alone.
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None  # logits = softcap * tanh(logits / softcap)
    shard: VocabShard | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] → float32 logits [T, V], whole on every rank."""
        raw = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        if self.shard is not None:
            raw = self.shard.join(raw)
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)


class Backbone(nn.Module):
    """The transformer below the head, shared by policies, critics and reward models."""

    adapters: Adapters | None  # None: the whole model trains
    shards: Shards  # where its parameters lie (models/sharding.py)
    chunks: tuple[nn.Module, ...]  # what `run_layers` runs: the base model, or pieces of it (models/stage.py)

    def __init__(self, hf: Any, tokenizer: Any, adapters: Adapters | None = None) -> None:
        super().__init__()
        self.hf = hf
        self.tokenizer = tokenizer
        self.adapters = adapters
        self.shards = Shards()
        self.chunks = (hf.base_model,)
        self.text_config = hf.config.get_text_config()
        use_fast_norms(hf)
        use_fast_gates(hf)

    @property
    def device(self) -> torch.device:
        return next(self.hf.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        if self.shards.compute_dtype is not None:
            return self.shards.compute_dtype
        return next(self.hf.parameters()).dtype

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model's positions allow (None: no stated limit)."""
        value = getattr(self.text_config, "max_position_embeddings", None)
        return int(value) if value else None

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        """input_ids [T], position_ids [T] (int64, on the model's device) → last hidden states [T, H].

        Raises RunError on a process that has only some of the layers.
        """
        if self.shards.mesh.size("pp") > 1:
            raise RunError(
                "parallelism.pp: this process has only some layers of the model; it can train them alone"
            )
        return self.run_layers(input_ids, position_ids, attention)[0]

    def run_layers(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention: AttentionContext,
        chunk: int = 0,
        incoming: Tensor | None = None,
    ) -> Tensor:
        """`hidden_states` as transformers gives them, [1, T, H]: FSDP's hooks want no view of them.

        `incoming` [1, T, H]: what the layers before this chunk gave, where the model is cut into several.
        """
        ids = {"input_ids": input_ids.unsqueeze(0)} if incoming is None else {"inputs_embeds": incoming}
        out = self.chunks[chunk](
            **ids,
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            headrace_attention=attention,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """What training changes, by its name in `hf`: every parameter (tied ones once), or only the adapters'."""
        everything = dict(self.hf.named_parameters())
        if self.adapters is None:
            return everything
        return {name: everything[name] for name in (*self.adapters.names, *self._trained_beside_adapters())}

    def _trained_beside_adapters(self) -> list[str]:
        return []

    def set_trainable(self, trains: bool) -> None:
        """Gradients for exactly the trained parameters, or for none."""
        self.hf.requires_grad_(False)
        if trains:
            for parameter in self.trained_parameters().values():
                parameter.requires_grad_(True)

    def trainable_state(self) -> dict[str, Tensor]:
        """The tensors of `trained_parameters`, not copied: what a checkpoint of this model has to hold."""
        return {name: parameter.detach() for name, parameter in self.trained_parameters().items()}

    def use_gradient_checkpointing(self) -> None:
        """Recompute each layer's activations in the backward pass.

        Only the layer wrappers enter training mode, so that dropout inside them stays off.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in self.hf.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True


class CausalLM(Backbone):
    """A policy: wraps a `PreTrainedModel` with a language-model head (see models/hf.py)."""

    vocab_shard: VocabShard | None = None  # the ids whose logits this rank has; None: all

    def __init__(
        self, hf: Any, tokenizer: Any, eos_token_ids: tuple[int, ...], adapters: Adapters | None = None
    ) -> None:
        super().__init__(hf, tokenizer, adapters)
        self.eos_token_ids = eos_token_ids

    @property
    def num_layers(self) -> int:
        return int(self.text_config.num_hidden_layers)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of this rank."""
        heads = getattr(self.text_config, "num_key_value_heads", None) or self.text_config.num_attention_heads
        return int(heads) // self.shards.mesh.size("tp")

    @property
    def head_dim(self) -> int:
        explicit = getattr(self.text_config, "head_dim", None)
        return int(explicit or self.text_config.hidden_size // self.text_config.num_attention_heads)

    @property
    def vocab_size(self) -> int:
        return self.vocab_shard.vocab if self.vocab_shard else int(self.head().weight.shape[0])

    def head(self) -> OutputHead:
        linear = self.hf.get_output_embeddings()
        return OutputHead(
            linear.weight,
            getattr(linear, "bias", None),
            getattr(self.text_config, "final_logit_softcapping", None),
            self.vocab_shard,
        )


class ScalarModel(Backbone):
    """One number per position: a critic's value or a reward model's score.

    `hf` is a transformers `...ForSequenceClassification` with one label; its linear `score` is the head,
    always computed in float32.
    """

    def _trained_beside_adapters(self) -> list[str]:
        """The head, which has no trained weights to add to."""
        return [f"score.{name}" for name, _ in self.hf.score.named_parameters()]

    def scalars(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] → float32 [T], or float64 where hidden is."""
        head, dtype = self.hf.score, torch.promote_types(torch.float32, hidden.dtype)
        bias = head.bias.to(dtype) if head.bias is not None else None
        return nn.functional.linear(hidden.to(dtype), head.weight.to(dtype), bias).squeeze(-1)


@torch.no_grad()
def verify_against_hf(model: CausalLM | ScalarModel, tolerance: float | None = None) -> None:
    """Compares headrace's forward with the model's own on a few tokens and refuses a model it gets wrong.

    An architecture that scales its logits, biases its attention or routes tokens in a way headrace does not know
    is refused here by name instead of training on silently wrong numbers. `tolerance` bounds, at every position, the
    root mean square difference of the centred logits, relative to their own spread (of hidden states and score where
    the head is a scalar), so that neither flat nor peaked distributions hide an error. Raises ConfigError.
    """
    if tolerance is None:
        tolerance = 1e-3 if model.dtype == torch.float32 else 0.4  # bf16 noise of real models: 0.1
    error = model.shards.mesh.from_last(_error_against_hf(model))
    if not math.isfinite(error):
        raise ConfigError(
            f"the outputs of this {type(model.hf).__name__} are not finite; its weights may be damaged, or too large for"
            f" {model.dtype}"
        )
    if not error <= tolerance:
        raise ConfigError(
            f"headrace does not compute {type(model.hf).__name__} correctly (its outputs differ from the model's own by"
            f" {error:.1%} of their spread); decoder-only models with full or sliding-window attention are supported"
        )


def _error_against_hf(model: CausalLM | ScalarModel) -> float:
    """See verify_against_hf. Meaningless where the head is elsewhere."""
    config, mesh = model.hf.config, model.shards.mesh
    vocab = int(model.text_config.vocab_size)
    window = getattr(model.text_config, "sliding_window", None) or 0
    length = int(min(model.max_positions or 64, max(12, min(window + 4, 64))))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (length,), generator=generator).to(model.device)
    short = length // 2
    # two sequences in one pack: the second must equal the model's own forward over that sequence alone
    packed = torch.cat([ids[:short], ids])
    positions = torch.cat([torch.arange(short), torch.arange(length)]).to(model.device)
    part = PackSlice(len(packed), mesh)
    attention = CountedAttention(part.attention([short, length], model.device))

    def ours(chunk: int, incoming: Tensor | None) -> Tensor:
        return model.run_layers(part.of(packed), part.of(positions), attention, chunk, incoming)

    def their_own(chunk: int, incoming: Tensor | None) -> Tensor:
        given = {"input_ids": ids.unsqueeze(0)} if incoming is None else {"inputs_embeds": incoming}
        out: Tensor = model.chunks[chunk](**given, use_cache=False).last_hidden_state
        return out

    def passed(run: Run, tokens: int) -> Tensor:
        width = int(model.text_config.hidden_size)
        return relay(mesh, (1, tokens, width), model.dtype, run)

    hidden = part.join(passed(ours, part.count)[0])[short:]
    if mesh.size("pp") == 1 and not attention.calls:
        raise ConfigError(
            f"{type(model.hf).__name__} computes attention by itself: it cannot generate from headrace's cache"
        )
    before = config._attn_implementation
    try:
        model.hf.set_attn_implementation("eager")
        their_hidden = passed(their_own, length)[0]
        theirs = _their_outputs(model, ids, their_hidden)
    finally:
        model.hf.set_attn_implementation(before)
    if not mesh.is_last:
        return 0.0
    if isinstance(model, CausalLM):
        if model.vocab_shard is not None:
            theirs = model.vocab_shard.join(theirs)
        return relative_error(centred(model.head().logits(hidden)), centred(theirs))
    score_error = (model.scalars(hidden[-1:]) - theirs).abs().max() / (theirs.abs().max() + 1e-3)
    errors = [float(score_error), relative_error(hidden.float(), their_hidden.float())]
    return max(errors) if all(map(math.isfinite, errors)) else math.nan


def _their_outputs(model: CausalLM | ScalarModel, ids: Tensor, hidden: Tensor) -> Tensor:
    """float32 logits [T, …] of the model's own forward over `ids` [T], or of its head alone where others have layers."""
    hf: Any = model.hf
    if model.shards.mesh.size("pp") == 1:
        own: Tensor = hf(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
        return own
    base, no_layers = hf.base_model, without_layers(hf)
    if not model.shards.mesh.is_last:
        return hidden
    setattr(hf, hf.base_model_prefix, no_layers)
    try:
        own = hf(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0].float()
    finally:
        setattr(hf, hf.base_model_prefix, base)
    return own


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest over rows of |ours - theirs| / |theirs|, both [T, X]."""
    spread = theirs.square().mean(-1).sqrt() + 1e-6
    return float(((ours - theirs).square().mean(-1).sqrt() / spread).max())


def centred(logits: Tensor) -> Tensor:
    """Logits without what the softmax does not see."""
    return logits - logits.mean(-1, keepdim=True)
