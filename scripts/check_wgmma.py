#!/usr/bin/env python3
"""Looks for instructions that write registers which a matrix product in flight (wgmma) still reads or writes.

    scripts/check_wgmma.py build/cuda/src/libdelta_matching.so

ptxas warns where it serialises products, but not always where it reuses a register too early: it once dropped the
copies that kept an operand apart, and the results differed from run to run. Follows every path from a product to the
wait that lands it, in the SASS of all kernels of a library, object or cubin. Needs cuobjdump and nvdisasm: of the CUDA
toolkit on PATH or in $CUDA_HOME, or of the Triton beside this Python's PyTorch. Status 1 if something was found, 2 if
nothing could be looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_LINE = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(.*?)\s*;")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_PRODUCT = re.compile(r"[QHI]GMMA\.64x(\d+)x\d+\S* R(\d+), (?:R(\d+), )?")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_TARGET = re.compile(r"\bBRA\S*\s.*?(0x[0-9a-f]+)\s*$")
#: Without a destination in a register, or with one that is not the first operand's.
_NO_RESULT = ("ST", "RED", "BAR", "BRA", "SYNCS.ARRIVE", "MEMBAR", "ERRBAR", "FENCE", "UTMA", "UBLKCP", "WARPGROUP")
_WIDE = (".64", ".WIDE", "DADD", "DMUL", "DFMA", ".F64")


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    text: str

    @property
    def plain(self) -> str:
        return _PREDICATE.sub("", self.text)

    def writes(self) -> range:
        """Registers of its result."""
        name, _, operands = self.plain.partition(" ")
        found = re.match(r"(?:U?P\w+, )?R(\d+)\b", operands.strip())
        if not found or name.startswith(_NO_RESULT) or _PRODUCT.match(self.plain):
            return range(0)
        first = int(found[1])
        if ".128" in name or (name.startswith("LDSM") and name.endswith(".4")):
            return range(first, first + 4)
        if (name.startswith("LDSM") and name.endswith(".2")) or any(part in name for part in _WIDE) or name == "CS2R":
            return range(first, first + 2)
        return range(first, first + 1)


def disassembled(path: Path) -> Iterator[tuple[str, list[Instruction]]]:
    """(name, instructions) of each kernel."""
    folders = [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        folders.append(os.path.join(triton.submodule_search_locations[0], "backends", "nvidia", "bin"))
    search = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    tool = shutil.which("cuobjdump", path=search)
    if tool is None:
        sys.exit(_fail(f"cuobjdump: expected on PATH or in one of {', '.join(folders)}"))
    environment = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(tool), search])}
    done = subprocess.run([tool, "-sass", str(path)], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(_fail(f"{path}: cuobjdump could not read it: {(done.stderr or done.stdout).strip()[:200]}"))
    name, kernel = "", []
    for line in done.stdout.splitlines():
        if "Function :" in line:
            if kernel:
                yield name, kernel
            name, kernel = line.split(":", 1)[1].strip(), []
        elif found := _LINE.match(line):
            kernel.append(Instruction(int(found[1], 16), found[2]))
    if kernel:
        yield name, kernel


def followers(kernel: list[Instruction], at: int, index: dict[int, int]) -> list[int]:
    text = kernel[at].text
    if kernel[at].plain.startswith(("EXIT", "RET", "BRX")):
        return [] if text == kernel[at].plain else [at + 1]
    target = _TARGET.search(text)
    if target is None:
        return [at + 1]
    jump = index.get(int(target[1], 16))
    always = re.match(r"BRA\S* 0x", text) is not None
    return [n for n in ([jump] if always else [at + 1, jump]) if n is not None]


def early_writes(kernel: list[Instruction]) -> list[tuple[Instruction, Instruction]]:
    """(product, instruction that writes one of its registers before a wait has landed it)."""
    index = {instruction.address: n for n, instruction in enumerate(kernel)}
    found = []
    for start, instruction in enumerate(kernel):
        product = _PRODUCT.match(instruction.plain)
        if product is None:
            continue
        sums, left = int(product[2]), product[3]
        registers = set(range(sums, sums + int(product[1]) // 2))
        if left is not None:
            registers |= set(range(int(left), int(left) + 4))
        # A state is a place and how many groups were closed on the way: the product's own first, if it is not its last.
        todo, seen = [(start, 0)], set()
        while todo:
            at, closed = todo.pop()
            if (at, closed) in seen or at >= len(kernel):
                continue
            seen.add((at, closed))
            here = kernel[at]
            wait = _WAIT.search(here.text)
            if wait and (int(wait[1], 16) == 0 or closed > int(wait[1], 16)):
                continue
            if at != start and registers & set(here.writes()):
                found.append((instruction, here))
                continue
            if "GMMA" in here.text and "gsb0" in here.text:
                closed = min(closed + 1, 8)
            todo += [(n, closed) for n in followers(kernel, at, index)]
    return found


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="a library, an object or a cubin with kernels")
    path = parser.parse_args().library
    if not path.is_file():
        return _fail(f"library: expected a file, got {str(path)!r}")
    kernels = products = faults = 0
    for name, kernel in disassembled(path):
        kernels += 1
        products += sum(_PRODUCT.match(i.plain) is not None for i in kernel)
        early = early_writes(kernel)
        faults += len(early)
        for product, writer in early[:4]:
            print(
                f"{name}: {writer.address:#x} {writer.text}: writes a register of {product.address:#x} {product.text}"
            )
    if not products:
        return _fail(f"{path}: expected kernels with matrix products, found {kernels} kernels and no product")
    print(f"{products} products of {kernels} kernels: {faults or 'no'} early writes")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
