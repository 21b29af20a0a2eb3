"""Moving weights from training to rollout layouts: the reshard plan beside gathering everything and scattering it.

    python benchmarks/reshard.py                    # 2, 4 and 8 processes on the CPU, gloo over loopback
    python benchmarks/reshard.py --device cuda --ranks 2      # one process a GPU, NCCL

Prints one JSON object. For each pair of layouts: bytes moved, the least possible, and for comparison those of two ways
to build the whole weights first: gathering them on rank 0 and sending every rank its part (run here through the same
transport), and gathering them on every rank (counted only). Milliseconds are the slowest rank's, medians. Extra memory
is the fullest rank's: `planned` by arithmetic, `reported` by what was allocated, `measured` as growth of the process's
peak (resident on the CPU, allocated on CUDA). `nested` is the plan with `target_tensors(nest=True)`, where held parts
move into the new tensors. Every result is compared with the weights element by element.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from headrace.reshard.layout import Layout, Mesh, stages_of_layers
from headrace.reshard.plan import Plan, plan
from headrace.reshard.schedule import buckets, peak_extra_bytes
from headrace.reshard.transfer import run, target_tensors

GOAL = 0.76
TABLE = {
    "*.q_proj.weight": 0,
    "*.k_proj.weight": 0,
    "*.v_proj.weight": 0,
    "*.o_proj.weight": 1,
    "*.gate_proj.weight": 0,
    "*.up_proj.weight": 0,
    "*.down_proj.weight": 1,
    "*.embed_tokens.weight": 0,
    "lm_head.weight": 0,
}
# Axes in the order of the mesh, the last running fastest. A rollout of fewer ways than training keeps the ranks of one
# training tensor-parallel group together ("tp dp"), so that what they hold is part of what they need.
TRAIN = {
    2: ["dp2", "zero3:2", "tp2", "pp2"],
    4: ["dp4", "zero3:4", "tp4", "dp2 tp2", "zero3:2 tp2", "pp2 tp2", "pp2 dp2"],
    8: ["dp8", "zero3:8", "tp8", "dp2 tp4", "zero3:2 tp4", "zero3:4 tp2", "pp2 tp4", "pp2 dp2 tp2"],
}
ROLLOUT = {
    2: ["dp2", "tp2"],
    4: ["dp4", "tp2 dp2", "tp4"],
    8: ["dp8", "tp2 dp4", "dp2 tp4", "dp2 tp2 dp2", "tp8"],
}


def shapes(hidden: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    inner = 3 * hidden
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (hidden // 2, hidden),
        "self_attn.v_proj.weight": (hidden // 2, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def layout(text: str, parameters: dict[str, Any], layers: int) -> Layout:
    """`dp2 tp4` → that layout; a second dp is another axis of copies."""
    axes: dict[str, int] = {}
    for name, size in re.findall(r"([a-z]+3?):?(\d+)", text):
        axes[name if name not in axes else name + "_inner"] = int(size)
    stages = stages_of_layers([layers // axes["pp"]] * axes["pp"]) if "pp" in axes else None
    zero3 = "zero3" if "zero3" in axes else None
    return Layout.parallel(parameters, Mesh(axes), tp=TABLE, zero3=zero3, stages=stages)


def whole_on_rank_0(parameters: dict[str, Any], world: int) -> Layout:
    return Layout.parallel(parameters, Mesh({"dp": 1}), world=world)


def weights(
    parameters: dict[str, Any], made: Layout, rank: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """What a rank holds of weights whose values tell every element's place."""
    found = {}
    for number, (name, (shape, dtype)) in enumerate(parameters.items()):
        box = made.box(name, rank)
        if box is not None:
            whole = (
                torch.arange(torch.Size(shape).numel(), device=device)
                .add_(number)
                .remainder_(251)
                .view(shape)
            )
            found[name] = whole[(*(slice(a, b) for a, b in zip(box.start, box.stop, strict=True)), ...)].to(
                dtype
            )
    return found


