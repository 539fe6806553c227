"""The tensor core of docs/numerics.md, section 2: 32 products a step, 13 fraction bits, truncation."""

from __future__ import annotations

import numpy as np

from .arithmetic import ieee

STEP = 32
FRACTION = 13
SMALLEST_UNIT = -126
_NEVER = -100000  # exponent of a term that takes no part


def _exponents(codes):
    """Exponent of each E4M3 number; a subnormal one has -6."""
    exponent = np.maximum(np.frexp(codes)[1] - 1, -6)
    return np.where(codes == 0, _NEVER, exponent)


def one_step(accumulator, a, b):
    """accumulator [M, N] + a [M, 32] b [N, 32]^T. Everything is exact in FP64: the terms are integers below 2^16 once
    they are divided by their common unit."""
    products = a[:, None, :] * b[None, :, :]
    exponents = _exponents(a)[:, None, :] + _exponents(b)[None, :, :]
    exponents = np.where(products == 0, _NEVER, exponents).max(axis=-1)
    own = np.where(accumulator == 0, _NEVER, np.frexp(accumulator)[1] - 1)
    largest = np.maximum(exponents, own)
    largest = np.where(largest == _NEVER, 0, largest)
    unit = np.ldexp(1.0, np.maximum(largest - FRACTION, SMALLEST_UNIT))
    total = np.trunc(products / unit[:, :, None]).sum(axis=-1) + np.trunc(accumulator / unit)
    surplus = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - (FRACTION + 1), 0))
    return np.trunc(total / surplus) * surplus * unit + 0.0  # + 0.0: a zero is positive


@ieee
def product(a, b, extra=None, start=None):
    """a [M, K] b [N, K]^T of E4M3 numbers, from `start` or zero, K in ascending steps of 32; FP32. `extra` is a pair of
    operands that come after, one more step."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    total = np.zeros((a.shape[0], b.shape[0])) if start is None else start.astype(np.float64)
    for k in range(0, a.shape[1], STEP):
        total = one_step(total, a[:, k : k + STEP], b[:, k : k + STEP])
    if extra is not None:
        total = one_step(total, *(np.asarray(x, np.float64) for x in extra))
    return total.astype(np.float32)
