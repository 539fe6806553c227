"""Tokenizers: text to ids and back, and one file, tokens.json, that holds any of them whole.

| kind | ids | between documents |
|---|---|---|
| bytes | 0 ... 255, the UTF-8 of the text | two newlines |
| characters | 0 is unknown, then the characters kept from the text, by code point | two newlines |
| bpe | a byte-level BPE trained on the text; the last id is the end of a document | that id |
| transformers | those of a tokenizer folder or a GGUF file | its end of text, else two newlines |

Text that spells a control token ("<|endoftext|>") is text: no document can forge the end of a document.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..checkpoint import durable

Ids = npt.NDArray[np.uint32]
KINDS = ("bytes", "characters", "bpe", "transformers")
SIZE_LIMIT = 1 << 22  # ids; the largest vocabularies in use have a quarter of a million
FILE_LIMIT = 256 << 20  # bytes of a JSON file
SCHEMA = "dmattn.tokens/1"
JOIN = "\n\n"  # between documents, where there is no id for it
CODE_POINTS = 0x110000


class Tokens(Protocol):
    """What a tokenizer has."""

    @property
    def kind(self) -> str:
        """One of KINDS."""

    @property
    def size(self) -> int:
        """How many ids there are: 0 ... size - 1."""

    @property
    def end(self) -> int | None:
        """The id after a document; None where JOIN is put between two."""

    def encode(self, text: str) -> Ids:
        """Ids of a text, uint32 [tokens]."""

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Text of ids; what is no text (half a character, an unknown one) becomes U+FFFD."""

    def content(self) -> dict[str, Any]:
        """What tokens.json holds beside kind and size."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of kind, size and content: equal when ids mean the same."""


