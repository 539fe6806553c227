"""What the tests of the training share: a text of its own, tiny runs, and what two runs have in common bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from train import checkpoint, config, log, loop
from train.cli import main
from train.text import data

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the of and a model key value attention gradient loss step river stone green quiet".split()

TOML = """
[model]
width = 16
layers = 2
heads = 2
context = 32
[attention]
numerics = "paper"
[data]
path = {path}
[optim]
lr = 1e-2
warmup = 2
schedule = "cosine"
weight_decay = 0.01
[train]
steps = 6
batch = 4
context = 16
validate_batches = 2
threads = 1
"""


def texts(folder: Path, seed: int = 0) -> Path:
    """A few documents of nonsense."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    for at in range(10):
        words = (draw.choice(WORDS) for _ in range(150))
        (folder / f"{at}.txt").write_text(" ".join(words) + ".\n", encoding="utf-8")
    return folder


def prepared(folder: Path, kind: str = "bytes", seed: int = 0, size: int | None = None) -> Path:
    """A folder of tokens. Characters are 17 ids, so they make a smaller model."""
    data.prepare(texts(folder / "texts", seed), folder / "data", kind, size, held_out=0.2)
    return folder / "data"


def written(folder: Path, tokens: Path, text: str = TOML) -> Path:
    """The config file of a tiny run."""
    path = folder / "tiny.toml"
    path.write_text(text.format(path=json.dumps(str(tokens))), encoding="utf-8")
    return path


@contextlib.contextmanager
def torch_as_it_was() -> Iterator[None]:
    """A training sets Torch's threads and its determinism for the process."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    generator = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
        torch.set_rng_state(generator)


def trained(toml: Path, out: Path, *sets: str, **how: Any) -> dict[str, Any]:
    return loop.train(config.load(toml, sets), out, device="cpu", quiet=True, **how)


class Stopped(BaseException):
    """Stands for the end of a process between two steps."""


def stopped_after(monkeypatch: Any, toml: Path, out: Path, steps: int, *sets: str, **how: Any) -> None:
    """A run that ends without a word once ``steps`` steps are done in it."""
    own, done = loop.update, [0]

    def update(run: Any) -> dict[str, float]:
        if done[0] == steps:
            raise Stopped
        done[0] += 1
        return own(run)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "update", update)
        try:
            trained(toml, out, *sets, **how)
        except Stopped:
            return
    raise AssertionError(f"the run was to stop after {steps} steps, and came to its end")


TIMES = ("seconds", "tokens_per_second")


def log_lines(out: Path, *kinds: str) -> list[dict[str, Any]]:
    """Lines of the log of these kinds, apart from times."""
    lines = log.read(out / "log.jsonl")
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines if line["kind"] in kinds]


def last_state(out: Path) -> checkpoint.State:
    return checkpoint.load(checkpoint.found(out))


def same_bits(a: Any, b: Any, path: str = "") -> None:
    """Fails, naming the place, unless two nested values are the same to the last bit."""
    assert type(a) is type(b), f"{path}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{path}: {list(a)} and {list(b)}"
        for key in a:
            same_bits(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for at, (x, y) in enumerate(zip(a, b, strict=True)):
            same_bits(x, y, f"{path}/{at}")
    else:
        assert a == b, f"{path}: {a} and {b}"


def same_end(a: Path, b: Path, *kinds: str) -> None:
    """Weights, moments, generators, the log's lines apart from times, and the result of two runs are the same."""
    one, two = last_state(a), last_state(b)
    assert one.meta["step"] == two.meta["step"]
    same_bits(one.model, two.model, "model")
    same_bits(one.optimizers, two.optimizers, "optimizers")
    same_bits(one.rng, two.rng, "rng")
    kinds = kinds or ("step", "validation", "event")
    assert log_lines(a, *kinds) == log_lines(b, *kinds)
    results = [json.loads((out / "result.json").read_text(encoding="utf-8")) for out in (a, b)]
    assert results[0]["validation"] == results[1]["validation"]


def command(*arguments: str | Path) -> tuple[int, Any]:
    """``python -m train`` in this process: its status. What argparse ends with is a status too."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def environment() -> dict[str, str]:
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def process(*arguments: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """``python -m train`` as a process of its own."""
    words: Sequence[str] = [sys.executable, "-m", "train", *map(str, arguments)]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, **how)


def one_line(stderr: str, *names: str) -> None:
    """The error is one line and has the names in it."""
    lines = stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), stderr
    for name in names:
        assert name in lines[0], f"{name!r} is not in {lines[0]!r}"
