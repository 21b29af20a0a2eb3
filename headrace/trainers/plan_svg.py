"""The picture of a flow: a band for each group of devices, stages as boxes in columns by their order, edges with bytes.

An edge to the next column is a curve between the two; one that goes further runs along a track of its own in the band
it starts from, above the boxes, so that it crosses none.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from headrace.flow.cluster_plan import ClusterPlan
from headrace.flow.compile import CheckedFlow
from headrace.flow.edges import Edge, direct_source
from headrace.observe.report_facts import format_bytes
from headrace.trainers.plan_cluster import micro_text, shortened

WIDTH = 1280
MARGIN, LABEL = 16, 168  # around the picture; the column with the names of the groups
BOX, PORT, TRACK, PAD = (
    40,
    16,
    18,
    14,
)  # least height of a box, between edges at a box, of a track, within a band
LEAST_BOX, LEAST_GAP = 96, 92  # widths
FILLS = ("#e8f0fe", "#fdeee0", "#e6f4ea", "#f6e8f8", "#fbf3d0", "#e0f3f5", "#f1ece4", "#eceff1")
LINES = ("#3b6fd4", "#d2721a", "#2e8b4f", "#9a4fb0", "#a78a12", "#1f8a96", "#80674a", "#5f6f78")
STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:12px;fill:#1c2733}"
    ".name{font-weight:600;font-size:13px}.small{font-size:11px;fill:#52606d}"
    ".edge{fill:none;stroke:#52606d;stroke-width:1.4}.moves{stroke-width:2.2;stroke:#1c2733}"
    ".size{font-size:11px;paint-order:stroke;stroke:#fff;stroke-width:4px;stroke-linejoin:round}"
)


@dataclass
class _Box:
    name: str
    lines: tuple[str, ...]
    band: int
    column: int
    after: tuple[str, ...]
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = BOX


@dataclass
class _Link:
    source: _Box
    target: _Box
    bytes: int | None
    track: int | None = None
    leaves: float = 0
    arrives: float = 0


@dataclass
class _Band:
    title: str
    lines: tuple[str, ...]
    tracks: int = 0
    top: float = 0
    height: float = 0


def plan_svg(flow: CheckedFlow, cluster: ClusterPlan | None) -> str:
    """An SVG document; without a cluster, of the stages on the one device."""
    bands, boxes = _parts(flow, cluster)
    sizes = _sizes(flow, cluster.edges if cluster is not None else [])
    by_name = {box.name: box for box in boxes}
    links = [
        _Link(by_name[name], box, sizes.get((name, box.name)) if cluster is not None else None)
        for box in boxes
        for name in box.after
    ]
    width, height = _place(bands, boxes, links)
    body = [*_draw_bands(bands, width), *map(_draw_link, links), *map(_draw_box, boxes)]
    title = escape(f"{flow.name}: stages, groups and the bytes that move in a step, at most")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" role="img"><title>{title}</title><style>{STYLE}</style><defs><marker id="head"'
        ' viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse"'
        ' orient="auto"><path d="M0,0.5L8,4L0,7.5z" fill="#1c2733"/></marker></defs>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(body)}</svg>\n'
    )


def _parts(flow: CheckedFlow, cluster: ClusterPlan | None) -> tuple[list[_Band], list[_Box]]:
    if cluster is None:
        columns: dict[str, int] = {}
        for stage in flow.stages:
            columns[stage.name] = max((columns[d] + 1 for d in stage.depends_on), default=0)
        boxes = [_Box(s.name, (_what(s.spec.trains),), 0, columns[s.name], s.depends_on) for s in flow.stages]
        return [_Band("one device", ())], boxes
    names = list(cluster.placement.groups)
    peaks = {g.group: max(g.peaks) for g in cluster.memory.groups}
    bands = []
    for name in names:
        own = [r for r in cluster.roles if r.place.group == name]
        layouts: dict[str, list[str]] = {}
        for role in own:
            layouts.setdefault(str(role.place.parallelism), []).append(role.name.replace("_", " "))
        lines = [shortened(own[0].devices)] if own else []
        lines += [
            line for layout, roles in layouts.items() for line in _wrapped(f"{layout}: {', '.join(roles)}")
        ]
        bands.append(_Band(name, (*lines, f"up to {format_bytes(peaks[name])} a rank")))
    boxes = [
        _Box(
            s.name,
            (micro_text(s).partition(" in ")[0], _what(s.trains)),
            names.index(s.place.group),
            s.column,
            s.after,
        )
        for s in cluster.stages
    ]
    return bands, boxes


def _what(trains: bool) -> str:
    return "trains" if trains else ""


def _wrapped(text: str, most: int = 25) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _sizes(flow: CheckedFlow, edges: list[Edge]) -> dict[tuple[str, str], int]:
    """(stage, stage that depends on it) → bytes that come this way, also of stages before it."""
    out: dict[tuple[str, str], int] = {}
    for edge in edges:
        via = direct_source(flow, edge)
        if via is not None:
            out[via, edge.target] = out.get((via, edge.target), 0) + edge.bytes
    return out


def _place(bands: list[_Band], boxes: list[_Box], links: list[_Link]) -> tuple[float, float]:
    """Gives everything its place; returns width and height of the picture."""
    count = 1 + max((box.column for box in boxes), default=0)
    room = WIDTH - 2 * MARGIN - LABEL - PAD
    gap = max(LEAST_GAP, min(150.0, room / count * 0.42))
    box_width = max(LEAST_BOX, min(170.0, (room - gap * (count - 1)) / count))
    width = max(WIDTH, 2 * MARGIN + LABEL + PAD + count * box_width + (count - 1) * gap)
    for link in links:
        if link.target.column > link.source.column + 1:
            band = bands[link.source.band]
            link.track, band.tracks = band.tracks, band.tracks + 1
    for box in boxes:
        ports = max(sum(x.target is box for x in links), sum(x.source is box for x in links))
        box.height = max(BOX, 22 + 15 * sum(map(bool, box.lines)), (ports + 1) * PORT)
        box.width = box_width
        box.x = MARGIN + LABEL + box.column * (box_width + gap)
    y = float(MARGIN)
    for number, band in enumerate(bands):
        band.top = y
        own = [box for box in boxes if box.band == number]
        below = y + PAD + band.tracks * TRACK
        bottom = below
        for column in range(count):
            at = below
            for box in (b for b in own if b.column == column):
                box.y, at = at, at + box.height + PAD
            bottom = max(bottom, at)
        band.height = max(bottom - y, 30 + 16 * (1 + len(band.lines)))
        y += band.height + PAD
    for box in boxes:
        coming = sorted((x for x in links if x.target is box), key=lambda x: (_level(x, bands), x.source.x))
        going = sorted((x for x in links if x.source is box), key=lambda x: (x.track is None, x.target.y))
        for i, link in enumerate(coming):
            link.arrives = box.y + box.height * (i + 1) / (len(coming) + 1)
        for i, link in enumerate(going):
            link.leaves = box.y + box.height * (i + 1) / (len(going) + 1)
    for link in links:
        if link.track is not None:
            link.track = round(bands[link.source.band].top + PAD + link.track * TRACK + TRACK / 2 - 4)
    return width, y - PAD + MARGIN


def _level(link: _Link, bands: list[_Band]) -> float:
    """The height that an edge comes from."""
    return link.source.y if link.track is None else bands[link.source.band].top + link.track


def _draw_bands(bands: list[_Band], width: float) -> list[str]:
    out = []
    for i, band in enumerate(bands):
        fill, line = FILLS[i % len(FILLS)], LINES[i % len(LINES)]
        out.append(
            f'<rect x="{MARGIN / 2:g}" y="{band.top:g}" width="{width - MARGIN:g}" height="{band.height:g}" rx="8"'
            f' fill="{fill}" stroke="{line}" data-group={quoteattr(band.title)}/>'
        )
        y = band.top + 22
        out.append(f'<text class="name" x="{MARGIN + 4}" y="{y:g}">{escape(band.title)}</text>')
        for line_text in band.lines:
            y += 16
            out.append(f'<text class="small" x="{MARGIN + 4}" y="{y:g}">{escape(line_text)}</text>')
    return out


def _draw_box(box: _Box) -> str:
    line = LINES[box.band % len(LINES)]
    lines = [text for text in box.lines if text]
    x, y = box.x + box.width / 2, box.y + box.height / 2 - 7.5 * len(lines) + 4
    texts = [f'<text class="name" text-anchor="middle" x="{x:g}" y="{y:g}">{escape(box.name)}</text>']
    for i, text in enumerate(lines):
        texts.append(
            f'<text class="small" text-anchor="middle" x="{x:g}" y="{y + 15 * (i + 1):g}">{escape(text)}</text>'
        )
    return (
        f'<g data-stage={quoteattr(box.name)}><rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}"'
        f' height="{box.height:g}" rx="6" fill="#fff" stroke="{line}" stroke-width="2"/>{"".join(texts)}</g>'
    )


def _draw_link(link: _Link) -> str:
    x1, y1, x2, y2 = link.source.x + link.source.width, link.leaves, link.target.x, link.arrives
    if link.track is None:
        bend = (x2 - x1) / 2
        path = f"M{x1:g},{y1:g}C{x1 + bend:g},{y1:g} {x2 - bend:g},{y2:g} {x2:g},{y2:g}"
    else:
        t, out, back = link.track, x1 + 26, x2 - 26
        path = (
            f"M{x1:g},{y1:g}C{x1 + 20:g},{y1:g} {x1 + 6:g},{t:g} {out:g},{t:g}"
            f"L{back - 22:g},{t:g}C{x2 - 20:g},{t:g} {x2 - 40:g},{y2:g} {x2:g},{y2:g}"
        )
    kind = "edge moves" if link.bytes else "edge"
    ends = f"data-from={quoteattr(link.source.name)} data-to={quoteattr(link.target.name)}"
    drawn = f'<path class="{kind}" d="{path}" marker-end="url(#head)" {ends}/>'
    if not link.bytes:
        return drawn
    # on the side that the curve does not come from
    x, y, anchor = x2 - 9, y2 - 5 if y1 >= y2 else y2 + 14, "end"
    if link.track is not None:
        x, y, anchor = x1 + 32, link.track - 4, "start"
    size = format_bytes(link.bytes)
    return f'{drawn}<text class="size" text-anchor="{anchor}" x="{x:g}" y="{y:g}">{size}</text>'
