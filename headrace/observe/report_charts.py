"""What a report draws: which metrics, in which order, and their values in bounded amounts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.observe.metrics import describe
from headrace.observe.report_runs import ReportRun, clean_text, room_for_texts, stage_means, thin

# What is drawn first, in this order, and what it is called; metrics that no run has are left out. A <part> stands for
# any name, which takes the place of {} in the title.
CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Learning",
        (
            ("eval/accuracy", "Held-out accuracy"),
            ("eval/pass_at_<k>", "Held-out pass@{}"),
            ("reward/mean", "Reward"),
            ("sft/loss", "Loss"),
            ("reward_model/loss", "Reward model: loss"),
            ("reward_model/accuracy", "Reward model: pairs in order"),
            ("dpo/loss", "DPO: loss"),
            ("dpo/accuracy", "DPO: pairs in order"),
            ("eval/reward_mean", "Held-out reward"),
            ("reward/part/<name>", "Reward: {}"),
            ("eval/part/<name>", "Held-out reward: {}"),
            ("reward/std", "Spread of rewards"),
            ("reward/zero_spread_group_fraction", "Prompts without a spread"),
            ("reward/filtered_group_fraction", "Prompts replaced for want of a spread"),
        ),
    ),
    (
        "Pairs",
        (
            ("eval/margin", "Held-out margin"),
            ("eval/loss", "Held-out loss"),
            ("eval/chosen_reward", "Held-out reward of the chosen"),
            ("eval/rejected_reward", "Held-out reward of the rejected"),
            ("reward_model/margin", "Reward model: margin"),
            ("reward_model/chosen_reward", "Reward model: score of the chosen"),
            ("reward_model/rejected_reward", "Reward model: score of the rejected"),
            ("dpo/margin", "DPO: margin"),
            ("dpo/chosen_reward", "DPO: reward of the chosen"),
            ("dpo/rejected_reward", "DPO: reward of the rejected"),
        ),
    ),
    (
        "Episodes",
        (
            ("agent/reward_mean", "Reward of the environment"),
            ("agent/turns_mean", "Turns in an episode"),
            ("agent/part/<name>", "Episodes: {}"),
            ("agent/environment_tokens_mean", "Tokens the environment wrote"),
            ("agent/max_turns_fraction", "Episodes cut at the turn limit"),
            ("agent/timeout_fraction", "Episodes that timed out"),
            ("agent/environment_s", "Time in environments"),
            ("eval/agent/part/<name>", "Held-out episodes: {}"),
            ("eval/agent/turns_mean", "Turns in a held-out episode"),
        ),
    ),
    (
        "Policy",
        (
            ("actor/kl", "KL to the reference"),
            ("actor/kl_coefficient", "Weight of the KL"),
            ("actor/entropy", "Entropy"),
            ("gap/abs_logprob_mean", "Gap of rollout and trainer"),
            ("rollout/response_tokens_mean", "Response length"),
            ("rollout/truncated_fraction", "Responses cut at the limit"),
            ("actor/clip_fraction", "Clipped tokens"),
            ("importance/weight_mean", "Importance weight"),
            ("importance/capped_fraction", "Tokens with a capped weight"),
        ),
    ),
    (
        "Optimisation",
        (
            ("actor/loss", "Actor loss"),
            ("actor/grad_norm", "Actor gradient norm"),
            ("sft/grad_norm", "Gradient norm"),
            ("reward_model/grad_norm", "Reward model: gradient norm"),
            ("dpo/grad_norm", "DPO: gradient norm"),
            ("critic/loss", "Critic loss"),
            ("critic/explained_variance", "Variance the critic explains"),
            ("critic/grad_norm", "Critic gradient norm"),
            ("actor/learning_rate", "Learning rate"),
            ("sft/learning_rate", "Learning rate"),
            ("reward_model/learning_rate", "Reward model: learning rate"),
            ("dpo/learning_rate", "DPO: learning rate"),
        ),
    ),
    (
        "Speed and memory",
        (
            ("time/step_s", "Time of a step"),
            ("rollout/tokens_per_s", "Tokens generated per second"),
            ("memory/peak_device_bytes", "Peak memory of the device"),
            ("memory/peak_resident_bytes", "Peak memory of the process"),
        ),
    ),
)


def page_data(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """What the page's script draws: charts by section, stage times and samples."""
    room = room_for_texts(runs)
    return {
        "runs": [run.name for run in runs],
        "sections": _sections(runs),
        "stages": [dict(zip(("steps", "seconds"), stage_means(run), strict=True)) for run in runs],
        "sets": [
            {
                "run": i,
                "kind": s.kind,
                "step": s.step,
                "found": s.found,
                "samples": [
                    {
                        k: clean_text(v, room) if k in ("prompt", "completion") else v
                        for k, v in sample.items()
                    }
                    for sample in s.samples
                ],
            }
            for i, run in enumerate(runs)
            for s in run.samples
        ],
    }


