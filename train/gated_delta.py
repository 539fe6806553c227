"""Gated DeltaNet, the linear-time layer of hybrid models: an attention layer every fourth, this one in between.

A head carries a state S [head_dim (keys), head_dim (values)], and for each token, with a decay exp(g) in (0, 1] and a
step beta in (0, 1):

    S <- exp(g) S;    u = beta (v - S^T k);    S <- S + k u^T;    o = S^T q / sqrt(head_dim)

Three forms of it: :func:`recurrent` (token by token, the definition), :func:`chunked` (64 tokens at a time, equal to it
up to FP32 round-off, in matrix products), and the kernels of flash-linear-attention, which is what CUDA uses.

**Triton and Hopper.** flash-linear-attention 0.6.0 refuses its own backward there with Triton from 3.4.0 up to, but not
including, 3.7.1 (fla/ops/common/chunk_o.py, chunk_bwd_dqkwg): Triton miscompiles the product with a transposed
64-by-64 tile, and the gradients of beta and g come out wrong (its issue 640; the forward pass is right). The refusal
looks at versions alone, whatever head_dim is, and its ways out are a newer Triton or the TileLang package; there is no
option for heads of 128. So on those versions the layer runs :func:`chunked` instead, says so in one warning, and never
asks Triton for that backward, also where an older flash-linear-attention would not refuse.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GatedDeltaNet", "chunked", "pick_backend", "recurrent"]

BACKENDS = ("auto", "fla", "torch")
CHUNK = 64
CONVOLUTION = 4  # taps of the short causal convolution

_MISSING = "Gated DeltaNet layers on CUDA need flash-linear-attention ({}): pip install 'delta-matching[train]'"
_REFUSED = (
    "Gated DeltaNet: Triton {} computes wrong gradients on this GPU (from 3.4.0 up to 3.7.1 on Hopper, "
    "flash-linear-attention's issue 640); {}"
)


# --- The recurrence --------------------------------------------------------------------------------------------------


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    if q.ndim != 4:
        raise ValueError(f"q: expected [batch, length, heads, head_dim], got {list(q.shape)}")
    rows = q.shape[:3]
    for name, tensor, shape in (("k", k, q.shape), ("v", v, q.shape), ("g", g, rows), ("beta", beta, rows)):
        if tensor.shape != shape:
            raise ValueError(f"{name}: expected {list(shape)}, as q says, got {list(tensor.shape)}")


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence token by token in FP32 (FP64 for FP64): the reference, slow, differentiable, on any device.

    Args:
        q, k, v: ``[batch, length, heads, head_dim]``, any floating dtype; q and k of norm 1 (the caller's business).
        g: ``[batch, length, heads]``, the logarithm of the decay, at most 0.
        beta: ``[batch, length, heads]``, the step, in (0, 1).

    Returns: o ``[batch, length, heads, head_dim]``, FP32 (FP64).
    Raises: ValueError for shapes that do not fit.
    """
    _check(q, k, v, g, beta)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
        batch, length, heads, head_dim = q.shape
        scale, decay = head_dim**-0.5, g.exp()
        state = q.new_zeros(batch, heads, head_dim, head_dim)
        rows = []
        for t in range(length):
            state = state * decay[:, t, :, None, None]
            seen = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            update = beta[:, t, :, None] * (v[:, t] - seen)
            state = state + k[:, t, :, :, None] * update[:, :, None, :]
            rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * scale))
    return torch.stack(rows, dim=1) if rows else torch.zeros_like(q)


