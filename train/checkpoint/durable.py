"""Files that are on the disk once written, and are checked byte for byte when read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

#: What the system says of a disk, a quota or a file that can hold no more.
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PIECE: Final = 1 << 24  # bytes written or read at once


def write(path: Path, buffers: Iterator[memoryview]) -> str:
    """Write a new file through to the disk; its sha256. Errors: OSError."""
    digest = hashlib.sha256()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for buffer in buffers:
            digest.update(buffer)
            at = 0
            while at < len(buffer):
                at += os.write(handle, buffer[at : at + _PIECE])
        os.fsync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(handle)
        raise
    os.close(handle)  # network file systems tell of a full disk here
    return digest.hexdigest()


def replace(path: Path, content: bytes, label: str) -> None:
    """The file is as it was, or whole and on the disk. Errors: RuntimeError, one line that begins with ``label``."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # a process killed may have left one of its own
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary, iter([memoryview(content)]))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise RuntimeError(f"{label}: {str(path)!r} cannot be written: {error.strerror or error}") from None


def sync(folder: Path) -> None:
    """The names in a folder, through to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def claim(handle: int, refusal: str) -> None:
    """Lock an open file or folder until it is closed. Errors: RuntimeError if another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(refusal) from None
    except OSError:
        pass  # a file system without locks


@contextlib.contextmanager
def claimed(folder: Path, refusal: str) -> Iterator[None]:
    """The folder's lock while within. Errors: RuntimeError if another process has it; OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        claim(handle, refusal)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors from within become a ValueError that names the file, in one line."""
    try:
        yield
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ValueError(f"checkpoint: {path}: {reason}") from error
    except MemoryError as error:
        raise ValueError(f"checkpoint: {path}: does not fit into memory") from error
    except ValueError as error:
        raise ValueError(f"checkpoint: {path}: {error}") from error


def size(path: Path) -> int:
    """Bytes of a file. Errors: ValueError unless it is one (a pipe would be waited for without end); OSError."""
    found = path.stat().st_size
    if not path.is_file():
        raise ValueError("is not a file")
    return found


def pieces(path: Path, entry: dict[str, Any]) -> Iterator[bytes]:
    """The file in pieces, which hold only once the last has come.

    Errors: ValueError unless the file has the ``bytes`` and, known at its end, the ``sha256`` of the entry; OSError.
    """
    found, expected = size(path), entry["bytes"]
    if found != expected:
        raise ValueError(f"expected {expected} bytes, got {found}")
    if found > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise ValueError(f"its {found} bytes do not fit into memory")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            yield piece
    if digest.hexdigest() != entry["sha256"]:
        raise ValueError(f"damaged: its sha256 is {digest.hexdigest()[:12]}..., expected {entry['sha256'][:12]}...")
