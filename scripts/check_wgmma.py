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
#: Their first operand is a register that they read. Stores have an address there.
_NO_RESULT = ("BAR", "WARPSYNC", "NANOSLEEP")


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    text: str

    @property
    def plain(self) -> str:
        return _PREDICATE.sub("", self.text)

    def result(self) -> int | None:
        """The first register of its result. Two or four are aligned, and so are a product's: the first tells."""
        name, _, operands = self.plain.partition(" ")
        found = re.match(r"(?:U?P\w+, )?R(\d+)\b", operands.strip())
        if not found or name.startswith(_NO_RESULT) or _PRODUCT.match(self.plain):
            return None
        return int(found[1])


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


def followers(kernel: list[Instruction]) -> list[list[int]]:
    """Where each instruction's successors are. ValueError if a branch leads nowhere."""
    index = {instruction.address: n for n, instruction in enumerate(kernel)}
    found = []
    for at, instruction in enumerate(kernel):
        always = instruction.text == instruction.plain
        after = [at + 1] if at + 1 < len(kernel) else []
        if instruction.plain.startswith(("EXIT", "RET", "BRX")):
            found.append([] if always else after)
            continue
        if not instruction.plain.startswith("BRA"):
            found.append(after)
            continue
        target = _TARGET.search(instruction.text)
        if target is None or int(target[1], 16) not in index:
            raise ValueError(f"{instruction.address:#x} {instruction.text}: expected a target in the kernel")
        # With a register in front of the target it is taken where that says so.
        always = always and re.match(r"BRA\S* 0x", instruction.text) is not None
        found.append([*([] if always else after), index[int(target[1], 16)]])
    return found


def early_writes(kernel: list[Instruction]) -> list[tuple[Instruction, Instruction]]:
    """(product, instruction that writes one of its registers before a wait has landed it)."""
    products = [_PRODUCT.match(i.plain) for i in kernel]
    if not any(products):
        return []
    successors, results = followers(kernel), [i.result() for i in kernel]
    waits = [int(found[1], 16) if (found := _WAIT.search(i.text)) else None for i in kernel]
    closes = [product is not None and "gsb0" in i.text for product, i in zip(products, kernel, strict=True)]
    found = []
    for start, product in enumerate(products):
        if product is None:
            continue
        sums, left = int(product[2]), product[3]
        registers = set(range(sums, sums + int(product[1]) // 2))
        if left is not None:
            registers |= set(range(int(left), int(left) + 4))
        # A state is a place and how many groups were closed on the way: the product's own first, if it is not its last.
        todo, seen = [(start, 0)], set()
        while todo:
            at, closed = state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            wait = waits[at]
            if wait is not None and closed > wait:
                continue
            if results[at] in registers:
                found.append((kernel[start], kernel[at]))
                continue
            closed = min(closed + closes[at], 8)
            todo += [(n, closed) for n in successors[at]]
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
        try:
            early = early_writes(kernel)
        except ValueError as error:
            return _fail(f"{path}: {name}: {error}")
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
