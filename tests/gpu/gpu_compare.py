"""Distances between results, and attention in FP64 on the tests' device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from gpu_calls import DEVICE, Case, Gradients, Inputs, Result, Saved
from gpu_record import Judge
from torch import Tensor

#: GPU against twin, relative Frobenius (docs/numerics.md, section 7), and what dQ and dK, whose terms went through two
#: casts, may take of it.
LIMIT = 2e-3
TWO_CASTS = dict(dq=math.sqrt(2), dk=math.sqrt(2))
#: Pairs of a query and a key from which LIMIT holds as it is. The grade allows one code in a thousand to fall on the
#: other side of its rounding, which is 2e-3 of a large sum; few terms feel a single such code more: 1 / sqrt of their
#: number.
PAIRS = 600**2
#: Where the outputs hang on differences of nearly equal numbers (saturated heads: dP - delta), a flipped code or a BF16
#: of O that rounds the other way is a share of an error that is large itself: GPU and twin may then differ by this
#: share of the twin's distance from FP64.
ILL_CONDITIONED = 0.5
#: How far the GPU's error against FP64 may be from the twin's.
ERROR_SHARE = 0.02
OUTPUTS = ("o", "lse", "delta", "dq", "dk", "dv")


def bits(x: Tensor) -> Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(width)


def mismatches(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ; every NaN equals every other."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    b = b.to(a.device)
    differ = bits(a) != bits(b)
    if a.is_floating_point():
        differ &= ~(a.isnan() & b.isnan())
    return int(differ.sum())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return mismatches(a, b) == 0


#: Rows of a head that its own distance leaves out, where it has many. A code of P or dS that lies between two E4M3
#: numbers may fall on either side (one in a million does, docs/numerics.md, section 6); it moves one row by a twentieth
#: of one of its terms, which in a short head is more than the limit. A fault of the kernels moves more than two rows.
FLIPPED_ROWS = 2


def by_head(x: Tensor, row_vector: bool = False) -> Tensor:
    """[heads, rows, channels] in FP64 (one channel for row vectors); heads are the last dimension but one of both."""
    x = x.to(DEVICE).double().movedim(-2, 0)
    return x.flatten(1)[..., None] if row_vector else x.flatten(1, -2)


class Distance(NamedTuple):
    whole: float
    worst_head: float  # FLIPPED_ROWS left out


def _ratio(difference: Tensor, size: Tensor) -> Tensor:
    """difference / size, 0 where both are 0."""
    return torch.where(difference == 0, 0.0, difference / size)


def distance(a: Tensor, b: Tensor, floor: Tensor | None = None, row_vector: bool = False) -> Distance:
    """Relative Frobenius distance of ``a`` from ``b``, over all and by head.

    Args:
        floor: [heads], sizes below which a head counts as round-off: its distance is taken relative to this instead.
    """
    a, b = by_head(a, row_vector), by_head(b, row_vector)
    rows, size = (a - b).norm(dim=2), b.flatten(1).norm(dim=1)
    if floor is not None:
        size = torch.maximum(size, floor)
    whole = _ratio(rows.norm(), size.norm())
    if rows.shape[1] >= 16 * FLIPPED_ROWS:
        rows = rows.sort(dim=1).values[:, :-FLIPPED_ROWS]
    return Distance(float(whole), float(_ratio(rows.norm(dim=1), size).max()))


#: Share of the largest size that an output could have, below which it is round-off.
_ROUND_OFF = 1e-3


def _spread(x: Tensor, heads: int) -> Tensor:
    """Root mean square over the rows of the rows' norms, by query head."""
    rows = by_head(x)
    mean = rows.square().sum(dim=(1, 2)) / max(rows.shape[1], 1)
    return mean.sqrt().repeat_interleave(heads // x.shape[-2])


def floors(case: Case, x: Inputs) -> dict[str, Tensor]:
    """Sizes below which outputs are round-off: with one key, say, dS is zero but for it.

    |dS_ij| <= P_ij |dO_i| |v_j - O_i|, so dQ is at most scale |dO| max|v - O| max|k| by row, and so on; a thousandth of
    that, with typical sizes in place of the largest, is far below the outputs of any row that has several keys.
    """
    x = Inputs(*(t.nan_to_num(0.0) for t in x))
    heads, group = case.q_heads, case.q_heads // case.kv_heads
    d_o, v, k, q = (_spread(t, heads) for t in (x.d_o, x.v, x.k, x.q))
    rows = math.sqrt(case.batch * case.q_len if not case.varlen else case.q_len)
    of_delta = rows * d_o * v * _ROUND_OFF
    of_dk = (of_delta * q * case.scale).view(case.kv_heads, group).norm(dim=1)
    lse = torch.full((heads,), 0.05 * rows, dtype=torch.float64, device=DEVICE)
    return dict(delta=of_delta, dq=of_delta * k * case.scale, dk=of_dk, lse=lse)


def _pairs(case: Case) -> float:
    """Pairs of a query and a key, about."""
    q_lengths = case.q_lengths if case.varlen else (case.q_len,) * case.batch
    k_lengths = case.k_lengths if case.varlen else (case.k_len,) * case.batch
    pairs = 0.0
    for n, m in zip(q_lengths, k_lengths, strict=True):
        seeing = min(n, m)  # causal: the last queries see all keys but a triangle
        pairs += seeing * (m - seeing / 2) if case.causal else n * m
    return case.q_heads * pairs


def _flips(pairs: float) -> float:
    return math.sqrt(max(1.0, PAIRS / max(pairs, 1.0)))


def compare(
    judge: Judge, case: Case, x: Inputs, gpu: Result, twin: Result, limit: float = LIMIT, label: str = ""
) -> None:
    """GPU against twin: every output, over all and by head. Rows of NaN or infinity must be the same ones."""
    floor = floors(case, x)
    mine, theirs = gpu.tensors(), twin.tensors()
    truth: Exact | None = None
    for name in OUTPUTS:
        if name not in mine:
            continue
        a, b = mine[name].to(DEVICE), theirs[name].to(DEVICE)
        usual = b.isfinite()
        special = int((usual != a.isfinite()).sum()) + mismatches(a[~usual], b[~usual])
        judge.true(f"{label}{name}: {special} values are NaN or infinite on one side alone", special == 0, case)
        vector = name in ("lse", "delta")
        a, b = (torch.where(usual & a.isfinite(), t, 0) for t in (a, b))
        whole, head = distance(a, b, floor.get(name), row_vector=vector)
        sequences = len(case.q_lengths) if case.varlen else 1  # many short ones: few terms weigh most
        base = limit * TWO_CASTS.get(name, 1.0)
        limits = [base * _flips(_pairs(case) / n) for n in (sequences, sequences * case.q_heads)]
        if (whole > limits[0] or head > limits[1]) and not case.varlen:
            truth = truth or exact(case, x)
            own = distance(b, torch.where(usual, getattr(truth, name), 0), floor.get(name), row_vector=vector)
            limits = [max(limits[0], ILL_CONDITIONED * own.whole), max(limits[1], ILL_CONDITIONED * own.worst_head)]
        judge.at_most(f"{label}{name}", whole, limits[0], case)
        judge.at_most(f"{label}{name} of the worst head", head, limits[1], case)


def compare_errors(judge: Judge, case: Case, gpu: Result, twin: Result, truth: Exact) -> None:
    """The GPU's errors against FP64 beside the twin's."""
    for name in ("o", "dq", "dk", "dv"):
        ours, theirs = (distance(result.tensors()[name], getattr(truth, name)).whole for result in (gpu, twin))
        detail = f"{ours:.5f} and {theirs:.5f}"
        judge.at_most(f"error of {name} beside the twin's", abs(ours / theirs - 1), ERROR_SHARE, case, detail=detail)


# --- FP64 ------------------------------------------------------------------------------------------------------------


class Exact(NamedTuple):
    """Attention in FP64, in the layouts of the inputs."""

    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor


def _head64(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, case: Case) -> tuple[Tensor, ...]:
    """One head, [rows, head_dim], in blocks of queries."""
    queries, keys = q.shape[0], k.shape[0]
    o, dq, dk, dv = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    lse, delta = (q.new_full((queries,), fill) for fill in (-torch.inf, 0.0))
    if keys == 0:
        return o, lse, dq, dk, dv, delta
    step = max(64, (1 << 26) // keys)
    j = torch.arange(keys, device=q.device)[None, :]
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        s = (q[rows] @ k.T) * case.scale
        if case.causal:
            i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            s.masked_fill_(j > i + keys - queries, -torch.inf)
        lse[rows] = torch.logsumexp(s, dim=1)
        p = torch.exp(s - lse[rows].clamp(min=-1e300)[:, None])
        o[rows] = p @ v
        dp = d_o[rows] @ v.T
        delta[rows] = (p * dp).sum(dim=1)
        ds = p * (dp - delta[rows][:, None])
        dq[rows] = ds @ k * case.scale
        dk += ds.T @ q[rows] * case.scale
        dv += p.T @ d_o[rows]
    return o, lse, dq, dk, dv, delta


def exact(case: Case, x: Inputs) -> Exact:
    """Attention of the BF16 inputs in FP64 on the tests' device; equal lengths alone."""
    assert not case.varlen
    q, k, v, d_o = (t.to(DEVICE).double() for t in x)
    out = Exact(
        torch.zeros_like(q),
        q.new_zeros(case.row_vector),
        torch.zeros_like(q),
        torch.zeros_like(k),
        torch.zeros_like(v),
        q.new_zeros(case.row_vector),
    )
    group = case.q_heads // case.kv_heads
    for b in range(case.batch):
        for h in range(case.q_heads):
            g = h // group
            one = _head64(q[b, :, h], k[b, :, g], v[b, :, g], d_o[b, :, h], case)
            o, lse, dq, dk, dv, delta = one
            out.o[b, :, h], out.lse[b, h], out.dq[b, :, h], out.delta[b, h] = o, lse, dq, delta
            out.dk[b, :, g] += dk
            out.dv[b, :, g] += dv
    return out


def median_row_error(x: Tensor, truth: Tensor) -> float:
    """Median over rows (keys, say) of the rows' relative errors; x and truth [..., head_dim]."""
    x, truth = (t.to(DEVICE).double().flatten(0, -2) for t in (x, truth))
    size = truth.norm(dim=1)
    return float(((x - truth).norm(dim=1)[size > 0] / size[size > 0]).median())


def together(parts: list[Result], dim: int) -> Result:
    """Results of parts of a call, joined along a dimension of the tensors: 0 for the batch."""
    saved = Saved(*(None if t[0] is None else torch.cat(t, dim) for t in zip(*(p.saved for p in parts), strict=True)))
    gradients = (torch.cat(t, dim) for t in zip(*(p.gradients for p in parts), strict=True))
    return Result(saved, Gradients(*gradients))
