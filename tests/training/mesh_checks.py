"""What the processes of tests/training/test_mesh_*.py do; what they return is compared there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mesh_run
import torch
import torch.distributed as dist
from mesh_run import Case, key, make, run, step
from safetensors.torch import load_file

from headrace.checkpoint.export import save_hf_folder
from headrace.checkpoint.files import write_tensors
from headrace.checkpoint.parts import TensorParts, part_path
from headrace.errors import HeadraceError
from headrace.models.attention import PackedAttention
from headrace.models.causal_lm import CausalLM, OutputHead, ScalarModel
from headrace.models.hf import copy_causal_lm
from headrace.models.load_sharded import Head, load_onto_mesh
from headrace.models.logprobs import token_logprobs
from headrace.models.mesh import Mesh, Parallelism
from headrace.models.sharding import shard_model
from headrace.models.shards import local
from headrace.models.tensor_parallel import VocabShard
from headrace.rollout.engine import Request, SamplingParams
from headrace.rollout.native.engine import NativeEngine
from headrace.training.engine import TrainingState
from headrace.training.passes import Pass
from headrace.training.torch_engine import TorchEngine

Layout = dict[str, int]


def everything(layouts: list[Layout], cases: list[Case], folders: dict[str, str]) -> dict[str, Any]:
    """Each case under each layout, and with model `folders` (two processes) all other checks."""
    out: dict[str, Any] = {}
    meshes = {mesh_run.label(layout): Mesh(Parallelism(**layout)) for layout in layouts}
    for layout in layouts:
        mesh = meshes[mesh_run.label(layout)]
        for case in cases:
            deep = mesh_run.num_layers(case[0]) > 2
            if case[0] in ("gpt2", "qwen3+lora") and layout != {"sp": 2}:
                continue
            if mesh_run.fits(mesh, case[0]) and ("pp" in layout or not deep):
                checkpointing = case[0] == "qwen2"
                out[key(layout, case)] = run(make(*case, mesh, checkpointing=checkpointing), mesh)
    if folders:
        all_meshes = meshes
        meshes = {name: mesh for name, mesh in meshes.items() if mesh_run.fits(mesh, "of 2 layers")}
        out["skip"] = {name: skip(mesh) for name, mesh in meshes.items()}
        out["move"] = move_state(list(all_meshes.values())[1:], Path(folders.pop("state")))
        out["rows"] = row_by_row(meshes["sp2"])
        out["kept_bytes"] = kept_bytes(meshes["sp2"])
        out["vocab"] = vocabulary_parallel(meshes["tp2"])
        out["bfloat16"] = {name: bfloat16(mesh) for name, mesh in meshes.items()}
        out["rollout"] = sampled(meshes["tp2"], folders["untied"])
        out["wrong"] = wrong_on_the_last_stage(meshes["pp2"], folders["untied"])
        out["load"] = {
            f"{name} {kind}": load(mesh, folder, kind)
            for name, mesh in meshes.items()
            for kind, folder in folders.items()
        }
    return out


def load(mesh: Mesh, folder: str, kind: str) -> dict[str, Any]:
    """A folder's model loaded onto the mesh, its parts in memory, and one update of it."""
    head: Head = "new scalar" if kind == "critic" else "vocabulary"
    whole_loads: list[str] = []
    logging.getLogger("headrace.models.load_sharded").addFilter(
        lambda record: whole_loads.append(record.getMessage()) is None
    )
    model = load_onto_mesh(folder, mesh, head=head, tokenizer=mesh_run.NO_TOKENIZER)
    engine = mesh_run.engine_of(model, "policy" if head == "vocabulary" else "value")
    memory = {id(p): local(p).untyped_storage().nbytes() for p in model.hf.parameters()}
    return {
        "whole_loads": whole_loads,
        "names": [name for name, _ in model.hf.named_parameters()],
        "bytes": sum(memory.values()),
        "metrics": [step(engine, 0, mesh)],
        "tensors": dict(engine.state_dict().tensors),
        "refusals": refusals(engine),
        "saved": saved(model, Path(folder).with_name(f"saved-{label(mesh)}-{kind}")),
        "end_ids": list(model.eos_token_ids) if isinstance(model, CausalLM) else [],
    }


