"""Attention in float64 with Torch autograd, written independently of the library, and helpers that the tests share."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MODES = ("matched", "onepass", "consistent", "stale")

# E4M3 has three fraction bits: rounding to nearest is off by at most 2^-4 of the value (in the normal range).
E4M3 = 2.0**-4


def tolerance(roundings: int) -> float:
    """Relative Frobenius error that ``roundings`` independent roundings to E4M3 can cause.

    Each is at most 2^-4 of its operand; independent ones add in quadrature. It is a bound for inputs without outliers
    and without saturated rows, about twice what is seen: the root mean square of one rounding is nearer 2.6 % than 6.3.
    - O: q, k (in S), P, v: 4.
    - dV: q, k (in S), P, dO: 4.
    - dQ: q, k (in S), dO, v (in dP), P and v once more in delta, dS, and k: 8; dK the same with q.
    """
    return math.sqrt(roundings) * E4M3


TOLERANCE = {"o": tolerance(4), "dq": tolerance(8), "dk": tolerance(8), "dv": tolerance(4)}


def bf16(*shape: int, scale: float = 1.0, grad: bool = False) -> Tensor:
    """Normal values, rounded to BF16."""
    return (torch.randn(*shape) * scale).to(torch.bfloat16).requires_grad_(grad)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def inputs(
    batch: int = 2,
    q_len: int = 70,
    k_len: int | None = None,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    grad: bool = True,
) -> Inputs:
    k_len = q_len if k_len is None else k_len
    return Inputs(
        bf16(batch, q_len, q_heads, head_dim, grad=grad),
        bf16(batch, k_len, kv_heads, head_dim, grad=grad),
        bf16(batch, k_len, kv_heads, head_dim, grad=grad),
    )


def clone(tensors: Inputs) -> Inputs:
    """The same values as new leaves."""
    return Inputs(*(x.detach().clone().requires_grad_() for x in tensors))


def attention64(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """O ``[B, N, H, D]`` and lse ``[B, H, N]`` in float64, differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    q_len, k_len, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    if causal:
        i, j = torch.arange(q_len)[:, None], torch.arange(k_len)[None, :]
        seen = j <= i + k_len - q_len
    if k_len == 0:
        return q * 0.0, torch.full(s.shape[:3], -torch.inf, dtype=torch.float64)
    s = s.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def gradients64(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """O, lse, dQ, dK, dV in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = attention64(*leaves, causal, scale)
    grads = torch.autograd.grad(o, leaves, d_o.double(), allow_unused=True, materialize_grads=True)
    return o.detach(), lse.detach(), *grads


def error(value: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error; 0 where both are empty or zero."""
    exact = exact.double()
    norm = exact.norm().item()
    distance = (value.double() - exact).norm().item()
    return distance / norm if norm else (0.0 if distance == 0.0 else math.inf)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits (NaN equals itself, -0 does not equal 0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(width), b.contiguous().view(width))
