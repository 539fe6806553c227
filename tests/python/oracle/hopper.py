"""Forward and backward of docs/numerics.md, sections 3 and 4, for one head. Inputs are BF16 values held in FP32,
[rows, head_dim]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arithmetic import F32, LN2, LOG2E, ascending_sum, dot, e4m3, exp2, fma, from_bf16, ieee, power_of_two, to_bf16
from .quantise import AMAX_FLOOR, K_ROWS, Q_ROWS, bias_weights, operands, quantise
from .tensor_core import product

TILE = 64
SHIFT = F32(8)  # codes hold 2^8 p


class Scores(NamedTuple):
    """S of one head in units of the accumulator, and what turns it into log2 units."""

    acc: np.ndarray  # [queries, keys]
    factor: np.ndarray  # [queries, keys], the same for a row's 64 keys
    visible: np.ndarray  # [queries, keys]

    def group(self, rows, keys):
        """(acc, factor, visible, b) of a group of 64 keys; b is -infinity for a row that sees none of them."""
        acc, factor, visible = (x[rows, keys] for x in self)
        largest = np.where(visible, acc, -np.inf).astype(F32).max(axis=1, initial=-np.inf)  # NaN if one is
        return acc, factor, visible, np.ceil(np.where(np.isneginf(largest), largest, largest * factor[:, 0]))


def scores(ops, softmax_scale, causal):
    queries, keys = ops.q.codes.shape[0], ops.k.codes.shape[0]
    acc, factor = np.zeros((queries, keys), F32), np.zeros((queries, keys), F32)
    scale = F32(softmax_scale) * LOG2E
    for block, q_scale in enumerate(ops.q.scale):
        rows = slice(block * Q_ROWS, min((block + 1) * Q_ROWS, queries))
        codes = ops.q.codes[rows]
        extra = None if ops.bias[block] is None else (bias_weights(len(codes)), ops.bias[block])
        acc[rows] = product(codes, ops.k.codes, extra)
        factor[rows] = np.repeat((q_scale * ops.k.scale) * scale, K_ROWS)[:keys]
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    return Scores(acc, factor, (j <= i + keys - queries) if causal else np.ones((queries, keys), bool))


def probabilities(acc, factor, visible, reference):
    """(2^8 p, its codes) with p relative to `reference`, an integer per row."""
    reference = np.where(np.isneginf(reference), F32(0), reference)  # sees nothing: any will do
    p = exp2(fma(acc, factor, (SHIFT - reference)[:, None]))
    p = np.where(visible, p, F32(0))
    return p, e4m3(p)


class Forward(NamedTuple):
    o: np.ndarray  # BF16 bits
    o_low: np.ndarray  # BF16 bits of O - bf16(O)
    lse: np.ndarray
    reference: np.ndarray  # M
    sums: np.ndarray  # [2, rows]: unrounded, rounded


@ieee
def forward(q, k, v, *, softmax_scale, causal, centre="qk"):
    ops = operands(q, k, v, centre)
    s = scores(ops, softmax_scale, causal)
    queries, keys = s.acc.shape
    o, sums = np.zeros(q.shape, F32), np.zeros((2, queries), F32)
    m = np.full(queries, -np.inf, F32)
    for group, v_scale in enumerate(ops.v.scale):
        span = slice(group * TILE, min((group + 1) * TILE, keys))
        acc, factor, visible, b = s.group(slice(None), span)
        p, codes = probabilities(acc, factor, visible, b)
        seen = ~np.isneginf(b)  # the others keep what they have
        m_old, m = m, np.where((b > m) | np.isnan(b), b, m)
        old, new = (power_of_two(np.where(seen, x - m, 0)) for x in (m_old, b))
        # The order of the sum of p is not part of the contract: FP64, rounded once.
        for index, x in enumerate((p.astype(np.float64).sum(axis=1).astype(F32), codes.sum(axis=1))):
            sums[index] = np.where(seen, sums[index] * old + x * new, sums[index])
        t = product(pad(codes), pad(ops.v.codes[span].T))
        o = np.where(seen[:, None], fma(t, (v_scale * new)[:, None], o * old[:, None]), o)
    return finish(q, ops, softmax_scale, o, m, sums)


def pad(x):
    """Columns up to a multiple of 32: missing terms are zero."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 32)))


def finish(q, ops, softmax_scale, o, m, sums):
    empty = np.isneginf(m)
    outside = ~empty & ~(np.abs(m) <= F32(2.0**24))  # no exact reference: the row is NaN
    m, sums = np.where(outside, F32(np.nan), m), np.where(outside, F32(np.nan), sums)
    o = np.where((sums[1] == 0)[:, None], F32(0), o * (F32(1) / sums[1])[:, None])
    sums = sums * F32(2.0**-8)
    centre = F32(softmax_scale) * dot(q, np.broadcast_to(ops.k_mean, q.shape))
    lse = np.where(empty, F32(-np.inf), fma(np.where(empty, 0, m), LN2, np.log(sums[0])) + centre)
    high = to_bf16(o)
    low = to_bf16(o - from_bf16(high))
    return Forward(high, low, lse, m, sums)


class RowStatistics(NamedTuple):
    w: np.ndarray  # [rows], 0 for a row without keys
    w_dv: np.ndarray
    c: np.ndarray  # [rows], an integer


def row_statistics(reference, sums, mode):
    total = sums[1] if mode == "onepass" else sums[0]
    empty = total == 0
    total = np.where(empty, F32(1), total)
    fraction, exponent = np.frexp(total)
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)  # smallest power of two >= total
    power = np.ldexp(F32(1), exponent)
    w = np.where(empty, F32(0), power / total)
    w_dv = np.where(empty, F32(0), power / sums[1])
    return RowStatistics(w, w_dv, np.where(empty, F32(0), reference + exponent.astype(F32)))


