"""Every setting of a run: typed, documented once, checked all at once. Loading and overrides: config_load.py.

Batch sizes carry their unit in their name; times end in `_s`, bytes in `_bytes`, ratios in `_fraction`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config_algorithm import AlgorithmConfig
from headrace.config_presets import GROUPED_ADVANTAGES
from headrace.config_section import Section, key

SHORTHAND = {
    "model": "path",
    "data": "path",
    "reward": "function",
    "algorithm": "name",
    "eval": "path",
    "critic": "path",
    "reference": "path",
    "agent": "environment",
    "cluster": "layout",
}
"""The key that a section given as a single string sets (`model: Qwen/Qwen2.5-0.5B`)."""


class RunConfig(Section):
    name: str | None = key(None, "name of the run directory (default: <algorithm>-<date>-<time>)")
    dir: str = key("runs", "folder that holds run directories")
    seed: int = key(0, "seed of everything random in the run", ge=0, le=2**32 - 1)
    device: str = key("auto", "auto | cpu | cuda | cuda:N", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    overwrite: bool = key(False, "replace an existing run directory of the same name")
    tensorboard: bool = key(True, "write TensorBoard event files")
    samples_per_step: int = key(4, "responses written to samples.jsonl each step", "samples", ge=0)
    progress: Literal["auto", "live", "plain", "off"] = key(
        "auto",
        "live: a display that redraws; plain: one line a step, more in long ones; auto: live on a terminal, else plain",
    )
    save_final: bool = key(True, "save the trained model as a Hugging Face folder at the end")
    resume: bool = key(False, "continue the run in run.dir/run.name from its latest checkpoint")


class ModelConfig(Section):
    path: str | None = key(
        None, "Hugging Face folder, hub id, .gguf file or adapter folder of the policy (the actor)"
    )
    tokenizer: str | None = key(None, "tokenizer folder or hub id (default: model.path)")
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "dtype that training and rollout compute in; the optimizer always keeps float32 weights"
    )
    chat_template: str | None = key(None, "file with a Jinja chat template that replaces the tokenizer's")
    trust_remote_code: bool = key(False, "run Python code that comes with the model folder")
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass to save memory")


class LoraConfig(Section):
    rank: int | None = key(
        None, "rank of the LoRA adapters, which then train alone; null or 0: all weights train", ge=0
    )
    alpha: float = key(32.0, "scale of the adapters: weights are W + alpha / rank x B A", gt=0)
    targets: list[str] = key(
        ["all-linear"],
        "linear layers that get adapters, by the end of their names, such as [q_proj, v_proj]; all-linear: every"
        " one below the output head",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class DataConfig(Section):
    path: str | None = key(
        None, "hub data set id, .jsonl/.json/.csv/.parquet file, or path/to/file.py:function"
    )
    subset: str | None = key(None, "configuration name of a hub data set (such as 'main')")
    split: str = key("train", "split of a hub data set")
    prompt: str | None = key(
        None,
        "column with the prompt, text or chat messages (default: the one of prompt, question, problem, "
        "instruction, query, messages that exists)",
    )
    completion: str | None = key(
        None,
        "sft: column with the target response (default: the one of completion, response, answer, output)",
    )
    chosen: str | None = key(
        None,
        "reward-model, dpo: column with the better response, or whole text or conversation (default: chosen)",
    )
    rejected: str | None = key(
        None,
        "reward-model, dpo: column with the worse one, of the same form (default: rejected)",
    )
    template: str | None = key(None, "prompt text with {column} fields, used instead of data.prompt")
    system_prompt: str | None = key(None, "system message put before every chat prompt")
    format: Literal["auto", "chat", "plain"] = key(
        "auto",
        "chat: apply the chat template; plain: the text as it is; auto: chat where the tokenizer has a template",
    )
    max_prompt_tokens: int = key(1024, "longest prompt", "tokens", ge=1)
    over_limit: Literal["error", "drop", "truncate_left"] = key(
        "error", "what happens to a longer prompt; counted"
    )
    shuffle: bool = key(True, "a new order every epoch, drawn from run.seed")
    limit_rows: int | None = key(None, "use only the first rows", "rows", ge=1)


class EvalConfig(Section):
    path: str | None = key(None, "held-out data set, read like data.path (default: no evaluation)")
    subset: str | None = key(None, "configuration name of a hub data set")
    split: str = key("test", "split of a hub data set")
    limit_rows: int | None = key(None, "use only the first rows", "rows", ge=1)
    every_steps: int = key(
        0, "evaluate every so many steps; 0: only before the first and after the last", "steps", ge=0
    )
    temperature: float = key(0.0, "sampling temperature of evaluation; 0 is greedy", ge=0)
    samples_per_prompt: int = key(1, "responses per prompt in evaluation", "samples", ge=1, le=65536)


class RolloutConfig(Section):
    samples_per_prompt: int = key(
        8, "responses drawn per prompt (the group of GRPO)", "samples", ge=1, le=65536
    )
    temperature: float = key(
        1.0, "sampling temperature; log-probabilities are computed at this temperature", gt=0
    )
    top_k: int = key(0, "sample from the k likeliest tokens; 0: all", "tokens", ge=0)
    top_p: float = key(
        1.0, "sample from the smallest set of tokens with this probability; 1: all", gt=0, le=1
    )
    min_p: float = key(
        0.0, "drop tokens below this share of the likeliest token's probability; 0: off", ge=0, lt=1
    )
    max_new_tokens: int = key(256, "longest response", "tokens", ge=1)
    min_new_tokens: int = key(0, "no end of sequence before this many tokens", "tokens", ge=0)
    stop: list[str] = key([], "strings that end a response (kept in it)")
    stop_token_ids: list[int] = key([], "token ids that end a response, besides the model's own end ids")
    max_sequence_tokens: int | None = key(
        None, "longest prompt + response (default: what the model's positions allow)", "tokens", ge=2
    )
    max_concurrent_sequences: int = key(256, "sequences generated at the same time", "sequences", ge=1)
    kv_cache_tokens: int | None = key(
        None, "tokens the KV cache holds (default: from the need and free memory)", "tokens", ge=16
    )
    replay_steps: bool = key(
        True,
        "record the forward pass of a decode step and replay it without the modules' own code: on a CPU, and on CUDA in"
        " half precision; false for models whose code has to be called each time",
    )
    staleness: int = key(
        0,
        "0: a step's rollout has the weights after the step before; 1: it is made while that step trains, with the"
        " weights from before it; needs rollouts on devices of their own, and algorithm.importance_weights",
        "steps",
        ge=0,
        le=1,
    )


class RewardConfig(Section):
    function: str | None = key(
        None, "path/to/file.py:function, package.module:function, or exact_match | numeric_match"
    )
    model: str | None = key(
        None, "folder or hub id of a reward model with one scalar output; added to the function's reward"
    )
    max_concurrency: int = key(32, "async reward and environment calls in flight", "calls", ge=1)


class AgentConfig(Section):
    environment: str | None = key(
        None,
        "path/to/file.py:Class or package.module:Class; answers the model turn by turn (default: one response, no turns)",
    )
    max_turns: int = key(
        8, "responses of the model in an episode; rollout.max_new_tokens bounds all of them", "turns", ge=1
    )
    timeout_s: float = key(
        60.0, "longest call of the environment; a longer one ends its episode, which is left out", "s", gt=0
    )


class CriticConfig(Section):
    path: str | None = key(None, "model the critic starts from (default: model.path)")
    learning_rate: float = key(1e-5, "peak learning rate of the critic", gt=0)
    value_clip: float | None = key(0.2, "clip of the value change in the value loss; null: off", gt=0)
    warmup_steps: int = key(0, "steps in which only the critic learns", "steps", ge=0)


class ReferenceConfig(Section):
    path: str | None = key(None, "frozen reference model (default: the actor as it starts)")


class PreferenceConfig(Section):
    beta: float = key(
        0.1, "dpo: weight of the log-ratio to the reference; larger stays nearer to the reference", gt=0
    )


class TrainConfig(Section):
    steps: int | None = key(
        None,
        "steps of the run; for sft, reward-model and dpo: optimizer updates (default: train.epochs)",
        "steps",
        ge=1,
    )
    epochs: float = key(1.0, "passes over the data set, when train.steps is not given", "epochs", gt=0)
    prompts_per_step: int = key(32, "prompts per rollout step", "prompts", ge=1)
    samples_per_update: int | None = key(
        None,
        "samples per optimizer update (default: all of the step, so one update; sft: 32; reward-model, dpo: 32 pairs)",
        "samples",
        ge=1,
    )
    passes_per_step: int = key(1, "times each step's samples are gone through (PPO epochs)", "passes", ge=1)
    tokens_per_microbatch: int = key(16384, "token budget of one forward and backward pass", "tokens", ge=1)
    microbatches_per_update: int | None = key(
        None,
        "split each update into this many micro-batches instead of by token budget",
        "micro-batches",
        ge=1,
    )
    learning_rate: float = key(1e-6, "peak learning rate of the actor, or of the reward model", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "learning rate after warm-up, counted in updates"
    )
    min_learning_rate_fraction: float = key(
        0.0, "share of the peak that linear and cosine end at", ge=0, le=1
    )
    warmup_updates: int = key(0, "updates over which the learning rate rises from 0", "updates", ge=0)
    weight_decay: float = key(0.0, "AdamW weight decay (matrices only, no biases or norms)", ge=0)
    adam_beta1: float = key(0.9, "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = key(0.999, "AdamW beta 2", ge=0, lt=1)
    adam_epsilon: float = key(1e-8, "AdamW epsilon", gt=0)
    max_grad_norm: float | None = key(1.0, "global gradient norm is clipped to this; null: off", gt=0)
    offload_optimizer: bool = key(False, "keep optimizer state in CPU memory between updates")
    offload_parameters: bool = key(
        False,
        "keep a model's weights in CPU memory while stages of other models of its process have the device",
    )
    max_skipped_updates: int = key(10, "stop after so many non-finite updates in a row", "updates", ge=1)


class CheckpointConfig(Section):
    every_steps: int = key(
        50,
        "write a checkpoint every so many steps; 0: only at the end, at Ctrl-C and for the best evaluation",
        "steps",
        ge=0,
    )
    keep: int = key(2, "newest checkpoints kept, besides the best; 0: write none at all", "checkpoints", ge=0)
    allow_changed: list[str] = key(
        [],
        "settings that may differ from the checkpoint's when a run is resumed, such as train.learning_rate",
    )


class ClusterConfig(Section):
    """Where a run's models are; read by cluster/layouts.py. Without any of it: on one device, in one process."""

    layout: str | dict[str, Any] | None = key(
        None,
        "hosts, groups and which role runs where: a template such as gpu_8, a .yaml file, or a mapping",
    )
    parallelism: dict[str, int | bool] = key(
        {}, "degrees {dp, sp, tp, pp, zero3} of every role that the layout gives none"
    )
    num_gpus: int | None = key(
        None,
        "GPUs of the run, which picks a layout where none is given (default: what run.device finds)",
        "GPUs",
        ge=0,
    )
    communication_backend: Literal["auto", "nccl", "gloo"] = key("auto", "no effect on one device")
    hybrid_engine_mode: Literal["optimized"] = key(
        "optimized", "optimized: trainer and rollout share one set of weights"
    )
    timeout_s: float = key(
        1800.0,
        "longest call of a worker, and longest wait for the others; no effect on one device",
        "s",
        gt=0,
    )

    @field_validator("parallelism", mode="before")
    @classmethod
    def _degrees(cls, value: Any) -> Any:
        problems = []
        for name, degree in value.items() if isinstance(value, dict) else ():
            if name not in ("dp", "sp", "tp", "pp", "zero3"):
                problems.append(f"unknown degree {name}; the degrees are dp, sp, tp, pp and zero3")
            elif not isinstance(degree, int) or (degree < 1 and degree is not False):
                problems.append(f"{name} is {degree!r}; expected a whole number of at least 1")
        if problems:
            raise ValueError("; ".join(problems))
        return value


