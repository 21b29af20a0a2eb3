"""`headrace doctor`: what this machine can run. Each check is ok, missing (something optional) or a problem."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace import __version__
from headrace.errors import ConfigError, HeadraceError
from headrace.observe.machine import (
    cpu_cores,
    free_disk,
    host_memory,
    installed_version,
    processor,
    requirements,
)

GIB = 1 << 30
LITTLE_MEMORY, LITTLE_DISK = 2 * GIB, 2 * GIB  # the smallest useful models fit above these
# extras that add something to a run; what they add
EXTRAS = {
    "hub": "data sets by hub id",
    "parquet": ".parquet files",
    "gguf": "models from .gguf files",
    "plot": "curves as a picture",
}
OTHER_ENGINES = ("vllm", "sglang")

Status = Literal["ok", "missing", "problem"]


@dataclass(frozen=True)
class Check:
    """One line of the table. Only a problem keeps the main job from running."""

    name: str
    status: Status
    text: str


def add_parser(commands: Any) -> None:
    meaning = "say what this machine can run"
    parser = commands.add_parser("doctor", help=meaning, description=meaning, allow_abbrev=False)
    parser.add_argument(
        "--quick", action="store_true", help="leave out the self-test (a tiny model, some seconds)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--dir", default="runs", metavar="FOLDER", help="where runs will go (default: runs)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Prints the table; 0 when the main job can run, 1 when something is a problem."""
    if rest:
        raise ConfigError(f"{rest[0]}: headrace doctor takes --quick, --json and --dir FOLDER")
    checks = list(examine(Path(arguments.dir), quick=arguments.quick))
    problems = [check for check in checks if check.status == "problem"]
    if arguments.json:
        record = {
            "headrace": __version__,
            "ok": not problems,
            "checks": [dataclasses.asdict(c) for c in checks],
        }
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        sys.stdout.write(table(checks))
    return 1 if problems else 0


def table(checks: list[Check]) -> str:
    """The checks for people, problems named once more at the end."""
    width = max(len(check.name) for check in checks)
    lines = [f"{check.status:<7}  {check.name:<{width}}  {check.text}" for check in checks]
    problems = [check.name for check in checks if check.status == "problem"]
    verdict = f"problems: {', '.join(problems)}" if problems else "headrace can train on this machine."
    return "\n".join([f"headrace {__version__}", "", *lines, "", verdict]) + "\n"


def examine(run_dir: Path, *, quick: bool) -> Iterator[Check]:
    yield Check("python", "ok" if sys.version_info >= (3, 11) else "problem", _python())
    yield from _packages()
    yield Check("processor", "ok", f"{processor()}, {cpu_cores()} cores for this process")
    memory = host_memory()
    text = f"{_gib(memory.total)} in all, {_gib(memory.free)} free"
    yield Check("memory", "ok" if memory.total >= LITTLE_MEMORY else "problem", text)
    yield from _disk(run_dir)
    yield from _hub_cache()
    can_compute = installed_version("torch") is not None and installed_version("transformers") is not None
    if can_compute:
        yield from _devices()
    yield Check("engine native", "ok", "part of headrace")
    for name in OTHER_ENGINES:
        version = installed_version(name)
        yield Check(f"engine {name}", "missing", f"{version or 'not installed'}; not used by this version")
    if can_compute and not quick:
        yield _self_test()


def _python() -> str:
    needed = "" if sys.version_info >= (3, 11) else "; headrace needs 3.11 or newer"
    return f"{platform.python_version()} ({sys.executable}){needed}"


def _packages() -> Iterator[Check]:
    """The dependencies against the ranges of the package, then each extra with the command that adds it."""
    wanted = requirements()
    if not wanted:
        yield Check(
            "headrace",
            "problem",
            "not installed as a package, so its requirements are unknown: pip install -e .",
        )
        return
    for requirement in (r for r in wanted if not r.extra):
        version = requirement.installed
        if version is None:
            text = f"not installed: pip install '{requirement.name}{requirement.specifier}'"
        elif not requirement.allows(version):
            add = f"pip install '{requirement.name}{requirement.specifier}'"
            text = f"{version} is outside {requirement.specifier}: {add}"
        else:
            yield Check(requirement.name, "ok", f"{version} ({requirement.specifier})")
            continue
        yield Check(requirement.name, "problem", text)
    for extra in dict.fromkeys(r.extra for r in wanted if r.extra and r.extra != "dev"):
        own = [r for r in wanted if r.extra == extra]
        lacking = [r.name for r in own if r.installed is None or not r.allows(r.installed)]
        gives = EXTRAS.get(extra, ", ".join(r.name for r in own))
        if lacking:
            add = f'pip install "headrace[{extra}]"'
            yield Check(f"extra {extra}", "missing", f"{gives}; needs {', '.join(lacking)}: {add}")
        else:
            yield Check(f"extra {extra}", "ok", gives)