class Peak:
    """Growth of the process's peak memory inside the block."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
            self.before = resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        now = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else resident("VmHWM")
        self.nbytes = now - self.before


def resident(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def measure(
    plans: list[Plan],
    rank: int,
    source: dict[str, torch.Tensor],
    device: torch.device,
    bucket_bytes: int,
    nest: bool = False,
) -> tuple[dict[str, torch.Tensor], float, int, int]:
    """(target tensors, milliseconds, reported and measured extra bytes) of one or more plans, one after the other."""
    extra = between = 0
    dist.barrier()
    with Peak(device) as peak:
        started = time.perf_counter()
        tensors = source
        for made in plans:
            target = target_tensors(made, rank, tensors, device, nest)
            report = run(made, rank, tensors, target, bucket_bytes)
            extra = max(extra, between + report.peak_extra_bytes)
            between += report.new_bytes
            tensors = target
        dist.barrier()
        ms = (time.perf_counter() - started) * 1e3
    return tensors, ms, extra, peak.nbytes


def worker(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    dtype = getattr(torch, options.dtype)
    parameters = {
        n: (s, dtype) for n, s in shapes(options.hidden, options.layers, options.vocabulary).items()
    }
    results = []
    for train in TRAIN[world]:
        for rollout in ROLLOUT[world]:
            results.append(compare(train, rollout, rank, world, parameters, device, options))
    Path(folder, f"{world}.{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def compare(
    train: str,
    rollout: str,
    rank: int,
    world: int,
    parameters: dict[str, Any],
    device: torch.device,
    options: argparse.Namespace,
) -> dict[str, Any]:
    source, target = layout(train, parameters, options.layers), layout(rollout, parameters, options.layers)
    middle = whole_on_rank_0(parameters, world)
    ours = plan(source, target)
    detour = [plan(source, middle), plan(middle, target)]
    own = weights(parameters, source, rank, device)
    expected = weights(parameters, target, rank, device)
    found: dict[str, Any] = {
        "ranks": world,
        "train": train,
        "rollout": rollout,
        "bytes_moved": ours.bytes_moved,
        "bytes_minimum": ours.bytes_minimum,
        "gather_scatter_bytes": sum(p.bytes_moved for p in detour),
        "gather_everywhere_bytes": plan(source, layout(f"dp{world}", parameters, options.layers)).bytes_moved,
        "needed_bytes": sum(target.bytes_held(r) for r in range(world)),
        "missing_bytes": int(ours.received_bytes[rank]),
        "planned_extra_bytes": int(peak_extra_bytes(ours, options.bucket_bytes)[rank]),
    }
    for name, plans in (("plan", [ours]), ("nested", [ours]), ("gather_scatter", detour)):
        times, measured = [], []
        nest = name == "nested"
        for _ in range(options.repeats + 1):
            given = {n: t.clone() for n, t in own.items()} if nest else own  # nesting changes where it lies
            tensors, ms, extra, peak = measure(plans, rank, given, device, options.bucket_bytes, nest)
            if not all(torch.equal(tensors[n], expected[n]) for n in expected):
                raise RuntimeError(f"{name} from {train} to {rollout}: rank {rank} has wrong weights")
            del tensors, given
            times.append(ms)
            measured.append(peak)
        found[f"{name}_ms"] = times[1:]  # the first opens connections
        found[f"{name}_extra_bytes_reported"] = extra
        found[f"{name}_extra_bytes_measured"] = int(statistics.median(measured[1:]))
    return found


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One row from those of all ranks: the slowest and the fullest, and the ratios with both of their sides."""
    row = {key: max(r[key] for r in ranks) for key in ranks[0] if not key.endswith("_ms")}
    for name in ("plan", "nested", "gather_scatter"):
        slowest = [max(times) for times in zip(*(r[f"{name}_ms"] for r in ranks), strict=True)]
        row[f"{name}_ms"] = round(statistics.median(slowest), 2)
    row["held_fraction"] = round(1 - row["bytes_minimum"] / row["needed_bytes"], 4)
    for other in ("gather_scatter", "gather_everywhere"):
        theirs = row[f"{other}_bytes"]
        row[f"saving_beside_{other}"] = round(1 - row["bytes_moved"] / theirs, 4) if theirs else None
    return row


def planner() -> dict[str, Any]:
    """Seconds to plan for 1,024 ranks and the 507 parameters of a model of 56 layers, hidden size 8,192."""
    parameters = {name: (shape, torch.bfloat16) for name, shape in shapes(8192, 56, 128256).items()}
    found = {}
    rollout = layout("dp128 tp8", parameters, 56)
    for train in ("zero3:1024", "zero3:128 tp8", "pp8 dp16 tp8"):
        started = time.perf_counter()
        made = plan(layout(train, parameters, 56), rollout, [rank // 8 for rank in range(1024)])
        planned = time.perf_counter()
        count = len(buckets(made, 1 << 30))
        found[f"{train} → dp128 tp8"] = {
            "plan_s": round(planned - started, 2),
            "buckets_s": round(time.perf_counter() - planned, 2),
            "parameters": len(parameters),
            "transfers": sum(len(e.pairing.cell) for e in made.entries),
            "buckets_of_1_GiB": count,
            "bytes_moved": made.bytes_moved,
            "bytes_minimum": made.bytes_minimum,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], choices=list(TRAIN))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--bucket-bytes", type=int, default=1 << 20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-planner", action="store_true")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = (
        "65536"  # in the workers: freed tensors go back, so that peaks can be seen
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in options.ranks:
            mp.spawn(worker, (world, folder, options), nprocs=world)
            ranks = [json.loads(Path(folder, f"{world}.{r}.json").read_text()) for r in range(world)]
            rows += [merged(list(same)) for same in zip(*ranks, strict=True)]
    from headrace.observe.machine import environment

    sizes = shapes(options.hidden, options.layers, options.vocabulary).values()
    record = {
        "environment": environment(),
        "load": os.getloadavg()[0],
        "options": vars(options),
        "model_parameters": sum(torch.Size(s).numel() for s in sizes),
        "goal_saving": GOAL,
        "pairs": len(rows),
        "pairs_at_the_minimum": sum(r["bytes_moved"] == r["bytes_minimum"] for r in rows),
        "pairs_that_save_the_goal_beside_gather_scatter": sum(
            r["saving_beside_gather_scatter"] >= GOAL for r in rows
        ),
        "pairs_nested_within_bucket_plus_missing": sum(
            r["nested_extra_bytes_reported"] <= options.bucket_bytes + r["missing_bytes"] for r in rows
        ),
        "results": rows,
        "planner": None if options.no_planner else planner(),
    }
    print(json.dumps(record, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
