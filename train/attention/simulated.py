"""FP8 attention in Torch operations, on any device: paper numerics where the library has none, and ablations.

What is computed is docs/numerics.md without the tensor core: operands are rounded to codes as there, products and sums
are FP32. ``paper`` is the CPU twin's paper numerics, ablations included, up to the order of FP32 sums. ``hopper`` keeps
what decides its errors (the codes, O's division by the rounded sum, the weight on dO, the centring) and leaves out the
13-bit accumulator (and so what onepass makes up for it), the limit of the column bias and the exponents that rise over
an interval: P keeps the forward's codes in the backward, and dS has its own power of two in each tile.

Every N x N matrix of a call exists in memory, so this is for short sequences. No operation waits for the device, and
all are deterministic (on CUDA with CUBLAS_WORKSPACE_CONFIG set, as Torch asks).

Shapes below: H batch x KV heads, G query heads of a KV head, N queries and K keys, both padded to whole blocks with
rows that see nothing and keys that nothing sees, C channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .codes import TILE, cast, from_heads, inverse, next_power, quantise, quantise_tiles, rounded, to_heads

__all__ = ["Recipe", "attention", "residual"]

MODES = ("stale", "consistent", "matched", "onepass", "per_tensor", "bf16_dp")
ABLATIONS = ("per_tensor", "bf16_dp")
QUERY_ROWS = 128  # rows of S's Q that share a scale, in paper numerics of dO too
FLUSH_ROWS = 1024  # hopper: rows of dO and of dK's Q that share a scale
MEAN_SPAN = 8192  # hopper: queries to 128 rows of Q's mean
LOG2_E = math.log2(math.e)
LARGEST_REFERENCE = 2.0**24  # log2 units; beyond it FP32 cannot subtract the row's maximum, and the row is NaN
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Recipe:
    """What is computed. Errors: ValueError for a name or a combination that is not offered.

    ``per_tensor`` (one scale for each of Q, K, V, dO, O and dS, delta from FP8 dO and FP8 O, K never centred) and
    ``bf16_dp`` (dP from unrounded dO and V) are ablations of paper numerics. ``unrounded`` divides O by the sum of
    unrounded P whatever the numerics, and changes nothing else.
    """

    mode: str  # stale | consistent | matched | onepass | per_tensor | bf16_dp
    numerics: str = "paper"  # paper | hopper
    centre: str = "k"  # none | k | qk: what is subtracted before S is quantised
    normaliser: str = "default"  # default | unrounded: what divides O

    def __post_init__(self) -> None:
        choices = {
            "mode": MODES,
            "numerics": ("paper", "hopper"),
            "centre": ("none", "k", "qk"),
            "normaliser": ("default", "unrounded"),
        }
        for name, names in choices.items():
            value = getattr(self, name)
            if value not in names:
                raise ValueError(f"{name}: expected one of {', '.join(names)}, got {value!r}")
        if self.numerics == "hopper" and self.mode in ABLATIONS:
            raise ValueError(f"mode: {self.mode} is offered in paper numerics only, got hopper")
        if self.numerics == "paper" and self.centre == "qk":
            raise ValueError("centre: paper numerics centres none or k, got qk (use hopper numerics)")


class _Call(NamedTuple):
    """What a call is beside its tensors. Sizes are those of the arguments, before padding."""

    recipe: Recipe
    causal: bool
    scale: float
    kv_heads: int
    queries: int
    keys: int

    @property
    def onepass(self) -> bool:
        return self.recipe.mode == "onepass"

    @property
    def hopper(self) -> bool:
        return self.recipe.numerics == "hopper"

    @property
    def mean_rows(self) -> int:
        """Rows of a block of Q's mean; queries are padded to a multiple of it."""
        return QUERY_ROWS * max(1, -(-self.queries // MEAN_SPAN))

    def block(self, rows: int) -> int | None:
        """Rows that share a scale where blocks have ``rows``; None: the whole tensor."""
        return None if self.recipe.mode == "per_tensor" else rows


class _State(NamedTuple):
    """What the backward reads, FP32; codes are held dequantised."""

    q: Tensor  # [H, G N, C] what dK multiplies dS by
    k: Tensor  # [H, K, C] codes of (centred) K
    v: Tensor  # [H, K, C] what dP multiplies dO by
    p: Tensor  # [H, G, N, K] 2^(x - reference of the row), x the score in log2 units
    p_hat: Tensor  # [H, G, N, K] the same as its codes hold it
    total: Tensor  # [H, G, N, 1] sum of p
    total_hat: Tensor  # [H, G, N, 1] sum of p_hat
    o: Tensor  # [H, G, N, C] O as delta reads it


def _hidden(call: _Call, queries: int, keys: int, device: torch.device) -> Tensor:
    """[N, K] of padded sizes: must the query not see the key? Causal is aligned bottom-right."""
    size, pad = (call.queries, call.keys), (0, keys - call.keys, 0, queries - call.queries)
    if call.causal:
        hidden = torch.ones(size, dtype=torch.bool, device=device).triu(1 + call.keys - call.queries)
    else:
        hidden = torch.zeros(size, dtype=torch.bool, device=device)
    return F.pad(hidden, pad, value=True) if any(pad) else hidden


def _centred_queries(call: _Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q [H, G, N, C] less the BF16 mean of its block of rows, and the scores that takes away, [H, G, blocks, 1, K].

    k: centred and unrounded, [H, K, C].
    """
    blocks = q.unflatten(-2, (-1, call.mean_rows))
    first = torch.arange(blocks.shape[2], device=q.device)[:, None] * call.mean_rows
    rows = (call.queries - first).clamp(1, call.mean_rows)  # [blocks, 1] that are not padding
    mean = (blocks.sum(-2) / rows).bfloat16().float()
    centred = (blocks - mean.unsqueeze(-2)).flatten(-3, -2)
    centred[..., call.queries :, :] = 0.0  # padding must not reach a scale
    return centred, (mean @ k.unsqueeze(1).mT).unsqueeze(-2)


def _scores(call: _Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [H, G, N, K] in log2 units, masked; Q as dK reads it [H, G N, C]; K's codes [H, K, C]."""
    recipe = call.recipe
    if recipe.centre != "none" and recipe.mode != "per_tensor":
        k = k - k.sum(-2, keepdim=True) / max(1, call.keys)
        k[..., call.keys :, :] = 0.0
    k_hat = quantise(k, call.block(TILE))
    for_s, bias = _centred_queries(call, q, k) if recipe.centre == "qk" else (q, None)
    q_hat = quantise(for_s, call.block(QUERY_ROWS)).flatten(1, 2)
    factor = call.scale * LOG2_E
    scores = ((q_hat * factor) @ k_hat.mT).unflatten(1, q.shape[1:3])
    if bias is not None:
        scores = (scores.unflatten(-2, (-1, call.mean_rows)) + factor * bias).flatten(-3, -2)
    hidden = _hidden(call, q.shape[2], k.shape[1], q.device)
    plain = quantise(q, FLUSH_ROWS).flatten(1, 2) if call.hopper else q_hat
    return scores.masked_fill_(hidden, -math.inf), plain, k_hat


def _probabilities(call: _Call, scores: Tensor) -> tuple[Tensor, Tensor]:
    """p and p_hat of _State."""
    groups = scores.unflatten(-1, (-1, TILE))
    largest = groups.amax(-1, keepdim=True)
    if call.hopper:
        largest = largest.ceil()  # references are powers of two
    reference = largest.amax(-2, keepdim=True)
    reference = torch.where(reference == -math.inf, 0.0, reference)  # a row without keys: p = exp2(-inf)
    reference = torch.where(reference.abs() > LARGEST_REFERENCE, math.nan, reference)
    p = torch.exp2(groups - reference)
    if call.hopper:
        unit = torch.exp2((largest - reference).clamp_min(-118.0) - 8.0)  # codes hold 2^8 at a group's reference
        p_hat = cast(p / unit) * unit
    elif call.recipe.mode == "per_tensor":
        p_hat = cast(p * 256.0) / 256.0  # one reference for the row
    else:
        p_hat = rounded(p, p.amax(-1, keepdim=True))
    return p.flatten(-2), p_hat.flatten(-2)


def _forward(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, _State]:
    """O [H, G, N, C] in FP32, to be rounded to BF16, and the state. q [B, N, Hq, C], k and v [B, K, Hk, C]."""
    mode = call.recipe.mode
    q, k, v = (to_heads(x, call.kv_heads, unit) for x, unit in ((q, call.mean_rows), (k, TILE), (v, TILE)))
    k, v = k.squeeze(1), v.squeeze(1)
    scores, for_dk, k_hat = _scores(call, q, k)
    p, p_hat = _probabilities(call, scores)
    total, total_hat = p.sum(-1, keepdim=True), p_hat.sum(-1, keepdim=True)
    v_hat = quantise(v, call.block(TILE), powers=call.hopper)
    rounded_sum = (call.hopper or call.onepass) and call.recipe.normaliser == "default"
    o = (p_hat.flatten(1, 2) @ v_hat).unflatten(1, q.shape[1:3]) * inverse(total_hat if rounded_sum else total)
    stored = o.bfloat16().float()
    if mode == "per_tensor":
        o = stored = quantise(o, None)
    elif mode == "onepass":  # hopper keeps the remainder in BF16, paper numerics keeps O in FP32
        stored = stored + (o - stored).bfloat16().float() if call.hopper else o
    return o, _State(for_dk, k_hat, v if mode == "bf16_dp" else v_hat, p, p_hat, total, total_hat, stored)


class _Gradient(NamedTuple):
    ds: Tensor  # [H, G, N, K] before its cast
    p: Tensor  # [H, G, N, K] and
    d_o: Tensor  # [H, G, N, C]: what dV is the product of


def _gradient_of_scores(call: _Call, state: _State, d_o: Tensor) -> _Gradient:
    """dS of the mode from d_o [H, G, N, C]. In hopper numerics dO carries the row's weight w in [1, 2)."""
    mode = call.recipe.mode
    lam = state.total_hat if call.onepass else state.total
    if call.hopper:
        power = next_power(lam)
        weighted = torch.where(lam == 0, 0.0, power * inverse(lam) * d_o)
        for_dv = torch.where(lam == 0, 0.0, power * inverse(state.total_hat) * d_o)
        d_hat = quantise(weighted, FLUSH_ROWS)
        row = dv_row = 1.0 / power
        dv_hat = d_hat if call.onepass else quantise(for_dv, FLUSH_ROWS)
    else:
        weighted, row, dv_row = d_o, inverse(lam), inverse(state.total)
        d_hat = dv_hat = quantise(d_o, call.block(QUERY_ROWS))
    left = weighted if mode == "bf16_dp" else d_hat
    dp = (left.flatten(1, 2) @ state.v.mT).unflatten(1, d_o.shape[1:3])
    probability = (state.p_hat if call.onepass else state.p) * row
    if mode == "matched":
        delta = (state.p * dp).sum(-1, keepdim=True) * inverse(state.total)
    else:
        factor = weighted if mode in ("stale", "bf16_dp") else d_hat
        delta = (factor * state.o).sum(-1, keepdim=True)
    return _Gradient(probability * (dp - delta), state.p_hat * dv_row, dv_hat)


def _cast_ds(call: _Call, ds: Tensor) -> Tensor:
    return quantise(ds, None) if call.recipe.mode == "per_tensor" else quantise_tiles(ds, call.hopper)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # its BF16 products would pass for FP32 ones
            o, state = _forward(call, q, k, v)
        ctx.save_for_backward(q, k, v, *state)
        ctx.call = call
        return from_heads(o, q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        q, k, v, *rest = ctx.saved_tensors
        call, state = ctx.call, _State(*rest)
        dq = dk = dv = None
        with torch.autocast(d_o.device.type, enabled=False):
            gradient = _gradient_of_scores(call, state, to_heads(d_o, call.kv_heads, call.mean_rows))
            ds = _cast_ds(call, gradient.ds)
            if ctx.needs_input_grad[0]:
                dq = from_heads((ds.flatten(1, 2) @ state.k).unflatten(1, ds.shape[1:3]) * call.scale, q)
            if ctx.needs_input_grad[1]:
                dk = from_heads((ds.flatten(1, 2).mT @ state.q).unsqueeze(1) * call.scale, k)
            if ctx.needs_input_grad[2]:
                dv = from_heads((gradient.p.flatten(1, 2).mT @ gradient.d_o.flatten(1, 2)).unsqueeze(1), v)
        return dq, dk, dv, None


def _check_tensors(tensors: dict[str, Tensor], q: Tensor) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: expected BF16, FP16, FP32 or FP64, got {x.dtype}")
        if x.dim() != 4 or x.shape[0] < 1 or x.shape[2] < 1 or x.shape[3] < 1:
            raise ValueError(f"{name}: expected [batch, length, heads, head_dim], got shape {list(x.shape)}")
        if x.device != q.device:
            raise RuntimeError(f"{name} is on {x.device}, q on {q.device}: expected one device")


def _call(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, causal: bool, softmax_scale: float | None) -> _Call:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: expected a Recipe, got {type(recipe).__name__}")
    _check_tensors({"q": q, "k": k, "v": v}, q)
    batch, queries, q_heads, head_dim = q.shape
    if v.shape != k.shape:
        raise ValueError(f"v: expected k's shape {list(k.shape)}, got {list(v.shape)}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"k: expected batch {batch} and head_dim {head_dim} as in q, got shape {list(k.shape)}")
    if q_heads % k.shape[2]:
        raise ValueError(f"q has {q_heads} heads, k and v have {k.shape[2]}: expected a multiple of k's heads in q")
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    if not 0.0 < scale < math.inf:
        raise ValueError(f"softmax_scale: expected a finite value above 0, got {softmax_scale}")
    if q.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        raise RuntimeError("torch.backends.cuda.matmul.allow_tf32: expected False (products here are FP32), got True")
    return _Call(recipe, bool(causal), scale, k.shape[2], queries, k.shape[1])


def attention(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, *, causal: bool = True, softmax_scale: float | None = None
) -> Tensor:
    """FP8 attention. q [B, N, Hq, D], k and v [B, Nk, Hk, D], Hq a multiple of Hk; returns o like q.

    Inputs and the incoming gradient are rounded to BF16 first, o and the gradients last; the dtypes are those of the
    arguments. A row without keys is zero, and so is its gradient. NaN or infinity in a block of an operand makes NaN of
    everything the block has a product with, of that head alone (in per_tensor, of all heads).
    ``softmax_scale``: None is 1 / sqrt(D).

    Errors: TypeError for what is no floating tensor or Recipe, ValueError for shapes and the scale, RuntimeError for
    tensors on several devices, TF32 products and a second derivative.
    """
    out: Tensor = _Attention.apply(q, k, v, _call(q, k, v, recipe, causal, softmax_scale))
    return out


@torch.no_grad()
def residual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    recipe: Recipe,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    after_cast: bool = False,
) -> Tensor:
    """Row sums of dS over the rows' sums of magnitudes, FP64 [B, N, Hq]: zero in exact arithmetic.

    ``d_o``: gradient of o, in its shape. ``after_cast``: of dS as its codes hold it. NaN for a row whose dS is
    all zero, as the first one's is in exact arithmetic if causal. Errors: those of `attention`.
    """
    call = _call(q, k, v, recipe, causal, softmax_scale)
    _check_tensors({"d_o": d_o}, q)
    if d_o.shape != q.shape:
        raise ValueError(f"d_o: expected q's shape {list(q.shape)}, got {list(d_o.shape)}")
    with torch.autocast(q.device.type, enabled=False):
        _, state = _forward(call, q, k, v)
        ds = _gradient_of_scores(call, state, to_heads(d_o, call.kv_heads, call.mean_rows)).ds
        ds = (_cast_ds(call, ds) if after_cast else ds).double()
    rows = (ds.sum(-1) / ds.abs().sum(-1))[:, :, : call.queries]
    return rows.reshape(q.shape[0], q.shape[2], call.queries).transpose(1, 2)
