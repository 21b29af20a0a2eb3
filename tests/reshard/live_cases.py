"""What each rank does in the tests with real process groups: tiny models, sharded by torch, resharded, compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.errors import ConfigError, RunError
from headrace.reshard.among import Among
from headrace.reshard.box import Box
from headrace.reshard.layout import Layout, Mesh, describe, stages_of_layers
from headrace.reshard.plan import Plan, plan
from headrace.reshard.schedule import peak_extra_bytes
from headrace.reshard.transfer import Report, run, target_tensors

TABLE = {
    "*.q_proj.weight": 0,
    "*.k_proj.weight": 0,
    "*.v_proj.weight": 0,
    "*.o_proj.weight": 1,
    "*.gate_proj.weight": 0,
    "*.up_proj.weight": 0,
    "*.down_proj.weight": 1,
    "*embed_tokens.weight": 0,
    "lm_head.weight": 0,
}
BUCKET = 6000
"""Bytes: smaller than most parameters of the model."""


def model(tied: bool = False, vocabulary: int = 96, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made.to(dtype)


def whole(made: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in made.named_parameters(remove_duplicate=False)}


def fsdp(made: Any, mesh: DeviceMesh) -> Any:
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def tensor_parallel(made: Any, mesh: DeviceMesh) -> Any:
    """By torch's own styles: the embedding and head are split over the vocabulary."""

    styles = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "o_proj": RowwiseParallel(),
        "down_proj": RowwiseParallel(),
    }
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
    plan = {
        name: styles.get(name.split(".")[-1], ColwiseParallel())
        for name, _ in made.named_modules()
        if name.split(".")[-1] in (*styles, *columns)
    }
    return parallelize_module(made, mesh, plan)


def parameters(made: Any) -> dict[str, torch.Tensor]:
    return dict(made.named_parameters(remove_duplicate=False))


def equal_boxes(a: Layout, b: Layout) -> None:
    assert a.world == b.world
    assert set(a.parameters) == set(b.parameters)
    assert dict(a.tied) == dict(b.tied)
    for name in a.parameters:
        assert a.parameters[name].dtype == b.parameters[name].dtype
        for rank in range(a.world):
            one, other = a.box(name, rank), b.box(name, rank)
            assert one == other or (
                one is not None and other is not None and one.shape == other.shape and one.numel == 0
            )


def check_targets(
    made: Plan, rank: int, target: dict[str, torch.Tensor], full: dict[str, torch.Tensor]
) -> None:
    names = 0
    for storage, parameter in made.target.parameters.items():
        box = made.target.box(storage, rank)
        if box is None:
            continue
        for name in made.target.names(storage):
            expected = full[name][(*box.within(everything(full[name])), ...)].to(parameter.dtype)
            assert torch.equal(target[name], expected), name
            names += 1
    assert names == len(target)


