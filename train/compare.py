"""The same training in several modes and with several seeds, side by side, and the table of what came out."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import config as configuration
from .checkpoint import durable
from .log import read
from .outcome import markdown, outcome, result_of
from .run import differences
from .text import data


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


def summary(out: Path, todo: Sequence[Cell]) -> dict[str, Any]:
    """The document of a comparison, ``dmattn.compare/1``."""
    runs = [
        {"name": cell.name, "labels": dict(cell.labels), "seed": cell.seed, **outcome(out / cell.name)} for cell in todo
    ]
    return {"schema": "dmattn.compare/1", "torch": torch.__version__, "runs": runs}


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
        durable.replace(out / "compare.json", (json.dumps(document, allow_nan=False) + "\n").encode(), "--out")
        durable.replace(out / "compare.md", markdown(document).encode(), "--out")
    return document


def check_device(device: str) -> None:
    """What each run would refuse, before the first one starts; the GPU is left to them."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("--device: cuda was asked for, and PyTorch sees no GPU")


def alone(out: Path) -> contextlib.AbstractContextManager[None]:
    """Refuse a second comparison in the same folder: it would count the first one's runs as failed."""
    return durable.claimed(out, f"--out: another comparison is running in {out}")
