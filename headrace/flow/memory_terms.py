"""The terms of the memory estimate: what the weights, an update and a rollout of one role take on one device.

docs/report.md has the formulas. The device may be the only one, or that of one rank of a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.config import Config
from headrace.models.adapter_size import AdapterSize, read_adapters
from headrace.models.hf import resolve_device
from headrace.models.shape import ModelShape, read_shape
from headrace.observe.report_facts import format_bytes
from headrace.roles.role import LanguageModelRole, Role
from headrace.rollout.native.engine import LOGITS_AT_ONCE
from headrace.rollout.native.kv_cache import BLOCK_TOKENS, FREE_MEMORY_SHARE
from headrace.training.torch_engine import CPU_TOKENS, LOGIT_CHUNK_BYTES

LIBRARIES = "libraries"
LIBRARY_BYTES = {"cpu": 700 << 20, "cuda": 600 << 20}  # Python, torch and transformers; the CUDA context
FIXED = (
    "gradients",
    "optimizer",
    "weights",
    "adapters",
)  # ends of the names of parts that no batch size makes smaller
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
    kind: str = "cpu"  # or "cuda"
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

    def least_largest(self, count: int = 3) -> list[Part]:
        return sorted(self.least, key=lambda part: -part.bytes)[:count]

    @property
    def least_bytes(self) -> int:
        return sum(part.bytes for part in self.least)

    def refusals(self) -> list[str]:
        """The error of a run that cannot fit; none for one that may."""
        if self.least_bytes <= self.total:
            return []
        return [
            f"memory: weights, gradients and optimizer alone take {format_bytes(self.least_bytes)}, and {self.device}"
            f" has {format_bytes(self.total)}: {named_parts(self.least_largest())}"
        ]

    def warning(self) -> str | None:
        if self.peak <= self.free:
            return None
        return (
            f"memory: this run may take up to {format_bytes(self.peak)} and {self.device} has"
            f" {format_bytes(self.free)} free: {named_parts(self.largest())}"
        )


def named_parts(parts: list[Part]) -> str:
    """Sizes with the settings that lower them."""
    return ", ".join(f"{p.what} {format_bytes(p.bytes)}{f' ({p.lower})' if p.lower else ''}" for p in parts)


@dataclass(frozen=True)
class Load:
    """How many tokens a run moves at once: rows and tokens are the most there can be."""

    longest: int  # tokens of a whole sequence
    rows_per_update: int
    rows_at_once: int  # sequences generated at the same time; 0 where nothing is generated
    prompts_at_once: int
    shared: float = 1.0  # tokens of sequences by tokens computed of them, where samples share their prompt


@dataclass(frozen=True)
class Cut:
    """What one rank has of a model that is laid over several.

    `numel` of its parameters, `stored` bytes each; `gathered` elements that zero3 puts together for a pass, at most, and
    `summed`, those of the largest gradient it adds up at once. `passes`: micro-batches of a pipeline that are on their
    way at the same time. `has_head`: it is in the last pipeline stage. `slices`: ranks over which a pass's tokens are
    shared out.
    """

    numel: int
    stored: int
    gathered: int = 0
    summed: int = 0
    passes: int = 1
    has_head: bool = True
    slices: int = 1


@dataclass(frozen=True)
class Sizes:
    """What a role holds. `start`: the role whose weights it copies, or, where those have adapters, shares.

    With `cut` these are the sizes of one rank: `shape` has its own heads, columns, layers and part of the vocabulary.
    """

    shape: ModelShape
    adapters: AdapterSize | None
    start: Sizes | None
    has_vocabulary: bool
    cut: Cut | None = None

    @property
    def head(self) -> int:
        """Parameters of a scalar head."""
        return 0 if self.has_vocabulary else self.shape.hidden

    @property
    def base(self) -> int:
        """Parameters without adapters."""
        if self.cut is not None:
            return self.cut.numel
        return self.shape.parameters if self.has_vocabulary else self.shape.backbone_parameters + self.head

    @property
    def trained(self) -> int:
        """Parameters that learn where the role does: Backbone.trained_parameters."""
        return self.base if self.adapters is None else self.adapters.parameters + self.head

    @property
    def shares(self) -> bool:
        return self.start is not None and self.start.adapters is not None


def sizes_of(role: Role, config: Config, known: dict[Role, Sizes], *, trains: bool) -> Sizes | None:
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


def add_weights(estimate: Estimate, role: Role, sizes: Sizes, width: int) -> None:
    """The weights; those of a role that shares its start's are its adapters, or, of a frozen one, a copy of them."""
    width = width if sizes.cut is None else sizes.cut.stored
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


