"""The sections of a report's page: the tables, the sentences around them, and where the plots go."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

from .axes import power, tick_text
from .plots import is_difference, words, worst_places
from .read import Bias, Comparison, Interval, Row, Run, mean
from .svg import Plot, Series, escape, mode_class, svg

MOST_CELLS = 40000  # of the tables of one plot
MOST_LOST = 40  # runs without a number that are listed
DASH = "\u2013"


# ---- Tables ---------------------------------------------------------------------------------------------------------


def absent(text: str) -> str:
    return f'<span class="absent">{escape(text)}</span>'


def signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "\u2212")


def percent(value: float | None) -> str:
    if value is None:
        return absent(DASH)
    if abs(value) >= 1e4:
        return "over 1 000 000 %".replace(" ", "\u202f", 2)
    return f"{100 * value:.3g} %" if abs(value) < 10 else f"{100 * value:,.0f} %".replace(",", "\u202f")


def residual(value: float) -> str:
    """Two digits and a power of ten."""
    factor, _, exponent = f"{value:.1e}".partition("e")
    return f"{factor}·{power(10.0 ** int(exponent))}" if value else "0"


def name_cell(mode: str, more: str = "") -> str:
    """``mode`` and what follows, as the first cell's HTML."""
    return f'<span class="{mode_class(mode)}"><i class="key"></i>{escape(mode)}</span>{escape(more)}'


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], grouped: bool = False) -> str:
    """``head`` is text, the cells are HTML. ``grouped``: neighbours with the same first cell share it."""
    kind = ' class="grouped"' if grouped else ""
    parts = [f'<div class="scroll"><table{kind}>', f"<caption>{escape(caption)}</caption>", "<thead><tr>"]
    parts += [f'<th scope="col">{escape(text)}</th>' for text in head]
    parts.append("</tr></thead><tbody>")
    if grouped:
        for first, members in itertools.groupby(rows, lambda row: row[0]):
            every = list(members)
            start = f'<th scope="rowgroup" rowspan="{len(every)}">{first}</th>'
            for row in every:
                cells = "".join(f"<td>{cell}</td>" for cell in row[2:])
                parts.append(f'<tr>{start}<td class="name">{row[1]}</td>{cells}</tr>')
                start = ""
    else:
        for row in rows:
            cells = "".join(f"<td>{cell}</td>" for cell in row[1:])
            parts.append(f'<tr><th scope="row">{row[0]}</th>{cells}</tr>')
    return "\n".join([*parts, "</tbody></table></div>"])


def numbers_of(plot: Plot) -> str:
    """Every point of a plot, a table for each panel, closed until it is asked for."""
    parts, cells = [], 0
    for panel in plot.panels:
        lines = plot_lines(panel.series)
        xs = sorted({x for _, points in lines for x in points})
        cells += len(xs) * len(lines)
        rows = (
            [
                tick_text(x, False),
                *(" / ".join(f"{y:.5g}" for y in points.get(x, [])) or absent(DASH) for _, points in lines),
            ]
            for x in xs
        )
        if cells <= MOST_CELLS:
            parts.append(table(panel.title or plot.y_label, [plot.x_label, *(name for name, _ in lines)], rows))
    if cells > MOST_CELLS:
        parts.append("<p>The other numbers of this plot are too many for a table; the file has them.</p>")
    return f"<details><summary>{escape(plot.title)}, in numbers</summary>\n" + "\n".join(parts) + "</details>"


def plot_lines(series: Sequence[Series]) -> list[tuple[str, dict[float, list[float]]]]:
    found = []
    for line in series:
        if not line.guide:
            points: dict[float, list[float]] = {}
            for x, y in line.points:
                points.setdefault(x, []).append(y)
            found.append((line.name, points))
    return found