class Backward(NamedTuple):
    dq: np.ndarray  # FP32, not yet multiplied by softmax_scale
    dk: np.ndarray
    dv: np.ndarray
    delta: np.ndarray  # true delta
    delta_size: np.ndarray  # matched: sum P |dP| / sum P, what the order of its sums acts on; else 0


class Tile(NamedTuple):
    rows: slice
    keys: slice
    p: np.ndarray  # P~ that dS uses
    codes: np.ndarray  # of P~
    exponent: np.float32
    t: np.ndarray  # tensor-core product of the codes of dO and V
    dp_scale: np.float32


def tiles(s, stats, d_hat, v8, mode):
    """Tiles in order of queries, then keys; those where no row sees a key are left out."""
    queries, keys = s.acc.shape
    for row in range(0, queries, TILE):
        rows = slice(row, min(row + TILE, queries))
        for key in range(0, keys, TILE):
            span = slice(key, min(key + TILE, keys))
            acc, factor, visible, b = s.group(rows, span)
            visible = visible & (stats.w[rows] != 0)[:, None]
            if not visible.any():
                continue
            c = stats.c[rows]
            e = F32(np.max(np.where(visible.any(axis=1), b - c, -np.inf)))
            p, codes = probabilities(acc, factor, visible, c + e)
            p = (codes if mode == "onepass" else p) * power_of_two(e - SHIFT)
            t = product(d_hat.codes[rows], v8.codes[span])
            yield Tile(rows, span, p, codes, e, t, d_hat.scale[row // Q_ROWS] * v8.scale[key // K_ROWS])


def shortcut_delta(mode, d, d_hat, o, o_low):
    """delta' of the modes that take it from O."""
    high = from_bf16(o)
    if mode == "stale":
        return dot(d, high)
    scale = np.repeat(d_hat.scale, Q_ROWS)[: d.shape[0]]
    return scale * dot(d_hat.codes, high + from_bf16(o_low) if mode == "onepass" else high)


def matched_delta(rows, tile_list):
    """delta' of matched, and the same with |dP'|. The order of these sums is not part of the contract: FP64, rounded
    once."""
    above, size, below = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    for tile in tile_list:
        p, dp = tile.p.astype(np.float64), tile.t * tile.dp_scale
        above[tile.rows] += (p * dp).sum(axis=1)
        size[tile.rows] += (p * np.abs(dp)).sum(axis=1)
        below[tile.rows] += p.sum(axis=1)
    below = np.where(below == 0, 1, below)
    return (above / below).astype(F32), size / below


def cast_tile(ds):
    """(codes, scale): a power of two brings the largest magnitude into [128, 256)."""
    amax = np.abs(ds).max()
    if not np.isfinite(amax):
        return np.full(ds.shape, np.nan, F32), F32(np.nan)
    if amax == 0:
        return np.zeros(ds.shape, F32), F32(0)
    exponent = int(np.frexp(max(amax, AMAX_FLOOR))[1]) - 8
    return e4m3(np.ldexp(ds, -exponent)), F32(np.ldexp(1.0, exponent))


@ieee
def backward(q, k, v, d_o, o, o_low, reference, sums, *, mode, softmax_scale, causal, centre="qk", delta=None):
    """`delta` replaces the mode's own true delta."""
    ops = operands(q, k, v, centre)
    s = scores(ops, softmax_scale, causal)
    stats = row_statistics(reference, sums, mode)
    d = stats.w[:, None] * d_o
    d_hat = quantise(d, Q_ROWS)
    d_dv = quantise(stats.w_dv[:, None] * d_o, Q_ROWS)
    tile_list = list(tiles(s, stats, d_hat, ops.v, mode))
    size = np.zeros(q.shape[0])
    if delta is not None:
        delta_prime = delta * stats.w
    elif mode == "matched":
        delta_prime, size = matched_delta(q.shape[0], tile_list)
    else:
        delta_prime = shortcut_delta(mode, d, d_hat, o, o_low)

    dq, dk, dv = (np.zeros(x.shape, F32) for x in (q, k, v))
    for tile in tile_list:
        rows, keys, block = tile.rows, tile.keys, tile.rows.start // Q_ROWS
        codes, scale = cast_tile(tile.p * fma(tile.t, tile.dp_scale, -delta_prime[rows][:, None]))
        t = product(pad(tile.codes.T), pad(d_dv.codes[rows].T))
        dv[keys] = fma(t, power_of_two(tile.exponent - SHIFT) * d_dv.scale[block], dv[keys])
        t = product(pad(codes.T), pad(ops.qt.codes[rows].T))
        dk[keys] = fma(t, scale * ops.qt.scale[block], dk[keys])
        t = product(pad(codes), pad(ops.k.codes[keys].T))
        dq[rows] = fma(t, scale * ops.k.scale[keys.start // K_ROWS], dq[rows])
    w = np.where(stats.w == 0, F32(1), stats.w)
    return Backward(dq, dk, dv, np.where(stats.w == 0, F32(0), delta_prime / w), size / w)


@ieee
def outputs(heads, softmax_scale):
    """BF16 bits of dQ of each query head, and of dK and dV of their KV head. dQ and dK are multiplied by softmax_scale
    head by head; then the heads are added in ascending order from zero."""
    scale = F32(softmax_scale)
    dk, dv = (ascending_sum(np.array(x, F32)) for x in ([h.dk * scale for h in heads], [h.dv for h in heads]))
    return [to_bf16(h.dq * scale) for h in heads], to_bf16(dk), to_bf16(dv)
