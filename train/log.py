"""The log of a training: lines of JSON, schema dmattn.train/1, in the order of its steps.

Each line is an object with ``schema``, ``kind`` and ``step`` (an integer; no line's is below that of the line before):

    run         one for each start: config, versions, device, ...; ``step`` steps were done before it
    step        what step number ``step`` (from 0) did: loss, lr, grad_norm, tokens, tokens_per_second, seconds
    validation  after ``step`` steps: loss, and what else was measured
    event       anything else, named by ``event``

JSON lacks NaN and infinity: such a number is null, and the line's ``nonfinite`` lists the paths of all of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from .checkpoint import durable

SCHEMA: Final = "dmattn.train/1"
_NUMBERS: Final = {
    "run": (),
    "step": ("loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds"),
    "validation": ("loss",),
    "event": (),
}
_OPENING: Final = f'{{"schema": "{SCHEMA}"'.encode()
_LINE_BYTES: Final = 1 << 22


class TrainLog:
    """A log that a training appends to; on other ranks than 0 it does nothing."""

    def __init__(
        self, path: str | os.PathLike[str], *, rank: int = 0, step: int = 0, tensorboard: bool = False
    ) -> None:
        """Open ``path`` to continue after ``step`` steps.

        What an existing log says of the time after them is cut off: the steps will be done again. So is half a line
        that a killed process left. ``tensorboard``: copy the numbers into the folder ``tensorboard`` beside the log.

        Errors: ValueError, one line, if the file is not such a log, with the file as it was; RuntimeError if it cannot
        be written, if another process writes to it, or without the package tensorboard.
        """
        self._path, self._handle, self._last = Path(path), -1, step
        self._kept: dict[str, Any] | None = None  # a validation of this very step
        self._board: Any = None
        if rank:
            return
        if tensorboard:
            self._board = _writer(self._path.parent / "tensorboard", step)
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._failure(error) from error
        try:
            durable.claim(self._handle, f"log: another process is writing to {self._path}")
            self._cut(step)
            if self._kept is not None:  # TensorBoard forgets all of the step that it continues at
                self._mirror("validation", step, self._kept)
        except OSError as error:
            self.close()
            raise self._failure(error) from error
        except BaseException:
            self.close()
            raise

    def _cut(self, step: int) -> None:
        end = 0
        for line in _lines(self._path):
            kind, at = line.entry["kind"], line.entry["step"]
            if at > step or (at == step and kind in ("step", "event")):
                break
            end = line.end
            self._kept = line.entry if kind == "validation" and at == step else self._kept
        if end < os.fstat(self._handle).st_size:
            os.ftruncate(self._handle, end)
            os.fsync(self._handle)

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, *, step: int, **values: Any) -> None:
        """A start, after ``step`` steps; ``values`` are JSON."""
        self._write("run", step, values)

    def step(
        self,
        step: int,
        *,
        loss: float,
        lr: float,
        grad_norm: float,
        tokens: int,
        tokens_per_second: float,
        seconds: float,
        **more: Any,
    ) -> None:
        """A step: ``loss`` in nats a token, ``tokens`` seen so far, ``seconds`` it took."""
        numbers = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": tokens}
        self._write("step", step, {**numbers, "tokens_per_second": tokens_per_second, "seconds": seconds, **more})

    def validation(self, step: int, *, loss: float, **more: Any) -> None:
        """What was measured after ``step`` steps; what a resumed log holds already is not written twice."""
        entry = _entry("validation", step, {"loss": loss, **more})
        if self._kept != entry:
            self._write("validation", step, {"loss": loss, **more})

    def event(self, event: str, *, step: int, **more: Any) -> None:
        self._write("event", step, {"event": event, **more})

    def sync(self) -> None:
        """Through to the disk: before a checkpoint, so that no checkpoint is ahead of its log after a power cut."""
        if self._handle >= 0:
            try:
                os.fsync(self._handle)
            except OSError as error:
                raise self._failure(error) from error

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        board, self._board = self._board, None
        try:
            if handle >= 0:
                os.close(handle)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            if board is not None:
                board.close()

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._handle < 0:
            return
        entry = _entry(kind, step, values)
        _check(entry, self._last)
        text = (json.dumps(entry, allow_nan=False) + "\n").encode()
        if len(text) > _LINE_BYTES:
            raise ValueError(f"log: a line of kind {kind} has {len(text)} bytes, more than {_LINE_BYTES}")
        before = os.fstat(self._handle).st_size
        try:
            at = 0
            while at < len(text):
                at += os.write(self._handle, text[at:])
        except OSError as error:
            os.ftruncate(self._handle, before)  # whole lines only
            raise self._failure(error) from error
        self._last = step
        self._mirror(kind, step, entry)

    def _mirror(self, kind: str, step: int, entry: dict[str, Any]) -> None:
        try:
            for name, value in entry.items() if self._board is not None else ():
                if kind in ("step", "validation") and name != "step" and type(value) in (int, float):
                    self._board.add_scalar(f"{'train' if kind == 'step' else kind}/{name}", value, step)
        except OSError as error:
            raise RuntimeError(f"log: tensorboard cannot be written: {error.strerror or error}") from error

    def _failure(self, error: OSError) -> RuntimeError:
        if error.errno in durable.FULL:
            return RuntimeError(f"log: no space left in {self._path.parent} while writing {self._path.name}")
        return RuntimeError(f"log: cannot write {self._path}: {error.strerror or error}")


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The log's lines, checked; half a last line, which a killed process leaves, is left out.

    Errors: ValueError, one line that names the file and the line.
    """
    for line in _lines(Path(path)):
        yield line.entry


