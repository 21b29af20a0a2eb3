"""Scoring a held-out data set: every row exactly once."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.algorithms.pass_at_k import pass_at_k
from headrace.config import Config
from headrace.data.batch import Batch
from headrace.data.loader import all_batches
from headrace.flow.compile import CheckedFlow
from headrace.flow.execute import execute
from headrace.flow.interrupt import InterruptGuard
from headrace.flow.runtime import Rows, Runtime
from headrace.flow.source import PreparedData
from headrace.observe.metrics import MetricSums
from headrace.observe.progress import Progress
from headrace.rewards.stage import CORRECT
from headrace.stages import StageContext


def evaluate(
    runtime: Runtime,
    flow: CheckedFlow,
    data: PreparedData,
    step: int,
    progress: Progress,
    guard: InterruptGuard,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Runs an evaluation flow over every row of `data` exactly once; returns its metrics and all its samples."""
    sums, samples = MetricSums(), []
    started = time.perf_counter()
    batches = list(all_batches(data.dataset, evaluation_rows(flow.config)))
    for number, prompts in enumerate(batches):
        context = StageContext(flow.config, step, step, MetricSums(), evaluation=True)
        share = (number, len(batches))
        rows = execute(
            runtime, flow, runtime.put(prompts), context, progress, guard, label="eval", share=share
        )
        sums.merge(context.metrics)
        if flow.generates:
            samples += records_of(runtime.fetch(rows, sample_columns(rows)))
    if "eval/accuracy" in sums.means() and flow.generates:
        _accuracy_metrics(sums, samples, flow.config.eval.samples_per_prompt)
    sums.add("time/eval_s", time.perf_counter() - started)
    metrics = {name: value for name, value in sums.means().items() if name.startswith(("eval/", "time/eval"))}
    return metrics, samples


def _accuracy_metrics(sums: MetricSums, samples: Sequence[Mapping[str, Any]], per_prompt: int) -> None:
    """The standard error of eval/accuracy, and pass@k for k = 1, 2, 4, … where prompts have several samples.

    Samples of a prompt are not independent, so the prompt is the unit: the error is the standard deviation of the
    prompts' own accuracies (n - 1 in its denominator) over the square root of their number. Samples without a reward
    count nowhere; a prompt with fewer than k others has no part in pass@k.
    """
    counts: dict[int, tuple[int, int]] = {}
    for sample in samples:
        reward = sample["reward"]
        if reward is not None and not math.isnan(reward):
            drawn, correct = counts.get(sample["prompt_id"], (0, 0))
            counts[sample["prompt_id"]] = drawn + 1, correct + (reward >= CORRECT)
    shares = [correct / drawn for drawn, correct in counts.values()]
    if len(shares) > 1:
        mean = math.fsum(shares) / len(shares)
        squares = math.fsum((share - mean) ** 2 for share in shares)
        sums.add("eval/accuracy_stderr", math.sqrt(squares / (len(shares) - 1) / len(shares)))
    k = 1
    while per_prompt > 1 and k <= per_prompt:
        estimates = [pass_at_k(drawn, correct, k) for drawn, correct in counts.values() if drawn >= k]
        sums.add(f"eval/pass_at_{k}", math.fsum(estimates), len(estimates))
        k *= 2


def best_step(evaluations: Mapping[int, Mapping[str, float]]) -> int | None:
    """The step whose evaluation is best, among those after training began: by eval/accuracy, then by
    eval/reward_mean, or for pairs by the smallest eval/loss; the earliest where several are equal. None where nothing
    was measured."""
    scores = {
        step: (
            metrics.get("eval/accuracy", -math.inf),
            metrics.get("eval/reward_mean", -metrics.get("eval/loss", math.inf)),
        )
        for step, metrics in sorted(evaluations.items())
        if step > 0 and not metrics.keys().isdisjoint(("eval/reward_mean", "eval/loss"))
    }
    return max(scores, key=lambda step: scores[step]) if scores else None


def evaluation_rows(config: Config) -> int:
    """Prompts given to the engine at once: several times what runs concurrently, so that it never runs dry."""
    return max(1, 4 * config.rollout.max_concurrent_sequences // config.eval.samples_per_prompt)


SAMPLE_COLUMNS = (
    "prompt_id", "sample_index", "prompt", "completion", "reward", "finish_reason", "num_tokens", "episode",
)  # fmt: skip


def sample_columns(rows: Rows) -> list[str]:
    """The columns that samples are made of, of those there are."""
    return [name for name in SAMPLE_COLUMNS if name in rows]


class StepSamples(Sequence[dict[str, Any]]):
    """What samples.jsonl keeps of each row of a step, fetched when it is asked for."""

    def __init__(self, runtime: Runtime, rows: Rows) -> None:
        self._runtime, self._rows = runtime, rows

    def __len__(self) -> int:
        return self._rows.num_rows

    def __getitem__(self, row: Any) -> Any:
        return records_of(self._runtime.fetch(self._rows, sample_columns(self._rows), row))[0]


def records_of(batch: Batch) -> list[dict[str, Any]]:
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
            **({"episode": batch["episode"][r]} if "episode" in batch else {}),
        }
        for r in range(batch.num_rows)
    ]
