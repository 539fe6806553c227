"""What the tests measured: judged against limits, and written down for the certificate."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

#: Grades of agreement of docs/numerics.md, section 7; "property" is for invariants that have no counterpart there.
GRADES = ("bitwise", "modelled", "bounded", "property")


class Judge:
    """Takes values and their limits; :meth:`conclude` fails with all that were beyond."""

    def __init__(self, test: str) -> None:
        self.test = test
        self.faults: list[str] = []

    def _write(self, line: dict[str, Any]) -> None:
        folder = os.environ.get("DMATTN_GPU_RECORDS")
        if not folder:
            return
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / f"records-{worker}.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")

    def at_most(
        self, what: str, value: float, limit: float, case: Any = None, grade: str = "bounded", detail: str = ""
    ) -> None:
        """``value`` must be a number of at most ``limit``; NaN is beyond any. ``detail``: what it was made from."""
        good = value <= limit
        if not good:
            self.faults.append(f"{what}: {value:.4g}, limit {limit:.4g}" + (f" ({detail})" if detail else ""))
        line: dict[str, Any] = {"name": f"{self.test}: {what}", "grade": grade, "pass": bool(good), "limit": limit}
        if detail:
            line["detail"] = detail
        line["value"] = value if math.isfinite(value) else None
        line["shape"] = None if case is None else case.document()
        line["mode"] = None if case is None else case.mode
        line["mismatches"] = int(value) if grade == "bitwise" and math.isfinite(value) else None
        self._write(line)

    def same_bits(self, what: str, mismatches: int, case: Any = None) -> None:
        """No value may differ."""
        self.at_most(what, float(mismatches), 0.0, case, "bitwise")

    def true(self, what: str, condition: bool, case: Any = None) -> None:
        """A property that holds or does not."""
        self.at_most(what, 0.0 if condition else math.inf, 0.0, case, "property")

    def conclude(self) -> None:
        if self.faults:
            shown = self.faults[:12] + ([f"... and {len(self.faults) - 12} more"] if len(self.faults) > 12 else [])
            pytest.fail("\n".join(shown), pytrace=False)
