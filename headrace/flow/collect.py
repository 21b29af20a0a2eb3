"""One step of a flow over fresh prompts, with groups that teach nothing replaced by others where that is asked for.

Dynamic sampling (DAPO: Yu et al. 2025, arXiv 2503.14476, section 3.2): a prompt whose samples all got the
same reward gives a group-relative advantage of 0, so more prompts are drawn until the step is full.
"""

from __future__ import annotations

import logging

from headrace.data.loader import Loader
from headrace.flow.ahead import Ahead
from headrace.flow.compile import CheckedFlow
from headrace.flow.execute import execute
from headrace.flow.interrupt import InterruptGuard
from headrace.flow.runtime import Rows, Runtime
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
    ahead: Ahead | None = None,
) -> Rows:
    """Draws the step's prompts and runs every stage over them; returns the rows with all columns.

    With `ahead` the step goes on with the rows that are made already, while those of the next one are being made.

    With `algorithm.filter_groups` the stages up to the reward run again on more prompts until `prompts_per_step`
    groups have rewards that differ, at most MAX_REFILLS times; groups too many are dropped in order. A step without
    any such group is skipped: the other stages do not run, and the rows drawn first are returned.
    """
    if ahead is not None:
        rows = ahead.take(context, progress, guard)
        return execute(runtime, ahead.rest, rows, context, progress, guard)
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
) -> tuple[Rows, Rows | None]:
    """(the rows drawn first, the rows of the groups to go on with, or None where there are none)."""
    wanted = context.config.train.prompts_per_step
    first: Rows | None = None
    found = drawn = draws = 0
    seen: set[int] = set()
    parts: list[tuple[Rows, dict[int, int]]] = []
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
        rows = execute(runtime, head, runtime.put(prompts), context, progress, guard)
        first = rows if first is None else first
        varied = runtime.varied_groups(rows, context)
        kept = varied[: wanted - found]
        if kept:
            parts.append((rows, {group: found + i for i, group in enumerate(kept)}))
        drawn += prompts.num_rows
        missed = prompts.num_rows - len(varied)
        context.metrics.add("reward/filtered_group_fraction", missed, prompts.num_rows)
        found += len(kept)
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
    return first, runtime.join_groups(parts) if parts else None
