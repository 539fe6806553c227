"""The documents of a report, read and checked: ``dmattn.compare/1`` and ``dmattn.bias/1``.

Nothing in a file is trusted: it may be another file, cut, or made to do harm. What does not hold what a page needs is
refused in one line that names the file and the place in it; text becomes printable and short here, once and for all.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

COMPARE, BIAS = "dmattn.compare/1", "dmattn.bias/1"
LARGEST_FILE = 64 << 20  # bytes
LARGEST = 1e100  # of a number: what is beyond it overflows on the way to a plot
MOST_RUNS, MOST_POINTS, MOST_ROWS, MOST_TEXT = 2000, 10000, 20000, 160
MODES = ("exact", "reference", "stale", "consistent", "matched", "onepass", "per_tensor", "bf16_dp")  # with a colour
MISSING = object()
Points = list[tuple[float, float]]


def printable(text: str, most: int = MOST_TEXT) -> str:
    """Without what neither HTML nor XML can hold (controls, halves of a surrogate pair), and not endless."""
    kept = "".join(c if c.isprintable() else " " for c in text[: most + 1])
    return kept if len(kept) <= most else kept[: most - 1] + "…"


@dataclass(frozen=True)
class At:
    """A value and where it stands; ``value`` is MISSING where the document has none."""

    file: str
    where: str
    value: Any

    def refuse(self, expected: str) -> NoReturn:
        got = "nothing" if self.value is MISSING else printable(repr(self.value), 60)
        raise ValueError(f"{self.file}: {self.where}: expected {expected}, got {got}")

    def __getitem__(self, key: str) -> At:
        inside = f"{self.where}.{key}" if self.where != "document" else key
        return At(self.file, printable(inside), self.mapping().get(key, MISSING))

    @property
    def given(self) -> bool:
        return self.value is not MISSING and self.value is not None

    def mapping(self) -> dict[str, Any]:
        return self.value if isinstance(self.value, dict) else self.refuse("an object")

    def items(self, most: int) -> list[At]:
        if not isinstance(self.value, list):
            self.refuse("a list")
        if len(self.value) > most:
            raise ValueError(f"{self.file}: {self.where}: expected at most {most} entries, got {len(self.value)}")
        return [At(self.file, f"{self.where}[{at}]", value) for at, value in enumerate(self.value)]

    def text(self) -> str:
        return printable(self.value) if isinstance(self.value, str) else self.refuse("a text")

    def number(self) -> float:
        wrong = isinstance(self.value, bool) or not isinstance(self.value, int | float)
        if wrong or not -LARGEST < self.value < LARGEST:  # false for NaN too
            self.refuse("a finite number")
        return float(self.value)

    def optional(self) -> float | None:
        """Null is a number that could not be had; a missing key is a mistake."""
        return None if self.value is None else self.number()

    def whole(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not 0 <= self.value < 1 << 63:
            self.refuse("a whole number, 0 or more")
        return int(self.value)

    def points(self) -> Points:
        """``[[step, number], ...]``; pairs without a number are left out, a missing list is an empty one."""
        found = []
        for item in self.items(MOST_POINTS) if self.given else []:
            pair = item.items(2)
            if len(pair) != 2:
                item.refuse("a step and a number")
            if pair[1].value is not None:
                found.append((pair[0].number(), pair[1].number()))
        return found


# ---- dmattn.compare/1 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """By mode medians over what was measured; by step the largest gain share of any layer and the mean entropy."""

    residual: dict[str, float]
    after_cast: dict[str, float]
    dq_worst: dict[str, float]
    gain: Points
    entropy: Points


@dataclass(frozen=True)
class Run:
    name: str
    mode: str
    labels: tuple[tuple[str, str], ...]  # of the grid, without the mode
    seed: int
    validation: float | None  # nats a token
    state: str  # finished | stopped | failed | unfinished | not run
    message: str
    curve: Points
    validations: Points
    probe: Probe | None

    @property
    def point(self) -> tuple[tuple[str, str], ...]:
        """What it has in common with the exact run that it is compared with."""
        return tuple(pair for pair in self.labels if not pair[0].startswith("attention."))

    @property
    def variant(self) -> str:
        """What else its attention has: modes of two variants are two lines of a plot."""
        return ", ".join(f"{short(name)} {value}" for name, value in self.labels if name.startswith("attention."))


def short(name: str) -> str:
    """``optim.lr``: lr."""
    return name.rpartition(".")[2] or name


@dataclass(frozen=True)
class Comparison:
    config: str
    source: str  # the folder and name of the file
    torch: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})


def by_mode(at: At) -> dict[str, float]:
    values = at.mapping() if at.given else {}
    return {printable(mode): at[mode].number() for mode in values if values[mode] is not None}


def probe_of(at: At) -> Probe | None:
    if not at.given:
        return None
    gain, entropy = [], []
    for item in at["curve"].items(MOST_POINTS) if at["curve"].given else []:
        step = item["step"].number()
        shares = list(by_mode(item["gain"]).values())
        gain += [(step, max(shares))] if shares else []
        if item["entropy"].given:
            entropy.append((step, item["entropy"].number()))
    return Probe(
        by_mode(at["residual"]), by_mode(at["residual_after_cast"]), by_mode(at["dq_error_worst"]), gain, entropy
    )


def state_of(at: At, failures: dict[str, str]) -> tuple[str, str]:
    name = at["name"].text()
    if at["validation"].optional() is not None:
        return "finished", ""
    if at["stopped"].given:
        return "stopped", at["stopped"].text()
    if name in failures:
        return "failed", failures[name]
    return ("unfinished" if at["curve"].given else "not run"), ""


def run_of(at: At, failures: dict[str, str]) -> Run:
    labels = {printable(name): at["labels"][name].text() for name in at["labels"].mapping()}
    mode = At(at.file, f"{at.where}.labels.mode", labels.pop("mode", MISSING)).text()
    state, message = state_of(at, failures)
    return Run(
        at["name"].text(), mode, tuple(labels.items()), at["seed"].whole(), at["validation"].optional(), state, message,
        at["curve"].points(), at["validations"].points(), probe_of(at["probe"]),
    )  # fmt: skip


def comparison_of(document: At, source: str) -> Comparison:
    failures = {}
    for line in document["failed"].items(MOST_RUNS) if document["failed"].given else []:
        name, _, message = line.text().partition(": ")
        failures[name] = message
    runs = tuple(run_of(item, failures) for item in document["runs"].items(MOST_RUNS))
    if not runs:
        document["runs"].refuse("at least one run")
    seen = set()
    for at, run in enumerate(runs):
        if (run.mode, run.labels, run.seed) in seen:
            raise ValueError(
                f"{document.file}: runs[{at}]: expected each run once, got {run.name!r} with seed {run.seed} again"
            )
        seen.add((run.mode, run.labels, run.seed))
    config = document["config"].text() if document["config"].given else "comparison"
    return Comparison(config, source, document["torch"].text() if document["torch"].given else "", runs)


# ---- dmattn.bias/1 --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; ``seen``: is it told from zero? Null: it could not be estimated."""

    value: float | None
    low: float | None
    high: float | None
    seen: bool


