"""Text files as documents, and which of them are held out.

A document is a file, and is held out whole: no token of it is trained on. Files with the same bytes are one document.
A single file is cut at empty lines into about PIECES pieces, and those are the documents. Held out are whole documents
in an order drawn from the seed, each that still fits into the share asked for (at least the smallest one).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

NOTE = "SOURCE"  # what corpus.py says of a folder: no document
PIECES = 64  # about how many a single file is cut into
PIECE_LEAST = 256  # characters of a piece, so that short files do not become lists of lines
T = TypeVar("T")


@dataclass(frozen=True)
class Document:
    """A file or a piece of one: characters [start, stop) of it, None for the whole."""

    name: str
    source: str  # the name of the file or folder that was asked for
    path: Path
    size: int  # characters
    digest: str  # SHA-256 of the file's bytes
    start: int | None = None
    stop: int | None = None


def draws(key: tuple[int, int], step: int, spans: Sequence[int]) -> list[int]:
    """One whole number below each span: a function of its arguments alone, the same in every version of NumPy.

    Bits of Philox4x64 with `step` in the counter's highest word, so that the numbers of two steps never overlap;
    the span scales them, which favours no number by more than span / 2^64.
    """
    philox = np.random.Philox(key=np.array(key, np.uint64), counter=np.array([0, 0, 0, step], np.uint64))
    bits = philox.random_raw(len(spans)).tolist() if spans else []
    return [word * span >> 64 for word, span in zip(bits, spans, strict=True)]


def whole(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int of [low, high]; ValueError that names it otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name}: expected a whole number of {low} ... {high}, got {value!r:.60}")
    return int(value)


def _progress(items: Sequence[T], name: str) -> Iterable[T]:
    """A bar on a terminal's standard error; nothing elsewhere, or without tqdm."""
    if not sys.stderr.isatty():
        return items
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return items
    bar: Iterable[T] = tqdm(items, desc=name, unit="document")
    return bar


def _files(sources: Sequence[str | Path]) -> list[tuple[str, Path]]:
    """(name, path) of every file: sources in their order, a folder's files by name, hidden ones and SOURCE left out."""
    found: list[tuple[str, Path]] = []
    for source in map(Path, sources):
        base = source.resolve().name
        if source.is_file():
            found.append((base, source))
        elif source.is_dir():
            inside = []
            for folder, folders, names in os.walk(source):
                folders[:] = [name for name in folders if not name.startswith(".")]
                inside += [Path(folder, name) for name in names if not name.startswith(".") and name != NOTE]
            paths = {path.relative_to(source).as_posix(): path for path in inside if path.is_file()}
            if not paths:
                raise ValueError(f"sources: expected text files, got the folder {str(source)!r} without any")
            found += [(f"{base}/{name}", paths[name]) for name in sorted(paths)]
        else:
            raise ValueError(f"sources: expected a file or a folder, got {str(source)!r}")
    if not found:
        raise ValueError("sources: expected at least one file or folder, got none")
    return found


def read_text(path: Path, digest: str | None = None) -> tuple[str, str]:
    """(text, SHA-256 of the bytes) of a UTF-8 file; ValueError names the file and the byte that is not."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"sources: {str(path)!r} cannot be read: {error.strerror}") from None
    found = hashlib.sha256(data).hexdigest()
    if digest is not None and found != digest:
        raise RuntimeError(f"sources: {str(path)!r} changed while it was read")
    try:
        return data.decode("utf-8").removeprefix("\ufeff"), found
    except UnicodeDecodeError as error:
        raise ValueError(f"sources: expected UTF-8, got {str(path)!r} with another byte at {error.start}") from None


def _pieces(document: Document, text: str) -> list[Document]:
    """Cuts after empty lines, each piece at least 1 / PIECES of the text (and PIECE_LEAST)."""
    least = max(PIECE_LEAST, len(text) // PIECES)
    pieces: list[Document] = []
    start = 0
    ends = [match.end() for match in re.finditer(r"\n[ \t\r]*\n\s*", text)]
    for stop in [*(end for end in ends if end < len(text)), len(text)]:
        if stop - start >= least or stop == len(text):
            name = f"{document.name}#{len(pieces)}"
            pieces.append(Document(name, document.source, document.path, stop - start, document.digest, start, stop))
            start = stop
    return pieces


def documents_of(sources: Sequence[str | Path]) -> tuple[list[Document], int]:
    """All documents that hold text, and how many files were left out as copies of another."""
    seen: set[str] = set()
    documents, copies, text = [], 0, ""
    for name, path in _progress(_files(sources), "reading"):
        text, digest = read_text(path)
        copies += digest in seen
        if text and digest not in seen:
            documents.append(Document(name, name.split("/")[0], path, len(text), digest))
            single = text
        seen.add(digest)
    if not documents:
        raise ValueError("sources: expected text, got empty files")
    return (documents, copies) if len(documents) > 1 else (_pieces(documents[0], single), copies)


def held_out_of(documents: list[Document], share: float, seed: int) -> set[int]:
    """Indices of the documents that are held out."""
    if share == 0:
        return set()
    if len(documents) < 2:
        raise ValueError("held_out: expected a text with empty lines to cut it at, or held_out 0, got one document "
                         f"({documents[0].name})")  # fmt: skip
    count = len(documents)
    order = list(range(count))
    for i, j in zip(range(count - 1, 0, -1), draws((seed, 2), 0, list(range(count, 1, -1))), strict=True):
        order[i], order[j] = order[j], order[i]
    room = share * sum(document.size for document in documents)
    chosen: set[int] = set()
    for index in order:
        if documents[index].size <= room:
            chosen.add(index)
            room -= documents[index].size
    return chosen or {min(order, key=lambda index: documents[index].size)}


def texts_of(documents: Sequence[Document], name: str) -> Iterator[str]:
    """Texts of documents, one in memory at a time (a file and its pieces once)."""
    last: tuple[Path, str] | None = None
    for document in _progress(documents, name):
        if last is None or last[0] != document.path:
            last = document.path, read_text(document.path, document.digest)[0]
        yield last[1][document.start : document.stop]


def whole_folder(out: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder under another name and renames it: `out` is whole or not there."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            fill(folder)
            folder.chmod(0o755)
            folder.rename(out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise RuntimeError(f"out: {str(out)!r} cannot be written: {error.strerror or error}") from None
