"""What the tests of the oracle share."""

from __future__ import annotations

import numpy as np

from . import twin
from .arithmetic import from_bf16


def name(case):
    shape = f"{case.queries}x{case.keys}x{case.head_dim}"
    return f"{case.kind}, {shape}, {'causal' if case.causal else 'full'}, {case.centre}"


def options(case, mode="stale", numerics="hopper"):
    return twin.Options(float(case.scale), case.causal, mode, numerics, case.centre)


def same(a, b):
    """Equal bits; every NaN equals every other."""
    if a.dtype == np.uint16:
        nan_a, nan_b = ((x & 0x7FFF) > 0x7F80 for x in (a, b))
        return a.shape == b.shape and bool(((a == b) | (nan_a & nan_b)).all())
    assert a.dtype == b.dtype == np.float32
    nan = np.isnan(a) & np.isnan(b)
    return a.shape == b.shape and bool(((a.view(np.int32) == b.view(np.int32)) | nan).all())


def distance(a, b):
    """Relative Frobenius distance of BF16 bits."""
    a, b = (from_bf16(x).astype(np.float64) for x in (a, b))
    norm = np.linalg.norm(b)
    return np.linalg.norm(a - b) / norm if norm else np.linalg.norm(a)
