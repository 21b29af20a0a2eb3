"""How much memory a run will take at most, from sizes alone, against what the device has. docs/report.md has the formula.

Parts that are there all the time add up; of the phases (rollout, each role's update) only the largest counts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from headrace.config import Config
from headrace.data.prompts import PromptDataset
from headrace.errors import ConfigError
from headrace.flow.compile import CheckedFlow
from headrace.flow.source import PreparedData
from headrace.models.adapter_size import AdapterSize, read_adapters
from headrace.models.hf import resolve_device, resolve_dtype
from headrace.models.shape import ModelShape, read_shape
from headrace.observe.machine import host_memory
from headrace.observe.report_facts import format_bytes
from headrace.roles.role import LanguageModelRole, Role
from headrace.rollout.native.engine import LOGITS_AT_ONCE
from headrace.rollout.native.kv_cache import FREE_MEMORY_SHARE
from headrace.training.torch_engine import CPU_TOKENS, LOGIT_CHUNK_BYTES

logger = logging.getLogger(__name__)

LIBRARIES = "libraries"
LIBRARY_BYTES = {"cpu": 700 << 20, "cuda": 600 << 20}  # Python, torch and transformers; the CUDA context
FIXED = ("gradients", "optimizer")  # ends of the names of parts that no batch size makes smaller
# what takes a role's weights away
WITHOUT = {
    "actor": "use a smaller model.path",
    "critic": "use a smaller critic.path, or algorithm.name=grpo",
    "reference": "use a smaller reference.path, or algorithm.kl_coefficient=0",
    "reward_model": "use a smaller reward.model",
}
LOGIT_CHUNKS_ALIVE = 3  # float32 tensors of a chunk's logits in the backward pass (models/logprobs.py)
SAMPLER_COPIES = 4  # of the logits of one decode step (rollout/native/sampler.py)
PREFILL_TOKENS = 8192  # of one forward pass of the rollout (rollout/native/engine.py)


@dataclass(frozen=True)
class Part:
    """One term: bytes, what they are, and the setting to lower, with what it does to them."""

    what: str
    bytes: int
    lower: str = ""


@dataclass
class Estimate:
    """`always` is there all the time, each of `phases` only in its turn. Sizes are those of `device`."""

    device: str
    total: int
    free: int
    always: list[Part] = field(default_factory=list)
    phases: dict[str, list[Part]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """The phase that takes the most."""
        return max(self.phases, key=lambda name: sum(p.bytes for p in self.phases[name]), default="")

    @property
    def peak(self) -> int:
        return sum(p.bytes for p in [*self.always, *self.phases.get(self.phase, [])])

    def largest(self, count: int = 3) -> list[Part]:
        parts = [*self.always, *self.phases.get(self.phase, [])]
        return sorted((p for p in parts if p.what != LIBRARIES), key=lambda part: -part.bytes)[:count]

    @property
    def least(self) -> list[Part]:
        """Weights, gradients and optimizer: what only another model, algorithm or device makes smaller."""
        fixed = [[p for p in parts if p.what.endswith(FIXED)] for parts in self.phases.values()]
        most = max(fixed, key=lambda parts: sum(p.bytes for p in parts), default=[])
        return [p for p in [*self.always, *most] if p.what != LIBRARIES]

    @property
    def least_bytes(self) -> int:
        return sum(part.bytes for part in self.least)

    def refusal(self) -> str | None:
        """The error of a run that cannot fit; None for one that may."""
        if self.least_bytes <= self.total:
            return None
        largest = sorted(self.least, key=lambda part: -part.bytes)[:3]
        return (
            f"memory: weights, gradients and optimizer alone take {format_bytes(self.least_bytes)}, and {self.device}"
            f" has {format_bytes(self.total)}: {_named(largest)}"
        )

    def warning(self) -> str | None:
        if self.peak <= self.free:
            return None
        return (
            f"memory: this run may take up to {format_bytes(self.peak)} and {self.device} has"
            f" {format_bytes(self.free)} free: {_named(self.largest())}"
        )


def _named(parts: list[Part]) -> str:
    return ", ".join(f"{p.what} {format_bytes(p.bytes)}{f' ({p.lower})' if p.lower else ''}" for p in parts)


@dataclass(frozen=True)
class Load:
    """How many tokens a run moves at once: rows and tokens are the most there can be."""

    longest: int  # tokens of a whole sequence
    rows_per_update: int
    rows_at_once: int  # sequences generated at the same time; 0 where nothing is generated
    prompts_at_once: int
    shared: float = 1.0  # tokens of sequences by tokens computed of them, where samples share their prompt


def refuse_what_cannot_fit(
    flow: CheckedFlow, data: PreparedData, held_out: PreparedData | None = None
) -> None:
    """The check at the start of a run, before weights are loaded. Raises ConfigError naming the largest terms."""
    if all(role.is_loaded for role in flow.roles if isinstance(role, LanguageModelRole)):
        return  # what is loaded already has shown that it fits
    estimate = estimate_memory(flow, load_of(flow, data, held_out))
    refusal = estimate.refusal()
    if refusal is not None:
        raise ConfigError(refusal)
    warning = estimate.warning()
    if warning is not None:
        logger.warning("%s", warning)


def load_of(flow: CheckedFlow, data: PreparedData, held_out: PreparedData | None = None) -> Load:
    config = flow.config
    sets = [d.dataset for d in (data, held_out) if d is not None]
    new = config.rollout.max_new_tokens
    longest = max(d.longest_tokens + (new if isinstance(d, PromptDataset) else 0) for d in sets)
    if flow.paired:
        return Load(longest, 2 * data.rows_per_step, 0, 0, shared=2.0)  # at most: pairs that are prompt alone
    if flow.supervised:
        rows, generated = data.rows_per_step, 0
    else:
        rows = config.train.samples_per_update or config.samples_per_step
        generated = min(config.samples_per_step, config.rollout.max_concurrent_sequences)
    if held_out is not None:
        held = len(held_out.dataset) * config.eval.samples_per_prompt
        generated = max(generated, min(held, config.rollout.max_concurrent_sequences))
    samples = 1 if flow.supervised else config.rollout.samples_per_prompt
    prompt = max(0, longest - new)
    shared = 1.0 if samples == 1 else samples * longest / (prompt + samples * new)
    return Load(longest, rows, generated, config.train.prompts_per_step, shared)


def estimate_memory(flow: CheckedFlow, load: Load) -> Estimate:
    """The largest memory of a run of `flow`, all of it on the device that run.device names."""
    config = flow.config
    device = resolve_device(config.run.device)
    width = resolve_dtype(config.model.dtype, device).itemsize
    estimate = _empty_estimate(device)
    models: dict[Role, Sizes] = {}
    for role in flow.roles:
        sizes = _sizes(role, config, models, trains=flow.trains(role))
        if sizes is None:
            estimate.unknown.append(f"{role.name} ({role.model_config.path})")
            continue
        models[role] = sizes
        _add_weights(estimate, role, sizes, width)
        if flow.trains(role):
            _add_training(estimate, config, role, sizes, width, load)
    weights = sum(part.bytes for part in estimate.always)
    generator = next((s.shape for role, s in models.items() if role.name == "actor"), None)
    if generator is not None and load.rows_at_once:
        room = max(0, estimate.free - weights)
        estimate.phases["rollout"] = _rollout_parts(config, generator, width, load, room)
    estimate.always.append(Part(LIBRARIES, LIBRARY_BYTES[device.type]))
    return estimate


def _empty_estimate(device: torch.device) -> Estimate:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Estimate(f"the device ({torch.cuda.get_device_name(device)})", total, free)
    memory = host_memory()
    return Estimate("this machine", memory.total, memory.free)


@dataclass(frozen=True)
class Sizes:
    """What a role holds. `start`: the role whose weights it copies, or, where those have adapters, shares."""

    shape: ModelShape
    adapters: AdapterSize | None
    start: Sizes | None
    has_vocabulary: bool

    @property
    def head(self) -> int:
        """Parameters of a scalar head."""
        return 0 if self.has_vocabulary else self.shape.hidden

    @property
    def base(self) -> int:
        """Parameters without adapters."""
        return self.shape.parameters if self.has_vocabulary else self.shape.backbone_parameters + self.head

    @property
    def trained(self) -> int:
        """Parameters that learn where the role does: Backbone.trained_parameters."""
        return self.base if self.adapters is None else self.adapters.parameters + self.head

    @property
    def shares(self) -> bool:
        return self.start is not None and self.start.adapters is not None


def _sizes(role: Role, config: Config, known: dict[Role, Sizes], *, trains: bool) -> Sizes | None:
    has_vocabulary = isinstance(role, LanguageModelRole)
    start = None if role.start is None else known.get(role.start)
    if start is not None:
        return Sizes(start.shape, start.adapters, start, has_vocabulary)
    c = role.model_config
    if c.path is None:
        return None
    shape = read_shape(str(c.path), role.key, c.trust_remote_code)
    if shape is None:
        return None
    adapters = read_adapters(
        str(c.path), role.key, config.lora, trains=trains, trust_remote_code=c.trust_remote_code
    )
    return Sizes(shape, adapters, None, has_vocabulary)


def _add_weights(estimate: Estimate, role: Role, sizes: Sizes, width: int) -> None:
    """The weights; those of a role that shares its start's are its adapters, or, of a frozen one, a copy of them."""
    adapters, lower = sizes.adapters, WITHOUT.get(role.name, "")
    if adapters is None:
        estimate.always.append(Part(f"{role.name} weights", sizes.base * width, lower))
        return
    own = adapters.parameters
    if not sizes.shares:
        estimate.always.append(Part(f"{role.name} weights", sizes.base * width, lower))
    elif sizes.has_vocabulary:
        own = adapters.parameters if adapters.loaded else 0  # fresh ones are switched off instead
    else:
        own += sizes.head
        # models/heads.py makes a whole critic before it takes over the actor's weights
        estimate.phases[f"{role.name} loading"] = [Part("its weights, until shared", sizes.base * width)]
    estimate.always.append(Part(f"{role.name} adapters", own * width, "lora.rank or lora.targets"))


