"""Tests of the CUDA kernels against the CPU twin and FP64; without a GPU of compute capability 9.0 all of them skip.

    DELTA_MATCHING_LIBRARY=build/cuda/src/libdelta_matching.so python -m pytest tests/gpu -n 12 --dist worksteal

Groups, by marker: ``quick`` (a few seconds: run first, with -x), ``matrix`` (every shape that is small), ``slow`` (long
rows), ``stress`` (many repeats, to be run alone: -n 0). What is left has no marker.

- DELTA_MATCHING_LIBRARY names the library; else build/release/src/libdelta_matching.so is taken.
- DMATTN_REAL: a folder with more real layers than the one in examples/.
- DMATTN_GPU_RECORDS: a folder for what was measured, one JSON line a value (tests/gpu/certify.py reads them).
- DMATTN_GPU_TESTS_DEVICE=cpu runs the suite with the twin in the GPU's place, to check the tests themselves.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in (".", "python", "tests/python", "tests/gpu"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))
os.environ.setdefault("DELTA_MATCHING_LIBRARY", str(ROOT / "build" / "release" / "src" / "libdelta_matching.so"))
# Inductor's caches on disk know an operator by its name, not by what its kernels do.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
# Workers share the cores, and the twin's threads would spin while they wait for one another.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

try:
    import torch
except ModuleNotFoundError:
    torch = None
    collect_ignore_glob = ["test_*.py"]

MARKERS = (
    "quick: a few seconds in all; run first",
    "matrix: every mode, head_dim, mask and ratio of heads at small lengths",
    "slow: long rows",
    "stress: many repeats under load, and times: nothing else runs beside them",
    "cuda_only: needs the GPU even where the twin stands in for it",
)


def _missing() -> str | None:
    """Why the GPU tests cannot run here."""
    if torch is None:
        return "needs PyTorch"
    if not Path(os.environ["DELTA_MATCHING_LIBRARY"]).is_file():
        return f"DELTA_MATCHING_LIBRARY: {os.environ['DELTA_MATCHING_LIBRARY']} is not a file"
    if os.environ.get("DMATTN_GPU_TESTS_DEVICE") == "cpu":
        return None
    if not torch.cuda.is_available():
        return "needs a GPU of compute capability 9.0 (Hopper): Torch finds no CUDA GPU"
    if torch.cuda.get_device_capability(0) != (9, 0):
        return f"needs a GPU of compute capability 9.0 (Hopper): {torch.cuda.get_device_name(0)} has another"
    from delta_matching import device_available

    return None if device_available("cuda") else "the library in DELTA_MATCHING_LIBRARY was built without CUDA"


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    # Torch warns about its own use of CUDA in many places; here the numbers are what counts.
    config.addinivalue_line("filterwarnings", "default")


def pytest_report_header() -> str:
    missing = _missing()
    if missing is not None:
        return f"tests/gpu: skipped, {missing}"
    if os.environ.get("DMATTN_GPU_TESTS_DEVICE") == "cpu":
        return "tests/gpu: the CPU twin in the GPU's place"
    return f"tests/gpu: {torch.cuda.get_device_name(0)}, {torch.cuda.device_count()} of them"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing()
    stands_in = os.environ.get("DMATTN_GPU_TESTS_DEVICE") == "cpu"
    for item in items:
        if Path(item.fspath).parent != Path(__file__).parent or item.path.name == "test_numerics_bits.py":
            continue  # the latter has conditions of its own
        if missing is not None:
            item.add_marker(pytest.mark.skip(reason=missing))
        elif stands_in and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason="the twin stands in for the GPU"))


if torch is not None:
    from gpu_record import Judge

    @pytest.fixture(autouse=True)
    def _quiet() -> None:
        """Few threads each for the twin and Torch, since workers run side by side."""
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
        torch.manual_seed(0)

    @pytest.fixture
    def judge(request: pytest.FixtureRequest):
        """Collects measured values and writes them down; at the test's end it fails if one was beyond its limit."""
        return Judge(request.node.nodeid.split("::", 1)[-1])

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(pyfuncitem: pytest.Function):
        result = yield
        judge = pyfuncitem.funcargs.get("judge")
        if judge is not None:
            judge.conclude()  # here, so that it counts as the test's failure and not as its teardown's
        return result
