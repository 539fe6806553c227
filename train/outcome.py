"""What came out of a run that `train run` left in its folder, and the table of several."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .log import read
from .text.tokens import read_json

#: Where a head's exact dQ all but vanishes its relative error has no bound, and no larger number says more.
ENOUGH = 1e6


def result_of(path: Path) -> dict[str, Any]:
    """A finished run's document. Errors: ValueError, one line that names the file."""
    return read_json(path, "dmattn.train_result/1")


def outcome(folder: Path) -> dict[str, Any]:
    """Of one run: validation (None where it was lost), largest gradient, residuals, gains, entropy.

    Files that cannot be read are named in ``unreadable``, and what they hold is left out.
    """
    found: dict[str, Any] = {"validation": None, "step": None, "stopped": None}
    for name, part in (("result.json", _of_result), ("log.jsonl", _of_log), ("probe.jsonl", probed_part)):
        if (folder / name).exists():
            try:
                found.update(part(folder / name))
            except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
                found.setdefault("unreadable", []).append(f"{name}: {' '.join(str(error).split())[:200]}")
    return found


def _of_result(path: Path) -> dict[str, Any]:
    document = result_of(path)
    loss = document.get("validation")
    if loss is not None and not (isinstance(loss, float) and math.isfinite(loss)):
        raise ValueError(f"validation: expected a finite number or null, got {loss!r:.40}")
    return {key: document.get(key) for key in ("validation", "step", "parameters", "recall")}


def _of_log(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    losses, norms, seconds = [], [], []
    for entry in read(path):
        if entry["kind"] == "step" and None not in (entry["loss"], entry["grad_norm"], entry["seconds"]):
            losses.append(entry["loss"])
            norms.append(entry["grad_norm"])
            seconds.append(entry["seconds"])
        elif entry["kind"] == "event":
            found["stopped"] = entry.get("message")
        elif entry["kind"] == "validation":
            found.setdefault("validations", []).append([entry["step"], entry["loss"]])
    if losses:
        found["train_loss_last"] = statistics.fmean(losses[-50:])
        found["curve"] = thinned(losses)
        found["grad_norm_largest"] = max(norms)
        found["step_ms"] = 1e3 * statistics.median(seconds)
        found["seconds"] = sum(seconds)
    return found


def probed_part(path: Path) -> dict[str, Any]:
    return {"probe": probed(path)}


def thinned(losses: Sequence[float], points: int = 60) -> list[list[float]]:
    """``[last step, mean loss]`` of at most ``points`` equal stretches; a last one of less than half is left out."""
    length = max(1, -(-len(losses) // points))
    parts = [losses[at : at + length] for at in range(0, len(losses), length)]
    if len(parts) > 1 and 2 * len(parts[-1]) < length:  # too few steps for a mean beside the others
        parts.pop()
    return [[at * length + len(part) - 1, statistics.fmean(part)] for at, part in enumerate(parts)]


def probed(path: Path) -> dict[str, Any]:
    """Medians over steps, layers and heads of what the probe measured, and the last step's gains and entropy."""
    residual: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    curves: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):  # a killed run's last
            break
        document = json.loads(line)
        gains, entropies = {}, []
        for layer in document["layers"]:
            shares = [head["gain"]["share"] for head in layer["heads"] if head["gain"]]
            if shares:
                gains[layer["layer"]] = max(shares)
            entropies += [head["entropy"] for head in layer["heads"] if head["entropy"] is not None]
            for head in layer["heads"]:
                for mode, numbers in head["modes"].items():
                    for into, value in (
                        (residual, numbers["residual"]["median"]),
                        (after, numbers["residual_after_cast"]["median"]),
                        (errors, numbers["error"]["dq"]),
                    ):
                        if value is not None:
                            into.setdefault(mode, []).append(value)
        curves.append(
            {"step": document["step"], "gain": gains, "entropy": statistics.fmean(entropies) if entropies else None}
        )
    return {
        "residual": {mode: statistics.median(values) for mode, values in residual.items()},
        "residual_after_cast": {mode: statistics.median(values) for mode, values in after.items()},
        "dq_error": {mode: statistics.median(values) for mode, values in errors.items()},
        "dq_error_worst": {mode: min(max(values), ENOUGH) for mode, values in errors.items()},
        "curve": curves,
    }


# ---- The table -------------------------------------------------------------------------------------------------------


def grouped(runs: Sequence[dict[str, Any]]) -> list[tuple[dict[str, str], list[dict[str, Any]]]]:
    """Runs with the same labels, in the order of their first."""
    groups: dict[str, tuple[dict[str, str], list[dict[str, Any]]]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run["labels"]), (run["labels"], []))[1].append(run)
    return list(groups.values())


def point(labels: dict[str, str]) -> str:
    """What an exact run has in common with those it is compared with."""
    return json.dumps(
        [(name, value) for name, value in labels.items() if name != "mode" and not name.startswith("attention.")]
    )


def markdown(document: dict[str, Any]) -> str:
    """A row for each point, a column for each seed; beside it the gap to exact with the same seed."""
    runs = document["runs"]
    seeds = sorted({run["seed"] for run in runs})
    failed = {line.partition(": ")[0] for line in document.get("failed", ())}
    exact = {(point(run["labels"]), run["seed"]): run["validation"] for run in runs if run["labels"]["mode"] == "exact"}
    head = ["run", *(f"seed {seed}" for seed in seeds), "gap to exact", "residual", "after the cast", "gain"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for labels, group in grouped(runs):
        at = point(labels)
        by_seed = {run["seed"]: run for run in group}
        values = [by_seed.get(seed, {}).get("validation") for seed in seeds]
        gaps = [gap_cell(value, exact.get((at, seed))) for value, seed in zip(values, seeds, strict=True)]
        shown = [labels["mode"], *(f"{k.partition('.')[2]} {v}" for k, v in labels.items() if k != "mode")]
        cells = [", ".join(shown)]
        cells += [seed_cell(by_seed.get(seed, {}), failed) for seed in seeds]
        cells.append(" / ".join(gaps) if any(gap != "-" for gap in gaps) else "-")
        cells += [probe_cell(group, labels["mode"], kind) for kind in ("residual", "residual_after_cast")]
        cells.append(gain_cell(group))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def gap_cell(value: float | None, exact: float | None) -> str:
    """Of one seed; where one of the two is missing its place stays."""
    return "-" if value is None or exact is None else f"{value - exact:+.3f}"


def seed_cell(run: dict[str, Any], failed: set[str]) -> str:
    """A run's validation loss, or why there is none: it became not finite, or its process ended with an error."""
    if run.get("validation") is not None:
        return f"{run['validation']:.4f}"
    return "stopped" if run.get("stopped") else "failed" if run.get("name") in failed else "-"


def probe_cell(group: Sequence[dict[str, Any]], mode: str, kind: str) -> str:
    values = [run["probe"][kind][mode] for run in group if mode in run.get("probe", {}).get(kind, {})]
    return f"{statistics.median(values):.1e}" if values else "-"


def gain_cell(group: Sequence[dict[str, Any]]) -> str:
    """The largest share of any layer at the last measured step, mean over seeds."""
    last = [run["probe"]["curve"][-1]["gain"] for run in group if run.get("probe", {}).get("curve")]
    shares = [max(gains.values()) for gains in last if gains]
    return f"{100 * statistics.fmean(shares):.1f} %" if shares else "-"
