"""Scoring a held-out data set: every row exactly once."""

from __future__ import annotations

import time
from typing import Any

from headrace.config import Config
from headrace.data.batch import Batch
from headrace.data.loader import all_batches
from headrace.flow.compile import CheckedFlow
from headrace.flow.execute import execute
from headrace.flow.interrupt import InterruptGuard
from headrace.flow.source import PreparedData
from headrace.observe.metrics import MetricSums
from headrace.observe.progress import Progress
from headrace.stages import StageContext


def evaluate(
    flow: CheckedFlow, data: PreparedData, step: int, progress: Progress, guard: InterruptGuard
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Runs an evaluation flow over every row of `data` exactly once; returns its metrics and all its samples."""
    sums, samples = MetricSums(), []
    started = time.perf_counter()
    batches = list(all_batches(data.dataset, evaluation_rows(flow.config)))
    for number, prompts in enumerate(batches):
        context = StageContext(flow.config, step, step, MetricSums(), evaluation=True)
        batch = execute(flow, prompts, context, progress, guard, label="eval", share=(number, len(batches)))
        sums.merge(context.metrics)
        if flow.generates:
            samples += sample_records(batch)
    sums.add("time/eval_s", time.perf_counter() - started)
    metrics = {name: value for name, value in sums.means().items() if name.startswith(("eval/", "time/eval"))}
    return metrics, samples


def evaluation_rows(config: Config) -> int:
    """Prompts given to the engine at once: several times what runs concurrently, so that it never runs dry."""
    return max(1, 4 * config.rollout.max_concurrent_sequences // config.eval.samples_per_prompt)


def sample_records(batch: Batch) -> list[dict[str, Any]]:
    """What samples.jsonl keeps of each row."""
    rewards = batch["reward"].tolist() if "reward" in batch else [None] * batch.num_rows
    return [
        {
            "prompt_id": int(batch["prompt_id"][r]),
            "sample_index": int(batch["sample_index"][r]),
            "prompt": batch["prompt"][r],
            "completion": batch["completion"][r],
            "reward": rewards[r],
            "finish_reason": batch["finish_reason"][r],
            "num_tokens": int(batch["num_tokens"][r]),
        }
        for r in range(batch.num_rows)
    ]
