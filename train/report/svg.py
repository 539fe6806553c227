"""Line plots as SVG, made by hand: the same data give the same bytes.

A plot is a row or grid of panels over one x axis. Colours come from the style sheet by the class of a mode, so the same
drawing serves the page, where it is inline, and a file of its own.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .axes import CHARACTER, Scale, linear_ticks, log_ticks, span, tick_text, tick_texts
from .read import MODES, printable

WIDTH, GAP, RIGHT = 920.0, 34.0, 12.0
MOST_MARKS = 16  # on one line
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A line, or with ``joined`` False its points alone. ``name`` says what it is to a reader of the file."""

    name: str
    mode: str
    points: Points
    joined: bool = True
    marked: bool = False
    dashed: bool = False
    guide: bool = False  # not data: thin and dotted, and the axes do not make room for it
    thin: bool = False
    spread: Sequence[float | None] = ()  # half a vertical bar at each point


@dataclass(frozen=True)
class Panel:
    title: str
    series: Sequence[Series]
    lost: Sequence[tuple[float, str]] = ()  # x and mode of what has no y: a cross above the frame


@dataclass(frozen=True)
class Key:
    text: str
    mode: str = ""
    dashed: bool = False
    guide: bool = False
    mark: str = ""  # "cross" or "leaves" instead of a line


@dataclass(frozen=True)
class Plot:
    name: str  # of its file, without the ending
    title: str
    text: str  # what a reader who does not see it should know
    x_label: str
    y_label: str
    panels: Sequence[Panel]
    keys: Sequence[Key]
    x_ticks: Sequence[float] = ()
    log_x: bool = False
    log_y: bool = False
    percent: bool = False
    shared: bool = True  # one y axis for all panels
    robust: tuple[float, float] | None = None  # lines far above the others leave the frame; see `ceiling`


def escape(text: str) -> str:
    return html.escape(text, quote=True)


def mode_class(mode: str) -> str:
    first = mode.partition(" - ")[0]
    return f"mode-{first}" if first in MODES else "mode-other"


