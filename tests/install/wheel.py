"""Checks a wheel of the package: its tag, what it holds, what its binaries need, and that it works without PyTorch.

    python tests/install/wheel.py WHEEL [--cuda]

With ``--cuda`` the kernels must be inside, else they must not. Installs the wheel alone into a new environment and runs
it from another folder. Needs the standard library and readelf (binutils); exits 1 with one line for the first fault.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "delta_matching"
LIBRARY, COMMAND = "delta_matching/lib/libdelta_matching.so", "delta_matching/bin/dmattn"

# The C++ and OpenMP runtimes and the C library's own parts. The CUDA runtime is linked statically and opens the driver
# (libcuda.so.1) itself, so that a library with kernels loads where there is no driver.
NEEDED = re.compile(r"lib(gomp|stdc\+\+|gcc_s|m|c|dl|rt|pthread)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")

# Unpacked bytes: a wheel without kernels has 2.2 MB, the kernels (in the library and in the command) add 6.5 MB. Twice
# that means that something came along: debug information, a second copy, a shared CUDA library.
MOST_BYTES = {False: 4 << 20, True: 17 << 20}

WITHOUT_TORCH = """
import pathlib, sys
import delta_matching as dm
assert pathlib.Path(dm.__file__).is_relative_to(sys.prefix), dm.__file__
assert dm.version() == dm.__version__ == sys.argv[1], dm.version()
assert dm.device_available("cpu") and dm.numerics_version() > 0
dm.set_workspace_cap(1 << 20)
assert dm.workspace_cap() == 1 << 20
dm.set_save_codes(False)
assert not dm.save_codes()
try:
    dm.dm_attn_func
except ImportError as error:
    assert "needs PyTorch" in str(error), error
else:
    raise SystemExit("dm_attn_func is there without PyTorch")
"""


class Fault(Exception):
    """What is wrong with the wheel, in one line."""


def check(condition: bool, fault: str) -> None:
    """Raises Fault; unlike an assert, under ``python -O`` too."""
    if not condition:
        raise Fault(fault)


def run(*command: str | Path, **options: object) -> str:
    """Standard output of a command; Fault with its last line of errors where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    check(done.returncode == 0, f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def version() -> str:
    return re.search(r"project\(delta_matching VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def package_files() -> Iterator[str]:
    """The files of python/delta_matching as a wheel should hold them."""
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(PACKAGE.parent).as_posix()


def check_contents(wheel: Path, names: list[str]) -> None:
    info = f"delta_matching-{version()}.dist-info"
    tag = r"py3-none-(linux|manylinux\w*)_[a-z0-9_]+"
    check(re.fullmatch(rf"delta_matching-{re.escape(version())}-{tag}\.whl", wheel.name) is not None,
          f"name: expected delta_matching-{version()}-py3-none-linux_….whl, got {wheel.name}")  # fmt: skip
    expected = {LIBRARY, COMMAND, *package_files()}
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    check(len(names) == len(set(names)), "a file is there twice")
    check(not expected - set(names), f"missing: {sorted(expected - set(names))}")
    check(not set(names) - expected, f"does not belong: {sorted(set(names) - expected)}")


def check_metadata(archive: zipfile.ZipFile) -> None:
    info = f"delta_matching-{version()}.dist-info"
    tags = re.findall(r"^Tag: (.*)$", archive.read(f"{info}/WHEEL").decode(), re.MULTILINE)
    check(bool(tags) and all(tag.startswith("py3-none-") for tag in tags), f"WHEEL: expected py3-none tags, got {tags}")
    metadata = archive.read(f"{info}/METADATA").decode().split("\n\n")[0].splitlines()
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.10", "Requires-Dist: torch>=2.9"):
        check(line in metadata, f"METADATA: expected the line {line!r}")
    needed = [line for line in metadata if line.startswith("Requires-Dist:") and "extra ==" not in line]
    check(needed == ["Requires-Dist: torch>=2.9"], f"METADATA: expected PyTorch as the only requirement, got {needed}")
    check(archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes(), "the licence is not LICENSE")


def check_binary(path: Path, cuda: bool) -> None:
    dynamic = run("readelf", "--dynamic", "--wide", path)
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        check(NEEDED.fullmatch(name) is not None, f"{path.name} needs {name}")
    check("RPATH" not in dynamic and "RUNPATH" not in dynamic, f"{path.name} has a search path of its own")
    sections = run("readelf", "--section-headers", "--wide", path)
    check((".nv_fatbin" in sections) == cuda, f"{path.name}: expected {'' if cuda else 'no '}kernels inside")
    check(".debug_info" not in sections, f"{path.name} has debug information")
    check(f"{ROOT}/src".encode() not in path.read_bytes(), f"{path.name} holds the path of the source tree")


def check_exports(library: Path) -> None:
    """The C ABI and nothing else: every function of the header, and no symbol of the libraries inside."""
    header = (ROOT / "include" / "delta_matching" / "delta_matching.h").read_text()
    declared = set(re.findall(r"\b(dmattn_\w+)\(", re.sub(r"/\*.*?\*/|//[^\n]*", "", header, flags=re.DOTALL)))
    rows = (line.split() for line in run("readelf", "--dyn-syms", "--wide", library).splitlines())
    exported = {row[7] for row in rows if len(row) > 7 and row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"}
    check(exported == declared, f"{library.name}: exports and header differ in {sorted(exported ^ declared)}")


def check_installed(wheel: Path, folder: Path) -> None:
    """Installs the wheel without PyTorch, away from the source tree, and runs package and command."""
    environment = folder / "env"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DELTA_MATCHING"))}
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=folder, env=clean)
    run(python, "-c", WITHOUT_TORCH, version(), cwd=folder, env=clean)
    command = run(environment / "bin" / "dmattn", "info", cwd=folder, env=clean)
    check(version() in command, f"dmattn info: expected {version()} in {command!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cuda", action="store_true", help="the kernels must be inside")
    options = parser.parse_args()
    wheel = options.wheel.resolve()
    try:
        with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
            check_contents(wheel, archive.namelist())
            check_metadata(archive)
            size = sum(entry.file_size for entry in archive.infolist())
            most = MOST_BYTES[options.cuda]
            check(size <= most, f"unpacked: expected at most {most} bytes, got {size}")
            folder = Path(name)
            for binary in (LIBRARY, COMMAND):
                check_binary(Path(archive.extract(binary, folder)), options.cuda)
            check_exports(folder / LIBRARY)
            check_installed(wheel, folder)
    except (Fault, OSError, zipfile.BadZipFile) as fault:
        sys.exit(f"{wheel.name}: {fault}")
    kernels = "with kernels" if options.cuda else "without kernels"
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {kernels}, as it should be")


if __name__ == "__main__":
    main()
