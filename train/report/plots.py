"""The plots of a comparison and of a bias experiment: which numbers go where. svg.py draws them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

from .read import Bias, Comparison, Points, Row, Run, mean, short
from .svg import Key, Panel, Plot, Series, ceiling

MOST_PANELS = 12
LOSS, EDGE, GAP = (0.35, 0.5), (4.0, 2.0), (4.0, 0.3)  # room above the median line: see `ceiling`; nats a token
LEAVES = "leaves the frame here"
WORST = 6  # places of a bias that are drawn
Pairs = tuple[tuple[str, str], ...]


def slug(text: str) -> str:
    """Letters, digits and dashes alone: a file's name is made of it."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:48].strip("-") or "unnamed"


def words(pairs: Pairs) -> str:
    return ", ".join(f"{short(name)} {value}" for name, value in pairs)


def modes_of(items: Iterable[Run | Row]) -> list[str]:
    return list(dict.fromkeys(item.mode for item in items))


def keys_of(modes: Sequence[str]) -> list[Key]:
    return [Key(mode, mode) for mode in modes]


def facets(runs: Sequence[Run], without: str = "") -> list[tuple[str, list[Run]]]:
    """A panel's title and its runs, for each point of the grid and each variant of attention. Exact attention knows no
    variants: its runs are in all panels of their point. ``without``: the axis that the panels show."""

    def place(run: Run) -> Pairs:
        return tuple(pair for pair in run.point if pair[0] != without)

    varied = {(place(run), run.variant) for run in runs if run.variant}
    with_variant = {point for point, _ in varied}
    found: dict[tuple[Pairs, str], list[Run]] = {}
    for run in runs:
        if run.variant or place(run) not in with_variant:
            found.setdefault((place(run), run.variant), [])
    for (point, variant), members in found.items():
        members += [run for run in runs if place(run) == point and run.variant in ("", variant)]
    return [(", ".join(filter(None, (words(point), variant))), members) for (point, variant), members in found.items()]


# ---- Comparisons ----------------------------------------------------------------------------------------------------


def over_steps(
    found: Comparison, prefix: str, name: str, title: str, y_label: str, of: Callable[[Run], Points], *,
    marked: bool = False, percent: bool = False, robust: tuple[float, float] | None = None,
) -> Plot | None:  # fmt: skip
    """One thin line for each run; None where no run has such numbers."""
    panels, leaving = [], False
    every = facets(found.runs)
    for heading, runs in every[:MOST_PANELS]:
        lines = [
            Series(f"{run.mode}, seed {run.seed}", run.mode, of(run), marked=marked, thin=True)
            for run in runs
            if of(run)
        ]
        if lines:
            panels.append(Panel(heading, lines))
    if not panels:
        return None
    top = ceiling(panels, robust)
    leaving = any(y > top for panel in panels for line in panel.series for _, y in line.points)
    there = {line.mode for panel in panels for line in panel.series}
    keys = keys_of([mode for mode in modes_of(found.runs) if mode in there])
    keys += [Key(LEAVES, mark="leaves")] if leaving else []
    lines_in_all = sum(len(panel.series) for panel in panels)
    text = f"{title} of {found.config}: {lines_in_all} lines, one for each run that has these numbers."
    if len(every) > MOST_PANELS:
        text += f" The first {MOST_PANELS} of {len(every)} points of the grid are drawn."
    return Plot(f"{prefix}-{name}", title, text, "steps", y_label, panels, keys, percent=percent, robust=robust)


def gap_of(found: Comparison) -> Callable[[Run], Points]:
    exact = {(run.point, run.seed): dict(run.validations) for run in found.runs if run.mode == "exact"}

    def gaps(run: Run) -> Points:
        if run.mode == "exact":
            return []
        theirs = exact.get((run.point, run.seed), {})
        return [(step, loss - theirs[step]) for step, loss in run.validations if step in theirs]

    return gaps


