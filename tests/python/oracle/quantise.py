"""Block scales, means and the bias of docs/numerics.md, section 1, for one head. Arrays are FP32 [rows, channels]."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from .arithmetic import E4M3_MAX, F32, ascending_sum, e4m3, fma, from_bf16, ieee, to_bf16

Q_ROWS, K_ROWS, FLUSH_ROWS = 128, 64, 1024
AMAX_FLOOR = F32(2.0**-110)
SLOTS, SLOT_WEIGHT = 16, F32(256)
CAPACITY = 12 * E4M3_MAX * 256


class Quantised(NamedTuple):
    codes: np.ndarray  # E4M3 numbers, FP32 [rows, channels]
    scale: np.ndarray  # FP32 [blocks]


def block_starts(rows, block):
    return range(0, rows, block)


def scale_of(amax, never_zero=False):
    """(scale, inverse) of a block."""
    if not np.isfinite(amax):
        return F32(np.nan), F32(np.nan)
    if amax == 0 and not never_zero:
        return F32(0), F32(0)
    amax = max(F32(amax), AMAX_FLOOR)
    return F32(amax / F32(E4M3_MAX)), F32(F32(E4M3_MAX) / amax)


def power_scale_of(amax):
    """(scale, inverse): the smallest power of two with amax <= 448 scale."""
    if not np.isfinite(amax):
        return F32(np.nan), F32(np.nan)
    if amax == 0:
        return F32(0), F32(0)
    fraction, exponent = np.frexp(np.float64(max(F32(amax), AMAX_FLOOR)) / E4M3_MAX)
    exponent = int(exponent) - (fraction == 0.5)
    return np.ldexp(F32(1), exponent), np.ldexp(F32(1), -exponent)


@ieee
def quantise(x, block, raise_by=None, scale_of=scale_of):
    """`raise_by(block index, scale)`: exponent by which a block's scale rises (the guard of the bias)."""
    codes, scales = np.zeros(x.shape, F32), []
    for index, start in enumerate(block_starts(x.shape[0], block)):
        part = x[start : start + block]
        scale, inverse = scale_of(np.abs(part).max())
        if raise_by is not None:
            exponent = raise_by(index, scale)
            scale, inverse = np.ldexp(scale, exponent), np.ldexp(inverse, -exponent)
        codes[start : start + block] = e4m3(part * inverse)
        scales.append(scale)
    return Quantised(codes, np.array(scales, F32))


@ieee
def mean(x):
    """Mean over the rows: sums of 64 rows, added up in order, and one division."""
    partial = [ascending_sum(x[start : start + 64]) for start in range(0, x.shape[0], 64)]
    total = ascending_sum(np.array(partial, F32).reshape(-1, x.shape[1]))
    return total / F32(x.shape[0]) if x.shape[0] else total


def query_means(q):
    """(rows a mean runs over, the means as BF16 values)."""
    rows = Q_ROWS * max(1, -(-q.shape[0] // 8192))
    means = [from_bf16(to_bf16(mean(q[start : start + rows]))) for start in block_starts(q.shape[0], rows)]
    return rows, np.array(means, F32).reshape(-1, q.shape[1])


def bias_dot(mu, k_centred):
    total = np.zeros(k_centred.shape[0], F32)
    for channel in range(k_centred.shape[1]):
        total = fma(mu[channel], k_centred[:, channel], total)
    return total


def guard_exponent(dot, q_scale, k_scale):
    """Smallest exponent for which every key's bias fits; `k_scale` per key, keys of scale 0 (or NaN) have none."""
    keys = k_scale > 0
    need = (np.abs(dot[keys]).astype(np.float64) / (k_scale[keys].astype(np.float64) * CAPACITY)).max(initial=0)
    if not np.isfinite(need) or not np.isfinite(q_scale):
        return 0
    exponent, scale = 0, np.float64(q_scale)
    while need > scale * 2.0**exponent:
        exponent += 1
    return exponent


def bias_codes(dot, q_scale, k_scale):
    """K side of the bias step, [keys, 32]; `k_scale` per key."""
    unit = q_scale * k_scale
    rest = np.where(unit < F32(2.0**-126), F32(0), dot / unit)
    slots = np.zeros((dot.shape[0], 32), F32)
    for s in range(SLOTS):
        slots[:, s] = e4m3(rest / SLOT_WEIGHT)
        rest = rest - SLOT_WEIGHT * slots[:, s]
    return slots


def bias_weights(rows):
    """Q side of the bias step, [rows, 32]."""
    weights = np.zeros((rows, 32), F32)
    weights[:, :SLOTS] = SLOT_WEIGHT
    return weights


class Operands(NamedTuple):
    """What the matrix products of one head read."""

    q: Quantised  # of S
    k: Quantised
    v: Quantised
    qt: Quantised  # of dK
    k_mean: np.ndarray
    bias: list  # per 128-row block the codes of its bias step, or None


@ieee
def operands(q, k, v, centre):
    k_mean = mean(k) if centre in ("k", "qk") else np.zeros(k.shape[1], F32)
    k_centred = k - k_mean
    k8, qt = quantise(k_centred, K_ROWS), quantise(q, FLUSH_ROWS)
    v8 = quantise(v, K_ROWS, scale_of=power_scale_of)
    if centre != "qk":
        q8 = quantise(q, Q_ROWS)
        return Operands(q8, k8, v8, qt, k_mean, [None] * len(q8.scale))
    rows, means = query_means(q)
    k_scale = np.repeat(k8.scale, K_ROWS)[: k.shape[0]]
    dots = [bias_dot(mu, k_centred) for mu in means]
    of_block = [dots[start // rows] for start in block_starts(q.shape[0], Q_ROWS)]
    q_centred = q - np.repeat(means, rows, axis=0)[: q.shape[0]]
    guard = lambda index, scale: guard_exponent(of_block[index], scale, k_scale)  # noqa: E731
    q8 = quantise(q_centred, Q_ROWS, guard, partial(scale_of, never_zero=True))
    for index, dot in enumerate(of_block):
        if not np.isfinite(dot[k_scale > 0]).all():  # a bias that FP32 cannot hold
            q8.scale[index] = np.nan
    bias = [bias_codes(dot, scale, k_scale) for dot, scale in zip(of_block, q8.scale, strict=True)]
    return Operands(q8, k8, v8, qt, k_mean, bias)