def _add_training(
    estimate: Estimate, config: Config, role: Role, sizes: Sizes, width: int, load: Load
) -> None:
    """Gradients, optimizer and one update, over what `Backbone.trained_parameters` holds."""
    shape, count = sizes.shape, sizes.trained
    on_gpu = estimate.device != "this machine"
    lower = "lora.rank or lora.targets" if sizes.adapters else "lora.rank=16 trains adapters alone"
    gradients = Part(f"{role.name} gradients", 4 * count, lower)
    # float32: the parameters are their own masters (training/optimizer.py)
    state = count * (8 if width == 4 else 12)
    optimizer = Part(
        f"{role.name} optimizer", state, f"train.offload_optimizer=true, or {lower}" if on_gpu else lower
    )
    if config.train.offload_optimizer and on_gpu:
        estimate.phases[f"{role.name} optimizer step"] = [gradients, optimizer]
    else:
        estimate.always.append(optimizer)
    tokens = tokens_at_once(config, load)
    parts = [gradients, _activations(config, sizes, width, tokens)]
    whole = min(int(tokens * load.shared), load.rows_per_update * load.longest)
    if whole > tokens:
        # queries, keys, values and results are laid out sequence by sequence for attention
        kept = 1 if config.model.gradient_checkpointing else shape.layers
        copies = kept * whole * width * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        parts.append(Part("attention over shared prompts", copies, "train.tokens_per_microbatch"))
    if sizes.has_vocabulary:
        chunk = min(LOGIT_CHUNK_BYTES["cuda" if on_gpu else "cpu"], 4 * shape.vocab * tokens)
        parts.append(Part("logits", LOGIT_CHUNKS_ALIVE * chunk))
        if sizes.adapters is None:
            head = shape.vocab * shape.hidden * (4 if width == 4 else 6)
            parts.append(Part("output head's gradient", head))
    estimate.phases[f"{role.name} update"] = parts


