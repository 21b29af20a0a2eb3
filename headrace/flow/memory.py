"""How much memory a run will take at most, from sizes alone, against what the device has. docs/report.md has the formula.

Parts that are there all the time add up; of the phases (rollout, each role's update) only the largest counts.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from headrace.data.prompts import PromptDataset
from headrace.errors import ConfigError
from headrace.flow.compile import CheckedFlow
from headrace.flow.memory_ranks import ClusterMemory, estimate_cluster
from headrace.flow.memory_terms import (
    LIBRARIES,
    LIBRARY_BYTES,
    Estimate,
    Load,
    Part,
    Sizes,
    add_training,
    add_weights,
    rollout_parts,
    sizes_of,
    weights_in_turn,
)
from headrace.flow.source import PreparedData
from headrace.models.hf import resolve_device, resolve_dtype
from headrace.observe.machine import host_memory
from headrace.roles.role import LanguageModelRole, Role

logger = logging.getLogger(__name__)


def refuse_what_cannot_fit(
    flow: CheckedFlow, data: PreparedData, held_out: PreparedData | None = None
) -> None:
    """The check at the start of a run, before weights are loaded. Raises ConfigError naming the largest terms."""
    if all(role.is_loaded for role in flow.roles if isinstance(role, LanguageModelRole)):
        return  # what is loaded already has shown that it fits
    memory: Estimate | ClusterMemory
    if flow.placement.world > 1:
        memory = estimate_cluster(flow, partial(load_of, flow, data, held_out))
    else:
        memory = estimate_memory(flow, load_of(flow, data, held_out))
    refusals, warning = memory.refusals(), memory.warning()
    if refusals:
        raise ConfigError(refusals)
    if warning is not None:
        logger.warning("%s", warning)


def load_of(flow: CheckedFlow, data: PreparedData, held_out: PreparedData | None = None, dp: int = 1) -> Load:
    """The load of one of `dp` data-parallel ranks, whose shares are as even as whole prompts and pairs allow."""
    config = flow.config
    sets = [d.dataset for d in (data, held_out) if d is not None]
    new = config.rollout.max_new_tokens
    longest = max(d.longest_tokens + (new if isinstance(d, PromptDataset) else 0) for d in sets)
    prompts = -(-config.train.prompts_per_step // dp)
    if flow.paired:
        return Load(
            longest, 2 * -(-data.rows_per_step // dp), 0, 0, shared=2.0
        )  # at most: pairs that are prompt alone
    if flow.supervised:
        rows, generated = -(-data.rows_per_step // dp), 0
    else:
        rows = -(-(config.train.samples_per_update or config.samples_per_step) // dp)
        generated = min(prompts * config.rollout.samples_per_prompt, config.rollout.max_concurrent_sequences)
    if held_out is not None:
        held = -(-len(held_out.dataset) // dp) * config.eval.samples_per_prompt
        generated = max(generated, min(held, config.rollout.max_concurrent_sequences))
    samples = 1 if flow.supervised else config.rollout.samples_per_prompt
    prompt = max(0, longest - new)
    shared = 1.0 if samples == 1 else samples * longest / (prompt + samples * new)
    return Load(longest, rows, generated, prompts, shared)


def estimate_memory(flow: CheckedFlow, load: Load) -> Estimate:
    """The largest memory of a run of `flow`, all of it on the device that run.device names."""
    config = flow.config
    device = resolve_device(config.run.device)
    width = resolve_dtype(config.model.dtype, device).itemsize
    estimate = _empty_estimate(device)
    models: dict[Role, Sizes] = {}
    for role in flow.roles:
        sizes = sizes_of(role, config, models, trains=flow.trains(role))
        if sizes is None:
            estimate.unknown.append(f"{role.name} ({role.model_config.path})")
            continue
        models[role] = sizes
        add_weights(estimate, role, sizes, width)
        if flow.trains(role):
            add_training(estimate, config, role, sizes, width, load)
    turns = weights_in_turn(estimate, config, models)
    own = turns.get("actor", [])
    weights = sum(part.bytes for part in [*estimate.always, *own])
    generator = next((s.shape for role, s in models.items() if role.name == "actor"), None)
    if generator is not None and load.rows_at_once:
        room = max(0, estimate.free - weights)
        estimate.phases["rollout"] = own + rollout_parts(config, generator, width, load, room)
    estimate.always.append(Part(LIBRARIES, LIBRARY_BYTES[device.type]))
    return estimate


def _empty_estimate(device: torch.device) -> Estimate:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Estimate(f"the device ({torch.cuda.get_device_name(device)})", total, free, "cuda")
    memory = host_memory()
    return Estimate("this machine", memory.total, memory.free)
