"""Forward and backward of docs/numerics.md, sections 3 and 4, for one head. Inputs are BF16 values held in FP32,
[rows, head_dim]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arithmetic import F32, LN2, LOG2E, dot, e4m3, exp2, fma, from_bf16, ieee, power_of_two, to_bf16
from .quantise import AMAX_FLOOR, FLUSH_ROWS, K_ROWS, Q_ROWS, bias_weights, operands, power_scale_of, quantise
from .tensor_core import product

TILE, EXPONENT_KEYS = 64, 16
SHIFT = F32(8)  # codes hold 2^8 p
ROOM = F32(1)  # of the backward's exponents, for codes twice as large
FORGETTING = {0} | {2**n for n in range(40)}  # intervals that start without exponents


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
    """(2^8 p, its codes) with p relative to `reference`, an integer per row, or per row and key."""
    reference = np.where(np.isneginf(reference), F32(0), reference)  # sees nothing: any will do
    reference = reference[:, None] if reference.ndim == 1 else reference
    p = exp2(fma(acc, factor, SHIFT - reference))
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
    dk: np.ndarray  # likewise
    dv: np.ndarray
    delta: np.ndarray  # true delta
    delta_size: np.ndarray  # matched: sum P |dP| / sum P, what the order of its sums acts on; else 0


class Inputs(NamedTuple):
    """What the backward of one head reads."""

    s: Scores
    stats: RowStatistics
    d_hat: object  # Quantised, of dP
    d_dv: object  # of dV
    k: object
    v: object
    qt: object
    onepass: bool


class Block(NamedTuple):
    """A tile, or all of a head, as far as P and dP go."""

    acc: np.ndarray
    factor: np.ndarray
    visible: np.ndarray  # and of a row that has keys at all
    c: np.ndarray  # [rows]
    t: np.ndarray  # tensor-core product of the codes of dO and V
    dp_scale: np.float32


def block(ops, rows, keys):
    acc, factor, visible = (x[rows, keys] for x in ops.s)
    visible = visible & (ops.stats.w[rows] != 0)[:, None]
    t = product(ops.d_hat.codes[rows], ops.v.codes[keys])
    dp_scale = ops.d_hat.scale[rows.start // FLUSH_ROWS] * ops.v.scale[keys.start // K_ROWS]
    return Block(acc, factor, visible, ops.stats.c[rows], t, dp_scale)


def spans(start, end, step):
    return [slice(at, min(at + step, end)) for at in range(start, end, step)]


def shortcut_delta(mode, d, d_hat, o, o_low):
    """delta' of the modes that take it from O."""
    high = from_bf16(o)
    if mode == "stale":
        return dot(d, high)
    scale = np.repeat(d_hat.scale, FLUSH_ROWS)[: d.shape[0]]
    if mode == "consistent":
        return scale * dot(d_hat.codes, high)
    full = high + from_bf16(o_low)
    o_hat = quantise(full, 1, scale_of=power_scale_of)
    truncated = np.zeros(len(d), F32)
    for rows in spans(0, len(d), TILE):  # of all products of two rows, those of a row with its own
        truncated[rows] = np.diagonal(product(d_hat.codes[rows], o_hat.codes[rows]))
    return scale * fma(o_hat.scale, truncated, dot(d_hat.codes, fma(-o_hat.scale[:, None], o_hat.codes, full)))


def matched_delta(ops):
    """delta' of matched, and the same with |dP'|. The order of these sums is not part of the contract: FP64, rounded
    once."""
    queries, keys = ops.s.acc.shape
    above, size, below = np.zeros(queries), np.zeros(queries), np.zeros(queries)
    for rows in spans(0, queries, TILE):
        for span in spans(0, keys, TILE):
            tile = block(ops, rows, span)
            p = probabilities(tile.acc, tile.factor, tile.visible, tile.c)[0].astype(np.float64)
            dp = np.where(tile.visible, tile.t * tile.dp_scale, F32(0))
            above[rows] += (p * dp).sum(axis=1)
            size[rows] += (p * np.abs(dp)).sum(axis=1)
            below[rows] += p.sum(axis=1)
    below = np.where(below == 0, 1, below)
    return (above / below).astype(F32), size / below


def exponent_of(amax):
    """The exponent that brings amax into [128, 256)."""
    return F32(int(np.frexp(max(amax, AMAX_FLOOR))[1]) - 8)


