"""The log of train/: its lines, resuming, what cannot be written or read, TensorBoard."""

from __future__ import annotations

import builtins
import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train.log import SCHEMA, TrainLog, read


def values(step: int) -> dict[str, Any]:
    numbers = {"loss": 3.0 / (step + 1), "lr": 0.1 + 0.2, "grad_norm": 1.5, "tokens": 64 * (step + 1)}
    return {**numbers, "tokens_per_second": 1e4, "seconds": 0.1 * step}


def write(path: Path, first: int, last: int, **options: Any) -> None:
    """Steps ``first`` to ``last - 1``, with a validation after every fourth step."""
    with TrainLog(path, step=first, **options) as log:
        log.run(step=first, config={"train": {"steps": last}}, device="cpu")
        for step in range(first, last):
            log.step(step, **values(step))
            if (step + 1) % 4 == 0:
                log.validation(step + 1, loss=1.0 / (step + 1), accuracy=0.5)


def but_runs(path: Path) -> list[dict[str, Any]]:
    return [entry for entry in read(path) if entry["kind"] != "run"]


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text and 0 < len(text) < 400
    return text


def line(**change: Any) -> str:
    return json.dumps({"schema": SCHEMA, "kind": "step", "step": 0, **values(0), **change}) + "\n"


RUN = json.dumps({"schema": SCHEMA, "kind": "run", "step": 0}) + "\n"


def test_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, 0, 5)
    entries = [json.loads(text) for text in path.read_text().splitlines()]
    assert entries == list(read(path))
    assert [entry["kind"] for entry in entries] == ["run", *["step"] * 4, "validation", "step"]
    assert all(entry["schema"] == "dmattn.train/1" for entry in entries)
    assert entries[0]["config"] == {"train": {"steps": 5}}
    assert entries[2] == {"schema": SCHEMA, "kind": "step", "step": 1, **values(1)}
    assert (entries[5]["step"], entries[5]["loss"], entries[5]["accuracy"]) == (4, 0.25, 0.5)


@pytest.mark.parametrize("at", [0, 3, 4, 8, 10])
@pytest.mark.parametrize("reached", [4, 10])
def test_resumed_is_uninterrupted(tmp_path, at, reached):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    write(whole, 0, 12)
    write(parts, 0, max(at, reached))
    with TrainLog(parts, step=max(at, reached)) as log:
        log.event("nonfinite", step=max(at, reached), message="lost")
    with parts.open("ab") as file:
        file.write(b'{"schema": "dmattn.train/1", "kind": "st')
    for _ in range(2):  # the second one cuts off what the first has done
        write(parts, at, 12)
    assert but_runs(parts) == but_runs(whole)
    assert [entry["step"] for entry in read(parts) if entry["kind"] == "run"][-1] == at


def test_a_validation_is_not_written_twice(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, 0, 4)
    for loss, count in ((0.25, 1), (0.5, 2)):
        with TrainLog(path, step=4) as log:
            log.validation(4, loss=loss, accuracy=0.5)
        assert [entry["kind"] for entry in read(path)].count("validation") == count


def test_nonfinite_is_null_and_listed(tmp_path):
    path = tmp_path / "log.jsonl"
    with TrainLog(path) as log:
        log.run(step=0, best=math.inf)
        log.step(0, **{**values(0), "loss": math.nan, "grad_norm": -math.inf}, more={"a": [1.0, math.nan]})
        log.validation(1, loss=math.inf)
    run, step, validation = read(path)
    assert run["best"] is None and run["nonfinite"] == ["best"]
    assert step["loss"] is None and step["grad_norm"] is None and step["more"] == {"a": [1.0, None]}
    assert sorted(step["nonfinite"]) == ["grad_norm", "loss", "more.a.1"]
    assert validation["nonfinite"] == ["loss"]
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def test_other_ranks_write_nothing(tmp_path):
    with TrainLog(tmp_path / "log.jsonl", rank=1, tensorboard=True) as log:
        log.run(step=0)
        log.step(0, **values(0))
        log.validation(1, loss=1.0)
        log.event("done", step=1)
        log.sync()
    assert os.listdir(tmp_path) == []


def test_killed_logs_hold_whole_lines(tmp_path):
    """Every line is with the system once its call returns: a kill loses none."""
    path = tmp_path / "log.jsonl"
    code = (
        "import os, signal, sys\nfrom train.log import TrainLog\nlog = TrainLog(sys.argv[1])\nlog.run(step=0)\n"
        "for at in range(50):\n    log.event('x', step=at)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], env=environment()).returncode == -signal.SIGKILL
    assert [entry["step"] for entry in read(path)] == [0, *range(50)]


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda log: log.step(3, **values(3)), "step: expected an integer from 5, got '3'"),
        (lambda log: log.step(True, **values(3)), "step: expected an integer"),
        (lambda log: log.step(5, **{**values(5), "loss": "1"}), "loss: expected a finite number"),
        (lambda log: log.validation(5, loss=None), "loss: expected a finite number"),
        (lambda log: log.event(7, step=5), "event: expected its name"),
        (lambda log: log.run(step=5, kind="x"), "'kind' is the log's own"),
        (lambda log: log.run(step=5, config="x" * 2**22), "more than 4194304"),
    ],
)
def test_what_reports_could_not_use_is_not_written(tmp_path, call, words):
    path = tmp_path / "log.jsonl"
    write(path, 0, 6)
    before = path.read_bytes()
    with TrainLog(path, step=6) as log:
        log._last = 5
        with pytest.raises(ValueError) as error:
            call(log)
    assert words in one_line(error)
    assert path.read_bytes() == before


