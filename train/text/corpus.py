"""English prose with a free licence, from a Debian package: one UTF-8 text file for each of its documents.

Documents are files that end in .html, .txt or .md, or in one of these and .gz. Change logs are left out. A package may
ship one text in several formats (html/a.html, markdown/a.md.gz): of files with one stem only those of the first format
in FORMATS are kept, since a copy in both parts of a held-out split would make the held-out loss a lie. The same package
gives the same bytes.

The package is read as a stream and never unpacked, so that links and paths such as ../x in it lead nowhere.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..cli import Parser
from .documents import NOTE, whole_folder
from .prose import html_to_text, plain

FORMATS = (".html", ".txt", ".md")  # the order is a preference
DOCUMENT_LIMIT = 256 << 20  # bytes after decompression: a .gz of a few KB can hold terabytes
LICENCE_LINES = 24

SECONDS = 600  # for one command


class Package(NamedTuple):
    """A package's documents as they are shipped: (path without a leading slash, bytes), and its copyright file."""

    name: str
    version: str
    documents: list[tuple[str, bytes]]
    licence: str


def _kind(path: str) -> tuple[str, str]:
    """(path without its endings, format), the format "" where it is no document."""
    bare = path.removesuffix(".gz")
    stem, suffix = os.path.splitext(bare)
    name = os.path.basename(stem).lower()
    return (stem, suffix) if suffix in FORMATS and name and not name.startswith("changelog") else (stem, "")


def _plain_path(path: str) -> bool:
    """Whether a path of a package stays where it is put: relative, no dots, nothing that a terminal would act on."""
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(path.split("/"))


def _run(command: list[str], what: str, folder: Path | None = None) -> bytes:
    """Output of a command; one line where it is missing, fails or takes too long."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"{what}: expected the command {command[0]}, which this machine does not have") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{what}: {command[0]} did not finish within {SECONDS} seconds") from None
    if done.returncode:
        said = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("E:") or "error:" in line] or said or ["no message"]
        raise RuntimeError(f"{what}: {command[0]} {command[1]} failed: {errors[-1]}")
    return done.stdout


def _read_deb(path: Path) -> Package:
    """A .deb file, read through dpkg-deb's stream; nothing is unpacked to disk."""
    what = f"package {path.name}"
    fields = _run(["dpkg-deb", "-f", str(path.resolve()), "Package", "Version"], what).decode(errors="replace")
    values = dict(line.split(": ", 1) for line in fields.splitlines() if ": " in line)
    stream = io.BytesIO(_run(["dpkg-deb", "--fsys-tarfile", str(path.resolve())], what))
    documents, licence = [], ""
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                inside = member.name.removeprefix("./")
                if not member.isreg() or not _plain_path(inside):
                    continue
                if _kind(inside)[1] or inside.endswith("/copyright"):
                    content = archive.extractfile(member)
                    data = content.read() if content else b""
                    if inside.endswith("/copyright"):
                        licence = licence or data.decode(errors="replace")
                    else:
                        documents.append((inside, data))
    except tarfile.TarError as error:
        raise RuntimeError(f"{what}: expected the archive of a package, got a broken one ({error})") from None
    return Package(values.get("Package", "?"), values.get("Version", "?"), documents, licence)