def everything(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


class Largest(TorchDispatchMode):
    """The largest new storage that any operation made, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in inputs:
            self.nbytes = max(self.nbytes, found.untyped_storage().nbytes())
        return found


def move(
    source: Layout,
    target: Layout,
    rank: int,
    tensors: dict[str, torch.Tensor],
    full: dict[str, torch.Tensor],
    bucket_bytes: int = BUCKET,
    nest: bool = False,
) -> tuple[Plan, Report]:
    """Reshard, and compare every target tensor with the whole weights, and the report with the plan."""
    made = plan(source, target)
    assert made.bytes_moved == made.bytes_minimum
    into = target_tensors(made, rank, tensors, nest=nest)
    with Largest() as largest:
        report = run(made, rank, tensors, into, bucket_bytes)
    check_targets(made, rank, into, full)
    assert report.sent_bytes == made.sent_bytes[rank]
    assert report.received_bytes == made.received_bytes[rank]
    assert max(largest.nbytes, report.staging_bytes) <= bucket_bytes
    assert report.sent_bytes + report.received_bytes == 0 or report.staging_bytes > 0
    if not nest:
        assert report.new_bytes == made.new_bytes[rank]
        expected = int(peak_extra_bytes(made, bucket_bytes)[rank])
        assert report.peak_extra_bytes <= expected <= made.new_bytes[rank] + bucket_bytes
    return made, report


def zero3_to_others(rank: int, world: int) -> None:
    """FSDP2 of torch over all ranks (97 tokens: uneven) → whole, tensor parallel, pipeline, and back."""
    made = model(vocabulary=97)
    full, described = whole(made), describe(made)
    sharded = fsdp(made, init_device_mesh("cpu", (world,)))
    live = Layout.of_model(sharded)
    equal_boxes(live, Layout.parallel(described[0], Mesh({"dp": world}), zero3="dp"))
    targets = [
        Layout.parallel(described[0], Mesh({"dp": world})),
        Layout.parallel(described[0], Mesh({"dp": world // 2, "tp": 2}), tp=TABLE),
        Layout.parallel(
            described[0], Mesh({"pp": 2, "tp": world // 2}), tp=TABLE, stages=stages_of_layers([1, 1])
        ),
        Layout.parallel(described[0], Mesh({"tp": 2}, [1, 0]), tp=TABLE, world=world),
    ]
    for target in targets:
        move(live, target, rank, parameters(sharded), full)
    # back into the DTensors of the model, from tensors that are whole: nothing moves
    with torch.no_grad():
        for p in sharded.parameters():
            p.to_local().zero_()
    back = plan(targets[0], live)
    assert back.bytes_moved == 0
    run(back, rank, full, parameters(sharded))
    for name, p in sharded.named_parameters():
        assert torch.equal(p.full_tensor(), full[name]), name


def tensor_parallel_to_others(rank: int, world: int) -> None:
    """Torch's tensor parallelism, copies over dp → fewer ways in micro-groups, more ways, whole."""
    made = model()
    full, described = whole(made), describe(made)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    split = tensor_parallel(made, mesh["tp"])
    live = Layout.of_model(split)
    train = Mesh({"dp": world // 2, "tp": 2})
    equal_boxes(live, Layout.parallel(described[0], train, tp=TABLE))
    same, report = move(live, Layout.parallel(described[0], train, tp=TABLE), rank, parameters(split), full)
    assert same.bytes_moved == report.new_bytes == report.copied_bytes == 0
    for target in (Mesh({"tp": world}), Mesh({"tp": 2, "dp": world // 2}), Mesh({"dp": world})):
        move(live, Layout.parallel(described[0], target, tp=TABLE), rank, parameters(split), full)
    stages = stages_of_layers([1, 1])
    staged = Layout.parallel(described[0], Mesh({"pp": 2, "dp": world // 2}), stages=stages)
    move(live, staged, rank, parameters(split), full)


def both_to_others(rank: int, world: int) -> None:
    """FSDP2 over dp on top of tensor parallelism over tp: a strided shard where both split dimension 0."""
    made = model()
    full, described = whole(made), describe(made)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    split = fsdp(tensor_parallel(made, mesh["tp"]), mesh["dp"])
    live = Layout.of_model(split)
    train = Mesh({"dp": world // 2, "tp": 2})
    equal_boxes(live, Layout.parallel(described[0], train, tp=TABLE, zero3="dp"))
    for target in (train, Mesh({"tp": world}), Mesh({"dp": world})):
        move(live, Layout.parallel(described[0], target, tp=TABLE), rank, parameters(split), full)


def tied_and_cast(rank: int, world: int) -> None:
    """Float32 masters of a tied model over FSDP2 → bfloat16; one storage under two names, moved once."""
    made = model(tied=True)
    full, (described, tied) = whole(made), describe(made)
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    live = Layout.of_model(fsdp(made, init_device_mesh("cpu", (world,))))
    assert dict(live.tied) == tied
    narrow = {name: (shape, torch.bfloat16) for name, (shape, _) in described.items()}
    target = Layout.parallel(narrow, Mesh({"dp": world}), tied=tied)
    moved, report = move(live, target, rank, parameters(made), full)
    numel = sum(torch.Size(shape).numel() for shape, _ in described.values())
    assert moved.bytes_moved == 2 * numel * (world - 1)
    assert report.new_bytes == 2 * numel


def tied_across_stages(rank: int, world: int) -> None:
    """A pipeline whose last stage knows the embedding as lm_head.weight only, norms in another dtype → whole."""
    made = model(tied=True, dtype=torch.bfloat16)
    made.model.norm.float()
    full, (described, tied) = whole(made), describe(made)
    described["lm_head.weight"] = described["model.embed_tokens.weight"]
    split = Mesh({"pp": 2, "tp": world // 2})
    stages = stages_of_layers([1, 1])
    staged = Layout.parallel(described, split, tp=TABLE, stages=stages, tied=tied)
    first = rank < world // 2
    own = {}
    for name, tensor in full.items():
        if stages(name) == [0 if first else 1]:
            box = staged.box(name, rank)
            own[name] = tensor[box.within(everything(tensor))].clone()
    assert ("lm_head.weight" in own) == (not first)
    if world == 2:  # whole tensors: what is live can be asked
        equal_boxes(Layout.of_tensors(own, tied=tied), staged)
    target = Layout.parallel(described, Mesh({"dp": world}), tied=tied)
    for bucket_bytes in (BUCKET, 1 << 20):
        made_plan, _ = move(staged, target, rank, own, full, bucket_bytes)
    assert made_plan.received_bytes[rank] == target.bytes_held(rank) - staged.bytes_held(rank)


def uneven_strided(rank: int, world: int) -> None:
    """97 tokens over tp, then over dp: the boxes are those of what the ranks hold."""
    made = model(vocabulary=97)
    full = whole(made)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    live = Layout.of_model(fsdp(tensor_parallel(made, mesh["tp"]), mesh["dp"]))
    for name, tensor in parameters(made).items():
        box = live.box(name, rank)
        assert torch.equal(tensor.to_local(), full[name][(*box.within(everything(full[name])), ...)]), name


def mixed_dtypes(rank: int, world: int) -> None:
    """One message with an odd number of two-byte elements before four- and eight-byte ones, and a single byte."""
    kinds = [torch.int8, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16]
    described = {f"p{i}": ((3 * world,), kind) for i, kind in enumerate(kinds)}
    full = {n: torch.arange(3 * world).to(kind) for n, (_, kind) in described.items()}
    source = Layout.parallel(described, Mesh({"dp": world}), zero3="dp")
    own = {n: t[3 * rank : 3 * rank + 3].clone() for n, t in full.items()}
    _, report = move(source, Layout.parallel(described, Mesh({"dp": world})), rank, own, full)
    assert report.buckets == 1


def nested(rank: int, world: int) -> None:
    """Source shards that become views of the target's memory: the new memory is that of what was missing."""
    made = model()
    full, described = whole(made), describe(made)[0]
    train = Layout.parallel(described, Mesh({"dp": world}), zero3="dp")
    own = {n: t[(*train.box(n, rank).within(everything(t)), ...)].clone() for n, t in full.items()}
    moved, report = move(train, Layout.parallel(described, Mesh({"dp": world})), rank, own, full, nest=True)
    assert report.new_bytes == moved.received_bytes[rank]
    assert report.copied_bytes == 0
    assert all(t.untyped_storage().nbytes() == full[n].nbytes for n, t in own.items())


def wrong_tensors(rank: int, world: int) -> None:
    """One rank's tensor does not fit: all ranks raise before anything is sent, and can go on."""
    described = {"w": ((8, 4), torch.float32)}
    source = Layout.parallel(described, Mesh({"dp": world}), zero3="dp")
    made = plan(source, Layout.parallel(described, Mesh({"dp": world})))
    rows = 8 // world
    good, into = {"w": torch.ones(rows, 4)}, {"w": torch.zeros(8, 4)}
    bad = {"w": torch.ones(rows, 4, dtype=torch.float64)} if rank == 1 else good
    with pytest.raises(
        ConfigError, match="is torch.float64 of shape" if rank == 1 else "another rank was given"
    ):
        run(made, rank, bad, into)
    with pytest.raises(ConfigError, match="target tensor w is missing" if rank == 0 else "another rank"):
        run(made, rank, good, {} if rank == 0 else into)
    with pytest.raises(ConfigError, match="different reshard plans or bucket_bytes"):
        run(made, rank, good, into, 1000 + rank)
    with pytest.raises(ConfigError, match="too small for"):
        run(made, rank, good, into, 8)
    across = torch.zeros(8 + rows, 4)
    mine = {"w": across[:rows]} if rank == 1 else good
    with pytest.raises(ConfigError, match="lies across its source's memory" if rank == 1 else "another rank"):
        run(made, rank, mine, {"w": across[rows:]} if rank == 1 else into)
    run(made, rank, good, into)
    assert torch.equal(into["w"], torch.ones(8, 4))


def untied_tensors(rank: int, world: int) -> None:
    """One storage by the layout, two tensors on rank 1: one of them would be left as it was."""
    described, tied = {"w": ((4, 4), torch.float32), "h": ((4, 4), torch.float32)}, {"h": "w"}
    source = Layout.parallel(described, Mesh({"dp": world}), zero3="dp", tied=tied)
    made = plan(source, Layout.parallel(described, Mesh({"dp": world}), tied=tied))
    into = target_tensors(made, rank, {"h": torch.ones(4 // world, 4)})
    assert into["w"] is into["h"]
    bad = {**into, "h": torch.zeros(4, 4)} if rank == 1 else into
    with pytest.raises(
        ConfigError, match="are tied in the layout, and two tensors here" if rank == 1 else "another"
    ):
        run(made, rank, {"h": torch.ones(4 // world, 4)}, bad)
    one = Layout.parallel(described, Mesh({"dp": 1}), tied=tied)
    with pytest.raises(ConfigError, match="of a plan for 1 ranks by rank"):
        run(plan(one, one), 0, into, into)


def among_some(rank: int, world: int) -> None:
    """Any ranks but the others: what the largest is, what each tells; and a transfer between them alone."""
    sets = [[r for r in range(world) if mask >> r & 1] for mask in range(1, 2**world)]
    for own in [ranks for ranks in sets if rank in ranks]:
        among = Among(own)
        assert among.largest([rank, -rank, 7]) == [own[-1], -own[0], 7]
        for sender in own:
            value = {"from": sender, "text": "ä" * (100 * sender)}
            assert among.tell(value if rank == sender else None, sender) == value
    if rank == 0:
        with pytest.raises(ConfigError, match="cannot talk: rank 0 called"):
            Among([1])
        with pytest.raises(ConfigError, match="cannot talk"):
            Among([0, world])
    if rank != 1:
        return
    described = {"w": ((4, 2), torch.float32)}
    one = Layout.parallel(described, Mesh({"dp": 1}, [1]), world=world)
    into = {"w": torch.zeros(4, 2)}
    run(plan(one, one), 1, {"w": torch.ones(4, 2)}, into, ranks=[1])
    assert torch.equal(into["w"], torch.ones(4, 2))


def ranks_disagree(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match="another rank has"):
        Layout.of_tensors({"w": torch.ones(2 + rank, 2)})


def _broken(rank: int, world: int, end: Any) -> None:
    """Rank 1 ends in its second bucket; every other rank gets RunError within the group's timeout."""
    from headrace.reshard.exchange import Exchange

    described = {"w": ((66, 64), torch.float32)}
    source = Layout.parallel(described, Mesh({"dp": world}), zero3="dp")
    made = plan(source, Layout.parallel(described, Mesh({"dp": world})))
    if rank == 1:
        send = Exchange.bucket

        def bucket(self: Exchange, number: int, items: Any) -> None:
            if number == 1:
                end()
            send(self, number, items)

        Exchange.bucket = bucket
    with pytest.raises(RunError, match=rf"on rank {rank} in bucket \d+: it sends to"):
        run(made, rank, {"w": torch.ones(66 // world, 64)}, {"w": torch.zeros(66, 64)}, 2000)


def killed(rank: int, world: int) -> None:
    import os
    import signal

    _broken(rank, world, lambda: os.kill(os.getpid(), signal.SIGKILL))


def raising(rank: int, world: int) -> None:
    """The process lives on, so that the others have only the timeout to go by."""
    import time

    def end() -> None:
        time.sleep(5)
        raise ValueError("rank 1 failed")

    _broken(rank, world, end)


def not_coming(rank: int, world: int) -> None:
    """Rank 1 never calls run."""
    import time

    described = {"w": ((4, 4), torch.float32)}
    made = plan(
        Layout.parallel(described, Mesh({"dp": world}), zero3="dp"),
        Layout.parallel(described, Mesh({"dp": world})),
    )
    if rank == 1:
        time.sleep(4)
        return
    with pytest.raises(RunError, match="resharding did not start"):
        run(made, rank, {"w": torch.ones(4 // world, 4)}, {"w": torch.zeros(4, 4)})
