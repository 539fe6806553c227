"""Checkpoints: all that a training needs to continue bit for bit, safe against kills, full disks and rot.

A checkpoint is a folder ``step-00000500`` with

    model.safetensors      the model's tensors
    optimizer.safetensors  the optimisers' tensors, and in its metadata the rest of their state (tensor_files.py)
    rng.safetensors        states of the generators, likewise
    state.json             schema dmattn.checkpoint/1: meta, size and sha256 of each file, sha256 of itself

It is written as a hidden folder, synced to the disk, and then renamed: a folder of that name is a whole one. The same
state gives the same bytes. Hidden folders of an interrupted save are put right at the next one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from . import durable, tensor_files
from .state import State, gather, restore

__all__ = ["State", "found", "gather", "latest", "load", "restore", "save"]

SCHEMA: Final = "dmattn.checkpoint/1"
_FILES: Final = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")
_STATE: Final = "state.json"
_STATE_BYTES: Final = 1 << 24  # of state.json: a config and a few numbers
_NAME: Final = re.compile(r"(\.replaced-)?step-([0-9]{8})")


class Latest(NamedTuple):
    """``path``: the newest intact checkpoint, None without one. ``warnings``: a line for each newer one skipped."""

    path: Path | None
    warnings: list[str]


def save(folder: Path, step: int, state: State, keep: int = 2) -> Path:
    """Write ``folder/step-{step:08}`` and then delete all but the newest ``keep`` of the steps up to this one.

    To be called by rank 0 alone. An earlier checkpoint of the same step is replaced; those of later steps are left
    alone. Errors: ValueError or TypeError for arguments that cannot be saved; RuntimeError, one line, for a full disk
    or any other failure to write, with the earlier checkpoints as they were.
    """
    if not 0 <= step < 10**8:
        raise ValueError(f"step: expected 0 to 99999999, got {step}")
    if keep < 1:
        raise ValueError(f"keep: expected 1 or more, got {keep}")
    if state.meta.get("step", step) != step:
        raise ValueError(f"meta: its step is {state.meta['step']}, but step {step} is saved")
    folder = Path(folder)
    files = _serialised(state)
    needed = sum(size for size, _ in files.values()) / 1e6
    now = ["the folder"]  # what is being written
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder):
            _tidy(folder)
            target = folder / f"step-{step:08}"
            temporary = folder / f".saving-{target.name}"
            try:
                _write_all(temporary, files, {**state.meta, "step": step}, now)
                _put_in_place(temporary, target, now)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            now[0] = "removal of older checkpoints"
            _delete_old(folder, step, keep)
    except OSError as error:
        if error.errno in durable.FULL:
            needs = f"needs about {needed:.1f} MB" + (f" ({error.strerror})" if error.errno != errno.ENOSPC else "")
            raise RuntimeError(f"checkpoint: no space left in {folder} while writing {now[0]}: {needs}") from error
        raise RuntimeError(f"checkpoint: cannot write to {folder} ({now[0]}): {error.strerror or error}") from error
    return target


def latest(folder: Path) -> Latest:
    """The newest checkpoint whose files are all as they were written; every byte of it is read.

    Errors: ValueError if ``folder`` cannot be read; none there is no error.
    """
    try:
        entries = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        entries = []
    except OSError as error:
        raise ValueError(f"checkpoint: {folder}: cannot be read: {error.strerror}") from error
    matches = [match for entry in entries if (match := _NAME.fullmatch(entry))]
    # Of one step, the one in place before the one that it was to replace.
    matches.sort(key=lambda match: (int(match[2]), match[1] is None), reverse=True)
    warnings = []
    for name in (match[0] for match in matches):
        try:
            _verify(Path(folder) / name)
        except ValueError as error:
            warnings.append(f"a damaged checkpoint is skipped: {error}")
        else:
            return Latest(Path(folder) / name, warnings)
    return Latest(None, warnings)


def found(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, the newest intact one in it, or that in its folder ``checkpoints``.

    Errors: ValueError, one line, if there is none.
    """
    path = Path(path)
    if (path / _STATE).exists():
        return path
    skipped: list[str] = []
    for folder in (path, path / "checkpoints"):
        newest, warnings = latest(folder)
        if newest is not None:
            return newest
        skipped += warnings
    raise ValueError("; ".join([f"checkpoint: no intact checkpoint in {path}", *skipped]))


def load(path: Path) -> State:
    """The state that was saved. Errors: ValueError, one line that names the file and what is wrong with it."""
    path = Path(path)
    document = _read_state(path)
    parsed = {}
    for name in _FILES:
        with durable.named(path / name):
            parsed[name] = tensor_files.parse(b"".join(durable.pieces(path / name, document["files"][name])))
    model, _ = parsed[_FILES[0]]
    trees = []
    for name in _FILES[1:]:
        with durable.named(path / name):
            tensors, tree = parsed[name]
            try:
                trees.append(tensor_files.decode(tree, tensors))
            except KeyError as error:
                raise ValueError(f"lacks the tensor {error}") from error
    optimizers, rng = trees
    with durable.named(path / _FILES[1]):
        if not isinstance(optimizers, list) or not all(_is_optimizer(entry) for entry in optimizers):
            raise ValueError("expected a list of optimisers, each with state and param_groups")
    with durable.named(path / _FILES[2]):
        if not isinstance(rng, dict):
            raise ValueError("expected a dict of generators")
    return State(model, optimizers, rng, document["meta"])


