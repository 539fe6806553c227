"""The same training in several modes and with several seeds, side by side, and the table of what came out."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import config as configuration
from .checkpoint import durable
from .log import read
from .run import differences
from .text import data
from .text.tokens import read_json

#: Where a head's exact dQ all but vanishes its relative error has no bound, and no larger number says more.
ENOUGH = 1e6


@dataclass(frozen=True)
class Cell:
    """One run: its folder's name, and what it sets beside the config."""

    name: str
    labels: tuple[tuple[str, str], ...]  # of the grid, the seed left out
    seed: int
    overrides: tuple[str, ...]


def parsed_grid(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """``table.key=a,b,c`` as names and values."""
    grid: list[tuple[str, list[str]]] = []
    for text in texts:
        name, equals, values = text.partition("=")
        name, parts = name.strip(), [value.strip() for value in values.split(",")]
        if not equals or not all(name.partition(".")) or not all(parts):
            raise ValueError(f"--grid {text}: expected TABLE.KEY=VALUE,VALUE...")
        if name in dict(grid):
            raise ValueError(f"--grid {text}: {name} is in the grid already")
        refuse_own(f"--grid {text}", name)
        grid.append((name, parts))
    return grid


def refuse_own(said: str, name: str) -> None:
    """What the modes and the seeds set would be lost, or theirs would."""
    own = {"attention.mode": "--modes", "train.seed": "--seeds"}
    if name in own:
        raise ValueError(f"{said}: expected {own[name]} to say this")


def cells(modes: Sequence[str], seeds: Sequence[int], grid: Sequence[str], overrides: Sequence[str]) -> list[Cell]:
    """Every mode with every point of the grid and every seed, each once.

    ``exact`` and ``reference`` know no numerics and no centre: points that differ in these alone are one.
    """
    axes = parsed_grid(grid)
    for text in overrides:
        refuse_own(f"--set {text}", text.partition("=")[0].strip())
    found: dict[tuple[str, ...], Cell] = {}
    names: set[str] = set()
    for mode, values in itertools.product(modes, itertools.product(*(values for _, values in axes))):
        pairs = [(name, value) for (name, _), value in zip(axes, values, strict=True)]
        if mode in ("exact", configuration.REFERENCE):
            pairs = [(name, value) for name, value in pairs if not name.startswith("attention.")]
        labels = (("mode", mode), *pairs)
        sets = [*overrides, f'attention.mode="{mode}"', *(f"{name}={value}" for name, value in pairs)]
        for seed in seeds:
            all_sets = (*sets, f"train.seed={seed}")
            if all_sets not in found:
                name = folder_name(mode, pairs, seed, names)
                names.add(name)
                found[all_sets] = Cell(name, labels, seed, all_sets)
    return list(found.values())


def folder_name(mode: str, pairs: Sequence[tuple[str, str]], seed: int, taken: set[str]) -> str:
    """One that can be read; where letters had to go, it ends in a digest of what they were."""
    short = "-".join(f"{name.partition('.')[2]}_{value}" for name, value in pairs)
    wanted = "-".join(part for part in (mode, short, f"seed_{seed}") if part)
    name = re.sub(r"[^A-Za-z0-9_.+-]", "_", wanted)[:150].lstrip(".")
    if name != wanted or name in taken:
        name += "-" + hashlib.sha256(json.dumps([mode, *pairs, seed]).encode()).hexdigest()[:8]
    return name


def run_all(config: Path, out: Path, todo: Sequence[Cell], device: str, jobs: int, threads: int) -> list[str]:
    """Run what has no ``result.json`` yet, ``jobs`` at a time; returns the last lines of those that failed."""
    waiting = [cell for cell in todo if not (out / cell.name / "result.json").exists()]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed = []
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")))
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    on: dict[str, int] = {}  # which GPU each running one has
    with tqdm(total=len(todo), initial=len(todo) - len(waiting), unit="run") as bar:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cell = waiting.pop(0)
                    if gpus:  # the one with the fewest runs
                        on[cell.name] = min(range(gpus), key=lambda gpu: list(on.values()).count(gpu))
                        environment["CUDA_VISIBLE_DEVICES"] = visible(on[cell.name])
                    running[cell.name] = start(config, out / cell.name, cell, device, environment)
                for name, process in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[name]
                    on.pop(name, None)
                    bar.update()
                    if process.returncode:
                        last = (out / name / "output.txt").read_text(encoding="utf-8", errors="replace").strip()
                        failed.append(f"{name}: {last.splitlines()[-1] if last else process.returncode}")
                time.sleep(0.05)
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():  # gone before this returns: their logs are free for the next one
                process.wait()
    return failed


def _end_with_parent() -> None:
    """In a started run: when the comparison is killed, so is this one, and another can go on with it (Linux)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (AttributeError, OSError):
        pass


def visible(gpu: int) -> str:
    """The name of the GPU that this process sees as number ``gpu``."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return given.split(",")[gpu] if given else str(gpu)


def start(config: Path, folder: Path, cell: Cell, device: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "train", "run", str(config), "--out", str(folder), "--device", device, "--quiet"]
    command += [part for text in cell.overrides for part in ("--set", text)]
    if (folder / "log.jsonl").exists():  # it was stopped
        command.append("--resume" if any((folder / "checkpoints").glob("step-*")) else "--again")
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, preexec_fn=_end_with_parent
        )