@dataclass(frozen=True)
class Row:
    """Of a mode, a layer (None: all together) and a kind of weights: error of the mean of 1, 2, 4 ... mini-batches."""

    mode: str
    layer: str | None
    parameter: str
    curve: tuple[float | None, ...]
    curve_error: tuple[float | None, ...]
    bias: Interval
    equal: Interval | None  # mini-batches whose mean has as much noise as bias

    @property
    def place(self) -> str:
        return self.parameter if self.layer is None else f"{self.layer}.{self.parameter}"


@dataclass(frozen=True)
class Bias:
    checkpoint: str
    step: float | None
    source: str
    facts: tuple[tuple[str, str], ...]
    batches: tuple[int, ...]
    batch: int
    context: int
    rows: tuple[Row, ...]


def interval(at: At, middle: str = "value", seen: bool | None = None) -> Interval:
    if seen is None:
        seen = at["seen"].value if isinstance(at["seen"].value, bool) else at["seen"].refuse("true or false")
    return Interval(at[middle].optional(), at["low"].optional(), at["high"].optional(), seen)


def curve_of(at: At, length: int) -> tuple[float | None, ...]:
    values = tuple(item.optional() for item in at.items(64))
    if len(values) != length:
        at.refuse(f"{length} numbers, one for each of batches")
    return values


