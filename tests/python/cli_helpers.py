"""Runs the dmattn program, and writes small layers for it.

DMATTN_BIN names the program; else build/release/cli/dmattn is taken.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DMATTN = os.environ.get("DMATTN_BIN", str(ROOT / "build" / "release" / "cli" / "dmattn"))
DTYPES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}


def dmattn(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [DMATTN, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)  # type: ignore[call-overload,no-any-return]


def document(*arguments: object) -> dict:
    done = dmattn(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # a pipe sees no progress
    return json.loads(done.stdout)


def refused(*arguments: object, says: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr."""
    done = dmattn(*arguments)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("dmattn: ") and done.stderr.endswith("\n")
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr, done.stderr


def encode(value: float, dtype: str) -> bytes:
    if dtype == "BF16":
        return struct.pack("<f", value)[2:]  # cut, not rounded: random values do not mind
    return struct.pack({"F16": "<e", "F32": "<f", "I32": "<i"}[dtype], int(value) if dtype == "I32" else value)


def layer_file(
    path: Path,
    tokens: int = 24,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    batch: int | None = None,
    dtype: str = "BF16",
    metadata: dict[str, str] | None = None,
    shapes: dict[str, list[int]] | None = None,
    change: Callable[[str, list[float]], None] | None = None,
    leave_out: str = "",
) -> Path:
    """A layer of Gaussian values, to be broken in one way."""
    numbers = random.Random(7)
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads), ("d_o", q_heads)):
        if name == leave_out:
            continue
        shape = (shapes or {}).get(name) or ([] if batch is None else [batch]) + [tokens, heads, head_dim]
        count = 1
        for size in shape:
            count *= size
        values = [numbers.gauss(0, 1) for _ in range(count)]
        if change:
            change(name, values)
        part = b"".join(encode(value, dtype) for value in values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path