def saved(model: CausalLM | ScalarModel, folder: Path) -> dict[str, torch.Tensor]:
    """What the mesh's first process wrote of the whole model, on that process."""
    model.tokenizer, writes = None, dist.get_rank() == 0
    save_hf_folder(model, folder, writes=writes)
    return load_file(folder / "model.safetensors") if writes else {}


def label(mesh: Mesh) -> str:
    p = mesh.parallelism
    return f"{p.dp_replicate}-{p.zero3}-{p.tp}-{p.sp}"


def refusals(engine: TorchEngine) -> list[str]:
    """What cannot be done with a model in parts."""
    model, said = engine.model, []
    attempts: list[Callable[[], Any]] = [lambda: shard_model(model, model.shards.mesh)]
    if model.shards.is_cut:
        attempts += [lambda: copy_causal_lm(model)]
    if model.shards.mesh.size("pp") > 1:
        ids = torch.arange(3)
        attempts += [lambda: model.hidden_states(ids, ids, PackedAttention([3], "cpu"))]
    for attempt in attempts:
        try:
            attempt()
        except HeadraceError as error:
            said.append(str(error))
    return said


def wrong_on_the_last_stage(mesh: Mesh, folder: str) -> str:
    """What loading says where the forward of the last stage alone is not the model's own."""
    run_layers = CausalLM.run_layers

    def flipped(self: CausalLM, ids: torch.Tensor, positions: torch.Tensor, *more: Any) -> torch.Tensor:
        return run_layers(self, ids, positions.flip(0) if mesh.is_last else positions, *more)

    CausalLM.run_layers = flipped  # type: ignore[method-assign]
    try:
        load_onto_mesh(folder, mesh, tokenizer=mesh_run.NO_TOKENIZER)
    except HeadraceError as error:
        return str(error)
    finally:
        CausalLM.run_layers = run_layers  # type: ignore[method-assign]
    return ""


