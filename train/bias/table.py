"""What `train bias` writes and prints of its measurements.

Every error is relative to the norm of the mean exact gradient over all batches (key columns: of the mean over batches
of the sum of |dK|), as it was measured, that is with the noise that the mean still has; the rows of ``exact`` say how
much of it that is. ``bias_of_mean`` is relative to that norm without its noise, where it can be told from zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..config import REFERENCE
from .statistics import Estimate, Moments, noise_square, pooled, squared_mean, squared_ratio

COLUMNS = "k_columns"
ALL = "all"  # every weight, without the key columns
KINDS = ("q", "k", "v", "o", "q_norm", "k_norm", ALL, COLUMNS)
Key = tuple[str, str]
WORST = 5


def share(value: float, scale: float) -> float | None:
    """value / scale; None where that is no number."""
    quotient = value / scale if scale > 0 else math.nan
    return quotient if math.isfinite(quotient) else None


def estimate(found: Estimate, scale: float) -> dict[str, Any]:
    """The root with its 95 % interval, its square (it may be negative) and that one's standard error."""
    return {
        "value": share(found.root, scale),
        "low": share(found.low, scale),
        "high": share(found.high, scale),
        "seen": found.seen,
        "square": share(found.square, scale**2),
        "square_error": share(found.error, scale**2),
    }


def equal_at(moments: Moments) -> dict[str, float | None] | None:
    """Mini-batches over which the noise of the mean has fallen to the bias, with its interval; None without a bias."""
    bias = squared_mean(moments)
    noise = max(0.0, noise_square(moments))
    if not bias.seen:
        return None
    return {"batches": noise / bias.square, "low": noise / bias.high**2, "high": noise / bias.low**2}


def curve(moments: Moments, scale: float) -> dict[str, list[float | None]]:
    """Roots of the mean squares for 1, 2, 4 ... batches, and their standard errors."""
    roots = [math.sqrt(square) for square in moments.curve]
    errors = [error / (2 * root) if root > 0 else math.nan for error, root in zip(moments.spread, roots, strict=True)]
    return {"curve": [share(root, scale) for root in roots], "curve_error": [share(error, scale) for error in errors]}


def row_of_mode(errors: Moments, exact: Moments, scale: float, columns: bool) -> dict[str, Any]:
    ratio = None if columns else squared_ratio(errors, exact)
    return {
        **curve(errors, scale),
        "noise": share(math.sqrt(max(0.0, noise_square(errors))), scale),
        "bias": estimate(squared_mean(errors), scale),
        "bias_of_mean": None if ratio is None else estimate(ratio, 1.0),
        "equal_at": equal_at(errors),
    }


def row_of_exact(exact: Moments, scale: float) -> dict[str, Any]:
    """Norms of the exact gradient: of its mean, as measured and without noise, and of a single batch's."""
    return {
        "scale": scale,
        "mean": math.sqrt(exact.mean_square),
        "mean_without_noise": estimate(squared_mean(exact), 1.0),
        "single": math.sqrt(exact.curve[0]),
        **curve(exact, 1.0),
    }


def groups(keys: Iterable[Key]) -> list[tuple[str | None, str, list[Key]]]:
    """(layer, parameter, its keys): every key alone, then each kind over all layers (layer None)."""
    every = list(keys)
    found: list[tuple[str | None, str, list[Key]]] = [
        (layer, parameter, [(layer, parameter)]) for layer, parameter in every
    ]
    for kind in KINDS:
        members = [key for key in every if key[1] == kind or (kind == ALL and key[1] != COLUMNS)]
        if members:
            found.append((None, kind, members))
    return found