def add_training(
    estimate: Estimate, config: Config, role: Role, sizes: Sizes, width: int, load: Load
) -> None:
    """Gradients, optimizer and one update, over what `Backbone.trained_parameters` holds."""
    shape, count = sizes.shape, sizes.trained
    on_gpu = estimate.kind == "cuda"
    stored = width if sizes.cut is None else sizes.cut.stored
    lower = "lora.rank or lora.targets" if sizes.adapters else "lora.rank=16 trains adapters alone"
    gradients = Part(f"{role.name} gradients", 4 * count, lower)
    # float32: the parameters are their own masters (training/optimizer.py)
    state = count * (8 if stored == 4 else 12)
    optimizer = Part(
        f"{role.name} optimizer", state, f"train.offload_optimizer=true, or {lower}" if on_gpu else lower
    )
    if config.train.offload_optimizer and on_gpu:
        estimate.phases[f"{role.name} optimizer step"] = [gradients, optimizer]
    else:
        estimate.always.append(optimizer)
    slices = 1 if sizes.cut is None else sizes.cut.slices
    tokens = -(-tokens_at_once(config, load, estimate.kind) // slices)
    parts = [gradients, _activations(config, sizes, width, tokens)]
    if sizes.cut is not None and sizes.cut.gathered:
        # a layer's gradient in the dtype of the pass, and the float32 copy that is added up over ranks
        parts += [
            gathered_part(sizes.cut, width),
            Part("gradients being summed", (width + 4) * sizes.cut.summed),
        ]
    whole = min(int(tokens * load.shared), -(-load.rows_per_update * load.longest // slices))
    if whole > tokens:
        # queries, keys, values and results are laid out sequence by sequence for attention
        kept = 1 if config.model.gradient_checkpointing else shape.layers
        copies = kept * whole * width * 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        parts.append(Part("attention over shared prompts", copies, "train.tokens_per_microbatch"))
    if sizes.has_vocabulary and (sizes.cut is None or sizes.cut.has_head):
        chunk = min(LOGIT_CHUNK_BYTES["cuda" if on_gpu else "cpu"], 4 * shape.vocab * tokens)
        parts.append(Part("logits", LOGIT_CHUNKS_ALIVE * chunk))
        if sizes.adapters is None:
            head = shape.vocab * shape.hidden * (4 if width == 4 else 6)
            parts.append(Part("output head's gradient", head))
    estimate.phases[f"{role.name} update"] = parts


def weights_in_turn(
    estimate: Estimate, config: Config, models: Mapping[Role, Sizes]
) -> dict[str, list[Part]]:
    """With `train.offload_parameters` on CUDA: the weights of each role, which are there in its own phases alone.

    A role that shares its start's weights has them in its turn as well. Empty where all are there all the time.
    """
    if not config.train.offload_parameters or estimate.kind != "cuda":
        return {}
    own = {
        role.name: [p for p in estimate.always if p.what in (f"{role.name} weights", f"{role.name} adapters")]
        for role in models
    }
    in_turn = [part for parts in own.values() for part in parts]
    estimate.always = [part for part in estimate.always if part not in in_turn]
    for role, sizes in models.items():
        if role.start is not None and sizes.shares:
            own[role.name] = own[role.start.name] + own[role.name]
    for name, parts in own.items():
        phases = [phase for phase in estimate.phases if phase.startswith(f"{name} ")]
        for phase in phases or [f"{name} pass"]:
            estimate.phases[phase] = parts + estimate.phases.get(phase, [])
    return own


def gathered_part(cut: Cut, width: int) -> Part:
    return Part("layers gathered from zero3", width * cut.gathered)


def tokens_at_once(config: Config, load: Load, kind: str | None = None) -> int:
    """The most tokens of one forward and backward pass; fewer where rows share a prompt, which is computed once.

    `kind` of device, cpu or cuda (default: that of run.device).
    """
    parts = config.train.microbatches_per_update
    if parts is not None:
        return -(-load.rows_per_update // parts) * load.longest
    on_cpu = (kind or resolve_device(config.run.device).type) == "cpu"
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
    passes = 1 if sizes.cut is None else sizes.cut.passes
    what = f"activations of up to {tokens:,} tokens" + (f" x {passes} micro-batches" if passes > 1 else "")
    return Part(what, tokens * (passes * kept + ends + passing), lower)


def rollout_parts(config: Config, shape: ModelShape, width: int, load: Load, room: int) -> list[Part]:
    """The KV cache as rollout/native/engine.py sizes it, and what one forward pass and one draw need beside it."""
    r = config.rollout
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * width
    if r.kv_cache_tokens is not None:
        tokens = r.kv_cache_tokens
    else:
        blocks = load.rows_at_once * (-(-load.longest // BLOCK_TOKENS) + 1)
        tokens = min(blocks * BLOCK_TOKENS, int(room * FREE_MEMORY_SHARE) // per_token)
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
