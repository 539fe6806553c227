"""Finds what is tested: the package in python/ over a library that was built, or an installed package.

- DELTA_MATCHING_LIBRARY names the library; else build/release/src/libdelta_matching.so is taken.
- DELTA_MATCHING_TEST_INSTALLED=1 tests the installed package with its own library instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the package train

if os.environ.get("DELTA_MATCHING_TEST_INSTALLED") != "1":
    sys.path.insert(0, str(ROOT / "python"))
    # Subprocesses of the tests (python -O, no Torch) must find the same package.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT / "python"), os.environ.get("PYTHONPATH", "")) if part
    )
    library = os.environ.setdefault(
        "DELTA_MATCHING_LIBRARY", str(ROOT / "build" / "release" / "src" / "libdelta_matching.so")
    )
    if not Path(library).is_file():
        raise pytest.UsageError(f"{library} does not exist: build it, or set DELTA_MATCHING_LIBRARY")

# Inductor's caches on disk know an operator by its name, not by what its kernels do: after a change here they would
# replay the old one.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import hypothesis
import torch

# No deadline: the first call of a process loads the library, and the machine may be shared. Derandomised, so that a
# failure is the change's and not the day's; DMATTN_HYPOTHESIS=explore looks further.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("DMATTN_HYPOTHESIS", "ci"))


@contextlib.contextmanager
def script_module(name: str) -> Iterator[ModuleType]:
    """scripts/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT
