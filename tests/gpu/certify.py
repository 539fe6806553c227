"""Makes a certificate (schema dmattn.certificate/1) from what the GPU tests measured.

    DMATTN_GPU_RECORDS=records python -m pytest tests/gpu ...
    python tests/gpu/certify.py records --out certs/gpu_h200 --build build/gpu

writes ``certs/gpu_h200.json`` and, to be read, ``certs/gpu_h200.txt``. A case stands for all runs of a test that
measured the same thing in the same mode: the worst value, its limit and shape, how many there were, how many failed.
The commit and the trees of src/cuda and src/numerics come from git, or where that is missing from DMATTN_COMMIT,
DMATTN_TREE_CUDA and DMATTN_TREE_NUMERICS (``git rev-parse HEAD HEAD:src/cuda HEAD:src/numerics``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from delta_matching import numerics_version, version  # noqa: E402

GRADES = ("bitwise", "modelled", "bounded", "property")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _revision(name: str, variable: str) -> str | None:
    return os.environ.get(variable) or _output("git", "rev-parse", "--verify", name)


def _gpu() -> tuple[str | None, str | None]:
    """(name, driver) of the first GPU."""
    line = (_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "").splitlines()
    name, _, driver = line[0].partition(", ") if line else ("", "", "")
    return name or None, driver or None


def _nvcc() -> str | None:
    found = re.search(r"V([0-9.]+)", _output("nvcc", "--version") or "")
    return found.group(1) if found else None


def _flags(build: Path | None) -> str | None:
    """Compiler flags of the kernels, from the build's compilation database."""
    database = build / "compile_commands.json" if build else None
    if database is None or not database.is_file():
        return None
    command = next((e["command"] for e in json.loads(database.read_text()) if e["file"].endswith(".cu")), "")
    paths = re.compile(r"-(I|D|isystem|o$|c$|x$)")
    return " ".join(w for w in command.split()[1:] if w.startswith("-") and not paths.match(w)) or None


def _ratio(line: dict[str, Any]) -> float:
    """How near a value came to its limit; what is not a number is beyond all."""
    if line["value"] is None:
        return math.inf
    if line["limit"]:
        return line["value"] / line["limit"]
    return math.inf if line["value"] else 0.0


def cases(records: Path) -> list[dict[str, Any]]:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for file in sorted(records.glob("records-*.jsonl")):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            test, _, what = line["name"].partition(": ")
            name = test.partition("[")[0]
            if line["limit"]:  # else all or nothing, whatever the quantity
                name += ": " + re.sub(r"[0-9]+", "#", what)
            groups.setdefault((line["grade"], name, line["mode"] or ""), []).append(line)
    found = []
    for (grade, name, mode), lines in sorted(groups.items(), key=lambda item: (GRADES.index(item[0][0]), item[0])):
        worst = max(lines, key=lambda line: (not line["pass"], _ratio(line)))
        failed = sum(not line["pass"] for line in lines)
        found.append(
            {
                "name": name,
                "shape": worst["shape"],
                "mode": mode or None,
                "grade": grade,
                "value": worst["value"],
                "limit": worst["limit"],
                "mismatches": sum(line["mismatches"] or 0 for line in lines) if grade == "bitwise" else None,
                "pass": failed == 0,
                "runs": len(lines),
                "failed": failed,
            }
        )
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def text_of(document: dict[str, Any]) -> str:
    lines = [
        f"delta_matching {document['version']}, numerics version {document['numerics_version']}, on {document['gpu']}",
        f"driver {document['driver']}, CUDA {document['cuda']}, nvcc {document['nvcc']}",
        f"flags: {document['flags']}",
        f"commit {document['commit']}",
        *(f"tree of {name}: {tree}" for name, tree in document["tree"].items()),
        "",
        f"{'grade':<9} {'mode':<11} {'runs':>6} {'failed':>6} {'worst':>10} {'limit':>10}  case",
    ]
    for case in document["cases"]:
        numbers = f"{case['runs']:>6} {case['failed']:>6} {_number(case['value']):>10} {_number(case['limit']):>10}"
        lines.append(f"{case['grade']:<9} {case['mode'] or '-':<11} {numbers}  {case['name']}")
    failed = sum(not case["pass"] for case in document["cases"])
    runs = sum(case["runs"] for case in document["cases"])
    lines += ["", f"{len(document['cases'])} cases of {runs} values: {f'{failed} FAILED' if failed else 'all pass'}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, help="folder that DMATTN_GPU_RECORDS named")
    parser.add_argument("--out", type=Path, required=True, help="path of the certificate without its ending")
    parser.add_argument("--build", type=Path, help="build folder, for the compiler's flags")
    chosen = parser.parse_args()
    try:
        import torch

        cuda = torch.version.cuda
    except ModuleNotFoundError:
        cuda = None
    gpu, driver = _gpu()
    document = {
        "schema": "dmattn.certificate/1",
        "version": version(),
        "numerics": "hopper",
        "numerics_version": numerics_version(),
        "device": "cuda",
        "gpu": gpu,
        "driver": driver,
        "cuda": cuda,
        "nvcc": _nvcc(),
        "flags": _flags(chosen.build),
        "commit": _revision("HEAD", "DMATTN_COMMIT"),
        "tree": {
            "src/cuda": _revision("HEAD:src/cuda", "DMATTN_TREE_CUDA"),
            "src/numerics": _revision("HEAD:src/numerics", "DMATTN_TREE_NUMERICS"),
        },
        "cases": cases(chosen.records),
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.with_name(chosen.out.name + ".json").write_text(json.dumps(document, indent=1) + "\n")
    text = text_of(document)
    chosen.out.with_name(chosen.out.name + ".txt").write_text(text)
    print(text.splitlines()[-1])
    return 0 if document["cases"] and all(case["pass"] for case in document["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