def _installed(name: str) -> Package | None:
    """The package as it lies on this system; None where it is not installed or its documents were left out."""
    try:
        version = _run(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", name], f"package {name}").decode()
        listed = _run(["dpkg", "-L", name], f"package {name}").decode().splitlines()
    except RuntimeError:
        return None
    wanted = [Path(line) for line in listed if line.startswith("/") and _kind(line)[1] and _plain_path(line[1:])]
    found = [path for path in wanted if path.is_file() and not path.is_symlink()]
    if not version.startswith("installed ") or not found:
        return None
    # A container may have been set up to drop most of /usr/share/doc: half of a package is another corpus.
    if any(not path.is_symlink() and not path.exists() for path in wanted):
        return None
    licences = [Path(line) for line in listed if line.endswith("/copyright") and Path(line).is_file()]
    licence = licences[0].read_text(errors="replace") if licences else ""
    return Package(name, version.split(" ", 1)[1], [(str(path)[1:], path.read_bytes()) for path in found], licence)


def _download(name: str) -> Package:
    with tempfile.TemporaryDirectory() as folder:
        try:
            _run(["apt-get", "download", name], f"package {name}", Path(folder))
        except RuntimeError as error:
            raise RuntimeError(f"{error} (is there a network, and was apt-get update run?)") from None
        found = sorted(Path(folder).glob("*.deb"))
        if len(found) != 1:
            raise RuntimeError(f"package {name}: expected one .deb from apt-get download, got {len(found)}")
        return _read_deb(found[0])


def _text(path: str, data: bytes) -> str:
    """Text of one document; ValueError says why there is none."""
    if path.endswith(".gz"):
        try:
            with gzip.open(io.BytesIO(data)) as unpacked:
                data = unpacked.read(DOCUMENT_LIMIT + 1)
        except (OSError, EOFError, zlib.error):
            raise ValueError("a broken .gz") from None
    if len(data) > DOCUMENT_LIMIT:
        raise ValueError(f"over {DOCUMENT_LIMIT >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    if "\0" in text:
        raise ValueError(f"not text: a NUL at character {text.index(chr(0))}")
    return html_to_text(text) if _kind(path)[1] == ".html" else plain(text)


def _chosen(documents: list[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Sorted by path, one format for each stem, a plain file before its .gz."""
    best: dict[str, int] = {}
    for path, _ in documents:
        stem, suffix = _kind(path)
        key = os.path.basename(stem)
        best[key] = min(best.get(key, len(FORMATS)), FORMATS.index(suffix))
    seen = set()
    for path, data in sorted(documents):
        stem, suffix = _kind(path)
        if FORMATS.index(suffix) == best[os.path.basename(stem)] and stem not in seen:
            seen.add(stem)
            yield path, data


def _texts(package: Package) -> tuple[dict[str, str], list[str]]:
    """Texts by their paths below the folder that all documents share, and a line for each document without text."""
    chosen = list(_chosen(package.documents))
    if not chosen:
        raise RuntimeError(f"package {package.name}: expected {', '.join(FORMATS)} files, got none")
    shared = PurePosixPath(os.path.commonpath([os.path.dirname(path) for path, _ in chosen]))
    texts, skipped = {}, []
    for path, data in chosen:
        inside = str(PurePosixPath(path).relative_to(shared))
        try:
            text = _text(path, data)
        except ValueError as error:
            skipped.append(f"{inside}: {error}")
            continue
        if text:
            texts[_kind(inside)[0] + ".txt"] = text
    if not texts:
        raise RuntimeError(f"package {package.name}: expected text, got none that can be read ({skipped[0]})")
    return texts, skipped


def digest(documents: dict[str, bytes]) -> str:
    """SHA-256 of names and contents, in the order of names."""
    total = hashlib.sha256()
    for name in sorted(documents):
        total.update(f"{name}\0{len(documents[name])}\0".encode())
        total.update(documents[name])
    return total.hexdigest()


def _note(package: Package, documents: dict[str, bytes], skipped: list[str]) -> str:
    lines = [
        f"package: {package.name}",
        f"version: {package.version}",
        f"documents: {len(documents)}",
        f"bytes: {sum(map(len, documents.values()))}",
        f"sha256: {digest(documents)}",
        *(f"skipped: {line}" for line in skipped),
        "licence:",
        *(f"  {line}".rstrip() for line in package.licence.splitlines()[:LICENCE_LINES]),
    ]
    return "\n".join(lines) + "\n"


def _there(out: Path, name: str | None) -> bool:
    """Whether `out` holds this package's text, whole; a line where it holds something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    note = out / NOTE
    if not note.is_file():
        raise ValueError(f"out: expected a new folder or an earlier corpus, got {str(out)!r} with other content")
    lines = note.read_text(encoding="utf-8", errors="replace").splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line and not line.startswith(" "))
    if name is not None and fields.get("package") != name:
        raise ValueError(f"out: expected the text of {name}, got {str(out)!r} with that of {fields.get('package')}")
    files = sorted(path for path in out.rglob("*.txt") if path.is_file())
    if digest({path.relative_to(out).as_posix(): path.read_bytes() for path in files}) != fields.get("sha256"):
        raise ValueError(f"out: the text in {str(out)!r} is not what its {NOTE} says; remove the folder and repeat")
    return True


def _write(out: Path, documents: dict[str, bytes], note: str) -> None:
    def fill(folder: Path) -> None:
        for name, data in documents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (folder / NOTE).write_text(note, encoding="utf-8", newline="\n")

    whole_folder(out, fill)


def fetch(package: str | Path, out: Path) -> Path:
    """Writes the text of a Debian package's documents to the folder `out`, and returns it.

    `package` is a name (taken from this system where it is installed, else from `apt-get download`) or the path of a
    .deb file. `out` gets one .txt for each document (UTF-8) and a note SOURCE: package, version, count, bytes, SHA-256
    of the text, what was skipped and why, the first lines of the licence. A folder that already holds this package's
    text is checked and kept, without a network; the version there is then not compared. Raises ValueError for a bad
    argument, RuntimeError where the package cannot be had or read; `out` is whole or untouched.
    """
    out, given = Path(out), str(package)
    file = Path(package) if given.endswith(".deb") or isinstance(package, Path) else None
    if file is not None and not file.is_file():
        raise ValueError(f"package: expected a .deb file, got {given!r}, which is not a file")
    if file is None and not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", given):
        raise ValueError(f"package: expected the name of a Debian package or a .deb file, got {given!r}")
    if file is None and _there(out, given):
        return out
    found = _read_deb(file) if file is not None else _installed(given) or _download(given)
    if file is not None and _there(out, found.name):
        return out
    texts, skipped = _texts(found)
    documents = {name: text.encode() for name, text in texts.items()}
    _write(out, documents, _note(found, documents, skipped))
    return out


def parser() -> argparse.ArgumentParser:
    """Arguments of `python -m train corpus`."""
    made = Parser(
        prog="python -m train corpus",
        description="Writes the prose of a Debian package as text files, one for each document, with a SOURCE note.",
        epilog="examples:\n"
        "  python -m train corpus anarchism --out build/corpus/anarchism\n"
        "  python -m train corpus ./anarchism_15.3-3_all.deb --out build/corpus/anarchism",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("package", help="name of a Debian package, or the path of a .deb file")
    made.add_argument("--out", required=True, type=Path, help="folder to write; kept if it already holds this package")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m train corpus`: returns the exit status; errors are raised as fetch raises them."""
    arguments = parser().parse_args(argv)
    out = fetch(arguments.package, arguments.out)
    for line in (out / NOTE).read_text(encoding="utf-8").splitlines():
        if line == "licence:":
            break
        print(line)
    print(f"wrote: {out}", file=sys.stderr)
    return 0
