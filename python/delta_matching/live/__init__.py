"""The probe on a model that trains: :class:`LiveProbe`, which ``delta_matching.probe(model)`` returns."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .. import _library, _record
from .capture import Capture, Hooks, Recorded
from .gain import gains
from .log import SCHEMA, LogFile, Scalars
from .measure import Pushes, measured
from .window import NotMeasured

__all__ = ["LiveProbe"]


def _at_least(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return value


def _checked_heads(heads: object) -> int | tuple[int, ...]:
    if isinstance(heads, int):
        return _at_least("heads", heads, 1)
    if not isinstance(heads, Iterable) or isinstance(heads, (str, bytes)):
        raise TypeError(f"heads: expected a number or a list of head numbers, got {type(heads).__name__}")
    named = tuple(_at_least("heads", head, 0) for head in heads)
    if not named or len(set(named)) != len(named):
        raise ValueError(f"heads: expected different head numbers, at least one, got {list(named)}")
    return named


def _checked_modes(modes: Iterable[str] | None) -> tuple[str, ...] | None:
    if modes is None:
        return None
    names = (modes,) if isinstance(modes, str) else tuple(modes)
    if not names:
        raise ValueError(f"modes: expected at least one of {', '.join(_library.MODES)}, got none")
    for name in names:
        _library.code_of("modes", name, _library.MODES)
    return names


class LiveProbe:
    """Measures a model's attention while it trains; see :func:`delta_matching.probe` for the arguments.

    A context manager for one use. Call :meth:`step` once after each optimiser step. Steps are counted from ``start``,
    and those that ``every`` divides are measured.

    Attributes:
        last: the last finished line (docs/schemas.md, ``dmattn.live/1``), None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        path: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
        heads: int | Sequence[int] = 2,
        max_tokens: int = 512,
        modes: Iterable[str] | None = None,
        numerics: str = "hopper",
        centre: str | None = None,
        sdpa: bool = True,
        gain_offset: float | None = None,
        start: int = 0,
        background: bool | None = None,
        threads: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        self._every = _at_least("every", every, 1)
        self._heads = _checked_heads(heads)
        self._max_tokens = _at_least("max_tokens", max_tokens, 2)
        self._modes = _checked_modes(modes)
        _library.code_of("numerics", numerics, _library.NUMERICS)
        _library.centre_code(centre)
        self._numerics, self._centre = numerics, centre
        self._step = _at_least("start", start, 0)
        self._threads = _at_least("threads", threads, 0)
        self._see_sdpa, self._gain_offset, self._background = sdpa, gain_offset, background
        self._path, self._tensorboard = path, tensorboard
        self._model: nn.Module | None = model
        self._entered = False
        self._capture: Capture | None = None
        self._hooks: Hooks | None = None
        self._pending: Future[dict[str, Any]] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._log: LogFile | None = None
        self._scalars: Scalars | None = None
        self._pushes = Pushes()
        self._run: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None

    def __enter__(self) -> LiveProbe:
        if self._entered:
            raise RuntimeError("probe: a live probe serves one with block; make another")
        self._entered = True
        self._run = self._describe()
        try:
            if self._path is not None:
                self._log = LogFile(self._path)
            if self._tensorboard is not None:
                self._scalars = Scalars(self._tensorboard)
            self._begin()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take everything off the model again. A step that was not concluded by :meth:`step` is not measured."""
        self._release()
        try:
            self.flush()
        finally:
            self._close()

    def step(self) -> None:
        """Conclude an optimiser step: measure it if it was to be measured, and count on.

        Errors: OSError if the log cannot be written (the disk is full); what a measurement in the background raised.
        """
        if self._model is None or not self._entered:
            raise RuntimeError("probe: step() was called outside the with block")
        if self._capture is not None and self._capture.running:
            raise RuntimeError("probe: step() was called while the model's forward runs; call it after")
        try:
            if self._pending is not None and self._pending.done():
                self.flush()
            if self._capture is not None:
                self._conclude(self._capture)
        finally:  # a caller that goes on after an error must not have its steps numbered anew
            self._release()
            self._step += 1
        self._begin()

    def flush(self) -> None:
        """Wait for a measurement in the background, and write its line."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write(pending.result())

    @property
    def recording(self) -> bool:
        """Whether the step that is running will be measured."""
        return self._capture is not None

    # --- a step that is measured ---

    def _begin(self) -> None:
        if self._step % self._every or self._model is None:
            return
        if _record.active is not None:
            raise RuntimeError("probe: another live probe is recording; one at a time")
        self._capture = Capture(self._heads, self._max_tokens)
        _record.active = self._capture
        self._hooks = Hooks(self._model, self._capture, self._see_sdpa)

    def _release(self) -> None:
        """Stop recording: no hook stays on the model."""
        if self._capture is not None:
            if _record.active is self._capture:
                _record.active = None
            self._capture.close()
        if self._hooks is not None:
            self._hooks.remove()
        self._capture = self._hooks = None

    def _conclude(self, capture: Capture) -> None:
        self._release()
        model = self._model
        if model is None:
            return
        gpus = {one.sample.q.device for one in capture.recorded.values() if one.sample.q.is_cuda}
        for gpu in gpus:  # a backward runs on its forward's stream, which may not be this one
            torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        recorded = {name: _on_host(one) for name, one in capture.recorded.items()}
        norms = {name: gains(model, name, self._gain_offset) for name in recorded}
        background = bool(gpus) if self._background is None else self._background
        threads = self._threads or (_background_threads() if background else 0)

        def work() -> dict[str, Any]:
            return self._line(step, recorded, capture, norms, threads, began)

        step = self._step
        self.flush()  # one at a time, in order
        if not background:
            self._write(work())
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "delta_matching probe")
        self._pending = self._worker.submit(work)

    def _line(
        self,
        step: int,
        recorded: dict[str, Recorded],
        capture: Capture,
        norms: dict[str, tuple[Tensor, Tensor] | None],
        threads: int,
        began: float,
    ) -> dict[str, Any]:
        layers, reasons = [], capture.compiled | capture.reasons
        order: Callable[[str], list[tuple[int, str]]] = _by_number
        for name in sorted(recorded, key=order):
            options = (self._modes, self._numerics, self._centre, threads, self._pushes)
            try:
                layers.append(measured(name, recorded[name], capture.calls[name], norms[name], *options))
            except NotMeasured as reason:
                reasons[name] = str(reason)
        first = layers[0] if layers else {}
        return {
            "schema": SCHEMA,
            "version": _library.version(),
            "numerics": first.get("numerics", self._numerics),
            "centre": first.get("centre", self._centre or ("qk" if self._numerics == "hopper" else "k")),
            "device": "cpu",
            "step": step,
            "seconds": round(time.perf_counter() - began, 6),
            "layers": layers,
            "not_measured": [
                {"layer": name, "reason": reasons[name]} for name in sorted(reasons, key=order)
            ],
        }  # fmt: skip

    def _write(self, line: dict[str, Any]) -> None:
        if self._run is not None:
            line["run"], self._run = self._run, None
        self.last = line
        if self._log is not None:
            self._log.write(line)
        if self._scalars is not None:
            self._scalars.write(line)

    def _describe(self) -> dict[str, Any]:
        return {
            "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "model": type(self._model).__name__,
            "every": self._every,
            "start": self._step,
            "heads": self._heads if isinstance(self._heads, int) else list(self._heads),
            "max_tokens": self._max_tokens,
            "modes": None if self._modes is None else list(self._modes),
            "numerics_version": _library.numerics_version(),
            "torch": torch.__version__,
        }

    def _close(self) -> None:
        self._model = None
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
        log, scalars = self._log, self._scalars
        self._log = self._scalars = None
        try:
            if log is not None:
                log.close()
        finally:
            if scalars is not None:
                scalars.close()


def _background_threads() -> int:
    """Half of the CPUs, since the training thread needs one to queue work from; a head has no work for more than 8."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(1, mine // 2))


def _on_host(recorded: Recorded) -> Recorded:
    sample = recorded.sample
    moved = {name: getattr(sample, name).to("cpu") for name in ("q", "k", "v", "d_o")}
    return recorded._replace(sample=sample._replace(**moved))


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts layers.2 before layers.10."""
    parts = name.replace("#", ".#").replace(" ", ".").split(".")
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