def _sections(runs: Sequence[ReportRun]) -> list[dict[str, Any]]:
    logged = list(dict.fromkeys(metric for run in runs for metric in run.metrics()))
    known = [(name, _named(charts, logged)) for name, charts in CHARTS]
    if all("eval/margin" in run.metrics() for run in runs if run.curve("eval/accuracy")):
        known = [(name, [(m, ON_PAIRS.get(m, title)) for m, title in charts]) for name, charts in known]
    titles = {metric: title for _, charts in known for metric, title in charts}
    shown = [m for m in logged if not m.startswith("time/") or m == "time/step_s"]
    rest = sorted(m for m in shown if m not in titles and m not in NOT_DRAWN)
    # the loss of a way of training that has no charts of its own comes first all the same
    losses = [m for m in rest if m.endswith(("/loss", "/accuracy"))]
    own = {"Learning": [(m, readable_name(m)) for m in losses]}
    rest = [m for m in rest if m not in losses]
    sections = [
        (name, [c for c in (*charts, *own.get(name, [])) if _is_worth_a_look(c[0], runs)], False)
        for name, charts in known
    ]
    seen = {metric for _, charts, _ in sections for metric, _ in charts}
    dull = [(metric, titles[metric]) for metric in titles if metric not in seen]
    sections.append(("Everything else", [*dull, *((m, readable_name(m)) for m in rest)], True))
    out = []
    for name, charts, folded in sections:
        drawn = [c for metric, title in charts if (c := _chart(metric, title, runs)) is not None]
        timed = name == "Speed and memory" and any(stage_means(run)[1] for run in runs)
        if drawn or timed:
            out.append({"title": name, "charts": drawn, "folded": folded})
    return out


def _named(charts: Sequence[tuple[str, str]], logged: Sequence[str]) -> list[tuple[str, str]]:
    """The charts with the logged metrics that match a <part> in its place; each metric once, the first match wins."""
    out: dict[str, str] = {}
    for pattern, title in charts:
        before, _, after = pattern.partition("<")
        if not after:
            out.setdefault(pattern, title)
            continue
        for metric in sorted((m for m in logged if m.startswith(before)), key=_by_number):
            out.setdefault(metric, title.format(metric[len(before) :].replace("_", " ")))
    return list(out.items())


def _by_number(metric: str) -> tuple[str, int]:
    """Sorts pass_at_16 after pass_at_2."""
    stem = metric.rstrip("0123456789")
    return stem, int(metric[len(stem) :] or 0)


def _is_worth_a_look(metric: str, runs: Sequence[ReportRun]) -> bool:
    """Not for a metric that never changes, nor for the held-out reward or pass@1 where it is the accuracy."""
    values = {value for run in runs for _, value in run.curve(metric) if value is not None}
    twin = TWINS.get(metric)
    return len(values) > 1 and (twin is None or any(run.curve(metric) != run.curve(twin) for run in runs))


# another title, where all runs that have the metric learn from pairs
ON_PAIRS = {"eval/accuracy": "Held-out pairs in order"}
TWINS = {
    "eval/reward_mean": "eval/accuracy",
    "eval/pass_at_1": "eval/accuracy",
    "agent/reward_mean": "reward/mean",
    "eval/agent/reward_mean": "eval/reward_mean",
}
NOT_DRAWN = (
    "train/step",
    "eval/rows",
    "rollout/samples",
    *(f"{area}/updates" for area in ("actor", "critic", "sft", "reward_model", "dpo")),
)


def _chart(metric: str, title: str, runs: Sequence[ReportRun]) -> dict[str, Any] | None:
    """One metric of all runs; None where no run has two points, since one point is no curve."""
    curves = [run.curve(metric) for run in runs]
    if max(len([1 for _, v in curve if v is not None]) for curve in curves) < 2:
        return None
    unit, meaning = documented(metric)
    lines = [thin(curve) for curve in curves]
    return {
        "metric": metric,
        "title": title,
        "unit": unit,
        "meaning": meaning,
        "noisy": not metric.startswith(("eval/", "memory/", "data/"))
        and not metric.endswith("learning_rate"),
        "lines": [
            {
                "x": [step for step, _ in line],
                "y": [None if v is None else float(f"{v:.5g}") for _, v in line],
            }
            for line in lines
        ],
    }


def readable_name(metric: str) -> str:
    """rollout/tokens_per_s → Rollout: tokens per s."""
    area, _, rest = metric.partition("/")
    area, rest = area.replace("_", " ").capitalize(), rest.replace("_", " ").replace("/", " ")
    return f"{area}: {rest}" if rest else metric


def documented(metric: str) -> tuple[str, str]:
    """Unit and meaning; a held-out metric of episodes has the unit of the one it repeats."""
    try:
        unit = describe(metric.removeprefix("eval/") if metric.startswith("eval/agent/") else metric).unit
        return unit, describe(metric).meaning
    except ValueError:  # a metric that a user's own code registered in its process
        return "", ""
