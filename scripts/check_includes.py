#!/usr/bin/env python3
"""Checks that includes point one way: numerics <- core <- {cpu, cuda} <- {analysis, io} <- abi <- cli.

Usage: check_includes.py [SOURCE_DIR]. Prints one line per violation and exits 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# What each part may include of the others; itself always. The C ABI's public headers include nothing of ours.
ALLOWED = {
    "src/numerics": set(),
    "src/core": {"numerics", "public"},
    "src/cpu": {"numerics", "core"},
    "src/cuda": {"numerics", "core"},
    "src/analysis": {"numerics", "core", "cpu", "cuda"},
    "src/io": {"numerics", "core", "cpu", "cuda", "analysis"},
    "src/abi": {"numerics", "core", "cpu", "cuda", "analysis", "io", "public"},
    "cli": {"numerics", "core", "cpu", "cuda", "analysis", "io", "abi", "public"},
    "include/delta_matching": {"public"},
}
PARTS = {"numerics", "core", "cpu", "cuda", "analysis", "io", "abi"}
SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh", ".inl"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def part_of(target: str) -> str | None:
    """The part of the project that an include names, or None for a header of someone else."""
    first = target.split("/", 1)[0]
    if first == "delta_matching":
        return "public"
    return first if first in PARTS and "/" in target else None


def violations(root: Path, folder: str) -> list[str]:
    own = "public" if folder.startswith("include") else folder.rsplit("/", 1)[-1]
    found = []
    for path in sorted((root / folder).rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            kind, target = match.groups()
            where = f"{path.relative_to(root)}:{number}"
            if ".." in target.split("/"):
                found.append(f"{where}: {target}: name headers from src/, not by ..")
                continue
            part = part_of(target)
            if part and part != own and part not in ALLOWED[folder]:
                found.append(f"{where}: {folder} must not include {target}")
            if part and part != "public" and kind == "<":
                found.append(f"{where}: {target} is ours: use quotes")
    return found


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    unknown = [p.name for p in (root / "src").iterdir() if p.is_dir() and p.name not in PARTS]
    found = [f"src/{name}: not in the table of scripts/check_includes.py" for name in sorted(unknown)]
    for folder in ALLOWED:
        if (root / folder).is_dir():
            found += violations(root, folder)
    print("\n".join(found) if found else "includes point one way")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