def rows(
    moments: dict[str, dict[Key, Moments]], elements: dict[Key, int], magnitudes: dict[str, Tensor]
) -> dict[str, Any]:
    """``batches`` (1, 2, 4 ...: where the curves are), ``exact`` and ``modes``: a row for each layer x parameter, and
    pooled over layers, where ``layer`` is null. All that a plot needs."""
    exact = moments[REFERENCE]
    levels = len(next(iter(exact.values())).squares)
    document: dict[str, Any] = {"batches": [1 << level for level in range(levels)], "exact": [], "modes": []}
    for layer, parameter, keys in groups(exact):
        own = pooled(exact[key] for key in keys)
        columns = parameter == COLUMNS
        scale = math.sqrt(
            sum(float(magnitudes[name].square().sum()) for name, _ in keys) if columns else own.mean_square
        )
        name = {"layer": layer, "parameter": parameter, "elements": sum(elements[key] for key in keys)}
        document["exact"].append({**name, **row_of_exact(own, scale)})
        for mode, streams in moments.items():
            if mode != REFERENCE:
                errors = pooled(streams[key] for key in keys)
                document["modes"].append({"mode": mode, **name, **row_of_mode(errors, own, scale, columns)})
    return document


# ---- Text -----------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2g} %" if abs(value) < 1 else f"{100 * value:.0f} %"


def bias_text(bias: dict[str, Any]) -> str:
    if not bias["seen"]:
        return "-" if bias["high"] is None else f"none seen: below {percent(bias['high'])}"
    return f"{percent(bias['value'])} [{percent(bias['low'])}, {percent(bias['high'])}]"


def equal_text(row: dict[str, Any]) -> str:
    equal = row["equal_at"]
    if equal is None:
        return "-"
    return "{} [{}, {}]".format(*(f"{equal[name]:.0f}" for name in ("batches", "low", "high")))


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    parts = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*parts, *("| " + " | ".join(line) + " |" for line in lines)])


def pooled_table(document: dict[str, Any]) -> str:
    batches = document["batches"]
    shown = sorted({0, len(batches) // 2, len(batches) - 1})
    lines = []
    for row in document["modes"]:
        if row["layer"] is None:
            pure = None if row["curve"][0] is None else row["curve"][0] / math.sqrt(batches[-1])
            values = [percent(row["curve"][at]) for at in shown]
            lines.append(
                [row["parameter"], row["mode"], *values, percent(pure), bias_text(row["bias"]), equal_text(row)]
            )
    head = ["weights", "mode", *(f"B = {batches[at]}" for at in shown), f"1/√B line at {batches[-1]}",
            "bias (95 %)", "no longer falls from B ="]  # fmt: skip
    return table(head, lines)


def exact_table(document: dict[str, Any]) -> str:
    lines = []
    for row in document["exact"]:
        if row["layer"] is None:
            clean = row["mean_without_noise"]
            interval = f"{number(clean['value'])} [{number(clean['low'])}, {number(clean['high'])}]"
            lines.append([row["parameter"], number(row["single"]), number(row["mean"]), interval, number(row["scale"])])
    head = ["weights", "norm, one batch", f"of the mean of {document['batches'][-1]}", "without its noise (95 %)",
            "errors are relative to"]  # fmt: skip
    return table(head, lines)


def worst_lines(document: dict[str, Any]) -> list[str]:
    """Of each mode: in how many places a bias is seen, and the largest ones by the lower end of their interval."""
    lines = []
    for mode in dict.fromkeys(row["mode"] for row in document["modes"]):
        every = [row for row in document["modes"] if row["mode"] == mode and row["layer"] is not None]
        seen = [row for row in every if row["bias"]["seen"] and row["bias"]["low"] is not None]
        chance = f"by chance at most about {0.025 * len(every):.1f}"
        lines.append(f"{mode}: a bias in {len(seen)} of {len(every)} places ({chance})")
        for row in sorted(seen, key=lambda row: -row["bias"]["low"])[:WORST]:
            where = f"{row['layer']}.{row['parameter']}"
            lines.append(f"  {where}: {bias_text(row['bias'])}, no longer falls from B = {equal_text(row)}")
    return lines


def markdown(document: dict[str, Any]) -> str:
    settings = document["settings"]
    title = (
        f"Error of the gradient, relative to the norm of the mean exact gradient of {settings['batches']} mini-batches "
        f"of {settings['batch']} x {settings['context']} tokens; all measured layers together"
    )
    parts = [
        title,
        pooled_table(document),
        "The exact gradient",
        exact_table(document),
        "\n".join(worst_lines(document)),
    ]
    return "\n\n".join(parts) + "\n"
