"""Every metric a run can log, documented once, and the sums that pool them over micro-batches and workers.

`python -m headrace.observe.metrics > docs/metrics.md` writes the page that documents them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

# torch is imported by the functions that sum: reading what a run logged needs only their names
Number: TypeAlias = "float | Tensor"
Kind = Literal["mean", "total", "maximum", "minimum"]


@dataclass(frozen=True)
class Metric:
    """One documented metric; a `<part>` in the name stands for any text without `/` or spaces."""

    name: str
    unit: str
    meaning: str


def _preference(prefix: str, model: str, unit: str) -> tuple[Metric, ...]:
    """What training on preference pairs logs."""
    reward = "log-probability ratio to the reference x preference.beta" if prefix == "dpo" else "score"
    return (
        Metric(
            f"{prefix}/loss", "nats", "Mean over pairs of -log sigmoid(margin); log 2 where nothing is known."
        ),
        Metric(f"{prefix}/accuracy", "fraction", "Pairs ordered rightly; a tie counts as half."),
        Metric(f"{prefix}/margin", unit, f"Mean {reward} of the chosen response minus that of the rejected."),
        Metric(f"{prefix}/chosen_reward", unit, f"Mean {reward} of the chosen responses."),
        Metric(f"{prefix}/rejected_reward", unit, f"Mean {reward} of the rejected responses."),
        Metric(f"{prefix}/grad_norm", "norm", f"Global gradient norm of {model} before clipping."),
        Metric(f"{prefix}/learning_rate", "rate", "Learning rate of the update."),
        Metric(f"{prefix}/updates", "updates", "Optimizer updates in the step."),
        Metric(f"{prefix}/skipped_updates", "updates", "Updates left out because a gradient was not finite."),
    )


_BUILT_IN = (
    Metric("train/step", "steps", "The step just finished, counted from 1."),
    Metric("reward/mean", "reward", "Mean reward of the step's samples."),
    Metric("reward/std", "reward", "Standard deviation of the step's rewards."),
    Metric("reward/max", "reward", "Highest reward of the step."),
    Metric("reward/min", "reward", "Lowest reward of the step."),
    Metric("reward/kl_penalty", "nats", "Mean KL taken off a token's reward, before its coefficient."),
    Metric("reward/part/<name>", "reward", "Mean of one named part, when a reward function returns parts."),
    Metric(
        "reward/excluded_fraction", "fraction", "Samples without a usable reward, left out of their group."
    ),
    Metric(
        "reward/zero_spread_group_fraction",
        "fraction",
        "Prompts whose samples all got the same reward: they teach a group-normalised algorithm nothing.",
    ),
    Metric(
        "reward/repeated_fraction",
        "fraction",
        "Samples that are word for word another one of the step, prompt and response: the reward model scores them once.",
    ),
    Metric("reward/overlong_penalty", "reward", "Mean length penalty taken off a response's reward."),
    Metric("reward/greedy_mean", "reward", "Mean reward of the greedy responses that remax compares with."),
    Metric(
        "reward/filtered_group_fraction",
        "fraction",
        "Prompts drawn whose samples all got the same reward, dropped by algorithm.filter_groups.",
    ),
    Metric("rollout/response_tokens_mean", "tokens", "Mean length of a response, end token included."),
    Metric("rollout/response_tokens_max", "tokens", "Longest response of the step."),
    Metric("rollout/prompt_tokens_mean", "tokens", "Mean length of a prompt."),
    Metric("rollout/truncated_fraction", "fraction", "Responses cut at rollout.max_new_tokens."),
    Metric("rollout/tokens_per_s", "tokens/s", "Response tokens generated per second of the rollout stage."),
    Metric("rollout/samples", "samples", "Responses generated in the step."),
    Metric("rollout/tokens", "tokens", "Response tokens generated in the step."),
    Metric(
        "rollout/weight_lag_updates",
        "updates",
        "Updates of the actor between the weights that generated a sample and those that learn from it.",
    ),
    Metric("rollout/refills", "draws", "Times more prompts were drawn to replace filtered ones."),
    Metric("agent/turns_mean", "turns", "Responses of the model in an episode."),
    Metric("agent/environment_tokens_mean", "tokens", "Tokens that the environment wrote in an episode."),
    Metric("agent/max_turns_fraction", "fraction", "Episodes that ended at agent.max_turns."),
    Metric("agent/timeout_fraction", "fraction", "Episodes left out since a call took over agent.timeout_s."),
    Metric("agent/reward_mean", "reward", "Mean over episodes of what the environment itself gave."),
    Metric("agent/environment_s", "s", "Wall-clock time of the step's calls of environments."),
    Metric(
        "agent/part/<name>",
        "number",
        "Mean over episodes of a number that the environment names in Step.metrics, such as tool_calls.",
    ),
    Metric("actor/loss", "loss", "What the optimizer minimised: policy loss, KL and entropy terms together."),
    Metric("actor/policy_loss", "loss", "The loss that algorithm.loss names, alone."),
    Metric(
        "actor/kl", "nats", "KL of the policy to the reference, per response token, before its coefficient."
    ),
    Metric(
        "actor/kl_coefficient", "ratio", "Weight of the KL in the step, where algorithm.kl_target moves it."
    ),
    Metric("actor/entropy", "nats", "Mean entropy of the policy's next-token distribution."),
    Metric("actor/ratio_mean", "ratio", "Mean probability ratio of the new to the old policy; 1 on-policy."),
    Metric("actor/clip_fraction", "fraction", "Response tokens on which a clip bound took effect."),
    Metric("actor/dual_clip_fraction", "fraction", "Response tokens bounded by algorithm.dual_clip."),
    Metric("actor/grad_norm", "norm", "Global gradient norm of the actor before clipping."),
    Metric("actor/learning_rate", "rate", "Learning rate of the actor, mean over the step's updates."),
    Metric("actor/updates", "updates", "Optimizer updates of the actor in the step."),
    Metric("actor/skipped_updates", "updates", "Actor updates left out because a gradient was not finite."),
    Metric("critic/loss", "loss", "Value loss of the critic."),
    Metric("critic/clip_fraction", "fraction", "Response tokens whose value change was clipped."),
    Metric("critic/grad_norm", "norm", "Global gradient norm of the critic before clipping."),
    Metric("critic/learning_rate", "rate", "Learning rate of the critic, mean over the step's updates."),
    Metric(
        "critic/explained_variance",
        "ratio",
        "1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 a constant, below 0 is harmful.",
    ),
    Metric("critic/value_mean", "reward", "Mean value over response tokens."),
    Metric("critic/updates", "updates", "Optimizer updates of the critic in the step."),
    Metric("critic/skipped_updates", "updates", "Critic updates left out because a gradient was not finite."),
    Metric("advantage/mean", "advantage", "Mean advantage over response tokens."),
    Metric("advantage/std", "advantage", "Standard deviation of the advantage over response tokens."),
    Metric(
        "gap/abs_logprob_mean",
        "nats",
        "Mean absolute difference of rollout and trainer log-probabilities of the sampled tokens.",
    ),
    Metric("gap/abs_logprob_max", "nats", "Largest such difference in the step."),
    Metric(
        "gap/kl", "nats", "KL of the rollout to the trainer distribution, estimated on the sampled tokens."
    ),
    Metric(
        "importance/weight_mean",
        "ratio",
        "Mean importance weight, trainer over rollout probability, before algorithm.importance_cap.",
    ),
    Metric(
        "importance/capped_fraction",
        "fraction",
        "Response tokens whose importance weight was above the cap: truncated or masked out.",
    ),
    Metric("sft/loss", "nats", "Mean negative log-likelihood of a target token."),
    Metric("sft/perplexity", "ratio", "exp of sft/loss."),
    Metric("sft/tokens", "tokens", "Target tokens trained on in the update."),
    Metric("sft/grad_norm", "norm", "Global gradient norm before clipping."),
    Metric("sft/learning_rate", "rate", "Learning rate of the update."),
    Metric("sft/updates", "updates", "Optimizer updates in the step."),
    Metric("sft/skipped_updates", "updates", "Updates left out because a gradient was not finite."),
    *_preference("reward_model", "the reward model", "reward"),
    *_preference("dpo", "the policy", "nats"),
    Metric(
        "eval/accuracy",
        "fraction",
        "Held-out responses with a reward of at least 1 (not beside a reward model); pairs ordered rightly (ties half).",
    ),
    Metric("eval/loss", "nats", "Mean of -log sigmoid(margin) on held-out pairs."),
    Metric("eval/margin", "reward", "Mean reward of the chosen minus the rejected response, held-out pairs."),
    Metric("eval/chosen_reward", "reward", "Mean reward of the chosen responses of held-out pairs."),
    Metric("eval/rejected_reward", "reward", "Mean reward of the rejected responses of held-out pairs."),
    Metric(
        "eval/accuracy_stderr",
        "fraction",
        "Standard error of eval/accuracy, with the prompt as the unit: prompts' accuracies, their deviation / sqrt(n).",
    ),
    Metric(
        "eval/pass_at_<k>",
        "fraction",
        "Chance that one of k samples of a prompt is correct (reward of at least 1): unbiased, mean over prompts.",
    ),
    Metric("eval/reward_mean", "reward", "Mean reward of held-out responses."),
    Metric("eval/part/<name>", "reward", "Mean of one named part of the reward on held-out responses."),
    Metric("eval/response_tokens_mean", "tokens", "Mean length of a held-out response."),
    Metric("eval/truncated_fraction", "fraction", "Held-out responses cut at rollout.max_new_tokens."),
    Metric("eval/agent/<name>", "as agent/<name>", "The metric agent/<name> on held-out episodes."),
    Metric("eval/agent/part/<name>", "number", "The metric agent/part/<name> on held-out episodes."),
    Metric("eval/rows", "rows", "Held-out rows, or pairs, that were evaluated, each once."),
    Metric("data/epoch", "epochs", "Passes over the data set so far, with fraction."),
    Metric("data/prompts_dropped", "prompts", "Prompts over data.max_prompt_tokens that were dropped."),
    Metric("data/prompts_truncated", "prompts", "Prompts over data.max_prompt_tokens that were cut."),
    Metric(
        "cluster/controller_s", "s", "The controller's own work for the orders of the step, waiting left out."
    ),
    Metric(
        "cluster/controller_bytes",
        "bytes",
        "Orders and replies of the step: rows never go through the controller.",
    ),
    Metric("cluster/rows_bytes", "bytes", "Rows that went from worker to worker in the step."),
    Metric(
        "sync/weights_s", "s", "Time of giving the rollout the actor's weights, where its layout is another."
    ),
    Metric("sync/weights_bytes", "bytes", "What that moved between ranks."),
    Metric("sync/weights_minimum_bytes", "bytes", "The least that it could have moved."),
    Metric(
        "sync/weights_extra_bytes",
        "bytes",
        "Memory beyond the actor's weights that it took on the fullest rank.",
    ),
    Metric("time/step_s", "s", "Wall-clock time of the whole step."),
    Metric("time/eval_s", "s", "Wall-clock time of the evaluation."),
    Metric("time/checkpoint_s", "s", "Wall-clock time of the checkpoint written after the step before."),
    Metric("time/<stage>_s", "s", "Wall-clock time of one stage of the step."),
    Metric("memory/peak_device_bytes", "bytes", "Highest memory allocated on the device so far."),
    Metric("memory/peak_resident_bytes", "bytes", "Highest resident memory of the process so far."),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _BUILT_IN}


def register(name: str, unit: str, meaning: str) -> Metric:
    """Documents a metric of your own, such as one a user-written stage emits; a `<part>` matches any text.

    Raises ValueError when `name` is not of the form `area/name`, or already means something else.
    """
    if not re.fullmatch(r"[a-z][\w.-]*(/[\w.<>-]+)+", name):
        raise ValueError(f"metric name '{name}': write it as area/name, such as tools/calls_mean")
    if not unit or not meaning:
        raise ValueError(f"metric '{name}': give its unit and its meaning")
    metric = Metric(name, unit, meaning)
    if METRICS.setdefault(name, metric) != metric:
        raise ValueError(f"metric '{name}' is already registered with unit '{METRICS[name].unit}'")
    describe.cache_clear()
    return metric


@cache
def describe(name: str) -> Metric:
    """The documentation of a metric by its emitted name. Raises ValueError naming an undocumented one."""
    if name in METRICS:
        return METRICS[name]
    for metric in METRICS.values():
        pattern = re.sub(r"<[^>]*>", r"[^/\\s]+", re.escape(metric.name))
        if "<" in metric.name and re.fullmatch(pattern, name):
            return metric
    raise ValueError(
        f"metric '{name}' is not documented: add it to headrace/observe/metrics.py, or call "
        f"headrace.observe.metrics.register('{name}', unit, meaning)"
    )


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for the first name that is not documented."""
    for name in names:
        describe(name)