def n(value: float) -> str:
    """A coordinate."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


# ---- Drawing ---------------------------------------------------------------------------------------------------------


def ceiling(panels: Sequence[Panel], robust: tuple[float, float] | None) -> float:
    """What lines may reach: the median line's highest point, and above it so many times its height over the lowest
    point, or so much at least, in units of y. One run that diverges must not flatten the others."""
    if robust is None:
        return math.inf
    lines = [[y for _, y in series.points] for panel in panels for series in panel.series if series.points]
    if not lines:
        return math.inf
    middle, lowest = statistics.median_low([max(line) for line in lines]), min(min(line) for line in lines)
    return middle + max(robust[0] * (middle - lowest), robust[1])


def mark(mode: str, x: float, y: float, size: float = 3.6) -> str:
    """Each mode has a shape of its own, for those who cannot tell the colours."""
    shapes: dict[str, str] = {
        "mode-consistent": f"M{n(x - size)} {n(y - size)}h{n(2 * size)}v{n(2 * size)}h{n(-2 * size)}z",
        "mode-matched": f"M{n(x)} {n(y - 1.3 * size)}l{n(1.3 * size)} {n(1.3 * size)}l{n(-1.3 * size)} {n(1.3 * size)}"
        f"l{n(-1.3 * size)} {n(-1.3 * size)}z",
        "mode-onepass": f"M{n(x)} {n(y - 1.2 * size)}l{n(1.2 * size)} {n(2.1 * size)}h{n(-2.4 * size)}z",
        "mode-per_tensor": f"M{n(x)} {n(y + 1.2 * size)}l{n(1.2 * size)} {n(-2.1 * size)}h{n(-2.4 * size)}z",
        "mode-bf16_dp": f"M{n(x - size)} {n(y)}h{n(2 * size)}M{n(x)} {n(y - size)}v{n(2 * size)}",
    }
    kind = mode_class(mode)
    if kind in shapes:
        return f'<path class="mark" d="{shapes[kind]}"/>'
    return f'<circle class="mark{" hollow" if kind == "mode-exact" else ""}" cx="{n(x)}" cy="{n(y)}" r="{n(size)}"/>'


def cross(x: float, y: float) -> str:
    return f'<path class="cross" d="M{n(x - 4)} {n(y - 4)}l8 8m-8 0l8 -8"/>'


def caret(x: float, y: float) -> str:
    return f'<path class="leaves" d="M{n(x)} {n(y)}l4.5 7h-9z"/>'


def line_class(dashed: bool, guide: bool, thin: bool) -> str:
    return " ".join(
        ["line", *(["dashed"] if dashed else []), *(["guide"] if guide else []), *(["thin"] if thin else [])]
    )


def drawn(series: Series, x: Scale, y: Scale) -> list[str]:
    at = [(x(a), y(b), index) for index, (a, b) in enumerate(series.points) if x.holds(a) and y.holds(b)]
    parts = []
    every = 1 if len(at) <= MOST_MARKS or not series.joined else math.ceil(len(at) / MOST_MARKS)
    if series.joined and len(at) > 1:
        points = " ".join(f"{n(a)},{n(b)}" for a, b, _ in at)
        parts.append(f'<polyline class="{line_class(series.dashed, series.guide, series.thin)}" points="{points}"/>')
    for a, b, index in at:
        spread = series.spread[index] if index < len(series.spread) else None
        value = series.points[index][1]
        if spread is not None and spread > 0:
            ends = [y(end) if y.holds(end) else y.start for end in (value - spread, value + spread)]
            parts.append(f'<path class="bar" d="M{n(a)} {n(ends[0])}V{n(ends[1])}"/>')
        if (series.marked and index % every == 0) or (len(at) == 1 and not series.guide):
            parts.append(mark(series.mode, a, b, 2.4 if series.thin else 3.2))
    return parts


def leaves(series: Series, x: Scale, y: Scale) -> list[float]:
    """Where a line first crosses the upper edge of the frame, and each lone point above it, in the drawing."""
    if series.guide:
        return []
    at = [(x(a), y(b)) for a, b in series.points if x.holds(a) and y.holds(b)]
    above = [index for index, (_, b) in enumerate(at) if b < y.stop - 0.01]
    if not series.joined:
        return sorted({at[index][0] for index in above})
    if not above or above[0] == 0:
        return [at[0][0]] if above else []
    (a, b), (c, d) = at[above[0] - 1], at[above[0]]
    return [a + (c - a) * (y.stop - b) / (d - b)]


def of_panel(
    panel: Panel, plot: Plot, frame: tuple[float, float, float, float], ident: str, x_span: tuple[float, float],
    y_span: tuple[float, float], texts: bool,
) -> list[str]:  # fmt: skip
    """Grid, tick labels, lines, and what leaves the frame or has no value; ``frame``: left, top, right, bottom."""
    left, top, right, bottom = frame
    x, y = Scale(*x_span, left, right, plot.log_x), Scale(*y_span, bottom, top, plot.log_y)
    title = printable(panel.title, int((right - left) / (CHARACTER + 0.6)))
    parts = [f'<text class="panel" x="{n(left)}" y="{n(top - 16)}">{escape(title)}</text>'] if title else []
    for value in log_ticks(*y_span) if plot.log_y else linear_ticks(*y_span, 5):
        parts.append(f'<path class="grid" data-y="{value:.9g}" d="M{n(left)} {n(y(value))}H{n(right)}"/>')
        if texts:
            label = escape(tick_text(value, plot.percent))
            parts.append(f'<text class="soft end" x="{n(left - 8)}" y="{n(y(value) + 4)}">{label}</text>')
    ticks: Sequence[float] = plot.x_ticks or linear_ticks(*x_span, max(3, int((right - left) / 90)))
    last = -math.inf
    for value, label in zip(ticks, tick_texts(plot.x_ticks) or [tick_text(tick, False) for tick in ticks], strict=True):
        half = len(label) * CHARACTER / 2
        parts.append(f'<path class="axis" data-x="{value:.9g}" d="M{n(x(value))} {n(bottom)}v4"/>')
        if x(value) - half > last + 6:  # labels never touch
            parts.append(f'<text class="soft middle" x="{n(x(value))}" y="{n(bottom + 19)}">{escape(label)}</text>')
            last = x(value) + half
    parts.append(f'<path class="axis" d="M{n(left)} {n(bottom)}H{n(right)}"/>')
    parts.append(f'<clipPath id="{ident}"><rect x="{n(left - 5)}" y="{n(top)}" width="{n(right - left + 10)}" '
                 f'height="{n(bottom - top + 5)}"/></clipPath><g clip-path="url(#{ident})">')  # fmt: skip
    for series in panel.series:
        kind = "guide" if series.guide else "data"
        parts.append(f'<g class="{mode_class(series.mode)}" data-{kind}="{escape(series.name)}">')
        parts += [*drawn(series, x, y), "</g>"]
    parts.append("</g>")
    leaving = set()
    for series in panel.series:
        for at in leaves(series, x, y):
            parts.append(f'<g class="{mode_class(series.mode)}">{caret(at, top - 8)}</g>')
        leaving |= {a for a, b in series.points if not series.joined and y.holds(b) and y(b) < top}
    for at, (value, mode) in enumerate(panel.lost):  # side by side, and beside what leaves the frame there
        beside = 11 * (sum(other == value for other, _ in panel.lost[:at]) + (value in leaving))
        if x.holds(value):
            parts.append(
                f'<g class="{mode_class(mode)}" data-lost="{value:.9g}">{cross(x(value) + beside, top - 5)}</g>'
            )
    return parts


def legend(keys: Sequence[Key], top: float) -> tuple[list[str], float]:
    """Its parts, and where it ends."""
    parts, x, y = [], 0.0, top
    for key in keys:
        wide = 34 + len(key.text) * CHARACTER + 18
        if x > 0 and x + wide > WIDTH:
            x, y = 0.0, y + 22
        parts.append(f'<g class="{mode_class(key.mode) if key.mode else "mode-none"}">')
        if key.mark:
            parts.append(cross(x + 13, y) if key.mark == "cross" else caret(x + 13, y - 3.5))
        else:
            parts.append(f'<path class="{line_class(key.dashed, key.guide, False)}" d="M{n(x)} {n(y)}h26"/>')
            if key.mode and not key.guide:
                parts.append(mark(key.mode, x + 13, y))
        parts.append(f'<text x="{n(x + 34)}" y="{n(y + 4)}">{escape(key.text)}</text></g>')
        x += wide
    return parts, y + 10


def spans(plot: Plot) -> tuple[tuple[float, float], list[tuple[float, float]]]:
    """Of x, and of y for each panel."""
    top = ceiling(plot.panels, plot.robust)
    columns = [
        [y for series in panel.series if not series.guide for _, y in series.points if y <= top]
        for panel in plot.panels
    ]
    xs = [x for panel in plot.panels for series in panel.series if not series.guide for x, _ in series.points]
    xs += [x for panel in plot.panels for x, _ in panel.lost]
    every = span([y for column in columns for y in column], plot.log_y, 0.06)
    own = [every if plot.shared else span(column, plot.log_y, 0.06) for column in columns]
    return span([*xs, *plot.x_ticks], plot.log_x, 0.04 if plot.x_ticks else 0.015), own


def svg(plot: Plot, ident: str, style: str = "") -> str:
    """The drawing. ``ident``: what ids begin with; ``style``: CSS that a file of its own brings along."""
    columns = 2 if len(plot.panels) == 4 else min(3, len(plot.panels))
    parts, y = legend(plot.keys, 12)
    parts.append(f'<text class="soft" x="0" y="{n(y + 18)}">{escape(plot.y_label)}</text>')
    y += 26 + (14 if any(panel.title for panel in plot.panels) else 0)
    x_span, y_spans = spans(plot)
    ticks = [
        tick_text(v, plot.percent) for s in y_spans for v in (log_ticks(*s) if plot.log_y else linear_ticks(*s, 5))
    ]
    margin = 12 + CHARACTER * max((len(text) for text in ticks), default=1)
    inner = margin if not plot.shared else 0.0  # what labels take beside every panel but the first
    wide = (WIDTH - RIGHT - margin - (columns - 1) * (GAP + inner)) / columns
    tall = 300.0 if columns == 1 else 210.0
    for at, panel in enumerate(plot.panels):
        row, column = divmod(at, columns)
        left = margin + column * (wide + GAP + inner)
        top = y + 28 + row * (tall + 66)
        box = (left, top, left + wide, top + tall)
        texts = column == 0 or not plot.shared
        parts += of_panel(panel, plot, box, f"{ident}-{at}", x_span, y_spans[at], texts)
    bottom = y + 28 + (math.ceil(len(plot.panels) / columns) - 1) * (tall + 66) + tall
    parts.append(f'<text class="soft" x="{n(margin)}" y="{n(bottom + 42)}">{escape(plot.x_label)}</text>')
    pad = 20.0 if style else 4.0
    frame = (-pad, 4 - pad, WIDTH + 2 * pad, bottom + 48 + 2 * pad)
    view = " ".join(map(n, frame))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" role="img" '
        f'aria-labelledby="{ident}-title {ident}-text">'
        f'<title id="{ident}-title">{escape(plot.title)}</title><desc id="{ident}-text">{escape(plot.text)}</desc>'
    )
    if style:
        paper = " ".join(
            f'{name}="{n(value)}"' for name, value in zip(("x", "y", "width", "height"), frame, strict=True)
        )
        head += f'<style>{style}</style><rect class="paper" {paper}/>'
    return "\n".join([head, *parts, "</svg>"])
