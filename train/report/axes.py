"""Axes of a report's plots: from numbers to places in the drawing, where the ticks are and what they say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CHARACTER = 6.6  # width of a letter, about
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Scale:
    low: float  # of the data, or its logarithm
    high: float
    start: float  # in the drawing
    stop: float
    log: bool

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        return self.start + (at - self.low) / (self.high - self.low) * (self.stop - self.start)

    def holds(self, value: float) -> bool:
        return not self.log or value > 0


def span(values: Iterable[float], log: bool, room: float) -> tuple[float, float]:
    """Lowest and highest, as logarithms if ``log``, with a share of room at both ends; never of no width."""
    kept = [math.log10(value) if log else value for value in values if not log or value > 0]
    low, high = (min(kept), max(kept)) if kept else (0.0, 1.0)
    wide = high - low
    least = max(abs(low), abs(high), 1e-12) * 1e-6 if not log else 0.05
    if wide < least:
        wide = least * 10 if log else max(least, abs(high) * 0.02, 1e-9)
        low, high = low - wide / 2, high + wide / 2
    return low - room * wide, high + room * wide


def linear_ticks(low: float, high: float, about: int) -> list[float]:
    unit = 10.0 ** math.floor(math.log10((high - low) / about))
    step = min((factor * unit for factor in (1, 2, 5, 10)), key=lambda size: abs((high - low) / size - about))
    first = math.ceil(low / step - 1e-9)
    return [
        round(at * step, 12) if abs(step) > 1e-9 else at * step
        for at in range(first, math.floor(high / step + 1e-9) + 1)
    ]


def log_ticks(low: float, high: float) -> list[float]:
    """Decades, or as many of their multiples as it takes to have three; even steps where the axis is shorter still."""
    skip = max(1, math.ceil((high - low) / 6))
    decades = [at for at in range(math.floor(low), math.ceil(high) + 1) if at % skip == 0]
    for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        values = [factor * 10.0**at for at in decades for factor in factors]
        found = [value for value in values if low - 1e-9 <= math.log10(value) <= high + 1e-9]
        if len(found) >= 3:
            return found
    return linear_ticks(10.0**low, 10.0**high, 4)


def tick_texts(values: Sequence[float]) -> list[str]:
    """Of one axis, all in one way: as powers of ten where one of them needs it."""
    return (
        [tick_text(v, False) for v in values]
        if min(map(abs, values), default=1) >= 1e-3 or 0 in values
        else list(map(power, values))
    )


def tick_text(value: float, percent: bool) -> str:
    if percent:
        return f"{100 * value:.6g} %" if value == 0 or 1e-6 <= abs(value) < 100 else power(100 * value) + " %"
    if value and not 1e-3 <= abs(value) < 1e6:
        return power(value)
    return f"{value:,.6g}".replace(",", "\u202f").replace("-", "\u2212")


def power(value: float) -> str:
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    factor = f"{value / 10.0**exponent:.3g}"
    return ("" if factor == "1" else f"{factor}·") + "10" + str(exponent).translate(SUPERSCRIPTS)
