"""Entry point of the ``dmattn`` command of an installed package: the program itself lies inside the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Become ``dmattn`` with the arguments given; exit code 2 with one line where the package was built without it."""
    program = Path(__file__).parent / "bin" / "dmattn"
    if not program.is_file():
        sys.exit(_missing())
    os.execv(program, [str(program), *sys.argv[1:]])


def _missing() -> int:
    print(
        "dmattn: this package was built without the command; reinstall it with DMATTN_BUILD_CLI=ON and CLI11 "
        "(libcli11-dev)",
        file=sys.stderr,
    )
    return 2
