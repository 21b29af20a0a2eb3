"""One step of a flow over fresh prompts, with groups that teach nothing replaced by others where that is asked for.

Dynamic sampling (DAPO: Yu et al. 2025, arXiv 2503.14476, section 3.2): a prompt whose samples all got the
same reward gives a group-relative advantage of 0, so more prompts are drawn until the step is full.

Shapes: R rows (samples), G prompts (groups).
"""

from __future__ import annotations

import logging

import torch

from headrace.algorithms.advantages.groups import group_rewards
from headrace.algorithms.stages import counted_rows, greedy_rows
from headrace.data.batch import Batch
from headrace.data.loader import Loader
from headrace.flow.compile import CheckedFlow
from headrace.flow.execute import execute
from headrace.flow.interrupt import InterruptGuard
from headrace.flow.runtime import Rows, Runtime, local_batch
from headrace.observe.progress import Progress
from headrace.stages import StageContext

logger = logging.getLogger(__name__)

MAX_REFILLS = 10


def run_step(
    runtime: Runtime,
    flow: CheckedFlow,
    loader: Loader,
    context: StageContext,
    progress: Progress,
    guard: InterruptGuard,
) -> Rows:
    """Draws the step's prompts and runs every stage over them; returns the rows with all columns.

    With `algorithm.filter_groups` the stages up to the reward run again on more prompts until `prompts_per_step`
    groups have rewards that differ, at most MAX_REFILLS times; groups too many are dropped in order. A step without
    any such group is skipped: the other stages do not run, and the rows drawn first are returned.
    """
    if not flow.filters_groups:
        return execute(runtime, flow, runtime.put(loader.next()), context, progress, guard)
    head, rest = flow.cut_after("reward")
    first, batch = _full_groups(runtime, head, loader, context, progress, guard)
    if batch is None:
        logger.warning(
            "step %d: no prompt has samples with different rewards, so there is nothing to learn from; the step is"
            " skipped (algorithm.filter_groups)",
            context.step,
        )
        return first
    return execute(runtime, rest, batch, context, progress, guard)


def _full_groups(
    runtime: Runtime,
    head: CheckedFlow,
    loader: Loader,
    context: StageContext,
    progress: Progress,
    guard: InterruptGuard,
) -> tuple[Batch, Batch | None]:
    """(the rows drawn first, the rows of the groups to go on with, or None where there are none)."""
    wanted = context.config.train.prompts_per_step
    parts: list[Batch] = []
    first: Batch | None = None
    found = drawn = draws = 0
    seen: set[int] = set()
    while found < wanted and draws <= MAX_REFILLS and len(seen) < len(loader.dataset):
        prompts = loader.next()
        draws += 1
        # in a new epoch a prompt may come again: its samples would be the same ones
        prompts = prompts.select(
            [r for r, who in enumerate(prompts["prompt_id"].tolist()) if who not in seen]
        )
        seen.update(prompts["prompt_id"].tolist())
        if prompts.num_rows == 0:
            continue
        batch = local_batch(execute(runtime, head, prompts, context, progress, guard))
        first = batch if first is None else first
        part, kept, of = _with_spread(batch, context, wanted - found, found)
        drawn += of
        if kept:
            parts.append(part)
        context.metrics.add("reward/filtered_group_fraction", of - kept, of)
        found = min(wanted, found + kept)
    context.metrics.add_total("rollout/refills", draws - 1)
    if 0 < found < wanted:
        logger.warning(
            "step %d: only %d of the %d groups of a step have rewards that differ, after %d prompts in %d draws; it goes"
            " on with those (algorithm.filter_groups)",
            context.step,
            found,
            wanted,
            drawn,
            draws,
        )
    if first is None:
        raise RuntimeError("a loader gave no prompts")
    return first, Batch.concat(parts) if parts else None


def _with_spread(batch: Batch, context: StageContext, room: int, start: int) -> tuple[Batch, int, int]:
    """(rows of the first `room` groups whose rewards differ, how many groups differ, how many there are).

    The groups are numbered anew, from `start`. Rows that do not count, and greedy baselines, make no difference.
    """
    ids = batch["group_id"]
    valid = counted_rows(batch, context) & ~greedy_rows(batch)
    groups = group_rewards(torch.as_tensor(batch["reward"], dtype=torch.float64), ids, valid)
    varied = groups.varies[groups.index]
    order = list(dict.fromkeys(ids[varied].tolist()))
    number = {group: start + i for i, group in enumerate(order[:room])}
    rows = [r for r, group in enumerate(ids.tolist()) if group in number]
    part = batch.select(rows)
    renumbered = torch.tensor([number[group] for group in part["group_id"].tolist()], dtype=torch.int64)
    return part.with_columns({"group_id": renumbered}), len(order), len(groups.count)
