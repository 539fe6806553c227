"""Tensors and nested plain values as safetensors and JSON, bit for bit and without pickle.

A nested value becomes a tree of plain JSON in which a tensor is ``{"$tensor": name}``, a tuple ``{"$tuple": [...]}``, a
dict whose keys are not all plain strings ``{"$dict": [[key, value], ...]}`` and a number that JSON lacks
``{"$float": "nan" | "inf" | "-inf"}``. The tree lies in the metadata of the safetensors file that holds its tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DEPTH: Final = 64  # of nested values; those of an optimiser have 5
_TREE: Final = "tree"
_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(tree: Any) -> str:
    """JSON whose bytes depend on the values alone."""
    return json.dumps(tree, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """Errors: ValueError, one line, for anything but JSON (NaN and its like included)."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def encode(value: Any, tensors: dict[str, Tensor], path: str, depth: int = 0) -> Any:
    """The tree of ``value``; each tensor in it goes into ``tensors`` under its path.

    Errors: TypeError that names the path, for what is neither a tensor nor plain; ValueError if nested too deep.
    """
    if depth > _DEPTH:
        raise ValueError(f"checkpoint: {path[:80]!r}...: nested deeper than {_DEPTH}")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        name = path
        while name in tensors:  # the keys 0 and "0" make the same path
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, (list, tuple)):
        items = [encode(item, tensors, f"{path}/{at}", depth + 1) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, tensors, path, depth)
    raise TypeError(f"checkpoint: {path!r}: expected tensors, plain values, lists, tuples, dicts; got {type(value)}")


def _encode_dict(value: dict[Any, Any], tensors: dict[str, Tensor], path: str, depth: int) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(f"checkpoint: {path!r}: expected str or int as keys; got {type(key)}")
    keys: list[Any] = list(value)
    if all(type(key) is int for key in keys):
        keys.sort()
    pairs = [(key, encode(value[key], tensors, f"{path}/{key}", depth + 1)) for key in keys]
    if value and all(type(key) is str and not key.startswith("$") for key in keys):
        return dict(pairs)
    return {"$dict": [list(pair) for pair in pairs]}


def decode(tree: Any, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """What ``encode`` was given. Errors: ValueError, one line; KeyError for a tensor that ``tensors`` lacks."""
    if depth > _DEPTH:
        raise ValueError(f"nested deeper than {_DEPTH}")
    if isinstance(tree, list):
        return [decode(item, tensors, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if not (len(tree) == 1 and next(iter(tree)).startswith("$")):
        return {key: decode(value, tensors, depth + 1) for key, value in tree.items()}
    [(kind, content)] = tree.items()
    if kind == "$tensor" and isinstance(content, str):
        return tensors[content]
    if kind == "$float" and isinstance(content, str) and content in _FLOATS:
        return _FLOATS[content]
    if kind == "$tuple" and isinstance(content, list):
        return tuple(decode(item, tensors, depth + 1) for item in content)
    if kind == "$dict" and isinstance(content, list):
        pairs = all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int) for pair in content)
        if pairs:
            return {key: decode(value, tensors, depth + 1) for key, value in content}
    raise ValueError(f"unknown content of {kind[:40]!r}")


def serialise(tensors: dict[str, Tensor], tree: Any = None) -> tuple[int, Iterator[memoryview]]:
    """The bytes of a safetensors file, and how many they are; the same for the same bits, names and tree.

    The buffers must be used one after the other. Errors: TypeError or ValueError that names the tensor.
    """
    header: dict[str, Any] = {} if tree is None else {"__metadata__": {_TREE: dumps(tree)}}
    # Wide elements first: every tensor then lies aligned to its elements.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    at = 0
    for name in order:
        tensor = tensors[name]
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(f"checkpoint: {name!r}: expected a dense tensor with data; got {type(tensor)}")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"checkpoint: {name!r}: {tensor.dtype} cannot be saved")
        if name == "__metadata__":
            raise ValueError(f"checkpoint: {name!r}: safetensors keeps this name for itself")
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def buffers() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].numel():
                flat = tensors[name].detach().cpu().contiguous().reshape(-1)
                yield flat.view(torch.uint8).numpy().data

    return 8 + len(text) + at, buffers()


def parse(data: bytes) -> tuple[dict[str, Tensor], Any]:
    """Tensors (CPU) and tree (None without one) of a safetensors file. Errors: ValueError, one line."""
    try:
        tensors = safetensors.torch.load(data)
        # A file of this kind has passed, so its header is JSON of this form.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tree = header.get("__metadata__", {}).get(_TREE)
        return tensors, None if tree is None else loads(tree)
    except Exception as error:  # the library's own error, and Torch's for shapes that no tensor can have
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"not a valid safetensors file: {reason[:200]}") from error