def _chunks(x: Tensor, count: int) -> Tensor:
    """``[batch, heads, count, CHUNK, ...]`` of ``[batch, length, heads, ...]``; what is missing at the end is zero."""
    missing = count * CHUNK - x.shape[1]
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)).transpose(1, 2)
    return x.unflatten(2, (count, CHUNK))


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """What :func:`recurrent` computes, 64 tokens at a time; same arguments, result and errors.

    Within a chunk, with G the running sum of g and S the state before it, the updates u solve a triangular system

        (1 + A) U = beta (V - exp(G) K S),    A_ij = beta_i exp(G_i - G_j) k_i.k_j for j < i

    so all chunks are prepared at once, and only two products per chunk wait for the chunk before. Padding is tokens
    with k = 0 and beta = 0, which leave the state alone. Every exponent is at most 0: nothing overflows.
    """
    _check(q, k, v, g, beta)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    length, head_dim = q.shape[1], q.shape[3]
    count = -(-length // CHUNK)
    if count == 0 or q.numel() == 0:
        return torch.zeros_like(q, dtype=dtype)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, g, beta = (_chunks(x.to(dtype), count) for x in (q, k, v, g, beta))
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
        total = (g[..., None, :] * lower).sum(-1)  # G; PyTorch does not promise cumsum's bits on a GPU
        # Masked before the exponential: above the diagonal exp would overflow, and 0 * inf is NaN in the gradient.
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
        step = beta[..., None]
        system = (step * (k @ k.mT) * decay).tril(-1)
        seen_by_k, seen_by_q = k * total.exp()[..., None], q * total.exp()[..., None]
        right = torch.cat((step * v, step * seen_by_k), dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        fresh, stale = solved.split(head_dim, dim=-1)  # U = fresh - stale S
        last = total[..., -1]
        keys = (k * (last[..., None] - total).exp()[..., None]).mT
        kept = last.exp()[..., None, None]
        state = q.new_zeros(*q.shape[:2], head_dim, head_dim)
        states, updates = [], []
        for i in range(count):
            update = fresh[:, :, i] - stale[:, :, i] @ state
            states.append(state)
            updates.append(update)
            state = kept[:, :, i] * state + keys[:, :, i] @ update
        o: Tensor = seen_by_q @ torch.stack(states, 2) + ((q @ k.mT) * decay) @ torch.stack(updates, 2)
    return (o * head_dim**-0.5).flatten(2, 3)[:, :, :length].transpose(1, 2)


# --- Which form runs -------------------------------------------------------------------------------------------------


def _release(version: str) -> tuple[int, ...]:
    """(3, 6, 0) of "3.6.0+git1234"; what is no number ends it."""
    numbers: list[int] = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def miscompiled(triton: str, capability: tuple[int, int]) -> bool:
    """Whether this version of Triton gets the gated backward wrong on a GPU of this compute capability."""
    return capability[0] == 9 and (3, 4) <= _release(triton) < (3, 7, 1)


@functools.cache
def _tilelang() -> bool:
    """Whether flash-linear-attention hands that backward to TileLang, which computes it right: that takes the
    package, a usable nvcc, and neither FLA_TILELANG=0 nor FLA_DISABLE_BACKEND_DISPATCH=1 in the environment."""
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return False
    try:
        backends = importlib.import_module("fla.ops.common.backends.tilelang")
        return bool(backends.CommonTileLangBackend.can_use())
    except (ImportError, AttributeError):  # another version: not known to be right
        return False


@functools.cache
def _warn(line: str) -> None:
    warnings.warn(line, RuntimeWarning, stacklevel=3)


@functools.cache
def _fla() -> Any:
    """chunk_gated_delta_rule of flash-linear-attention."""
    try:
        return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError as error:
        raise RuntimeError(_MISSING.format(str(error).splitlines()[0])) from None


def pick_backend(device: torch.device, backend: str = "auto") -> str:
    """ "fla" or "torch": what computes the recurrence on a device.

    "auto" is "torch" on a CPU; on CUDA "fla", or "torch" with one warning where Triton miscompiles (see the module).

    Raises:
        ValueError: an unknown backend.
        RuntimeError: flash-linear-attention is missing (CUDA), or "fla" was asked for where it cannot be right.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch" or (backend == "auto" and device.type == "cpu"):
        return "torch"
    if device.type != "cuda":
        raise RuntimeError(f"backend: flash-linear-attention needs a CUDA device, got {device}; use 'torch'")
    _fla()
    triton = importlib.import_module("triton").__version__
    if not miscompiled(triton, torch.cuda.get_device_capability(device)) or _tilelang():
        return "fla"
    if backend == "fla":
        raise RuntimeError(_REFUSED.format(triton, "expected Triton 3.7.1 or newer, TileLang, or backend 'torch'"))
    _warn(_REFUSED.format(triton, "the slower form in Torch operations takes its place"))
    return "torch"


@torch.compiler.disable
def _recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, backend: str) -> Tensor:
    if pick_backend(q.device, backend) == "torch":
        return chunked(q, k, v, g, beta)
    # Its kernels are made for 16 bits; decays and steps stay FP32.
    o, _ = _fla()(q.bfloat16(), k.bfloat16(), v.bfloat16(), g.float(), beta.float(), scale=q.shape[-1] ** -0.5)
    return o


# --- The layer -------------------------------------------------------------------------------------------------------


class ShortConvolution(nn.Module):
    """A causal convolution over the last four tokens, channel by channel, then SiLU: ``[batch, length, channels]``.

    The weight is ``[channels, 1, 4]``, as in torch.nn.Conv1d: no matrix, so optimisers for matrices leave it alone. A
    sum of shifted products rather than a convolution of cuDNN: its gradient has the same bits in every run.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, CONVOLUTION))
        bound = CONVOLUTION**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        padded = F.pad(x, (0, 0, CONVOLUTION - 1, 0))
        taps = [padded[:, i : i + length] * self.weight[:, 0, i] for i in range(CONVOLUTION)]
        return F.silu(sum(taps[1:], taps[0]))


