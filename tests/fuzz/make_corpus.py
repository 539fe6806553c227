#!/usr/bin/env python3
"""Writes seeds for fuzz_safetensors: one small sound file for each thing the format can hold, and near misses.

Usage: make_corpus.py FOLDER
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8}


def file_of(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        count = ELEMENT_BYTES[dtype]
        for size in shape:
            count *= size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + bytes(i * 37 % 256 for i in range(end))


def layer(dtype: str, lead: list[int], q_heads: int, k_heads: int, head_dim: int) -> dict[str, tuple[str, list[int]]]:
    q, k = [*lead, q_heads, head_dim], [*lead, k_heads, head_dim]
    return {"q": (dtype, q), "k": (dtype, k), "v": (dtype, k), "d_o": (dtype, q)}


def seeds() -> dict[str, bytes]:
    plain = layer("BF16", [3], 2, 1, 2)
    sound = file_of(plain, {"softmax_scale": "0.5"})
    return {
        "bf16": sound,
        "f16_batch": file_of(layer("F16", [2, 2], 2, 2, 1)),
        "f32": file_of(layer("F32", [2], 1, 1, 3)),
        "no_tokens": file_of(layer("BF16", [0], 1, 1, 4)),
        "no_batch": file_of(layer("BF16", [0, 4], 1, 1, 4)),
        "wrong_dtype": file_of({**plain, "q": ("I64", [3, 2, 2])}),
        "wrong_scale": file_of(plain, {"softmax_scale": "nan"}),
        "heads_disagree": file_of(layer("BF16", [1], 3, 2, 1)),
        "truncated": sound[:-1],
        "header_alone": sound[:8],
        "no_tensors": file_of({}),
        "empty": b"",
        "deep": struct.pack("<Q", 40) + b'{"q":' + b"[" * 35,
        "twice": struct.pack("<Q", 15) + b'{"q":{},"q":{}}',
    }


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in seeds().items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