def refuse_others(config: Path, out: Path, todo: Sequence[Cell]) -> None:
    """Refuse to take for done what is, but of another config or other data. Errors: ValueError that names the run."""
    free = {"data.path", *(f"train.{name}" for name in ("checkpoint_every", "keep", "tensorboard", "threads"))}
    for cell in todo:
        wanted = configuration.load(config, cell.overrides).document()
        path = out / cell.name / "result.json"
        if path.exists():
            differing = differences(wanted, result_of(path).get("config"), free)
            if differing:
                raise ValueError(f"--out: {path} is of another config, it differs in {', '.join(differing)}")
            theirs, ours = trained_on(path.with_name("log.jsonl")), fingerprint(wanted["data"]["path"])
            if theirs is not None and ours is not None and theirs != ours:
                raise ValueError(f"--out: {path} is of other data than data.path: {theirs[:12]}, not {ours[:12]}")


def trained_on(log: Path) -> str | None:
    """The fingerprint of the data that a run's log names, None where it names none (`outcome` tells of a bad log)."""
    try:
        found = next(read(log), {}).get("data")
    except ValueError:
        return None
    return found if isinstance(found, str) else None


@functools.cache
def fingerprint(folder: str) -> str | None:
    """Of the data in a folder, None where there is none: runs that are done can be tabled without it."""
    try:
        return data.open(folder).fingerprint
    except ValueError:
        return None


def write_whole(path: Path, text: str) -> None:
    """The file is as it was, or whole. Errors: RuntimeError, one line."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        durable.write(temporary, iter([memoryview(text.encode())]))
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RuntimeError(f"{path}: cannot be written: {error.strerror or error}") from None


def result_of(path: Path) -> dict[str, Any]:
    """A finished run's document. Errors: ValueError, one line that names the file."""
    return read_json(path, "dmattn.train_result/1")


# ---- What came out --------------------------------------------------------------------------------------------------


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


def summary(out: Path, todo: Sequence[Cell]) -> dict[str, Any]:
    """The document of a comparison, ``dmattn.compare/1``."""
    runs = [
        {"name": cell.name, "labels": dict(cell.labels), "seed": cell.seed, **outcome(out / cell.name)} for cell in todo
    ]
    return {"schema": "dmattn.compare/1", "torch": torch.__version__, "runs": runs}


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


def compare(
    config: Path, out: Path, *, modes: Sequence[str], seeds: Sequence[int], grid: Sequence[str] = (),
    overrides: Sequence[str] = (), device: str = "auto", jobs: int = 1, threads: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Run every cell that is not done, and write ``compare.json`` and ``compare.md`` into ``out``."""
    for name, count in (("--jobs", jobs), ("--threads", threads)):
        if count < 1:
            raise ValueError(f"{name}: expected 1 or more, got {count}")
    check_device(device)
    todo = cells(modes, seeds, grid, overrides)
    refuse_others(config, out, todo)  # all are checked before the first runs
    out.mkdir(parents=True, exist_ok=True)
    with alone(out):
        failed = run_all(config, out, todo, device, jobs, threads)
        document = {**summary(out, todo), "config": str(config.name), "failed": failed}
        write_whole(out / "compare.json", json.dumps(document, allow_nan=False) + "\n")
        write_whole(out / "compare.md", markdown(document))
    return document


def check_device(device: str) -> None:
    """What each run would refuse, before the first one starts; the GPU is left to them."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("--device: cuda was asked for, and PyTorch sees no GPU")


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Refuse a second comparison in the same folder: it would count the first one's runs as failed."""
    handle = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"--out: another comparison is running in {out}") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