def _disk(run_dir: Path) -> Iterator[Check]:
    there = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Check(
            "run.dir",
            "problem",
            f"{run_dir}: {there} is no folder that can be written to; choose another run.dir",
        )
        return
    free = free_disk(run_dir)
    few = "; little for models and checkpoints" if free < LITTLE_DISK else ""
    yield Check(
        "run.dir",
        "problem" if free < LITTLE_DISK // 16 else "ok",
        f"{run_dir}: can be written to, {_gib(free)} free{few}",
    )


def _hub_cache() -> Iterator[Check]:
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    data_sets = len(list(cache.glob("datasets--*"))) if cache.is_dir() else 0
    offline = ", offline (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "") else ""
    there = next(p for p in (cache, *cache.parents) if p.exists())
    if not os.access(there, os.W_OK):
        yield Check(
            "hub cache", "missing", f"{cache}: cannot be written to; set HF_HOME to use models by hub id"
        )
    else:
        yield Check("hub cache", "ok", f"{cache}: {models} models, {data_sets} data sets{offline}")


def _devices() -> Iterator[Check]:
    """GPUs and the attention kernels found. Imports torch."""
    try:
        import torch

        from headrace.kernels import build
        from headrace.models import varlen
        from headrace.rollout.native import decode_kernel
    except (ImportError, OSError, RuntimeError) as error:
        yield Check("torch import", "problem", f"{type(error).__name__}: {error}")
        return
    slow = build.missing()
    found = f"slow: {slow}" if slow else "compiled; attention, feed-forward layers and norms in float32"
    yield Check("cpu kernels", "missing" if slow else "ok", found)
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            f"torch is built for CUDA {built}, and no GPU or driver is found"
            if built
            else "torch is a build for CPUs"
        )
        yield Check("gpu", "missing", f"none: {why}; runs use the CPU in float32")
        yield Check(
            "attention", "ok", "SDPA by sequence" if slow else "compiled kernels in float32, SDPA else"
        )
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        half = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16: set model.dtype=float32"
        text = f"{p.name}, {_gib(total)} ({_gib(free)} free), compute capability {p.major}.{p.minor}, {half}"
        yield Check(f"gpu {index}", "ok", f"{text}, CUDA {torch.version.cuda}, driver {_driver()}")
    kernel = "variable-length kernel for bfloat16, SDPA else" if varlen.is_available() else "SDPA by sequence"
    yield Check("attention", "ok", kernel)
    lacking = decode_kernel.missing()
    text = (
        "kernel over the KV cache, and CUDA graphs, in half precision"
        if lacking is None
        else f"slow; needs {lacking}"
    )
    yield Check("decoding", "missing" if lacking else "ok", text)


def _driver() -> str:
    """The version of NVIDIA's kernel driver, as the kernel tells."""
    try:
        text = Path("/sys/module/nvidia/version").read_text()
    except OSError:
        return "unknown"
    return text.strip()


def _self_test() -> Check:
    """A tiny model of random weights: one update and one response, on the device that runs would use."""
    started = time.perf_counter()
    try:
        device = _try_tiny_model()
    except (
        HeadraceError,
        RuntimeError,
        ImportError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        line = str(error).strip().splitlines()
        return Check("self-test", "problem", f"{type(error).__name__}: {line[0] if line else ''}")
    return Check(
        "self-test",
        "ok",
        f"a tiny model learned and answered on {device} in {time.perf_counter() - started:.1f} s",
    )


def _try_tiny_model() -> str:
    """Raises what went wrong; the device's name else."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from headrace.data.batch import Batch
    from headrace.models.hf import resolve_device, resolve_dtype, wrap
    from headrace.rollout.engine import Request, SamplingParams
    from headrace.rollout.native.engine import NativeEngine
    from headrace.training.optimizer import OptimizerSettings
    from headrace.training.torch_engine import TorchEngine
    from headrace.training.value_loss import SupervisedLoss

    device = resolve_device("auto")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = LlamaForCausalLM(config).to(resolve_dtype("auto", device))
    model = wrap(hf, None, device=device)
    engine = TorchEngine(model, prefix="sft", optimizer=OptimizerSettings(learning_rate=1e-2))
    batch = Batch.from_rows(
        {
            "input_ids": [[1, 2, 3, 4]] * 2,
            "response_mask": [[False, True, True, True]] * 2,
            "loss_weight": [[0.25] * 4] * 2,
        },
        {},
        {"input_ids": torch.int64, "response_mask": torch.bool, "loss_weight": torch.float32},
    )
    losses = [engine.update(batch, SupervisedLoss()).means()["sft/loss"] for _ in range(3)]
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the loss did not fall: {losses}")
    rollout = NativeEngine(model, max_concurrent_sequences=2)
    [[answer]] = rollout.generate([Request((1, 2), (0,))], SamplingParams(max_new_tokens=4))
    if len(answer.token_ids) != 4:
        raise RuntimeError(f"4 tokens were asked for and {len(answer.token_ids)} came")
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