def row_of(at: At, length: int) -> Row:
    layer = None if at["layer"].value is None else at["layer"].text()
    spread = curve_of(at["curve_error"], length) if at["curve_error"].given else (None,) * length
    return Row(
        at["mode"].text(), layer, at["parameter"].text(), curve_of(at["curve"], length), spread, interval(at["bias"]),
        interval(at["equal_at"], "batches", True) if at["equal_at"].given else None,
    )  # fmt: skip


def rank(mode: str) -> tuple[bool, int]:
    """Modes in the order of their colours, differences of two modes after them."""
    first = mode.partition(" - ")[0]
    return " - " in mode, MODES.index(first) if first in MODES else len(MODES)


def bias_of(document: At, source: str) -> Bias:
    batches = tuple(item.whole() for item in document["batches"].items(64))
    if len(batches) < 2 or batches[0] < 1 or any(b <= a for a, b in itertools.pairwise(batches)):
        document["batches"].refuse("growing whole numbers, two or more")
    rows = tuple(row_of(item, len(batches)) for item in document["modes"].items(MOST_ROWS))
    if not rows:
        document["modes"].refuse("at least one row")
    order = {place: at for at, place in enumerate(dict.fromkeys(row.place for row in rows))}
    rows = tuple(sorted(rows, key=lambda row: (order[row.place], rank(row.mode))))
    settings, checkpoint = document["settings"], document["checkpoint"]
    facts = [(name, document[name].text()) for name in ("device", "torch", "version") if document[name].given]
    trained = checkpoint["trained_in"]
    if trained.given and trained["mode"].given:
        facts.insert(0, ("trained in mode", trained["mode"].text()))
    step = checkpoint["step"].number() if checkpoint["step"].given else None
    return Bias(
        checkpoint["name"].text(), step, source, tuple(facts), batches, settings["batch"].whole(),
        settings["context"].whole(), rows,
    )  # fmt: skip


# ---- Files ----------------------------------------------------------------------------------------------------------


def not_a_number(text: str) -> NoReturn:
    raise ValueError(f"expected finite numbers, got {text}")


def load(path: Path) -> Comparison | Bias:
    """A file as its document. Errors: ValueError in one line; OSError where there is no such file."""
    name = printable(str(path))
    with path.open("rb") as file:
        raw = file.read(LARGEST_FILE + 1)
    if len(raw) > LARGEST_FILE:
        raise ValueError(f"{name}: expected at most {LARGEST_FILE >> 20} MiB, got more")
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=not_a_number)
    except RecursionError:
        raise ValueError(f"{name}: expected JSON of a report, got lists in lists without end") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: expected JSON in UTF-8, got other bytes") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: expected JSON, got something else in line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        said = str(error) if str(error).startswith("expected") else f"expected JSON of a report: {error}"
        raise ValueError(f"{name}: {printable(said)}") from None
    document = At(name, "document", value)
    schema = document["schema"]
    source = printable("/".join(path.absolute().parts[-2:]))
    if schema.value == COMPARE:
        return comparison_of(document, source)
    if schema.value == BIAS:
        return bias_of(document, source)
    schema.refuse(f"{COMPARE} or {BIAS}")


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