class MetricSums:
    """Metrics pooled over micro-batches and workers: a mean is the sum of totals over the sum of counts.

    So 3 of 12 and 3 of 4 pool to 6/16 = 0.375, not to the mean of the two means. Tensors stay on their
    device until `means()`, so that adding never waits for the device. A name is a mean, a total, a maximum or a
    minimum, not two of them. Every method raises ValueError for an undocumented name, for a name used in two of these
    ways and for a tensor of several values.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        self._values: dict[str, Number] = {}
        self._counts: dict[str, Number] = {}

    def add(self, name: str, total: Number, count: Number = 1) -> None:
        """Adds to a mean: a total over `count` tokens, samples or updates.

        The count may be 0 where it is added apart from the total, as for a loss whose micro-batches add up to
        one value per update. Raises ValueError for a negative count.
        """
        if isinstance(count, int | float) and count < 0:
            raise ValueError(f"metric '{name}': count {count} is negative")
        self._sum(name, "mean", total)
        self._counts[name] = self._counts.get(name, 0.0) + _scalar(name, count)

    def add_total(self, name: str, value: Number) -> None:
        """Adds to a sum that is divided by nothing, such as a number of tokens."""
        self._sum(name, "total", value)

    def add_max(self, name: str, value: Number) -> None:
        """Keeps the largest value; NaN wins over every number."""
        self._claim(name, "maximum")
        value = _scalar(name, value)
        self._values[name] = _larger(self._values[name], value) if name in self._values else value

    def add_min(self, name: str, value: Number) -> None:
        """Keeps the smallest value; NaN wins over every number."""
        self._claim(name, "minimum")
        value = _scalar(name, value)
        # the smaller of two numbers is the larger of their negatives, negated
        self._values[name] = -_larger(-self._values[name], -value) if name in self._values else value

    def merge(self, other: MetricSums) -> None:
        """Pools the sums of another micro-batch or worker into these."""
        for name, kind in other._kinds.items():
            if kind == "mean":
                self.add(name, other._values[name], other._counts[name])
            elif kind == "total":
                self.add_total(name, other._values[name])
            elif kind == "maximum":
                self.add_max(name, other._values[name])
            else:
                self.add_min(name, other._values[name])

    def plain(self) -> list[tuple[str, Kind, float, float]]:
        """(name, kind, value, count) of each, as plain values for another process; the count of other kinds than
        means is 0. Waits for the device, once."""
        values = _to_floats(list(self._values.values()))
        counts = dict(zip(self._counts, _to_floats(list(self._counts.values())), strict=True))
        return [
            (name, self._kinds[name], value, counts.get(name, 0.0))
            for name, value in zip(self._values, values, strict=True)
        ]

    @classmethod
    def from_plain(cls, plain: list[tuple[str, Kind, float, float]]) -> MetricSums:
        """The inverse of `plain`."""
        sums = cls()
        for name, kind, value, count in plain:
            sums._claim(name, kind)
            sums._values[name] = value
            if kind == "mean":
                sums._counts[name] = count
        return sums

    def means(self) -> dict[str, float]:
        """Means, totals, maxima and minima as Python floats; a mean over a count of 0 is absent, never NaN.

        Waits for the device, once.
        """
        numbers = _to_floats([*self._values.values(), *self._counts.values()])
        values = dict(zip(self._values, numbers, strict=False))
        counts = dict(zip(self._counts, numbers[len(self._values) :], strict=True))
        return {
            name: value / counts.get(name, 1.0) for name, value in values.items() if counts.get(name, 1.0) > 0
        }

    def _claim(self, name: str, kind: Kind) -> None:
        describe(name)
        if self._kinds.setdefault(name, kind) != kind:
            raise ValueError(f"metric '{name}' is a {self._kinds[name]}; it cannot be a {kind} as well")

    def _sum(self, name: str, kind: Literal["mean", "total"], value: Number) -> None:
        self._claim(name, kind)
        self._values[name] = self._values.get(name, 0.0) + _scalar(name, value)


def _scalar(name: str, value: Number) -> Number:
    """The value as a Python float or as a detached 0-dimensional float64 tensor on its own device."""
    import torch

    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"metric '{name}': give one value, not a tensor of shape {tuple(value.shape)}")
    return value.detach().reshape(()).to(torch.float64)


def _larger(a: Number, b: Number) -> Number:
    import torch
    from torch import Tensor

    if isinstance(a, Tensor) or isinstance(b, Tensor):
        device = a.device if isinstance(a, Tensor) else b.device if isinstance(b, Tensor) else None
        a, b = (torch.as_tensor(x, dtype=torch.float64, device=device) for x in (a, b))
        return torch.maximum(a, b)
    return b if b > a or math.isnan(b) else a


def _to_floats(values: list[Number]) -> list[float]:
    """Copies all tensors of a device to the host together, so that there is one wait per device."""
    import torch
    from torch import Tensor

    out = [math.nan if isinstance(value, Tensor) else value for value in values]
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, Tensor)}
    for device in {tensor.device for tensor in tensors.values()}:
        places = [i for i, tensor in tensors.items() if tensor.device == device]
        for i, number in zip(places, torch.stack([tensors[i] for i in places]).tolist(), strict=True):
            out[i] = number
    return out


def markdown() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every metric of a run: one key of a `metrics.jsonl` line and one TensorBoard scalar each. A",
        "`<part>` of a name stands for any name. Logging a name that is not listed here is an error; add",
        "your own with `headrace.observe.metrics.register(name, unit, meaning)`. A metric that nothing was",
        "measured for is absent, never NaN; one that was measured and is not finite is `null`. Means are",
        "pooled: the sum over all tokens or samples of the step divided by their number, whatever the",
        "micro-batches were.",
        "",
        "This page is written by `make docs` from `headrace/observe/metrics.py`.",
    ]
    area = ""
    for metric in _BUILT_IN:
        if metric.name.split("/")[0] != area:
            area = metric.name.split("/")[0]
            lines += ["", f"## {area}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines.append(f"| `{metric.name}` | {metric.unit} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