def sampled(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Tokens and log-probabilities of two samples a prompt from a model that is cut over tp."""
    model = load_onto_mesh(folder, mesh, tokenizer=mesh_run.NO_TOKENIZER)
    assert isinstance(model, CausalLM)
    return rollout(model)


def rollout(model: CausalLM) -> dict[str, Any]:
    requests = [Request((3, 1, 4), (11, 12)), Request((1, 5, 9, 2, 6), (13, 14))]
    engine = NativeEngine(model, max_concurrent_sequences=3, block_tokens=4, kv_cache_tokens=96)
    groups = engine.generate(requests, SamplingParams(max_new_tokens=12, temperature=0.8))
    flat = [c for group in groups for c in group]
    return {"ids": [c.token_ids for c in flat], "logprobs": [c.logprobs for c in flat]}


def skip(mesh: Mesh) -> dict[str, Any]:
    """Two updates, of which the first has a NaN in a row of rank 0."""
    engine = make("llama", True, "value", mesh)
    before = {k: v.clone() for k, v in engine.state_dict().tensors.items()}
    metrics = [step(engine, 0, mesh, spoil=True)]
    state = engine.state_dict()
    unchanged = all(torch.equal(before[k], v) for k, v in state.tensors.items())
    metrics.append(step(engine, 1, mesh))
    return {
        "metrics": metrics,
        "unchanged": unchanged,
        "numbers": engine.state_dict().numbers,
        "tensors": dict(engine.state_dict().tensors),
    }


def row_by_row(mesh: Mesh) -> dict[str, Any]:
    """Outputs of each row by itself, and an update on the shortest."""
    engine = make("qwen3", True, "policy", mesh)
    batch = mesh_run.global_batch(0)
    outputs = [engine.outputs(batch.select([r])).logprobs for r in range(batch.num_rows)]
    shortest = batch.select([mesh_run.ROWS.index((1, 1))])
    metrics = engine.update(shortest, mesh_run.policy_loss()).means()
    return {"logprobs": outputs, "metrics": metrics, "tensors": dict(engine.state_dict().tensors)}


def kept_bytes(mesh: Mesh) -> int:
    """What the layers keep of a pass over all rows for the backward pass, besides the weights."""
    model = make("llama", True, "policy", mesh).model
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = mesh_run.global_batch(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = Pass(model, batch, batch["response_mask"].nonzero().flatten() - 1).run(0, None)
    return sum(kept.values()) if hidden.requires_grad else 0


def move_state(meshes: list[Mesh], folder: Path) -> dict[str, Any]:
    """Five updates under one layout after the other, the state handed on through files that all ranks write."""
    metrics = []
    numbers: dict[str, Any] = {}
    for number in range(mesh_run.UPDATES):
        mesh = meshes[number % len(meshes)]
        engine = make("qwen3/5", True, "policy", mesh)
        if number:
            with torch.no_grad():
                for parameter in engine.model.trained_parameters().values():
                    local(parameter).zero_()
            with TensorParts(sorted(folder.glob(f"{number - 1}-*.safetensors"))) as saved:
                engine.load_state_dict(TrainingState(saved, numbers))
        metrics.append(step(engine, number, mesh))
        state = engine.state_dict()
        numbers = state.numbers
        file = part_path(folder / f"{number}.safetensors", dist.get_rank(), mesh.parallelism.size)
        write_tensors(file, state.tensors)
        dist.barrier()
    return {"metrics": metrics, "tensors": dict(state.tensors), "numbers": numbers}


def vocabulary_parallel(mesh: Mesh) -> dict[str, Any]:
    """Log-probabilities, entropy and gradients from cut logits, float64; whole inputs and gradients of this part."""
    group = mesh.group("tp")
    assert group is not None
    out: dict[str, Any] = {}
    for name, softcap, has_bias in (("plain", None, False), ("softcap and bias", 3.0, True)):
        tensors, targets = vocabulary_inputs()
        shard = VocabShard(mesh_run.VOCAB, group)
        rows = slice(shard.ids.start, shard.ids.stop)
        hidden = tensors["hidden"].requires_grad_()
        weight = tensors["weight"][rows].clone().requires_grad_()
        bias = tensors["bias"][rows].clone().requires_grad_() if has_bias else None
        head = OutputHead(weight, bias, softcap, shard)
        got = token_logprobs(hidden, head, targets, temperature=0.7, chunk_bytes=mesh_run.VOCAB * 8 * 2)
        (got[0] @ tensors["grad_logprobs"] + got[1] @ tensors["grad_entropy"]).backward()
        with torch.no_grad():
            whole = head.logits(hidden)
        out[name] = {
            "logprobs": got[0].detach(),
            "entropy": got[1].detach(),
            "hidden": hidden.grad,
            "weight": weight.grad,
            "bias": torch.zeros(len(shard.ids)) if bias is None else bias.grad,
            "logits": whole,
            "rows": [shard.ids.start, shard.ids.stop],
        }
    return out


def vocabulary_inputs() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    tokens, width = 11, 8
    sizes = {
        "hidden": (tokens, width),
        "weight": (mesh_run.VOCAB, width),
        "bias": (mesh_run.VOCAB,),
        "grad_logprobs": (tokens,),
        "grad_entropy": (tokens,),
    }
    tensors = {k: torch.randn(size, generator=g, dtype=torch.float64) for k, size in sizes.items()}
    tensors["grad_logprobs"][3] = tensors["grad_entropy"][3] = 0.0  # no gradient at all: costs nothing
    return tensors, torch.randint(0, mesh_run.VOCAB, (tokens,), generator=g)


def bfloat16(mesh: Mesh) -> dict[str, Any]:
    engine = make("qwen3", True, "policy", mesh, dtype=torch.bfloat16)
    out = run(engine, mesh)
    out["computes_in"] = str(engine.model.dtype)
    return out


def two_groups() -> dict[str, Any]:
    """Four processes as two groups: a policy over ranks 0 and 2, a critic over 1 and 3, each with its own updates.

    Each makes its own meshes alone, the critic's one more of them.
    """
    if dist.get_rank() % 2 == 0:
        mesh, head = Mesh(Parallelism(tp=2), ranks=[0, 2]), "policy"
    else:
        Mesh(Parallelism(dp_replicate=2), ranks=[1, 3])
        mesh, head = Mesh(Parallelism(zero3=2), ranks=[1, 3]), "value"
    out = run(make("qwen3", True, head, mesh), mesh)
    return {"head": head, **out}
