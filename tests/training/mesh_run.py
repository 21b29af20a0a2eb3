"""Five updates of tiny models, on one process or on each rank of a mesh, and what the tests compare of them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from headrace.algorithms.reduction import token_weights
from headrace.config import AlgorithmConfig, LoraConfig
from headrace.data.batch import Batch
from headrace.models.causal_lm import CausalLM, ScalarModel
from headrace.models.heads import critic_from
from headrace.models.hf import wrap
from headrace.models.mesh import Mesh
from headrace.models.sharding import shard_model
from headrace.models.shards import local
from headrace.observe.metrics import MetricSums
from headrace.roles.role import adapt
from headrace.training.optimizer import OptimizerSettings
from headrace.training.policy_loss import PolicyLoss
from headrace.training.preference_loss import PreferenceLoss, pair_weights
from headrace.training.torch_engine import TorchEngine
from headrace.training.value_loss import ValueLoss

VOCAB = 97  # odd, so that no part of the vocabulary is like another
UPDATES = 5
MAX_GRAD_NORM = 0.3


class NoTokenizer:
    """Stands for a tokenizer where nothing is tokenized."""

    eos_token_id = 5


NO_TOKENIZER = NoTokenizer()

# rows of (prompt, response) tokens; rows of 7 share a prompt
ROWS = [(7, 12), (3, 5), (7, 2), (1, 1), (7, 7), (2, 9), (5, 3), (9, 4), (4, 0), (3, 11)]
# the data-parallel rank (modulo their number) of each row, by update: uneven, and once with nothing for rank 1
OWNERS = [
    [0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 0],
    [1, 0, 0, 1, 1, 1, 0, 0, 1, 0],
]


def build(name: str, tied: bool, kv_heads: int = 2) -> CausalLM:
    """A tiny model, the same in every process; norms and biases are away from their starting values.

    `name`: its kind, and perhaps how many layers it has, "qwen3/5" (default 2).
    """
    import transformers as t

    name, layers = name.partition("/")[0].partition("+")[0], num_layers(name)

    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 256,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": tied,
    }  # fmt: skip
    torch.manual_seed(7)
    kinds: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**shape, attention_bias=True, mlp_bias=True)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**shape)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**shape, head_dim=16)),
        "gemma3": lambda: t.Gemma3ForCausalLM(
            t.Gemma3TextConfig(**shape, head_dim=16, sliding_window=7, final_logit_softcapping=20.0)
        ),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_inner=48,
                n_layer=layers,
                n_head=4,
                n_positions=256,
                bos_token_id=None,
                eos_token_id=None,
                tie_word_embeddings=tied,
            )
        ),
    }
    hf = kinds[name]()
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return wrap(hf, None, verify=False)


def num_layers(name: str) -> int:
    return int(name.partition("/")[2] or 2)


def fits(mesh: Mesh, name: str) -> bool:
    """Whether each stage of a pipeline gets a layer."""
    return mesh.parallelism.pp * mesh.parallelism.pp_chunks <= num_layers(name)


def global_batch(update: int) -> Batch:
    """All rows of an update, with `loss_weight` over the whole of it."""
    g = torch.Generator().manual_seed(100 + update)
    total = sum(p + r for p, r in ROWS)
    mask = torch.cat([torch.tensor([False] * p + [True] * r) for p, r in ROWS])
    ids = torch.randint(0, VOCAB, (total,), generator=g)
    noise = torch.randn(total, generator=g)
    batch = Batch(
        [p + r for p, r in ROWS],
        {
            "input_ids": ids,
            "response_mask": mask,
            "loss_mask": mask,
            "advantages": torch.where(mask, torch.randn(total, generator=g), 0.0),
            "logprobs": torch.where(mask, -5 + 0.3 * noise, 0.0),
            "rollout_logprobs": torch.where(mask, -5 + 0.3 * noise, 0.0),
            "reference_logprobs": torch.where(mask, -5 - 0.2 * noise, 0.0),
            "values": torch.where(mask, 0.1 * noise, 0.0),
            "returns": torch.where(mask, noise, 0.0),
        },
    )
    prompts = [r for r, (p, _) in enumerate(ROWS) if p == 7]
    for row in prompts[1:]:
        batch.row_values("input_ids", row)[:7] = batch.row_values("input_ids", prompts[0])[:7]
    weights = token_weights(mask, batch.offsets, "token_mean")
    return batch.with_columns({"loss_weight": weights})


def rank_rows(update: int, mesh: Mesh) -> torch.Tensor:
    """The rows of this data-parallel rank."""
    p = mesh.parallelism
    rank = mesh.rank("dp_replicate") * p.zero3 + mesh.rank("zero3")
    owners = torch.tensor(OWNERS[update])
    # with four ranks, ranks 2 and 3 take every other row of 0 and 1
    owners = owners + 2 * (torch.arange(len(ROWS)) % 2) if p.dp_replicate * p.zero3 > 2 else owners
    return (owners % (p.dp_replicate * p.zero3) == rank).nonzero().flatten()


def policy_loss() -> PolicyLoss:
    algorithm = AlgorithmConfig(name="grpo", kl_coefficient=0.1, entropy_coefficient=0.01)
    return PolicyLoss(algorithm, measure_gap=False)


def settings() -> OptimizerSettings:
    return OptimizerSettings(1e-3, weight_decay=0.1, max_grad_norm=MAX_GRAD_NORM, adam_epsilon=1e-6)


def make(
    name: str,
    tied: bool,
    head: str,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
) -> TorchEngine:
    """`head`: "policy", "value" or "score" (a reward model)."""
    model: CausalLM | ScalarModel = build(name, tied)
    model.hf.to(dtype)
    if name.endswith("+lora"):
        torch.manual_seed(5)
        adapt(model, LoraConfig(rank=2), "base")
    if head != "policy":
        assert isinstance(model, CausalLM)
        model = critic_from(model)
        torch.manual_seed(3)
        torch.nn.init.normal_(model.hf.score.weight, 0, 0.2)
    if checkpointing:
        model.use_gradient_checkpointing()
    if mesh.parallelism.size > 1:
        shard_model(model, mesh)
    return engine_of(model, head)


def engine_of(model: CausalLM | ScalarModel, head: str) -> TorchEngine:
    return TorchEngine(
        model,
        prefix={"policy": "actor", "value": "critic", "score": "reward_model"}[head],
        temperature=0.7 if head == "policy" else 1.0,
        tokens_per_microbatch=24,
        optimizer=settings(),
        max_skipped_updates=3,
        scores_rows=head == "score",
    )


def loss_of(engine: TorchEngine) -> Any:
    if engine.prefix == "reward_model":
        return PreferenceLoss("reward_model")
    return policy_loss() if engine.prefix == "actor" else ValueLoss(0.2)


def step(engine: TorchEngine, update: int, mesh: Mesh, spoil: bool = False) -> dict[str, float]:
    """One update on this rank's rows; `spoil` makes one gradient of global row 0 NaN."""
    batch = global_batch(update)
    rows = rank_rows(update, mesh)
    if spoil:
        batch.row_values("returns", 0)[-1] = float("nan")
    if engine.scores_rows:
        # pairs of neighbours, each with the rank of its first row
        pairs = torch.arange(batch.num_rows) // 2
        rows = torch.tensor([r for r in range(batch.num_rows) if r // 2 * 2 in rows], dtype=torch.int64)
        batch = batch.without_columns(["loss_weight"]).with_columns(
            {
                "pair_id": pairs,
                "is_chosen": torch.arange(batch.num_rows) % 2 == 0,
                "loss_weight": pair_weights(batch),
            }
        )
    own, pooled = engine.update(batch.select(rows), loss_of(engine)), MetricSums()
    for plain in mesh.from_last(mesh.gather(own.plain())):
        pooled.merge(MetricSums.from_plain(plain))
    return pooled.means()


def run(engine: TorchEngine, mesh: Mesh, first: int = 0, last: int = UPDATES) -> dict[str, Any]:
    """Metrics of each update, this rank's outputs (by row) before and after, and the whole training state."""
    metrics: list[dict[str, float]] = []
    outputs = []
    rows = rank_rows(1, mesh)
    for update in range(first, last):
        metrics.append(step(engine, update, mesh))
    parameters = dict(engine.model.hf.named_parameters())
    own = engine.outputs(global_batch(1).select(rows), with_entropy=True)
    outputs = {k: v for k, v in vars(own).items() if v is not None}
    return {
        "metrics": metrics,
        "rows": rows,
        "has_outputs": mesh.is_last,
        "tied": {name: local(parameters[name].detach()) for name in engine.shards.tied},
        "outputs": outputs,
        "tensors": dict(engine.state_dict().tensors),
    }


def spawn(
    work: Callable[..., dict[str, Any]], world: int, folder: Path, *arguments: Any
) -> list[dict[str, Any]]:
    """Runs `work(*arguments)` in `world` processes that know each other by gloo; what each returned."""
    mp.spawn(_process, (work, world, str(folder), arguments), nprocs=world, join=True)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _process(rank: int, work: Any, world: int, folder: str, arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=world)
    try:
        torch.save(work(*arguments), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
            os._exit(1)  # the others wait for this rank; spawn ends them
    dist.destroy_process_group()


Case = tuple[str, bool, str]


def key(layout: dict[str, int], case: Case) -> str:
    name, tied, head = case
    return f"{label(layout)} {name} {'tied' if tied else 'untied'} {head}"


def label(layout: dict[str, int]) -> str:
    return "x".join(f"{axis}{n}" for axis, n in layout.items())
