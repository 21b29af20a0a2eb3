"""Numbers, curves and tables for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.observe.metrics import describe

if TYPE_CHECKING:
    from rich.table import Table

_BLOCKS = "▁▂▃▄▅▆▇█"


def format_number(value: float) -> str:
    """At most seven characters: 12.3k, 512, 87.3, 0.512, 0.0213, 1.2e-4."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if size < 0.001:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    for limit, divisor, suffix in ((999.5, 1, ""), (999.5e3, 1e3, "k"), (999.5e6, 1e6, "M")):
        if size < limit:
            return _three_digits(value / divisor) + suffix
    return _three_digits(value / 1e9) + "G" if size < 999.5e9 else f"{value:.1e}"


def _three_digits(value: float) -> str:
    size = abs(value)
    decimals = (
        0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3 if size >= 0.1 else 4
    )
    return f"{value:.{decimals}f}"


def format_percent(fraction: float) -> str:
    """A fraction of 1 as a percentage: 45.2%."""
    return f"{100 * fraction:.1f}%" if math.isfinite(fraction) else str(fraction)


def format_duration(seconds: float) -> str:
    """At most six characters for less than 100 days: 0.4s, 12s, 3m12s, 2h05m, 3d04h."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = whole // 60
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"


def format_metric(name: str, value: float) -> str:
    """A metric's value for people: fractions as percentages, seconds as durations.

    Raises ValueError for a metric that is not documented.
    """
    unit = describe(name).unit
    if unit == "fraction":
        return format_percent(value)
    return format_duration(value) if unit == "s" and math.isfinite(value) else format_number(value)


def sparkline(values: Sequence[float], width: int | None = None) -> str:
    """One block character per value, lowest to highest; more values than `width` are averaged in buckets.

    Values that are not finite are left out.
    """
    points = _buckets([v for v in values if math.isfinite(v)], width)
    if not points:
        return ""
    return "".join(_BLOCKS[level] for level in _levels(points, len(_BLOCKS)))


def _levels(points: Sequence[float], count: int) -> list[int]:
    """Each point's level of 0..count-1 between the lowest and the highest; the middle one where all are equal."""
    low, high = min(points), max(points)
    half = high / 2 - low / 2  # halves, since the difference of two finite floats may overflow
    if half <= 1e-12 * max(abs(low), abs(high)):  # equal but for the rounding of their averages
        return [(count - 1) // 2] * len(points)
    return [round((v / 2 - low / 2) / half * (count - 1)) for v in points]


def _buckets(values: Sequence[float], width: int | None) -> list[float]:
    """Means of `width` runs of neighbouring values whose lengths differ by at most one."""
    if width is None or len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [sum(v / (b - a) for v in values[a:b]) for a, b in itertools.pairwise(edges)]


def ascii_curve(values: Sequence[float], width: int = 60, height: int = 10) -> str:
    """A curve over its index (counted from 1), `height` lines high plus the axis, the y range at its left.

    `width`, at least 4, is that of the plotting area; `height` is at least 2. Values that are not finite are
    left out. Raises ValueError for a smaller size.
    """
    if width < 4 or height < 2:
        raise ValueError(f"ascii_curve: width {width} must be at least 4 and height {height} at least 2")
    finite = [v for v in values if math.isfinite(v)]
    points = _buckets(finite, width)
    if not points:
        return "(no values)"
    if len(points) > 1 and len(points) < width:
        points = [_interpolate(points, column / (width - 1)) for column in range(width)]
    heights = _levels(points, height)
    labels = {max(heights): format_number(max(points)), min(heights): format_number(min(points))}
    margin = max(len(label) for label in labels.values())
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(_cell(heights, column, row) for column in range(len(heights)))
        lines.append(f"{labels.get(row, ''):>{margin}} ┤{cells.rstrip()}")
    lines.append(f"{'':>{margin}} └{'─' * width}")
    lines.append(f"{'':>{margin}}  1{len(finite):>{width - 1}}")
    return "\n".join(lines)


def _interpolate(points: Sequence[float], position: float) -> float:
    """The piecewise linear curve through the points at `position` in 0..1."""
    x = position * (len(points) - 1)
    left = min(int(x), len(points) - 2)
    part = (points[left + 1] / 2 - points[left] / 2) * (x - left)  # half, against overflow
    return points[left] + part + part


def _cell(heights: Sequence[int], column: int, row: int) -> str:
    """The part of the connected line that passes through one character cell."""
    here, before = heights[column], heights[max(column - 1, 0)]
    if here == before:
        return "─" if row == here else " "
    if row == here:
        return "╭" if here > before else "╰"
    if row == before:
        return "╯" if here > before else "╮"
    return "│" if min(here, before) < row < max(here, before) else " "


def before_after_table(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    labels: Mapping[str, str] | None = None,
    title: str | None = None,
) -> Table:
    """A rich table with one line per metric: before, after, and the change.

    `labels` gives the metrics to show, in order, and their text (default: every metric of either side under
    its own name). A fraction is shown as a percentage and its change in points. Raises ValueError for an
    undocumented metric.
    """
    from rich import box
    from rich.table import Table

    labels = labels or {name: name for name in {**before, **after}}
    table = Table(title=title, box=box.SIMPLE_HEAD, title_style="bold")
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name, label in labels.items():
        old, new = before.get(name), after.get(name)
        shown = ["-" if value is None else format_metric(name, value) for value in (old, new)]
        table.add_row(
            label,
            shown[0],
            f"[bold]{shown[1]}[/bold]",
            "" if old is None or new is None else _change(name, old, new),
        )
    return table


def _change(name: str, old: float, new: float) -> str:
    difference = new - old
    if describe(name).unit == "fraction":
        return f"{100 * difference:+.1f} points"
    sign = "-" if difference < 0 else "+" if difference > 0 else ""
    return sign + format_metric(name, abs(difference))
