"""Pictures of runs: one panel per metric, one line per run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import DataError, MissingExtraError
from headrace.observe.metrics import describe
from headrace.observe.run_dir import RunDirectory

DEFAULT_METRICS = ("reward/mean", "eval/accuracy", "rollout/response_tokens_mean", "actor/kl")


def plot_curves(
    run_dirs: Sequence[str | Path],
    out_png: str | Path,
    metrics: Sequence[str] = DEFAULT_METRICS,
    labels: Sequence[str] | None = None,
) -> Path:
    """Draws the metrics of the runs over their steps into a PNG and returns its path.

    A metric that none of the runs has is left out. `labels` names the runs (default: their folder names).
    Raises MissingExtraError without matplotlib, DataError when a run has no metrics or none of those asked
    for, ValueError for a metric that is not documented.
    """
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtraError("plotting curves", "matplotlib", "plot") from error
    units = {name: describe(name).unit for name in metrics}
    runs = [RunDirectory(path) for path in run_dirs]
    names = list(labels) if labels is not None else [run.name for run in runs]
    logs = dict(zip(names, [run.read_metrics() for run in runs], strict=True))
    present = [m for m in metrics if any(line.get(m) is not None for log in logs.values() for line in log)]
    if not present:
        raise DataError(
            f"{', '.join(str(run.metrics) for run in runs)}: none of {', '.join(metrics)} was logged; "
            "name other metrics"
        )
    figure = figure_module.Figure(figsize=(4.2 * len(present), 3.0), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(present), squeeze=False)[0], present, strict=True):
        for name, log in logs.items():
            points = [(line["step"], line[metric]) for line in log if line.get(metric) is not None]
            if points:
                # evaluations are few: without a marker one alone would be invisible
                axes.plot(
                    *zip(*points, strict=True),
                    label=name,
                    linewidth=1.5,
                    marker="o" if len(points) < 12 else "",
                )
        axes.set_title(metric, fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel(units[metric])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if len(logs) > 1:
        figure.axes[0].legend(frameon=False, fontsize=8)
    path = Path(out_png)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
