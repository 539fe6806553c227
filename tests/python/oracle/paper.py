"""Paper numerics of docs/numerics.md, section 5, for one head. FP64 between the roundings that the recipe names: codes
are E4M3, their scales FP32, O BF16. Inputs are BF16 values held in FP32, [rows, head_dim]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arithmetic import E4M3_MAX, F32, e4m3, from_bf16, ieee
from .quantise import AMAX_FLOOR, K_ROWS, Q_ROWS, mean, quantise

TILE = 64


def dequantised(x, block):
    codes, scale = quantise(x, block)
    return codes.astype(np.float64) * np.repeat(scale, block)[: x.shape[0], None]


class Operands(NamedTuple):
    """Dequantised, FP64."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_mean: np.ndarray


def operands(q, k, v, centre="k"):
    k_mean = mean(k) if centre == "k" else np.zeros(k.shape[1], F32)
    return Operands(dequantised(q, Q_ROWS), dequantised(k - k_mean, K_ROWS), dequantised(v, K_ROWS), k_mean)


class Softmax(NamedTuple):
    p: np.ndarray  # e^(s - row maximum), 0 where masked
    p_hat: np.ndarray  # what its codes stand for
    maximum: np.ndarray
    total: np.ndarray  # l
    total_hat: np.ndarray


def cast_rows(p):
    """E4M3 with scale amax / 448 per row and 64 keys, dequantised."""
    result = np.zeros(p.shape)
    for key in range(0, p.shape[1], TILE):
        part = p[:, key : key + TILE].astype(F32)
        amax = part.max(axis=1)
        scale = np.where(amax == 0, F32(0), np.maximum(amax, AMAX_FLOOR) / F32(E4M3_MAX))
        inverse = F32(E4M3_MAX) / np.maximum(amax, AMAX_FLOOR)
        result[:, key : key + TILE] = e4m3(part * inverse[:, None]).astype(np.float64) * scale[:, None]
    return result


def softmax(ops, softmax_scale, causal):
    s = ops.q @ ops.k.T * np.float64(F32(softmax_scale))
    if causal:
        queries, keys = s.shape
        s = np.where(np.arange(keys)[None, :] <= np.arange(queries)[:, None] + keys - queries, s, -np.inf)
    maximum = s.max(axis=1, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(maximum), 0, maximum)[:, None])
    p_hat = cast_rows(p)
    return Softmax(p, p_hat, maximum, p.sum(axis=1), p_hat.sum(axis=1))


def _divide(x, total):
    total = total.reshape(-1, *[1] * (x.ndim - 1))
    return np.where(total == 0, 0.0, x / np.where(total == 0, 1.0, total))


class Forward(NamedTuple):
    o: np.ndarray  # FP64, before it becomes BF16
    lse: np.ndarray


@ieee
def forward(q, k, v, *, softmax_scale, causal, mode, centre="k"):
    ops = operands(q, k, v, centre)
    x = softmax(ops, softmax_scale, causal)
    o = _divide(x.p_hat @ ops.v, x.total_hat if mode == "onepass" else x.total)
    lse = x.maximum + np.log(x.total) + np.float64(F32(softmax_scale)) * (q.astype(np.float64) @ ops.k_mean)
    return Forward(o, np.where(x.total == 0, -np.inf, lse))


class Backward(NamedTuple):
    dq: np.ndarray  # FP64
    dk: np.ndarray
    dv: np.ndarray
    delta: np.ndarray


def cast_tiles(ds):
    result = np.zeros(ds.shape)
    for row in range(0, ds.shape[0], TILE):
        for key in range(0, ds.shape[1], TILE):
            tile = (slice(row, row + TILE), slice(key, key + TILE))
            result[tile] = dequantised(ds[tile].astype(F32), TILE)
    return result


@ieee
def backward(q, k, v, d_o, o, *, softmax_scale, causal, mode, centre="k", delta=None):
    """`o` as BF16 bits, for stale and consistent; `delta` replaces the mode's own."""
    ops = operands(q, k, v, centre)
    x = softmax(ops, softmax_scale, causal)
    d_hat = dequantised(d_o, Q_ROWS)
    onepass = mode == "onepass"
    p = _divide(x.p_hat, x.total_hat) if onepass else _divide(x.p, x.total)
    dp = d_hat @ ops.v.T
    if delta is None:
        if mode == "stale":
            delta = (d_o.astype(np.float64) * from_bf16(o)).sum(axis=1)
        elif mode == "consistent":
            delta = (d_hat * from_bf16(o)).sum(axis=1)
        elif onepass:
            delta = (d_hat * _divide(x.p_hat @ ops.v, x.total_hat)).sum(axis=1)
        else:
            delta = (p * dp).sum(axis=1)
    ds = p * (dp - delta[:, None])
    ds_hat = cast_tiles(ds)
    scale = np.float64(F32(softmax_scale))
    dv = _divide(x.p_hat, x.total).T @ d_hat
    return Backward(ds_hat @ ops.k * scale, ds_hat.T @ ops.q * scale, dv, delta)