class GatedDeltaNet(nn.Module):
    """One layer, ``[batch, length, width]`` to the same; causal, and aware of positions through its decay.

    Parameters: q, k, v, gate, o (matrices of width by heads * head_dim), a, b (width by heads), three short
    convolutions, decay_log and decay_bias [heads] (g = -exp(decay_log) softplus(a x + decay_bias)), norm [head_dim].

    Args:
        width: channels of the model.
        heads, head_dim: of keys and values alike; head_dim at most 256 in the kernels of flash-linear-attention.
        norm_eps: of the RMSNorm of each head's output.
        backend: "auto", "fla" or "torch" (see :func:`pick_backend`).

    Raises: ValueError for sizes below 1 or an unknown backend; the forward pass raises what pick_backend does.
    """

    def __init__(self, width: int, heads: int, head_dim: int, norm_eps: float = 1e-5, backend: str = "auto") -> None:
        super().__init__()
        for name, value in (("width", width), ("heads", heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
        self.heads, self.head_dim, self.norm_eps, self.backend = heads, head_dim, norm_eps, backend
        inner = heads * head_dim
        self.q, self.k, self.v, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(4))
        self.a, self.b = (nn.Linear(width, heads, bias=False) for _ in range(2))
        self.q_conv, self.k_conv, self.v_conv = (ShortConvolution(inner) for _ in range(3))
        self.decay_log, self.decay_bias = (nn.Parameter(torch.empty(heads)) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(head_dim))
        self.o = nn.Linear(inner, width, bias=False)
        self.reset_decay()

    @torch.no_grad()
    def reset_decay(self) -> None:
        """Decays as in the paper of Gated DeltaNet: exp(decay_log) uniform in [1, 16], softplus(decay_bias)
        log-uniform in [0.001, 0.1]: a head forgets over one to a thousand tokens."""
        self.decay_log.uniform_(1, 16).log_()
        step = self.decay_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        step.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    @torch.no_grad()
    def initialise(self, std: float, residual: float) -> None:
        """Normal matrices, o with its own standard deviation; what is no matrix keeps what the constructor gave it."""
        for matrix in (self.q, self.k, self.v, self.gate, self.a, self.b):
            nn.init.normal_(matrix.weight, std=std)
        nn.init.normal_(self.o.weight, std=residual)

    def forward(self, x: Tensor) -> Tensor:
        split = (self.heads, self.head_dim)
        q, k, v = (
            convolution(projection(x)).unflatten(-1, split)
            for projection, convolution in ((self.q, self.q_conv), (self.k, self.k_conv), (self.v, self.v_conv))
        )
        q, k = (_unit(y) for y in (q, k))
        g = -self.decay_log.float().exp() * F.softplus(self.a(x).float() + self.decay_bias.float())
        beta = self.b(x).float().sigmoid()
        o = _recurrence(q, k, v, g, beta, self.backend).float()
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.norm_eps) * self.norm.float()
        o = o * F.silu(self.gate(x).float()).unflatten(-1, split)
        return self.o(o.flatten(-2).to(x.dtype))


def _unit(x: Tensor) -> Tensor:
    """Rows of norm 1 in FP32; a row of zeros stays zero."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
