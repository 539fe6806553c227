#!/usr/bin/env python3
"""Writes seeds for fuzz_live_log: short logs of a live probe, whole, cut and sparse.

Usage: make_log_corpus.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from live_logs import line


def short(step: int, **options: Any) -> dict[str, Any]:
    """A line of one layer and one head: mutations should meet the numbers, not a hundred copies of them."""
    one = line(step, layers=1, **options)
    one["layers"][0]["heads"] = one["layers"][0]["heads"][:1]
    return one


def seeds() -> dict[str, str]:
    sparse = short(3)
    sparse["layers"][0]["heads"][0]["gain"] = None
    sparse["layers"].append({"layer": "x", "heads": []})
    lines = [json.dumps(one, separators=(",", ":")) + "\n" for one in (short(0, first=True), short(10), sparse)]
    return {
        "whole": lines[0] + lines[1],
        "again": lines[1] + lines[1],
        "cut": lines[0] + lines[1][:200],
        "sparse": lines[2],
        "bare": json.dumps({**line(0), "layers": [], "not_measured": []}) + "\n",
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in seeds().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
