"""What the processes of tests/training/test_weight_sync.py do; what they return is compared there."""

from __future__ import annotations

import gc
import math
from typing import Any

import mesh_run
import torch
import torch.distributed as dist
from mesh_run import step

from headrace.errors import HeadraceError
from headrace.models.causal_lm import CausalLM
from headrace.models.load_sharded import empty_on_mesh
from headrace.models.mesh import Mesh, Parallelism
from headrace.models.sharding import shard_model
from headrace.models.shards import local
from headrace.reshard.model_layout import ModelRanks, same_layout
from headrace.rollout.engine import Request, SamplingParams
from headrace.rollout.native.engine import NativeEngine
from headrace.training.torch_engine import TorchEngine
from headrace.training.weight_sync import WeightSync

BUCKET = 4096
"""Bytes: smaller than most parameters."""

Axes = dict[str, int]
Pair = tuple[Axes, list[int], Axes, list[int]]
"""(parallelism and ranks of the model that trains, of the one that generates)."""


def label(pair: Pair) -> str:
    train, a, rollout, b = pair
    where = "" if a == b else f" on {a} to {b}"
    return f"{mesh_run.label(train) or 'one'} to {mesh_run.label(rollout) or 'one'}{where}"


def model_of(kind: str) -> CausalLM:
    """`kind`: an architecture, "tied" or "untied", and its number of key/value heads; the same in every process."""
    name, tied, heads = kind.split()
    return mesh_run.build(name, tied == "tied", int(heads))


def everything(cases: list[tuple[Pair, str]], folders: dict[str, str], others: bool) -> dict[str, Any]:
    """Each pair of layouts with its kind of model (`folders`: their configurations), and `others`: the other checks."""
    meshes = Meshes()
    gc.collect()
    gc.freeze()  # what libraries made need not be looked through each time
    out = {f"{label(pair)}, {kind}": two_syncs(pair, kind, folders[kind], meshes) for pair, kind in cases}
    if others:
        kind, folder = next(iter(folders.items()))
        out["bfloat16"] = in_bfloat16(kind, folder, meshes)
        out["refusals"] = refusals(kind, folder, meshes)
    return out


class Meshes(dict[str, Mesh]):
    """The meshes that this process has made."""

    def of(self, axes: Axes, ranks: list[int]) -> Mesh | None:
        """None where this process is not in it."""
        if dist.get_rank() not in ranks:
            return None
        key = f"{axes} {ranks}"
        if key not in self:
            self[key] = Mesh(Parallelism(**axes), ranks=ranks)
        return self[key]


def pair_of(pair: Pair) -> tuple[ModelRanks, ModelRanks]:
    train, a, rollout, b = pair
    return ModelRanks(tuple(a), Parallelism(**train)), ModelRanks(tuple(b), Parallelism(**rollout))


def engine_on(mesh: Mesh, kind: str, dtype: torch.dtype = torch.float32) -> TorchEngine:
    model = model_of(kind)
    model.hf.to(dtype)
    shard_model(model, mesh)
    return mesh_run.engine_of(model, "policy")


def two_syncs(pair: Pair, kind: str, folder: str, meshes: Meshes) -> dict[str, Any]:
    """An update and a sync, twice, the rollout model's memory given up between; what it has and says at the end."""
    train, a, rollout, b = pair
    if dist.get_rank() not in {*a, *b}:
        return {}
    source_mesh, target_mesh = meshes.of(train, a), meshes.of(rollout, b)
    engine = None if source_mesh is None else engine_on(source_mesh, kind)
    target = (
        None if target_mesh is None else empty_on_mesh(folder, target_mesh, tokenizer=mesh_run.NO_TOKENIZER)
    )
    empty = memory(target, None)
    sync = WeightSync(*pair_of(pair), engine.model if engine else None, target, bucket_bytes=BUCKET)
    out: dict[str, Any] = {"reports": [], "bytes": [empty], "live": []}
    for number in range(2):
        if engine is not None and source_mesh is not None:
            step(engine, number, source_mesh)
        if number:
            sync.free()
            out["bytes"].append(memory(target, engine))
        report = sync.run()
        out["reports"].append({k: v for k, v in vars(report).items() if k != "ms"})
        out["bytes"].append(memory(target, engine))
    out["live"].append(live_bytes())
    sync.run()
    sync.free()
    sync.run()
    out["live"].append(live_bytes())
    if engine is not None:
        out["whole"] = {
            k.removeprefix("weight/"): v.clone()
            for k, v in engine.state_dict().tensors.items()
            if "weight/" in k
        }
    if target is not None:
        shards = target.shards
        for name, p in target.hf.named_parameters():
            ranges = [[r.start, r.stop] for r in shards.ranges(name, shards.shape(name, p))]
            out.setdefault("held", {})[name] = [p.detach().clone(), ranges]
        out |= outputs(target)
    return out


