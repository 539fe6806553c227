"""Inputs that reach the corners of docs/numerics.md: q, k, v, d_o as BF16 values held in FP32, [rows, head_dim]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arithmetic import from_bf16, to_bf16


class Case(NamedTuple):
    kind: str
    queries: int
    keys: int
    head_dim: int = 64
    causal: bool = True
    centre: str = "qk"
    softmax_scale: float | None = None

    @property
    def scale(self):
        return np.float32(self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale)


def _sink(q, k, v, d_o, draw):
    """Key 0 holds most of every row, with a logit of 10."""
    q[:, 0], k[:, 0], k[0] = 4, 0, 0
    k[0, 0] = 10 * np.sqrt(q.shape[1]) / 4


def _zeros(q, k, v, d_o, draw):
    """A block of zeros in each operand."""
    q[:128], k[64:128], v[:64], d_o[128:] = 0, 0, 0, 0


def _powers(q, k, v, d_o, draw):
    """Every value is 448 times a power of two, so scales are powers of two and nothing is rounded."""
    for x in (q, k, v, d_o):
        x[:] = 7 * 2.0 ** draw.integers(-6, 3, x.shape) * np.sign(x)


def _constant(q, k, v, d_o, draw):
    """q is constant inside its first block: q - mean is zero there, and the bias alone carries S."""
    q[:128] = 3 * q[:1]


def _means(q, k, v, d_o, draw):
    """Large means and little else: the guard raises q_scale."""
    q *= 0.01
    q += 30 * draw.standard_normal((1, q.shape[1]))
    k *= 5


def _loud(q, k, v, d_o, draw):
    """Causal rows that see no key have a huge gradient, which must not touch their block's scale."""
    d_o[: max(0, len(q) - len(k))] *= 2.0**40


def _edge(size):
    """A mean of such a size that the guard's decision hangs on its last slot; it shows in the small values of q."""

    def change(q, k, v, d_o, draw):
        q *= 2.0 ** draw.uniform(-16, 0, q.shape)
        q += size * draw.standard_normal((1, q.shape[1]))

    return change


def _outliers(q, k, v, d_o, draw):
    v[:, :2] *= 8
    d_o *= np.exp(draw.standard_normal((d_o.shape[0], 1)))


def _turning(logit):
    """Rows turn from one half of each 32 keys to the other, and their gradients grow: exponents of P and dS rise within
    an interval of queries; where they have risen, other rows are left far below."""

    def change(q, k, v, d_o, draw):
        width = np.sqrt(q.shape[1])
        turn = np.linspace(-1, 1, max(len(q), 1))
        q[:, 0] = turn * logit
        k[:, 0] = width * np.where(np.arange(len(k)) % 32 < 16, 1, -1)
        d_o *= 2.0 ** (5 * turn)[:, None]

    return change


def _scaled(**exponents):
    """Operands multiplied by powers of two."""

    def change(q, k, v, d_o, draw):
        for name, x in (("q", q), ("k", k), ("v", v), ("d_o", d_o)):
            x *= 2.0 ** exponents.get(name, 0)

    return change


CHANGES = {
    "gaussian": _scaled(),
    "spread 4": _scaled(q=2),
    "logits beyond 5e4": _scaled(q=8, k=6),
    "sink": _sink,
    "zero blocks": _zeros,
    "all zero": lambda q, k, v, d_o, draw: [x.fill(0) for x in (q, k, v, d_o)],
    "448 and powers of two": _powers,
    "constant q": _constant,
    "large means": _means,
    "bias just fits": _edge(2.5),  # 11 slots would not hold it (120 queries, 150 keys, first seed)
    "bias just does not": _edge(5.5),  # 13 would
    "equal keys": lambda q, k, v, d_o, draw: k.__setitem__(slice(None), k[:1]),
    "outliers": _outliers,
    "loud rows without keys": _loud,
    "turning": _turning(6),
    "turning far": _turning(60),
    "q and k huge": _scaled(q=60, k=60),
    "q huge, k tiny": _scaled(q=60, k=-60),
    "v and d_o huge": _scaled(v=60, d_o=60),
    "d_o tiny": _scaled(d_o=-60),
    "v and d_o tiny": _scaled(v=-60, d_o=-60),
    "all tiny": _scaled(q=-60, k=-60, v=-60, d_o=-60),
    "subnormal": _scaled(q=-126, k=-126, v=-126, d_o=-126),
}


def make(case, seed=0):
    draw = np.random.default_rng(seed)
    lengths = (case.queries, case.keys, case.keys, case.queries)
    tensors = [draw.standard_normal((rows, case.head_dim)) for rows in lengths]
    CHANGES[case.kind](*tensors, draw)
    return [round_to_bf16(x) for x in tensors]


def round_to_bf16(x):
    return from_bf16(to_bf16(np.asarray(x, np.float32)))


def bits(x):
    """uint16 [rows, 1, head_dim]: one head as the library takes it."""
    return np.ascontiguousarray(to_bf16(x))[:, None, :]