class KeyTile:
    """64 keys over an interval of queries: the exponents of their codes, which go on from `before`, and what the tensor
    core holds."""

    def __init__(self, ops, keys, before=None):
        self.ops, self.keys = ops, keys
        count, channels = ops.v.codes[keys].shape
        self.group = np.arange(count) // EXPONENT_KEYS  # of each key
        self.e = np.full(self.group[-1] + 1, -np.inf, F32)  # of P, by group; -infinity: unset
        self.g = F32(-np.inf)  # of dS
        if before is not None:
            self.e, self.g = before.e, before.g
        self.dv, self.dk = np.zeros((count, channels), F32), np.zeros((count, channels), F32)
        self.p_nan = self.ds_nan = False

    def by_group(self, x):
        """Largest of each group of keys; NaN takes no part."""
        largest = np.where(np.isnan(x), -np.inf, x).max(axis=0)
        return np.array([largest[self.group == w].max() for w in range(len(self.e))], F32)

    def probabilities(self, tile):
        own = np.where(tile.visible, np.ceil(tile.acc * tile.factor) - tile.c[:, None], F32(-np.inf))
        own = self.by_group(own) + ROOM
        before = self.e
        self.e = np.where(np.isneginf(before), own, before)
        for _ in range(2):
            p, codes = probabilities(tile.acc, tile.factor, tile.visible, tile.c[:, None] + self.e[self.group])
            full = self.by_group(codes) == 448
            raised = np.where(full, np.maximum(self.e, own), self.e)
            if (raised == self.e).all():
                break
            self.e = raised
        self.dv *= power_of_two(np.where(before == self.e, F32(0), before - self.e))[self.group, None]
        return p, codes

    def cast(self, ds):
        """(codes, scale) of dS, and dK's accumulator brought to that scale."""
        amax = np.abs(ds).max()
        if not np.isfinite(amax):
            self.ds_nan = True
            return None, F32(np.nan)
        before = self.g
        if amax > 0:
            if np.isneginf(before):
                self.g = exponent_of(amax) + ROOM
            elif (np.abs(e4m3(np.ldexp(ds, -int(before)))) == 448).any():
                self.g = max(before, exponent_of(amax) + ROOM)
        if np.isneginf(self.g):
            return np.zeros(ds.shape, F32), F32(0)
        self.dk *= power_of_two(before - self.g)
        return e4m3(np.ldexp(ds, -int(self.g))), power_of_two(self.g)

    def add(self, rows, delta_prime):
        """One tile of queries; returns what it adds to dQ: (product, factor)."""
        ops = self.ops
        tile = block(ops, rows, self.keys)
        if not tile.visible.any():
            return None
        p, codes = self.probabilities(tile)
        p_tilde = (codes if ops.onepass else p) * power_of_two(self.e - SHIFT)[self.group]
        self.p_nan = self.p_nan or np.isnan(p).any()
        if not self.p_nan:
            self.dv = product(pad(codes.T), pad(ops.d_dv.codes[rows].T), start=self.dv)
        ds = p_tilde * fma(tile.t, tile.dp_scale, -delta_prime[rows][:, None])
        ds_codes, scale = self.cast(np.where(tile.visible, ds, F32(0)))
        if ds_codes is None:
            return np.zeros((len(ds), self.dk.shape[1]), F32), scale
        self.dk = product(pad(ds_codes.T), pad(ops.qt.codes[rows].T), start=self.dk)
        return product(pad(ds_codes), pad(ops.k.codes[self.keys].T)), scale * ops.k.scale[self.keys.start // K_ROWS]

    def flush(self, interval, dk, dv):
        """FP32 takes the sums."""
        ops, keys = self.ops, self.keys
        if self.ds_nan:
            dk[keys] = np.nan
        elif not np.isneginf(self.g):
            dk[keys] = dk[keys] + self.dk * (power_of_two(self.g) * ops.qt.scale[interval])
        factor = (power_of_two(self.e - SHIFT) * ops.d_dv.scale[interval])[self.group, None]
        dv[keys] = np.where(np.isneginf(self.e)[self.group, None], dv[keys], dv[keys] + self.dv * factor)
        if self.p_nan:
            dv[keys] = np.nan


@ieee
def backward(
    q, k, v, d_o, o, o_low, reference, sums, *, mode, softmax_scale, causal, centre="qk", delta=None, start=None
):
    """`delta` replaces the mode's own true delta; `start` is the Backward of the query head before this one, whose dK
    and dV go on."""
    base = operands(q, k, v, centre)
    stats = row_statistics(reference, sums, mode)
    d = stats.w[:, None] * d_o
    d_hat, d_dv = quantise(d, FLUSH_ROWS), quantise(stats.w_dv[:, None] * d_o, FLUSH_ROWS)
    s = scores(base, softmax_scale, causal)
    ops = Inputs(s, stats, d_hat, d_dv, base.k, base.v, base.qt, mode == "onepass")
    queries, keys = len(q), len(k)
    size = np.zeros(queries)
    if delta is not None:
        delta_prime = delta * stats.w
    elif mode == "matched":
        delta_prime, size = matched_delta(ops)
    else:
        delta_prime = shortcut_delta(mode, d, d_hat, o, o_low)

    dq = np.zeros(q.shape, F32)
    dk, dv = (np.zeros(k.shape, F32), np.zeros(v.shape, F32)) if start is None else (start.dk.copy(), start.dv.copy())
    key_tiles = {}
    for interval, span in enumerate(spans(0, queries, FLUSH_ROWS)):
        if interval in FORGETTING:
            key_tiles.clear()
        for of_keys in spans(0, keys, TILE):
            key_tile = KeyTile(ops, of_keys, key_tiles.get(of_keys.start))
            key_tiles[of_keys.start] = key_tile
            for rows in spans(span.start, span.stop, TILE):
                to_dq = key_tile.add(rows, delta_prime)
                if to_dq is not None:
                    dq[rows] = fma(*to_dq, dq[rows])
            key_tile.flush(interval, dk, dv)
    w = np.where(stats.w == 0, F32(1), stats.w)
    return Backward(dq, dk, dv, np.where(stats.w == 0, F32(0), delta_prime / w), size / w)


@ieee
def outputs(heads, softmax_scale):
    """BF16 bits of dQ of each query head, and of dK and dV of their KV head, which the last of them holds: each started
    with the one before."""
    scale = F32(softmax_scale)
    return [to_bf16(h.dq * scale) for h in heads], to_bf16(heads[-1].dk * scale), to_bf16(heads[-1].dv)