def canonical(value: object) -> bytes:
    """The one JSON form of a value that is hashed: keys sorted, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _fingerprint(tokens: Tokens) -> str:
    body = {"kind": tokens.kind, "size": tokens.size, "content": tokens.content()}
    return hashlib.sha256(canonical(body)).hexdigest()


def _checked(ids: Sequence[int] | npt.NDArray[Any], size: int) -> npt.NDArray[np.int64]:
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"ids: expected one row of integers, got {array.dtype} of shape {array.shape}")
    if int(array.min()) < 0 or int(array.max()) >= size:
        bad = array[(array < 0) | (array >= size)][0]
        raise ValueError(f"ids: expected 0 ... {size - 1}, got {bad}")
    return array.astype(np.int64)


class ByteTokens:
    """The UTF-8 bytes of a text."""

    kind, size, end = "bytes", 256, None

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return _checked(ids, self.size).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def content(self) -> dict[str, Any]:
        return {}

    @property
    def fingerprint(self) -> str:
        return _fingerprint(self)


class CharacterTokens:
    """One id a character. `characters`: those kept, by code point; `size` may be larger, its last ids then unused."""

    kind, end = "characters", None

    def __init__(self, characters: str, size: int | None = None) -> None:
        self.size = len(characters) + 1 if size is None else size
        points = _points(characters)
        if np.any(points[1:] <= points[:-1]):
            raise ValueError("characters: expected each once, by code point")
        if not len(characters) < self.size <= SIZE_LIMIT:
            raise ValueError(f"size: expected more than {len(characters)}, at most {SIZE_LIMIT}, got {self.size}")
        self.characters = characters
        self._table = np.zeros(CODE_POINTS, np.uint32)  # 0, unknown, for all that is not kept
        self._table[points] = np.arange(1, len(points) + 1, dtype=np.uint32)
        self._back = np.full(self.size, ord("\ufffd"), np.uint32)
        self._back[1 : len(points) + 1] = points

    def encode(self, text: str) -> Ids:
        return self._table[_points(text)]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return self._back[_checked(ids, self.size)].astype("<u4").tobytes().decode("utf-32-le")

    def content(self) -> dict[str, Any]:
        return {"characters": self.characters}

    @property
    def fingerprint(self) -> str:
        return _fingerprint(self)


def _points(text: str) -> Ids:
    return np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint32)


class BackendTokens:
    """A tokenizer of the `tokenizers` package, from its own JSON. `end` may lie past its ids (bpe) or among them."""

    def __init__(self, kind: str, size: int, end: int | None, definition: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise RuntimeError(f"kind {kind}: expected the package tokenizers, which is not installed") from None
        try:
            self._backend = Tokenizer.from_str(definition)
        except BaseException as error:  # a panic in the package is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise ValueError(f"tokenizer: expected a definition that tokenizers reads, got {_line(error)}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # text that spells a control token stays text
        self.kind, self.size, self.end, self._definition = kind, size, end, json.loads(definition)
        known = self._backend.get_vocab(with_added_tokens=True).values()
        highest = max(max(known, default=0), -1 if end is None else end)
        if not highest < size <= SIZE_LIMIT or (end is not None and end < 0):
            raise ValueError(f"size: expected more than the highest id, {highest}, at most {SIZE_LIMIT}, got {size}")

    def encode(self, text: str) -> Ids:
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        array = _checked(ids, self.size)
        own = self._backend.id_to_token(self.end) is None if self.end is not None else False
        cuts: list[int] = np.flatnonzero(array == self.end).tolist() if own else []
        pieces = np.split(array, cuts)
        texts = [self._backend.decode(piece[i > 0 :].tolist(), skip_special_tokens=False)
                 for i, piece in enumerate(pieces)]  # fmt: skip
        return "<|end|>".join(texts)

    def content(self) -> dict[str, Any]:
        return {"end": self.end, "tokenizer": self._definition}

    @property
    def fingerprint(self) -> str:
        return _fingerprint(self)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def make_characters(texts: Iterable[str], limit: int | None = None) -> CharacterTokens:
    """The `limit` - 1 most frequent characters (of equals the lower code point) and unknown; None: all that occur.

    With a limit the size is the limit exactly: ids of a text with fewer characters are left unused.
    """
    if limit is not None and not 2 <= limit <= SIZE_LIMIT:
        raise ValueError(f"size: expected 2 ... {SIZE_LIMIT} for characters, got {limit}")
    counts = np.zeros(CODE_POINTS, np.int64)
    for text in texts:
        counts += np.bincount(_points(text), minlength=CODE_POINTS)
    found = np.flatnonzero(counts)
    kept = found[np.argsort(-counts[found], kind="stable")]
    kept = np.sort(kept if limit is None else kept[: limit - 1])
    return CharacterTokens("".join(map(chr, kept.tolist())), limit)


def make_bpe(texts: Iterable[str], size: int) -> BackendTokens:
    """A byte-level BPE of `size` ids: 256 bytes, merges, and the end of a document. Same texts, same ids."""
    if not 257 <= size <= SIZE_LIMIT:
        raise ValueError(f"size: expected 257 ... {SIZE_LIMIT} for bpe, got {size}")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise RuntimeError("kind bpe: expected the package tokenizers, which is not installed") from None
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab_size(with_added_tokens=True) + 1
    if found != size:
        raise ValueError(f"size: expected at most {found}, all that bpe finds in this text, got {size}")
    return BackendTokens("bpe", size, size - 1, backend.to_str())


def from_transformers(path: str | Path) -> BackendTokens:
    """The tokenizer of a Transformers folder or of a GGUF file, read through Transformers; nothing is downloaded."""
    path = Path(path)
    if not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
        raise ValueError(f"tokenizer: expected a folder of Transformers or a .gguf file, got {str(path)!r}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise RuntimeError("kind transformers: expected the package transformers, which is not installed") from None
    folder, extra = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **extra)
    except Exception as error:
        raise ValueError(f"tokenizer: Transformers cannot read {str(path)!r}: {_line(error)}") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer: expected one with a `tokenizers` form, got {type(loaded).__name__}")
    end = loaded.eos_token_id
    return BackendTokens("transformers", len(loaded), end if isinstance(end, int) else None, backend.to_str())


def save(tokens: Tokens, path: Path) -> None:
    """Writes tokens.json: the file is whole or not there."""
    body = {"schema": SCHEMA, "kind": tokens.kind, "size": tokens.size, **tokens.content()}
    write_json(path, {**body, "fingerprint": tokens.fingerprint})


def load(path: Path) -> Tokens:
    """Reads tokens.json. A file that is not one, or that was changed: ValueError, one line that names it."""
    path = Path(path)
    body = read_json(path, SCHEMA)
    kind, size, end = body.get("kind"), body.get("size"), body.get("end")
    if type(size) is not int or (end is not None and type(end) is not int):
        raise ValueError(f"{path.name}: expected whole numbers for size and end, got {size!r:.40} and {end!r:.40}")
    try:
        tokens: Tokens
        if kind == "bytes":
            tokens = ByteTokens()
        elif kind == "characters" and isinstance(body.get("characters"), str):
            tokens = CharacterTokens(body["characters"], size)
        elif kind in ("bpe", "transformers") and isinstance(body.get("tokenizer"), dict):
            tokens = BackendTokens(kind, size, end, json.dumps(body["tokenizer"]))
        else:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)} with its content, got {kind!r:.40}")
        same = tokens.size == size and tokens.fingerprint == body.get("fingerprint")
    except ValueError as error:  # UnicodeError is one: a half of a surrogate pair in JSON
        raise ValueError(f"{path.name}: {_line(error)}") from None
    if not same:
        raise ValueError(f"{path.name}: expected content with the fingerprint it states, got other content")
    return tokens


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """An object of JSON with this "schema"; ValueError, one line, for anything else."""
    try:
        found = os.stat(path)
        # A pipe would be waited for, without end.
        if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_LIMIT:
            raise ValueError(f"{path.name}: expected a file of at most {FILE_LIMIT} bytes, got {str(path)!r}")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path.name}: {str(path)!r} cannot be read: {error.strerror}") from None
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: expected JSON, got {str(path)!r}: {_line(error)}") from None
    if not isinstance(body, dict) or body.get("schema") != schema:
        raise ValueError(f"{path.name}: expected a file of schema {schema!r}, got another in {str(path)!r}")
    return body


def write_json(path: Path, body: dict[str, Any]) -> None:
    """The file is as it was, or whole. Errors: RuntimeError, one line."""
    text = json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n"
    durable.replace(path, text.encode("ascii"), path.name)