HOSTILE = {
    "another file": ("hello\n", "line 1: not JSON"),
    "another file without an end": ("hello", "not a log of schema"),
    "bytes": (b"\xff\xfe\x00\n", "line 1: not JSON"),
    "zeros": (RUN.encode() + b"\0" * 100 + b"\n", "line 2: not JSON"),
    "another schema": ('{"schema": "dmattn.live/1", "kind": "run", "step": 0}\n', "line 1: not of schema"),
    "a list": ("[]\n", "line 1: not of schema"),
    "deep": ("[" * 100_000 + "\n", "line 1: n"),
    "no run": (line(), "line 1: the first line is of kind step, expected run"),
    "NaN": (RUN + line(loss=math.nan), "line 2: not JSON (NaN"),
    "overflow": (RUN + line(more=1.0).replace("1.0}", "1e999}"), "line 2: not JSON (1e999"),
    "huge integer": (RUN + line(tokens=10**400), "line 2: tokens: expected"),
    "huger integer": (RUN + line(tokens=1).replace('"tokens": 1,', f'"tokens": {"1" * 5000},'), "line 2: not JSON"),
    "null": (RUN + line(loss=None), "line 2: loss: expected"),
    "a number as text": (RUN + line(lr="0.1"), "line 2: lr: expected"),
    "true": (RUN + line(lr=True), "line 2: lr: expected"),
    "a number that is listed": (RUN + line(nonfinite=["loss"]), "line 2: loss: expected"),
    "nonfinite": (RUN + line(nonfinite="loss"), "line 2: nonfinite: expected"),
    "unknown kind": (RUN + line(kind="x"), "line 2: kind: expected"),
    "a list as kind": (RUN + line(kind=[]), "line 2: kind: expected"),
    "backwards": (RUN + line(step=2) + line(step=1), "line 3: step: expected an integer from 2"),
    "negative": (RUN + line(step=-1), "line 2: step: expected"),
    "a fraction": (RUN + line(step=1.0), "line 2: step: expected"),
    "long": (RUN + "x" * 2**23, "line 2: longer than"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused_and_kept(tmp_path, kind):
    text, words = HOSTILE[kind]
    path = tmp_path / "log.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    for call in (lambda: list(read(path)), lambda: TrainLog(path, step=9)):
        with pytest.raises(ValueError) as error:
            call()
        assert str(path) in one_line(error) and words in str(error.value)
    assert path.read_bytes() == before


def test_empty_and_half_logs_are_begun_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    for text in ("", RUN[:5], RUN[:-1]):
        path.write_text(text)
        assert list(read(path)) == []
        write(path, 0, 1)
        assert len(list(read(path))) == 2


def test_what_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        list(read(tmp_path / "none"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for call in (lambda: list(read(pipe)), lambda: TrainLog(pipe)):
        with pytest.raises(ValueError, match="is not a file"):
            call()
    with pytest.raises(RuntimeError, match=r"log: cannot write .*: Is a directory"):
        TrainLog(tmp_path)
    with pytest.raises(RuntimeError, match=r"log: cannot write .*: No such file"):
        TrainLog(tmp_path / "none" / "log.jsonl")


def test_two_writers_are_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    with TrainLog(path) as log:
        log.run(step=0)
        with pytest.raises(RuntimeError, match="another process is writing to"):
            TrainLog(path)
        log.step(0, **values(0))
    assert len(list(read(path))) == 2


@pytest.mark.parametrize("written", [0, 10])
def test_a_full_disk_is_one_line(tmp_path, monkeypatch, written):
    path = tmp_path / "log.jsonl"
    real = os.write
    with TrainLog(path) as log:
        log.run(step=0)
        calls = []

        def full(handle: int, data: bytes) -> int:
            calls.append(1)
            if written and len(calls) == 1:
                return real(handle, data[:written])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(RuntimeError) as error:
            log.step(0, **values(0))
        monkeypatch.undo()
        assert one_line(error) == f"log: no space left in {tmp_path} while writing log.jsonl"
        assert path.read_text().endswith("\n") and len(list(read(path))) == 1
        log.step(0, **values(0))
    assert len(list(read(path))) == 2


def test_a_full_disk_at_sync(tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with TrainLog(tmp_path / "log.jsonl") as log:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RuntimeError, match="no space left in"):
            log.sync()


def test_a_file_too_large_is_one_line(tmp_path):
    path = tmp_path / "log.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with TrainLog(path) as log:
            log.run(step=0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
            with pytest.raises(RuntimeError, match="no space left in"):
                log.step(0, **values(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text().endswith("\n") and len(list(read(path))) == 1


# ---- TensorBoard ---------------------------------------------------------------------------------------------------


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    path = tmp_path / "log.jsonl"
    write(path, 0, 6, tensorboard=True)
    write(path, 4, 8, tensorboard=True)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert "train/loss" in found.Tags()["scalars"] and "train/step" not in found.Tags()["scalars"]
    assert [event.step for event in found.Scalars("train/loss")] == list(range(8))
    assert [event.value for event in found.Scalars("train/loss")] == pytest.approx([3.0 / (at + 1) for at in range(8)])
    assert [event.step for event in found.Scalars("validation/loss")] == [4, 8]


def test_tensorboard_missing(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RuntimeError) as error:
        TrainLog(tmp_path / "log.jsonl", tensorboard=True)
    assert "needs the package tensorboard" in one_line(error)
    assert os.listdir(tmp_path) == []
