"""Text files to token arrays: a folder with train.bin, valid.bin (little-endian ids), tokens.json and data.json.

documents.py says what a document is and which are held out. The vocabularies of `characters` and `bpe` are made from
the training documents alone. Documents are joined by the tokenizer's end of a document, or by two newlines.

Batches are a function of (seed, step): nothing has to be saved for a run to resume.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..cli import Parser
from . import tokens as tokenizers
from .documents import Document, documents_of, draws, held_out_of, texts_of, whole, whole_folder
from .tokens import Tokens

SCHEMA = "dmattn.data/1"
SPLITS = {"train": 0, "valid": 1}
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class Data:
    """Token arrays on disk, mapped into memory, and their tokenizer. `train`, `valid`: uint16 or uint32 [tokens]."""

    def __init__(self, folder: Path, header: dict[str, Any], tokens: Tokens) -> None:
        self.folder, self.header, self.tokens = folder, header, tokens
        # What is trained on and validated on; where it came from and how it is cut into files does not matter.
        body = [tokens.fingerprint, *(header[split]["sha256"] for split in SPLITS)]
        self.fingerprint = hashlib.sha256(tokenizers.canonical(body)).hexdigest()
        self.train = self._map("train")
        self.valid = self._map("valid")

    def _map(self, split: str) -> npt.NDArray[Any]:
        path, dtype, count = self.folder / f"{split}.bin", DTYPES[self.header["dtype"]], self.header[split]["count"]
        try:
            found = path.stat().st_size if path.is_file() else None
            if found != count * dtype.itemsize:
                got = "no such file" if found is None else f"{found} bytes"
                raise ValueError(f"{path.name}: expected {count * dtype.itemsize} bytes, as data.json says, got {got}")
            # An empty file cannot be mapped.
            return np.memmap(path, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)
        except OSError as error:
            raise ValueError(f"{path.name}: {str(path)!r} cannot be read: {error.strerror}") from None

    def verify(self) -> None:
        """Reads both arrays: ValueError where a hash is not that of data.json, or an id is no token."""
        for split in SPLITS:
            path = self.folder / f"{split}.bin"
            if file_digest(path) != self.header[split]["sha256"]:
                raise ValueError(f"{path.name}: expected the SHA-256 that data.json states, got other content")
            array = self.array(split)
            for start in range(0, len(array), 1 << 24):
                self._ids(array[start : start + (1 << 24)], split)

    def _ids(self, array: npt.NDArray[Any], split: str) -> npt.NDArray[Any]:
        # On a GPU an id past the embedding is an error nobody can read.
        if array.size and int(array.max()) >= self.tokens.size:
            raise ValueError(f"{split}.bin: expected ids below {self.tokens.size}, got {int(array.max())}")
        return array

    def array(self, split: str) -> npt.NDArray[Any]:
        """`train` or `valid` by name."""
        if split not in SPLITS:
            raise ValueError(f"split: expected train or valid, got {split!r:.40}")
        return self.train if split == "train" else self.valid

    def text(self, split: str = "valid", limit: int = 1 << 22) -> str:
        """The split's text, of its first `limit` tokens."""
        return self.tokens.decode(self._ids(self.array(split)[: whole("limit", limit, 0, 1 << 40)], split))

    def _positions(self, split: str, context: int) -> int:
        array = self.array(split)
        context = whole("context", context, 1, 1 << 40)
        if len(array) <= context:
            raise ValueError(f"context: expected at most {len(array) - 1}, since {split} has {len(array)} tokens and a "
                             f"window takes one more than the context, got {context}")  # fmt: skip
        return len(array) - context

    def _windows(self, split: str, starts: Iterable[int], context: int) -> tuple[torch.Tensor, torch.Tensor]:
        array = self.array(split)
        rows = np.stack([array[start : start + context + 1] for start in starts])
        ids = torch.from_numpy(self._ids(rows, split).astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def batch(
        self, step: int, seed: int, batch: int, context: int, split: str = "train", rank: int = 0, ranks: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows at random places: (inputs, targets), int64 CPU tensors [batch, context]; targets are the next ids.

        A function of the arguments alone. Row r of a rank is row rank * batch + r of the one batch of batch * ranks
        rows that all ranks share. Raises ValueError for a bad argument or a split shorter than one window.
        """
        positions = self._positions(split, context)
        step, seed = whole("step", step, 0, 2**64 - 1), whole("seed", seed, 0, 2**64 - 1)
        batch, ranks = whole("batch", batch, 1, 1 << 24), whole("ranks", ranks, 1, 1 << 16)
        rank = whole("rank", rank, 0, ranks - 1)
        starts = draws((seed, SPLITS[split]), step, [positions] * (batch * ranks))
        return self._windows(split, starts[rank * batch : (rank + 1) * batch], context)

    def validation(self, batch: int, context: int, batches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """`batches` times what `batch` gives, of held-out text: windows evenly spaced from its start to its end.

        Always the same windows, so that losses compare between steps and runs. ValueError where there are fewer places
        for a window than windows.
        """
        positions = self._positions("valid", context)
        batch, batches = whole("batch", batch, 1, 1 << 24), whole("batches", batches, 1, 1 << 40)
        windows = batch * batches
        if windows > positions:
            raise ValueError(f"batches: expected at most {positions // batch} of {batch} windows, got {batches}")
        starts = [window * (positions - 1) // max(windows - 1, 1) for window in range(windows)]
        return (self._windows("valid", starts[i : i + batch], context) for i in range(0, windows, batch))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open(folder: str | Path, verify: bool = False) -> Data:
    """The data that `prepare` wrote. Sizes and headers are checked; the arrays' hashes where `verify`, or later with
    Data.verify(). ValueError, one line, for a folder that is not one or was damaged."""
    folder = Path(folder)
    header = tokenizers.read_json(folder / "data.json", SCHEMA)
    if header.get("dtype") not in list(DTYPES):  # a list of JSON is not hashable
        raise ValueError(f"data.json: expected dtype {' or '.join(DTYPES)}, got {header.get('dtype')!r:.40}")
    for split in SPLITS:
        part = header.get(split)
        if not isinstance(part, dict) or not isinstance(part.get("sha256"), str):
            raise ValueError(f"data.json: expected count and sha256 of {split}, got {part!r:.60}")
        # Twice 2^47 four-byte ids: no file is larger, and sizes in bytes stay exact.
        whole(f"data.json: count of {split}", part.get("count"), 0, 1 << 48)
    tokens = tokenizers.load(folder / "tokens.json")
    if header.get("tokens") != tokens.fingerprint:
        raise ValueError("tokens.json: expected the tokenizer that data.json names, got another")
    data = Data(folder, header, tokens)
    if verify:
        data.verify()
    return data


def _given(tokenizer: str | Path) -> Tokens:
    """The tokenizer of a folder of `train import`, or one that Transformers reads."""
    ours = Path(tokenizer) / "tokens.json"
    return tokenizers.load(ours) if ours.is_file() else tokenizers.from_transformers(tokenizer)


def _tokens(kind: str, size: int | None, tokenizer: str | Path | None, train: list[Document]) -> Tokens:
    if kind == "characters":
        joins = [tokenizers.JOIN] * (len(train) > 1)
        return tokenizers.make_characters(
            (text for part in (texts_of(train, "characters"), joins) for text in part), size
        )
    if kind == "bpe":
        if size is None:
            raise ValueError("size: expected how many ids bpe is to have, got None")
        return tokenizers.make_bpe(texts_of(train, "bpe"), size)
    made = tokenizers.ByteTokens() if tokenizer is None else _given(tokenizer)
    if size not in (None, made.size):
        raise ValueError(f"size: expected {made.size} or None for kind {kind}, got {size}")
    return made


def _write_split(path: Path, documents: list[Document], tokens: Tokens, dtype: np.dtype[Any]) -> dict[str, Any]:
    """Writes one array; returns its part of data.json."""
    end = [] if tokens.end is None else [tokens.end]
    join = tokens.encode(tokenizers.JOIN) if tokens.end is None else np.zeros(0, np.uint32)
    count, total = 0, hashlib.sha256()
    with path.open("wb") as file:
        for i, text in enumerate(texts_of(documents, path.stem)):
            parts = [join] * (i > 0) + [tokens.encode(text), np.array(end, np.uint32)]
            ids = np.concatenate(parts).astype(dtype)
            file.write(ids.data)
            total.update(ids.data)
            count += len(ids)
        file.flush()
        os.fsync(file.fileno())
    return {"count": count, "documents": len(documents), "sha256": total.hexdigest()}


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    kind: str,
    size: int | None = None,
    held_out: float = 0.05,
    seed: int = 0,
    tokenizer: str | Path | None = None,
) -> Data:
    """Tokenizes text files and folders into the folder `out`, and opens it.

    `kind`: bytes, characters (`size`: the limit, None for all characters), bpe (`size` ids) or transformers
    (`tokenizer`: a folder or a .gguf file). `held_out`: share of the characters, 0 for none. In a folder all files are
    read but hidden ones and SOURCE. An `out` that already holds what this call would write is opened as it is; other
    content there is refused. Raises ValueError or RuntimeError, one line; `out` is then whole or untouched.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    if kind not in tokenizers.KINDS:
        raise ValueError(f"kind: expected one of {', '.join(tokenizers.KINDS)}, got {kind!r:.40}")
    if (tokenizer is None) == (kind == "transformers"):
        raise ValueError(f"tokenizer: expected a folder or a .gguf file for kind transformers alone, got {tokenizer!r}")
    if isinstance(held_out, bool) or not isinstance(held_out, int | float) or not 0 <= held_out < 1:
        raise ValueError(f"held_out: expected a share of 0 ... 1, without 1, got {held_out!r:.40}")
    seed, out = whole("seed", seed, 0, 2**64 - 1), Path(out)
    documents, copies = documents_of(sources)
    chosen = held_out_of(documents, held_out, seed)
    parts = {
        "train": [document for i, document in enumerate(documents) if i not in chosen],
        "valid": [document for i, document in enumerate(documents) if i in chosen],
    }
    request = {
        "kind": kind,
        "size": size,
        "held_out": float(held_out),
        "seed": seed,
        "tokenizer": None if tokenizer is None else _given(tokenizer).fingerprint,
        "documents": [[document.digest, document.start, document.stop] for document in documents],
    }
    asked = hashlib.sha256(tokenizers.canonical(request)).hexdigest()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        found = open(out)
        if found.header.get("request") != asked:
            raise ValueError(f"out: expected a new folder, got {str(out)!r} with data of other sources or settings")
        return found
    tokens = _tokens(kind, size, tokenizer, parts["train"])
    name = "uint16" if tokens.size <= 1 << 16 else "uint32"

    def fill(folder: Path) -> None:
        header: dict[str, Any] = {"schema": SCHEMA, "dtype": name, "seed": seed, "request": asked}
        for split, members in parts.items():
            header[split] = _write_split(folder / f"{split}.bin", members, tokens, DTYPES[name])
        header |= {"tokens": tokens.fingerprint, "held_out": float(held_out), "copies": copies}
        header["sources"] = sorted({document.source for document in documents})
        header["valid"]["names"] = [document.name for document in parts["valid"]]
        tokenizers.save(tokens, folder / "tokens.json")
        tokenizers.write_json(folder / "data.json", header)

    whole_folder(out, fill)
    return open(out)


def parser() -> argparse.ArgumentParser:
    """Arguments of `python -m train prepare`."""
    made = Parser(
        prog="python -m train prepare",
        description="Turns UTF-8 text files into tokens on disk, with some documents held out for validation.",
        epilog="examples:\n"
        "  python -m train prepare build/corpus/anarchism --tokens bytes --out build/data/bytes\n"
        "  python -m train prepare build/corpus/anarchism --tokens characters --size 97 --out build/data/characters\n"
        "  python -m train prepare a.txt b.txt --tokens bpe --size 4096 --out build/data/bpe\n"
        "  python -m train prepare texts/ --tokens transformers --tokenizer models/small --out build/data/small",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("sources", nargs="+", type=Path, help="text files and folders of them")
    made.add_argument("--out", required=True, type=Path, help="folder to write; kept if it already holds the same")
    made.add_argument("--tokens", required=True, choices=tokenizers.KINDS, help="kind of the tokenizer")
    made.add_argument("--size", type=int, help="ids: the limit of characters (default: all), the size of bpe")
    made.add_argument(
        "--tokenizer",
        type=Path,
        help="for --tokens transformers: a Transformers folder, a .gguf file, or a folder of `import`",
    )
    made.add_argument("--held-out", type=float, default=0.05, help="share of the text, whole documents (%(default)s)")
    made.add_argument("--seed", type=int, default=0, help="draws the documents held out (%(default)s)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m train prepare`: returns the exit status; errors are raised as prepare raises them."""
    chosen = parser().parse_args(argv)
    data = prepare(
        chosen.sources, chosen.out, chosen.tokens, chosen.size, chosen.held_out, chosen.seed, chosen.tokenizer
    )
    for split in SPLITS:
        part = data.header[split]
        print(f"{split}: {part['count']} tokens of {part['documents']} documents")
    print(f"tokens: {data.tokens.kind}, {data.tokens.size} ids, {data.tokens.fingerprint[:12]}")
    print(f"wrote: {chosen.out}", file=sys.stderr)
    return 0