class Config(Section):
    """A whole run. Sections given as a single string set their first key (`model: Qwen/Qwen2.5-0.5B`)."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    preference: PreferenceConfig = Field(default_factory=PreferenceConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            return {
                k: {SHORTHAND[k]: v} if isinstance(v, str) and k in SHORTHAND else v for k, v in raw.items()
            }
        return raw

    @property
    def samples_per_step(self) -> int:
        return self.train.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of the actor in one step."""
        per_update = self.train.samples_per_update or self.samples_per_step
        return self.train.passes_per_step * (self.samples_per_step // per_update)


Command = Literal["train", "sft", "reward-model", "dpo", "eval"]


def violations(config: Config, command: Command = "train") -> list[str]:
    """Everything wrong with a configuration that can be known without touching data or model, all at once."""
    out: list[str] = []
    c = config
    if c.model.path is None:
        out.append("model.path: not given; set it to a Hugging Face folder, a hub id or a .gguf file")
    if command != "eval" and c.data.path is None:
        out.append(
            "data.path: not given; set it to a data set id, a .jsonl/.csv/.parquet file or file.py:function"
        )
    if command == "eval" and c.eval.path is None and c.data.path is None:
        out.append("eval.path: not given; set it to the held-out data set")
    rewarded = c.reward.function or c.reward.model or c.agent.environment
    if command in ("train", "eval") and not rewarded:
        out.append("reward.function: not given; set it to path/to/file.py:function (or set reward.model)")
    if command == "train":
        out += step_violations(c, grouped=c.algorithm.advantage in GROUPED_ADVANTAGES)
    return out + setting_violations(c)


def setting_violations(c: Config) -> list[str]:
    """Settings that contradict each other or this version, whatever the command."""
    out: list[str] = []
    if c.data.template is not None and c.data.prompt is not None:
        out.append("data.prompt: not used, because data.template is given; drop one of them")
    if "" in c.rollout.stop:
        out.append("rollout.stop: an empty text would end every response at once; remove it")
    if min(c.rollout.stop_token_ids, default=0) < 0:
        out.append(f"rollout.stop_token_ids: {min(c.rollout.stop_token_ids)} is no token id; remove it")
    if c.rollout.min_new_tokens > c.rollout.max_new_tokens:
        out.append(
            f"rollout.min_new_tokens: {c.rollout.min_new_tokens} is more than rollout.max_new_tokens"
            f" ({c.rollout.max_new_tokens})"
        )
    if not c.lora.targets or "" in c.lora.targets:
        out.append("lora.targets: names no layer; give names such as [q_proj, v_proj], or all-linear")
    for name in ("alpha", "targets"):
        if not c.lora.rank and getattr(c.lora, name) != getattr(LoraConfig(), name):
            out.append(f"lora.{name}: not used without lora.rank; set lora.rank, such as 16, or drop it")
    if c.cluster.num_gpus == 0 and c.run.device.startswith("cuda"):
        out.append("cluster.num_gpus: 0 contradicts run.device 'cuda'; drop one of them")
    return out


def step_violations(c: Config, *, grouped: bool) -> list[str]:
    """Batch arithmetic and settings that contradict each other; `grouped` when samples of a prompt are compared."""
    out: list[str] = []
    a, per_update = c.algorithm, c.train.samples_per_update
    if grouped and c.rollout.samples_per_prompt == 1:
        out.append(
            f"rollout.samples_per_prompt: {a.advantage} compares the samples of a prompt with each other and needs at"
            " least 2 (a group of one has no spread)"
        )
    if per_update is not None and c.samples_per_step % per_update:
        out.append(
            f"train.samples_per_update: {per_update} does not divide the step's {c.samples_per_step} samples"
            f" (train.prompts_per_step {c.train.prompts_per_step} x rollout.samples_per_prompt"
            f" {c.rollout.samples_per_prompt})"
        )
    per_update = per_update or c.samples_per_step
    if c.train.microbatches_per_update is not None and c.train.microbatches_per_update > per_update:
        out.append(
            f"train.microbatches_per_update: {c.train.microbatches_per_update} micro-batches cannot be filled from"
            f" the {per_update} samples of an update"
        )
    elif a.filter_groups and c.rollout.samples_per_prompt == 1:
        out.append(
            "rollout.samples_per_prompt: algorithm.filter_groups drops every group of one sample, whose reward cannot"
            " differ from another; use at least 2, or set algorithm.filter_groups to false"
        )
    if a.kl_target is not None and a.kl_coefficient == 0:
        out.append(
            "algorithm.kl_target: changes algorithm.kl_coefficient by a share of itself, which is 0; set that above 0"
        )
    if a.divisor_tokens is not None and a.reduction != "constant":
        out.append(
            f"algorithm.divisor_tokens: only used by reduction 'constant', but the reduction is '{a.reduction}'"
        )
    if c.reference.path is not None and a.kl_coefficient == 0:
        out.append(
            "reference.path: given, but algorithm.kl_coefficient is 0, so it would never be used; set one of them"
        )
    if (
        c.rollout.max_sequence_tokens is not None
        and c.rollout.max_new_tokens >= c.rollout.max_sequence_tokens
    ):
        out.append(
            f"rollout.max_new_tokens: {c.rollout.max_new_tokens} leaves no room for a prompt in"
            f" rollout.max_sequence_tokens ({c.rollout.max_sequence_tokens})"
        )
    return out
