"""Runs functions `case(rank, world)` in real gloo processes, forked from one server that has imported the libraries."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "transformers.models.llama.modeling_llama",
    ]
)

Case = Callable[[int, int], None]


def run_cases(
    cases: Sequence[Case], world: int, folder: Path, timeout_s: float = 60, ended_by: float = 120
) -> dict[str, list[str]]:
    """Case name → for each rank `ok`, or the traceback of what it raised, or `did not get there`."""
    processes = [
        CONTEXT.Process(target=_rank, args=(rank, world, cases, folder, timeout_s)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=ended_by)
    for process in processes:
        process.join(max(0.0, (deadline - datetime.datetime.now()).total_seconds()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} were still running after {ended_by} s"
    done = [
        json.loads(path.read_text()) if (path := folder / f"{r}.json").exists() else {} for r in range(world)
    ]
    return {case.__name__: [d.get(case.__name__, "did not get there") for d in done] for case in cases}


def _rank(rank: int, world: int, cases: Sequence[Case], folder: Path, timeout_s: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "cpu:gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    done = {}
    for case in cases:
        try:
            case(rank, world)
            done[case.__name__] = "ok"
        except BaseException:  # noqa: BLE001 - what a rank raised is its result
            done[case.__name__] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(done))
        if done[case.__name__] != "ok":
            break  # the other ranks are not where this one is
    os._exit(0)  # a process group whose peers are gone would wait for them
