"""The Python example runs and learns: attention that trains, from the projection to the optimiser."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_torch_layer(root: Path, mode: str):
    command = [sys.executable, str(root / "examples" / "torch_layer.py"), "--steps", "12", "--mode", mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)]
    # Without attention the best loss is ln 32 = 3.47.
    assert losses[0] > 3 and losses[-1] < 1.5, done.stdout
