"""Scalar arithmetic of docs/numerics.md on NumPy arrays: FP32 with one rounding an operation, fma, BF16, E4M3, 2^y.

NumPy's float32 operators are IEEE, round to nearest even, and do not flush; only fma has to be built.
"""

from __future__ import annotations

import functools

import numpy as np

F32 = np.float32
LOG2E = F32(1.44269504088896340736)
LN2 = F32(0.69314718055994530942)
E4M3_MAX = 448.0
BF16_NAN = np.uint16(0x7FC0)


def ieee(function):
    """Infinities, NaN and underflow are results like any other: no warnings."""

    @functools.wraps(function)
    def silent(*args, **kwargs):
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return silent


@ieee
def fma(a, b, c):
    """a * b + c in FP32 with one rounding.

    The product of two FP32 numbers is exact in FP64. Its sum with c is rounded to odd there: with 53 bits against 24,
    the second rounding, to FP32, then is the only one that counts (Boldo and Melquiond 2008).
    """
    product = np.asarray(a, F32).astype(np.float64) * np.asarray(b, F32).astype(np.float64)
    addend = np.asarray(c, F32).astype(np.float64)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)  # exact (Knuth's two-sum); NaN beside infinities
    bits = np.ascontiguousarray(total).view(np.int64).copy()
    inexact = (lost != 0) & np.isfinite(lost) & ((bits & 1) == 0)
    outward = (lost > 0) == (total > 0)
    bits += np.where(inexact, np.where(outward, 1, -1), 0)
    return bits.view(np.float64).astype(F32)


@ieee
def ascending_sum(values):
    """FP32 sum over the first axis, in ascending order from zero."""
    total = np.zeros(values.shape[1:], F32)
    for value in values:
        total = total + value
    return total


def to_bf16(x):
    """FP32 to BF16 bits, nearest even; every NaN becomes BF16_NAN."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), BF16_NAN, rounded)


def from_bf16(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(F32)


@ieee
def e4m3(x):
    """Nearest E4M3 number, ties to even, saturating at 448; as FP32 values. NaN stays NaN."""
    x = np.asarray(x, F32)
    size = np.minimum(np.abs(x.astype(np.float64)), 1024.0)
    exponent = np.maximum(np.frexp(size)[1] - 1, -6)  # below 2^-6 the codes are multiples of 2^-9
    step = np.ldexp(1.0, exponent - 3)
    rounded = np.minimum(np.rint(size / step) * step, E4M3_MAX)
    return np.copysign(rounded, x).astype(F32)


def e4m3_bits(value):
    """The byte of an E4M3 number: sign, four exponent bits (bias 7), three fraction bits; NaN is 0x7f."""
    value = np.asarray(value, np.float64)
    size = np.where(np.isnan(value), 0.0, np.abs(value))
    exponent = np.maximum(np.frexp(size)[1] - 1, -6)
    eighths = np.ldexp(size, 3 - exponent).astype(np.int64)  # 8 ... 15, below 8 if subnormal
    byte = np.where(eighths >= 8, (exponent + 6) * 8 + eighths, eighths) | np.where(np.signbit(value), 0x80, 0)
    return np.where(np.isnan(value), 0x7F, byte).astype(np.uint8)


# Coefficients of src/numerics/exp2.h, highest power first; the constant is 1.
_EXP2 = [
    float.fromhex(c)
    for c in ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "0x1p0")
]


@ieee
def exp2(y):
    """2^y in FP32 by the polynomial: integers are exact, arguments below -126 give 0, above 127 give 2^127."""
    y = np.asarray(y, F32)
    usable = np.clip(np.where(np.isnan(y), F32(0), y), F32(-126), F32(127))
    n = np.rint(usable)
    r = usable - n
    p = np.full(y.shape, _EXP2[0], F32)
    for coefficient in _EXP2[1:]:
        p = fma(p, r, F32(coefficient))
    result = np.ldexp(p, n.astype(np.int32))
    return np.where(np.isnan(y), F32(np.nan), np.where(y < -126, F32(0), result))


def power_of_two(exponent):
    """2^exponent for integers held in FP32: 0 below -126 (and for -infinity)."""
    return exp2(exponent)


@ieee
def dot(a, b):
    """Row-wise <a, b> in FP32: lanes of 8 channels, fma ascending from zero; lanes added in a butterfly, far half
    first."""
    lanes = a.shape[-1] // 8
    a, b = (np.asarray(x, F32).reshape(*x.shape[:-1], lanes, 8) for x in (a, b))
    total = np.zeros(a.shape[:-1], F32)
    for channel in range(8):
        total = fma(a[..., channel], b[..., channel], total)
    while lanes > 1:
        lanes //= 2
        total = total[..., :lanes] + total[..., lanes : 2 * lanes]
    return total[..., 0]
