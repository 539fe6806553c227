"""Where a live probe's numbers go: a file of JSON lines, and TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, TextIO

SCHEMA: Final = "dmattn.live/1"


class LogFile:
    """Lines of schema ``dmattn.live/1``, appended, each whole on disk before the next begins."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open ``path`` for appending.

        A last line without an end is what a killed process left; it is cut off. Errors: OSError that names the path, if
        it cannot be written; ValueError if it holds something else than such a log.
        """
        self._path = Path(path)
        self._file: TextIO | None = None
        try:
            whole = self._whole_lines()
            self._file = self._path.open("a", buffering=1, encoding="utf-8", newline="\n")
            if whole is not None:
                os.truncate(self._path, whole)
        except OSError as error:
            raise type(error)(error.errno, f"path: cannot write {str(self._path)!r}: {error.strerror}") from error

    def _whole_lines(self) -> int | None:
        """Bytes up to the last line's end where they are not the whole file, else None."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return None
        with self._path.open("rb") as file:
            first = file.readline()
            try:
                known = json.loads(first).get("schema") == SCHEMA
            except (ValueError, AttributeError, RecursionError):
                known = False
            # A first line that is cut short can only be told by how it begins.
            if not known and not (not first.endswith(b"\n") and first.startswith(f'{{"schema": "{SCHEMA}"'.encode())):
                raise ValueError(f"path: {str(self._path)!r} exists and is not a log of schema {SCHEMA}")
            return _last_line_end(file)

    def write(self, document: dict[str, Any]) -> None:
        """Append one line. Errors: OSError that names the path; ValueError for NaN or infinity, which JSON lacks."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(document, allow_nan=False) + "\n")
        except OSError as error:
            raise type(error)(error.errno, f"path: cannot write {str(self._path)!r}: {error.strerror}") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _last_line_end(file: Any) -> int | None:
    """Position after the last newline; None if the file ends there."""
    size = file.seek(0, os.SEEK_END)
    step, end = 1 << 16, size
    while end > 0:
        start = max(0, end - step)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            at: int = start + found + 1
            return None if at == size else at
        end = start
    return 0


class Scalars:
    """A few numbers of each layer for TensorBoard, means over the measured heads unless named otherwise."""

    def __init__(self, target: Any) -> None:
        """``target``: a SummaryWriter, or a folder for one of our own. Errors: ImportError without tensorboard."""
        self._owned = isinstance(target, (str, os.PathLike))
        if self._owned:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as error:
                raise ImportError(f"tensorboard: writing to {target!r} needs the package: {error}") from error
            self._writer: Any = SummaryWriter(str(target))
        else:
            self._writer = target

    def write(self, document: dict[str, Any]) -> None:
        for layer in document["layers"]:
            for name, value in _summary(layer).items():
                self._writer.add_scalar(f"delta_matching/{name}/{layer['layer']}", value, document["step"])

    def close(self) -> None:
        if self._owned:
            self._writer.close()


def _summary(layer: dict[str, Any]) -> dict[str, float]:
    """By name; what could not be measured in any head is left out."""
    heads = layer["heads"]
    lists: dict[str, list[Any]] = {
        "entropy": [head["entropy"] for head in heads],
        "largest_gain_share": [head["gain"]["share"] for head in heads if head["gain"]],
    }
    for mode in heads[0]["modes"] if heads else ():
        own = [head["modes"][mode] for head in heads]
        lists[f"{mode}/residual_rms"] = [numbers["signed_residual"]["rms"] for numbers in own]
        lists[f"{mode}/residual_rms_after_cast"] = [numbers["signed_residual_after_cast"]["rms"] for numbers in own]
        lists[f"{mode}/residual_mean_after_cast"] = [numbers["signed_residual_after_cast"]["mean"] for numbers in own]
        lists[f"{mode}/column_sum_after_cast"] = [numbers["column_sum_after_cast"] for numbers in own]
        for name in ("o", "dq", "dk", "dv"):
            lists[f"{mode}/largest_error_{name}"] = [numbers["error"][name] for numbers in own]
    summary = {}
    for name, values in lists.items():
        known = [value for value in values if value is not None]
        if known:
            summary[name] = max(known) if "largest" in name else sum(known) / len(known)
    return summary