def figure(plot: Plot, ident: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return (
        f'<h3>{escape(plot.title)}</h3>\n<figure><div class="wide">{svg(plot, ident)}</div>{below}</figure>\n'
        f"{numbers_of(plot)}"
    )


# ---- A comparison ---------------------------------------------------------------------------------------------------


def grouped(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in their seed alone."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.mode, run.labels), []).append(run)
    return list(groups.values())


def gaps_of(group: Sequence[Run], runs: Sequence[Run]) -> list[float]:
    """To the exact run with the same seed and the same point of the grid, where both have a number."""
    exact = {(run.point, run.seed): run.validation for run in runs if run.mode == "exact"}
    found = []
    for run in group:
        theirs = exact.get((run.point, run.seed))
        if run.validation is not None and theirs is not None:
            found.append(run.validation - theirs)
    return found


def gap_cells(group: Sequence[Run], runs: Sequence[Run]) -> list[str]:
    if group[0].mode == "exact":
        return [absent(DASH)] * 2
    gaps = gaps_of(group, runs)
    if not gaps:
        has = any(run.mode == "exact" and run.point == group[0].point for run in runs)
        return [absent("no pair finished" if has else "no exact run"), absent(DASH)]
    of = "" if len(gaps) == len(group) else f" (of {len(gaps)})"
    spread = f"{signed(min(gaps))} … {signed(max(gaps))}" if len(gaps) > 1 else absent("one seed")
    return [escape(signed(mean(gaps)) + of), spread]


def probe_cells(group: Sequence[Run]) -> list[str]:
    mode, probes = group[0].mode, [run.probe for run in group if run.probe]
    cells = []
    for of in ("residual", "after_cast"):
        values = [getattr(probe, of)[mode] for probe in probes if mode in getattr(probe, of)]
        cells.append(residual(statistics.median(values)) if values else absent(DASH))
    shares = [probe.gain[-1][1] for probe in probes if probe.gain]
    worst = [probe.dq_worst[mode] for probe in probes if mode in probe.dq_worst]
    return [*cells, percent(mean(shares) if shares else None), percent(max(worst) if worst else None)]


def comparison_table(found: Comparison) -> str:
    head = ["run", *(f"seed {seed}" for seed in found.seeds), "gap to exact, mean", "lowest … highest", "residual",
            "after the cast", "gain share", "worst dQ error"]  # fmt: skip
    rows = []
    for group in grouped(found.runs):
        by_seed = {run.seed: run for run in group}
        labels = words(group[0].labels)
        row = [name_cell(group[0].mode, f", {labels}" if labels else "")]
        for seed in found.seeds:
            run = by_seed.get(seed)
            value = run.validation if run else None
            row.append(f"{value:.4f}" if value is not None else absent(run.state if run else "not run"))
        rows.append([*row, *gap_cells(group, found.runs), *probe_cells(group)])
    return table("Validation loss at the end in nats a token, by seed, and what the probe measured", head, rows)


def comparison_section(found: Comparison, plots: Sequence[Plot], ident: str) -> str:
    states: dict[str, int] = {}
    for run in found.runs:
        states[run.state] = states.get(run.state, 0) + 1
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    torch = f"; PyTorch {found.torch}" if found.torch else ""
    parts = [
        f'<section aria-labelledby="{ident}"><h2 id="{ident}">{escape(found.config)}</h2>',
        f'<p class="facts">{escape(found.source)}: {len(found.runs)} runs, {counts}{escape(torch)}</p>',
        comparison_table(found),
        '<p class="small">Gap: validation minus that of the exact run with the same seed and settings; below zero is '
        "better than exact. Residual: |Σ dS| / Σ|dS| of a row, zero in exact arithmetic, before and after dS is cast: "
        "median over rows, heads, layers, measured steps and seeds. Gain share: of one channel, in the layer with the "
        "largest, at the last measured step, mean over seeds. Worst dQ error: relative, of a head at any measured step "
        "and seed.</p>",
    ]
    lost = [
        f"<li>{escape(run.name)}: {escape(run.message or run.state)}</li>"
        for run in found.runs
        if run.validation is None
    ]
    if lost:
        more = f"<li>and {len(lost) - MOST_LOST} more</li>" if len(lost) > MOST_LOST else ""
        parts.append(f"<h3>Runs without a validation loss at the end</h3>\n<ul>{''.join(lost[:MOST_LOST])}{more}</ul>")
    captions = {
        "loss": "One line for each run and seed; each point is the mean over a stretch of steps, the last over "
        "what is left of them.",
        "gap": "At the same step and with the same seed; above zero is worse than exact.",
        "validation": "One line for each run and seed.",
    }
    for at, plot in enumerate(plots):
        parts.append(figure(plot, f"{ident}-{at}", captions.get(plot.name.rpartition("-")[2], "")))
    return "\n".join([*parts, "</section>"])


# ---- A bias experiment ----------------------------------------------------------------------------------------------


def bias_cell(bias: Interval) -> str:
    if bias.value is None:
        return absent(DASH)
    if not bias.seen:
        return absent("none seen" if bias.high is None else f"none seen: below {100 * bias.high:.2g} %")
    return f"{percent(bias.value)} [{percent(bias.low)}, {percent(bias.high)}]"


def equal_cell(equal: Interval | None) -> str:
    if equal is None or equal.value is None:
        return absent(DASH)
    ends = [DASH if end is None else f"{end:.0f}" for end in (equal.low, equal.high)]
    return f"{equal.value:.0f} [{', '.join(ends)}]"


def bias_table(found: Bias, caption: str, rows: Sequence[Row]) -> str:
    shown = sorted({0, len(found.batches) // 2, len(found.batches) - 1})
    last = found.batches[-1]
    head = ["weights", "mode", *(f"B = {found.batches[at]}" for at in shown), f"1/√B line at {last}", "bias [95 %]",
            "noise = bias at B"]  # fmt: skip
    lines = []
    for row in rows:
        first = row.curve[0]
        pure = None if first is None else first * (found.batches[0] / last) ** 0.5
        lines.append([escape(row.place), name_cell(row.mode), *(percent(row.curve[at]) for at in shown), percent(pure),
                      bias_cell(row.bias), equal_cell(row.equal)])  # fmt: skip
    return table(caption, head, lines, grouped=True)


def worst_part(found: Bias) -> list[str]:
    """In how many places each mode has a bias, and the table of the largest."""
    single = [row for row in found.rows if row.layer is not None]
    if not single:
        return []
    items = []
    for mode in dict.fromkeys(row.mode for row in single):
        every = [row for row in single if row.mode == mode]
        seen, chance = sum(row.bias.seen for row in every), f" (by chance {0.025 * len(every):.1f} at most)"
        items.append(f"<li>{name_cell(mode)}: seen in {seen} of {len(every)} places{chance}</li>")
    parts = ["<h3>A bias, layer by layer</h3>", f"<ul>{''.join(items)}</ul>"]
    places = [place for differences in (False, True)
              for place in worst_places([row for row in single if is_difference(row.mode) == differences])]  # fmt: skip
    worst = [row for place in dict.fromkeys(places) for row in single if row.place == place]
    return (
        [*parts, bias_table(found, "The places with the largest bias, by the lower end of its interval", worst)]
        if worst
        else parts
    )


def bias_section(found: Bias, plots: Sequence[Plot], ident: str) -> str:
    step = "" if found.step is None else f", step {found.step:.0f}"
    facts = [found.source, f"{found.batches[-1]} mini-batches of {found.batch} \u00d7 {found.context} tokens",
             *(f"{name} {value}" for name, value in found.facts)]  # fmt: skip
    caption = (
        "Both axes logarithmic. Bar: one standard error. Noise alone falls as the dotted line of its colour does; an "
        "error that does not average out flattens above it. The tables say where it can be told from noise."
    )
    figures = [figure(plot, f"{ident}-{at}", caption) for at, plot in enumerate(plots)]
    title = escape(f"Bias of the gradient: {found.checkpoint}{step}")
    parts = [
        f'<section aria-labelledby="{ident}"><h2 id="{ident}">{title}</h2>',
        f'<p class="facts">{escape("; ".join(facts))}</p>',
        "<p>The weights stay as they are. The gradient of each mini-batch is computed exactly and in each mode, and "
        "the difference of the means over B mini-batches is compared with the mean exact gradient.</p>",
        *figures[:1],
        bias_table(found, "All measured layers together", [row for row in found.rows if row.layer is None]),
        '<p class="small">Errors are relative to the norm of the mean exact gradient as it was measured; k_columns, '
        "the sum of dK over tokens, to that of |dK|. A - B is the difference of the gradients of two modes. A bias is "
        "seen where its 95 % interval excludes zero; noise = bias at B: over so many mini-batches the noise of the "
        "mean has fallen to the bias.</p>",
        *worst_part(found),
        *figures[1:],
    ]
    return "\n".join([*parts, "</section>"])