def number_of(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 1e-100 < abs(value) < 1e100 or value == 0 else None


def axes(found: Comparison) -> list[str]:
    """Names of the grid whose values are numbers, two or more; those of the attention are its variants."""
    values: dict[str, set[str]] = {}
    for run in found.runs:
        for name, value in run.point:
            values.setdefault(name, set()).add(value)
    numeric = [name for name, texts in values.items() if all(number_of(text) is not None for text in texts)]
    return [name for name in numeric if len({number_of(text) for text in values[name]}) > 1]


def edge_series(runs: Sequence[Run], mode: str, axis: str) -> list[Series]:
    """The mean over the seeds that finished, and each run as a point."""
    here: dict[float, list[float]] = {}
    for run in runs:
        if (
            run.mode == mode
            and run.validation is not None
            and (at := number_of(dict(run.point).get(axis, ""))) is not None
        ):
            here.setdefault(at, []).append(run.validation)
    middle = [(at, mean(values)) for at, values in sorted(here.items())]
    each = [(at, value) for at, values in sorted(here.items()) for value in values]
    line = Series(f"{mode}, mean over seeds", mode, middle, marked=len(each) == len(middle))
    return [line] if len(each) == len(middle) else [line, Series(f"{mode}, each run", mode, each, False, True)]


def edge(found: Comparison, prefix: str, axis: str) -> Plot | None:
    """Validation against an axis of the grid: where each mode stops learning."""
    panels: list[Panel] = []
    ticks: set[float] = set()
    for heading, runs in facets(found.runs, axis)[:MOST_PANELS]:
        lost = []
        for run in runs:
            at = number_of(dict(run.point).get(axis, ""))
            ticks.update(() if at is None else (at,))
            if at is not None and run.state in ("stopped", "failed"):
                lost.append((at, run.mode))
        lines = [line for mode in modes_of(runs) for line in edge_series(runs, mode, axis) if line.points]
        if lines or lost:
            panels.append(Panel(heading, lines, lost))
    if not panels:
        return None
    known = {"lr": "learning rate"}.get(short(axis), short(axis))
    keys = keys_of(modes_of(found.runs))
    top = ceiling(panels, EDGE)
    leaving = any(y > top for panel in panels for line in panel.series for _, y in line.points)
    keys += [Key(LEAVES, mark="leaves")] if leaving else []
    keys += [Key("stopped or failed: no value", mark="cross")] if any(panel.lost for panel in panels) else []
    every = sorted(ticks)
    return Plot(
        f"{prefix}-{slug(short(axis))}", f"Validation against {known}",
        f"Validation loss of {found.config} at the end, for each mode against the {known}.", known,
        "validation loss at the end, nats a token", panels, keys, every,
        log_x=every[0] > 0 and every[-1] / every[0] >= 4, robust=EDGE,
    )  # fmt: skip


def of_comparison(found: Comparison, prefix: str) -> list[Plot]:
    def probed(name: str) -> Callable[[Run], Points]:
        return lambda run: getattr(run.probe, name) if run.probe else []

    several = any(len(run.validations) > 1 for run in found.runs)
    plots = [edge(found, prefix, axis) for axis in axes(found)]
    plots.append(over_steps(found, prefix, "loss", "Training loss", "training loss, nats a token",
                            lambda run: run.curve, robust=LOSS))  # fmt: skip
    if several:
        plots += [
            over_steps(found, prefix, "validation", "Validation loss", "validation loss, nats a token",
                       lambda run: run.validations, marked=True, robust=LOSS),
            over_steps(found, prefix, "gap", "Gap to exact", "validation loss minus that of exact with the same seed, "
                       "nats a token", gap_of(found), marked=True, robust=GAP),
        ]  # fmt: skip
    plots += [
        over_steps(found, prefix, "entropy", "Entropy of the attention", "entropy of a row of P, nats, mean of layers "
                   "and heads", probed("entropy"), marked=True),
        over_steps(found, prefix, "gain", "Largest share of the gain", "largest share that one channel has of a head's "
                   "gain, of all layers", probed("gain"), marked=True, percent=True),
    ]  # fmt: skip
    return [plot for plot in plots if plot is not None]


# ---- Bias -----------------------------------------------------------------------------------------------------------


def is_difference(mode: str) -> bool:
    return " - " in mode


def guide(row: Row, batches: Sequence[int]) -> Points:
    """What is left if all of the error were noise: 1/sqrt(B) from the first point on."""
    first = next((at for at, value in enumerate(row.curve) if value is not None and value > 0), None)
    if first is None:
        return []
    start = row.curve[first] or 0.0
    return [(float(b), start * math.sqrt(batches[first] / b)) for b in (batches[first], batches[-1])]


def bias_series(row: Row, batches: Sequence[int]) -> list[Series]:
    kept = [
        (b, value, error)
        for b, value, error in zip(batches, row.curve, row.curve_error, strict=True)
        if value is not None
    ]
    points = [(float(b), value) for b, value, _ in kept]
    return [
        Series(f"{row.mode}, 1/√B", row.mode, guide(row, batches), guide=True),
        Series(row.mode, row.mode, points, marked=True, dashed=is_difference(row.mode), spread=[e for _, _, e in kept]),
    ]


def worst_places(rows: Sequence[Row]) -> list[str]:
    """Layer and weight of the largest biases, by the lower end of their interval in any mode; none that is not seen."""
    low: dict[str, float] = {}
    for row in rows:
        if row.layer is not None and row.bias.seen and row.bias.low is not None:
            low[row.place] = max(low.get(row.place, 0.0), row.bias.low)
    return sorted(low, key=lambda place: -low[place])[:WORST]


def bias_plot(found: Bias, rows: Sequence[Row], name: str, title: str, places: Sequence[str]) -> Plot | None:
    panels = []
    for place in places:
        lines = [line for row in rows if row.place == place for line in bias_series(row, found.batches)]
        if any(line.points for line in lines):
            panels.append(Panel(place, lines))
    if not panels:
        return None
    keys = [Key(mode, mode, dashed=is_difference(mode)) for mode in modes_of(rows)]
    keys.append(Key("as 1/√B from the first point: all of it noise", guide=True))
    text = (
        f"{title}, {found.checkpoint}: relative error of the mean gradient of B mini-batches against B, both axes "
        f"logarithmic, a panel for each of {', '.join(places)}."
    )
    return Plot(
        name, title, text, f"B, mini-batches of {found.batch} \u00d7 {found.context} tokens",
        "error of the mean gradient, relative to the exact one", panels, keys, list(map(float, found.batches)),
        log_x=True, log_y=True, percent=True, shared=False,
    )  # fmt: skip


def of_bias(found: Bias, prefix: str) -> list[Plot]:
    """Modes, then the differences of two modes; pooled over layers, then the worst places."""
    plots = []
    for differences, suffix, what in ((False, "", "Error"), (True, "-difference", "Difference of two modes")):
        rows = [row for row in found.rows if is_difference(row.mode) == differences]
        pooled = [row for row in rows if row.layer is None]
        kinds = list(dict.fromkeys(row.place for row in pooled))
        plots.append(bias_plot(found, pooled, f"{prefix}-bias{suffix}", f"{what}, all measured layers together", kinds))
        single = [row for row in rows if row.layer is not None]
        plots.append(
            bias_plot(
                found, single, f"{prefix}-worst{suffix}", f"{what}, where the bias is largest", worst_places(single)
            )
        )
    return [plot for plot in plots if plot is not None]