def _is_optimizer(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("state"), dict)
        and all(isinstance(own, dict) for own in entry["state"].values())
        and isinstance(entry.get("param_groups"), list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in entry["param_groups"])
    )


# ---- writing -------------------------------------------------------------------------------------------------------


def _serialised(state: State) -> dict[str, tuple[int, Iterator[memoryview]]]:
    """By file: its size and its bytes."""
    files = {_FILES[0]: tensor_files.serialise(state.model)}
    for name, part, value in ((_FILES[1], "optimizers", state.optimizers), (_FILES[2], "rng", state.rng)):
        tensors: dict[str, Tensor] = {}
        tree = tensor_files.encode(value, tensors, part)
        files[name] = tensor_files.serialise(tensors, tree)
    leaked: dict[str, Tensor] = {}
    tensor_files.encode(state.meta, leaked, "meta")
    if leaked:
        raise TypeError(f"checkpoint: meta: expected JSON values, got a tensor at {next(iter(leaked))!r}")
    return files


def _only_one(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Refuse to save where another process is saving: each would tidy the other's files away."""
    return durable.claimed(folder, f"checkpoint: another process is saving into {folder}")


def _write_all(temporary: Path, files: dict[str, tuple[int, Iterator[memoryview]]], meta: Any, now: list[str]) -> None:
    temporary.mkdir()
    entries = {}
    for name, (size, buffers) in files.items():
        now[0] = name
        entries[name] = {"bytes": size, "sha256": durable.write(temporary / name, buffers)}
    now[0] = _STATE
    text = _sealed({"schema": SCHEMA, "meta": tensor_files.encode(meta, {}, "meta"), "files": entries})
    durable.write(temporary / _STATE, iter([memoryview(text)]))
    durable.sync(temporary)


def _put_in_place(temporary: Path, target: Path, now: list[str]) -> None:
    now[0] = target.name
    if target.exists():
        # Killed between the two renames, the next save puts it back, and until then latest() finds it.
        replaced = target.with_name(f".replaced-{target.name}")
        target.rename(replaced)
        try:
            temporary.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
        durable.sync(target.parent)
        _delete(replaced)
        return
    temporary.rename(target)
    durable.sync(target.parent)


def _tidy(folder: Path) -> None:
    """Remove what an interrupted save left, or finish it."""
    for entry in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(entry)
        if match and match[1]:
            target = folder / f"step-{match[2]}"
            if target.exists():
                _delete(folder / entry)
            else:
                (folder / entry).rename(target)
        elif re.fullmatch(r"\.(saving|deleting)-step-[0-9]{8}", entry):
            shutil.rmtree(folder / entry)


def _delete_old(folder: Path, step: int, keep: int) -> None:
    matches = [_NAME.fullmatch(entry) for entry in os.listdir(folder)]
    steps = sorted(int(match[2]) for match in matches if match and not match[1])
    for old in [own for own in steps if own <= step][:-keep]:
        _delete(folder / f"step-{old:08}")


def _delete(path: Path) -> None:
    # Hidden first: killed halfway, it would else look like a damaged checkpoint.
    hidden = path.with_name(f".deleting-{path.name.removeprefix('.replaced-')}")
    try:
        path.rename(hidden)
        shutil.rmtree(hidden)
    except BaseException:  # Ctrl-C as well: nothing is left halfway
        shutil.rmtree(hidden, ignore_errors=True)
        raise


# ---- reading -------------------------------------------------------------------------------------------------------


def _sealed(document: dict[str, Any]) -> bytes:
    """The text of state.json: the document with its own sha256."""
    digest = hashlib.sha256(tensor_files.dumps(document).encode()).hexdigest()
    return (tensor_files.dumps({**document, "sha256": digest}) + "\n").encode()


def _read_state(path: Path) -> dict[str, Any]:
    """state.json, checked, with meta decoded. Errors: ValueError that names the file."""
    if not path.is_dir():
        raise ValueError(f"checkpoint: {path}: {'is not a folder' if path.exists() else 'does not exist'}")
    with durable.named(path / _STATE):
        if durable.size(path / _STATE) > _STATE_BYTES:
            raise ValueError(f"expected at most {_STATE_BYTES} bytes")
        text = (path / _STATE).read_bytes()
        try:
            document = tensor_files.loads(text)
        except ValueError as error:
            raise ValueError(f"damaged: not JSON ({error})") from error
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}")
        if _sealed({key: value for key, value in document.items() if key != "sha256"}) != text:
            raise ValueError("damaged: its own sha256 differs")
        files = document.get("files")
        if not isinstance(files, dict) or set(files) != set(_FILES):
            raise ValueError(f"files: expected {', '.join(_FILES)}")
        for name, entry in files.items():
            fine = isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
            if not fine:
                raise ValueError(f"files: {name}: expected bytes and sha256")
        meta = tensor_files.decode(document.get("meta"), {})
        if not isinstance(meta, dict) or type(meta.get("step")) is not int:
            raise ValueError("meta: expected an object with an integer step")
        match = _NAME.fullmatch(path.name)
        if match and int(match[2]) != meta["step"]:
            raise ValueError(f"holds step {meta['step']}, which is not the folder's")
        return {**document, "meta": meta}


def _verify(path: Path) -> None:
    document = _read_state(path)
    for name in _FILES:
        with durable.named(path / name):
            for _ in durable.pieces(path / name, document["files"][name]):
                pass