class _Line(NamedTuple):
    entry: dict[str, Any]
    end: int  # position in the file after it


def _lines(path: Path) -> Iterator[_Line]:
    number, end, last = 0, 0, 0
    try:
        durable.size(path)
        with path.open("rb") as file:
            while (text := file.readline(_LINE_BYTES + 1)).endswith(b"\n"):
                number += 1
                end += len(text)
                entry = _parsed(text)
                if number == 1 and entry["kind"] != "run":
                    raise ValueError(f"the first line is of kind {entry['kind']}, expected run")
                _check(entry, last)
                last = entry["step"]
                yield _Line(entry, end)
            if len(text) > _LINE_BYTES:
                number += 1
                raise ValueError(f"longer than {_LINE_BYTES} bytes")
            if number == 0 and not text.startswith(_OPENING[: len(text)]):
                raise ValueError(f"not a log of schema {SCHEMA}")
    except OSError as error:
        raise ValueError(f"log: {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"log: {path}{f', line {number}' if number else ''}: {error}") from error


def _parsed(text: bytes) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"{digits[:20]} is not finite")
        return value

    try:
        entry = json.loads(text, parse_constant=refuse, parse_float=number)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(entry, dict) or entry.get("schema") != SCHEMA:
        raise ValueError(f"not of schema {SCHEMA}")
    return entry


def _entry(kind: str, step: int, values: dict[str, Any]) -> dict[str, Any]:
    """A line's object, with null for what is not finite."""
    lost: list[str] = []
    for name in values.keys() & {"schema", "kind", "step", "nonfinite"}:
        raise ValueError(f"log: {name!r} is the log's own, not a value's name")

    def finite(value: Any, path: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            lost.append(path)
            return None
        if isinstance(value, dict):
            return {str(key): finite(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(item, f"{path}.{at}") for at, item in enumerate(value)]
        return value

    entry = {"schema": SCHEMA, "kind": kind, "step": step, **finite(values, "")}
    return {**entry, "nonfinite": lost} if lost else entry


def _is_finite(value: Any) -> bool:
    return math.isfinite(value) if type(value) is float else type(value) is int and abs(value) < 1 << 63


def _check(entry: dict[str, Any], last: int) -> None:
    """Errors: ValueError for what reports could not use: kinds, steps and numbers of other forms."""
    kind, step = entry.get("kind"), entry.get("step")
    if not isinstance(kind, str) or kind not in _NUMBERS:
        raise ValueError(f"kind: expected one of {', '.join(_NUMBERS)}; got {str(kind)[:40]!r}")
    if type(step) is not int or not last <= step < 1 << 53:
        raise ValueError(f"step: expected an integer from {last}, got {str(step)[:40]!r}")
    lost = entry.get("nonfinite", [])
    if not isinstance(lost, list) or not all(isinstance(name, str) for name in lost):
        raise ValueError("nonfinite: expected a list of names")
    for name in _NUMBERS[kind]:
        value = entry.get(name)
        fine = value is None if name in lost else _is_finite(value)
        if not fine:
            raise ValueError(f"{name}: expected a finite number, or null with its name in nonfinite")
    if kind == "event" and not isinstance(entry.get("event"), str):
        raise ValueError("event: expected its name")


def _writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RuntimeError(f"log: a copy for TensorBoard needs the package tensorboard: {error}") from error
    try:
        return SummaryWriter(str(folder), purge_step=step)
    except OSError as error:
        raise RuntimeError(f"log: cannot write to {folder}: {error.strerror or error}") from error