def tokens_at_once(config: Config, load: Load) -> int:
    """The most tokens of one forward and backward pass; fewer where rows share a prompt, which is computed once."""
    parts = config.train.microbatches_per_update
    if parts is not None:
        return -(-load.rows_per_update // parts) * load.longest
    on_cpu = resolve_device(config.run.device).type == "cpu"
    budget = (
        min(config.train.tokens_per_microbatch, CPU_TOKENS) if on_cpu else config.train.tokens_per_microbatch
    )
    return min(max(budget, load.longest), load.rows_per_update * load.longest)


def layer_bytes(shape: ModelShape, width: int) -> int:
    """Bytes that one layer keeps of one token for its backward pass.

    Norms keep a float32 input and two results; attention queries, keys, values and twice its output; a gated MLP
    four, a plain one five tensors of its inner width (an activation written out keeps its steps).
    """
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = shape.norms_per_layer * shape.hidden * (4 + 2 * width) + (
        shape.query_key_norm and (query + key) * (4 + width)
    )
    attention = width * (3 * query + 2 * key) + 4 * shape.heads
    mlp = width * (4 if shape.gated else 5) * shape.intermediate * shape.experts_per_token
    return norms + attention + mlp


def _activations(config: Config, sizes: Sizes, width: int, tokens: int) -> Part:
    shape = sizes.shape
    # B's inputs; A's are those of the layer
    between = sizes.adapters.inner * width // shape.layers if sizes.adapters is not None else 0
    layer = layer_bytes(shape, width) + between
    if config.model.gradient_checkpointing:
        kept = shape.layers * shape.hidden * width + layer
        lower = "train.tokens_per_microbatch"
    else:
        kept = shape.layers * layer
        lower = "train.tokens_per_microbatch, or model.gradient_checkpointing=true"
    ends = shape.hidden * (4 + 5 * width)  # the embedding, the last norm, response states and their gradients
    passing = width * (3 * shape.intermediate + 4 * shape.hidden)  # gradients inside one layer
    return Part(f"activations of up to {tokens:,} tokens", tokens * (kept + ends + passing), lower)


def _rollout_parts(config: Config, shape: ModelShape, width: int, load: Load, room: int) -> list[Part]:
    """The KV cache as rollout/native/engine.py sizes it, and what one forward pass and one draw need beside it."""
    r = config.rollout
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * width
    if r.kv_cache_tokens is not None:
        tokens = r.kv_cache_tokens
    else:
        blocks = load.rows_at_once * (-(-load.longest // r.kv_block_tokens) + 1)
        tokens = min(blocks * r.kv_block_tokens, int(room * FREE_MEMORY_SHARE) // per_token)
    rows = min(load.rows_at_once * shape.vocab, LOGITS_AT_ONCE)
    prefill = min(PREFILL_TOKENS, load.prompts_at_once * load.longest)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = 2 * shape.intermediate * shape.experts_per_token
    forward = prefill * (width * (3 * shape.hidden + 2 * query + 2 * key + inner) + 4 * shape.hidden)
    return [
        Part(
            f"KV cache of {tokens:,} tokens",
            tokens * per_token,
            "rollout.kv_cache_tokens or rollout.max_concurrent_sequences",
        ),
        Part("logits of one draw", SAMPLER_COPIES * 4 * rows, "rollout.max_concurrent_sequences"),
        Part("prefill", forward),
    ]