def outputs(model: CausalLM) -> dict[str, Any]:
    """Log-probabilities of all rows, and greedy generations."""
    engine = TorchEngine(model, prefix="rollout", tokens_per_microbatch=24)
    logprobs = engine.outputs(mesh_run.global_batch(1)).logprobs
    assert logprobs is not None
    native = NativeEngine(model, max_concurrent_sequences=3, block_tokens=4, kv_cache_tokens=96)
    requests = [Request((3, 1, 4), (0,)), Request((1, 5, 9, 2, 6), (0,)), Request((53,), (0,))]
    greedy = native.generate(requests, SamplingParams(max_new_tokens=12, temperature=0.0))
    return {"logprobs": logprobs, "ids": [c.token_ids for group in greedy for c in group]}


def memory(model: CausalLM | None, source: TorchEngine | None) -> int:
    """Bytes of the model's parameters that are not the source's."""
    if model is None:
        return 0
    theirs = {storage(p) for p in source.model.hf.parameters()} if source else set()
    own = {storage(p): local(p).untyped_storage().nbytes() for p in model.hf.parameters()}
    return sum(size for where, size in own.items() if where not in theirs)


def storage(parameter: torch.Tensor) -> int:
    return local(parameter).untyped_storage().data_ptr()


def live_bytes() -> int:
    """Of all tensors in this process."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    found = [o for o in gc.get_objects() if type(o) in kinds and o.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def in_bfloat16(kind: str, folder: str, meshes: Meshes) -> dict[str, Any]:
    """Float32 shards under zero3 into a bfloat16 model."""
    pair: Pair = ({"zero3": 2}, [0, 1], {"dp_replicate": 2}, [0, 1])
    source_mesh, target_mesh = meshes.of(*pair[:2]), meshes.of(*pair[2:])
    assert source_mesh is not None
    assert target_mesh is not None
    engine = engine_on(source_mesh, kind, torch.bfloat16)
    target = empty_on_mesh(folder, target_mesh, tokenizer=mesh_run.NO_TOKENIZER, dtype=torch.bfloat16)
    step(engine, 0, source_mesh)
    report = WeightSync(*pair_of(pair), engine.model, target).run()
    whole = {k: v.clone() for k, v in engine.state_dict().tensors.items() if "weight/" in k}
    return {
        "moved": report.bytes_moved,
        "whole": whole,
        "held": {f"weight/{n}": p.detach().clone() for n, p in target.hf.named_parameters()},
    }


def refusals(kind: str, folder: str, meshes: Meshes) -> dict[str, str]:
    """What every rank says when one of them, or all, come with something wrong; they can go on afterwards."""
    rank = dist.get_rank()
    zero3, dp = {"zero3": 2}, {"dp_replicate": 2}
    source_mesh, target_mesh = meshes.of(zero3, [0, 1]), meshes.of(dp, [0, 1])
    assert source_mesh is not None
    assert target_mesh is not None
    train, rollout = pair_of((zero3, [0, 1], dp, [0, 1]))
    source = engine_on(source_mesh, kind).model
    assert isinstance(source, CausalLM)
    target = empty_on_mesh(folder, target_mesh, tokenizer=mesh_run.NO_TOKENIZER)
    said = {}

    def attempt(name: str, work: Any) -> None:
        try:
            work()
            said[name] = "nothing"
        except HeadraceError as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("no model", lambda: WeightSync(train, rollout, source, None if rank else target))
    tp = ModelRanks((0, 1), Parallelism(tp=2))
    attempt("other parallelism", lambda: WeightSync(tp, rollout, source, target))
    attempt("order", lambda: WeightSync(ModelRanks((1, 0), train.parallelism), rollout, source, target))
    attempt("cut target", lambda: WeightSync(rollout, train, target, source))
    other = mesh_run.build("llama", False)
    attempt("other model", lambda: WeightSync(ModelRanks(), rollout, None if rank else other, target))
    attempt("too many", lambda: ModelRanks((0, 1, 2), Parallelism(tp=2)))
    attempt("no such rank", lambda: WeightSync(train, ModelRanks((rank + 5,)), source, target))
    sync = WeightSync(train, rollout, source, target)
    norm = source.hf.get_parameter("model.norm.weight")
    if rank == 1:
        target.hf.get_parameter("model.norm.weight").data = torch.zeros(3, dtype=torch.float64)
    attempt("changed dtype", sync.run)
    if rank == 1:
        target.hf.get_parameter("model.norm.weight").data = torch.zeros(0)
    attempt("good again", sync.run)
    assert same_layout(rollout, rollout)
    assert not same_layout(train, train)
    assert not same_layout(rollout, tp)
    assert math.isfinite(float(local(norm).sum()))
    return said
