"""Attention as functions of Torch tensors: :func:`dm_attn_func` and :func:`dm_attn_varlen_func`.

Source: docs/method.md (the modes), docs/numerics.md (what is computed).
"""

from __future__ import annotations

import numbers
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _dtensor, ops

Mode = Literal["matched", "onepass", "consistent", "stale"]
Numerics = Literal["hopper", "paper"]
Centre = Literal["none", "k", "qk"]

__all__ = ["Centre", "Mode", "Numerics", "dm_attn_func", "dm_attn_varlen_func"]

# What people pass out of habit, and why it stops here: silently ignoring any of these trains another model.
_UNSUPPORTED = {
    "dropout": "dropout of attention probabilities",
    "dropout_p": "dropout of attention probabilities",
    "bias": "an additive bias",
    "attn_bias": "an additive bias",
    "alibi_slopes": "an additive bias",
    "attn_mask": "a mask beside causal and cu_seqlens",
    "attention_mask": "a mask beside causal and cu_seqlens",
    "key_padding_mask": "a padding mask (use dm_attn_varlen_func)",
    "window": "a sliding window",
    "window_size": "a sliding window",
    "sliding_window": "a sliding window",
    "softcap": "capped logits",
    "sinks": "learned attention sinks",
    "sink": "learned attention sinks",
    "s_aux": "learned attention sinks",
}

_AUTOCAST_DEVICES = ("cpu", "cuda")


def _refuse(function: str, unsupported: dict[str, object]) -> None:
    for name in unsupported:
        reason = _UNSUPPORTED.get(name)
        if reason is None:
            raise TypeError(f"{function}: unknown argument {name!r}")
        raise TypeError(f"{function}: argument {name!r} is refused: {reason} is not supported")


def _check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast, FP32 and FP16 become BF16, whatever autocast's own dtype: the kernels take nothing else.
    FP64 stays, as everywhere in autocast, and is refused by the operator."""
    device = q.device.type
    if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return q, k, v
    castable = (torch.float32, torch.float16)
    q, k, v = (x.to(torch.bfloat16) if x.dtype in castable else x for x in (q, k, v))
    return q, k, v


def _refuse_forward_mode(**tensors: Tensor) -> None:
    """torch.library runs an operator on the primal alone and drops its tangent without a word (torch.func.jvp,
    torch.autograd.forward_ad): the one transform that would be silently wrong."""
    if forward_ad._current_level < 0:  # no dual level: the usual case, kept cheap
        return
    for name, tensor in tensors.items():
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(f"{name} carries a tangent: delta_matching does not support forward-mode derivatives")


def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, wants_lse: bool) -> tuple[Tensor, ...]:
    """Calls the forward: tracing and transforms want the operator itself, which else costs more time and makes lse
    whether it is wanted or not."""
    outputs: tuple[Tensor, ...]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        outputs = torch.ops.delta_matching.forward.default(q, k, v, *arguments)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        outputs = ops.Differentiable.apply(q, k, v, *arguments, wants_lse)
    else:
        outputs = ops.forward_without_graph(q, k, v, *arguments, wants_lse=wants_lse)
    return outputs


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    mode: str,
    numerics: str,
    centre: str | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    for name, value in (("mode", mode), ("numerics", numerics)):
        if not isinstance(value, str):
            raise TypeError(f"{name}: expected a name, got {type(value).__name__}")
    if centre is not None and not isinstance(centre, str):
        raise TypeError(f"centre: expected a name or None, got {type(centre).__name__}")
    q, k, v = _autocast(q, k, v)
    _refuse_forward_mode(q=q, k=k, v=v)
    if _dtensor.is_dtensor(q) or _dtensor.is_dtensor(k) or _dtensor.is_dtensor(v):

        def local(q: Tensor, k: Tensor, v: Tensor, *offsets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            options = (max_seqlen_q, max_seqlen_k, softmax_scale, causal, mode, numerics, centre, return_lse)
            return _attention(q, k, v, *(offsets or (None, None)), *options)  # type: ignore[call-arg]

        packed = () if cu_seqlens_q is None or cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
        result: Tensor | tuple[Tensor, Tensor] = _dtensor.attend(q, k, v, packed, local)
        return result
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, got {causal!r}")
    if softmax_scale is not None and not isinstance(softmax_scale, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"softmax_scale: expected a number or None, got {type(softmax_scale).__name__}")
    arguments = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, mode, numerics, centre)
    o: Tensor
    lse: Tensor
    try:
        o, lse, *_ = _forward(q, k, v, *arguments, wants_lse=return_lse)
    except RuntimeError as error:
        # torch.library's own words for this speak of a static method that no user of ours has written.
        if "functorch transforms" not in str(error):
            raise
        raise RuntimeError(
            "torch.func.grad and its relatives are not supported by delta_matching: use torch.autograd"
        ) from error
    if not return_lse:
        return o
    # Within vmap the graph belongs to the tensor inside, and o does not show it.
    if o.requires_grad or (torch.is_grad_enabled() and torch._C._are_functorch_transforms_active()):
        lse = torch.ops.delta_matching.lse_out(lse, o)
    return o, lse


@overload
def dm_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    mode: Mode = ...,
    softmax_scale: float | None = ...,
    numerics: Numerics = ...,
    centre: Centre | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def dm_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    mode: Mode = ...,
    softmax_scale: float | None = ...,
    numerics: Numerics = ...,
    centre: Centre | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def dm_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mode: Mode = "matched",
    softmax_scale: float | None = None,
    numerics: Numerics = "hopper",
    centre: Centre | None = None,
    return_lse: bool = False,
    **unsupported: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """FP8 attention ``softmax(q k^T * softmax_scale) v`` with a backward that keeps the rows of dS summing to zero.

    Args:
        q: BF16 ``[batch, q_len, q_heads, head_dim]``.
        k, v: BF16 ``[batch, k_len, kv_heads, head_dim]``; ``q_heads`` a multiple of ``kv_heads`` (GQA). Lengths and
            batch may be 0, and ``q_len`` and ``k_len`` may differ. Any strides: a tensor is copied only where its
            last dimension is not contiguous.
        causal: query i sees key j if ``j <= i + k_len - q_len`` (aligned bottom-right).
        mode: where the backward takes ``delta`` from: "matched", "onepass", "consistent" or "stale" (docs/method.md).
        softmax_scale: finite and > 0; None means ``1 / sqrt(head_dim)``.
        numerics: "hopper" (head_dim 64, 128 or 256) or "paper" (CPU tensors alone, any head_dim).
        centre: what is subtracted before S is quantised: "none", "k", "qk"; None means "qk" in hopper, "k" in paper.
        return_lse: also return the log-sum-exp of each row.

    Returns:
        ``o`` BF16 in q's shape, contiguous; with ``return_lse`` also ``lse`` FP32 ``[batch, q_heads, q_len]``, natural
        logarithm. A row without keys has o = 0, lse = -inf and gradients of zero. lse is not differentiable.

    Device:
        q, k and v on one device: the CPU, or a GPU of compute capability 9.0. There the call queues its kernels on the
        tensors' current stream without waiting for them, takes its workspace from Torch's allocator
        (:func:`delta_matching.set_workspace_cap` limits the backward's), can be captured into a CUDA graph, and gives
        the same bits in every run. They differ from the CPU's within the limits of docs/numerics.md, section 7. An
        eager call keeps FP8 codes for its backward in place of k and v (:func:`delta_matching.set_save_codes`).

    Raises:
        TypeError: an input that is not a BF16 tensor (under ``torch.autocast`` FP32 and FP16 are cast), or an argument
            that is not offered (dropout, bias, mask, window, softcap, sinks), by its name.
        ValueError: shapes that disagree, an unknown name (the message lists the choices), a scale out of its domain.
        RuntimeError: a device or a head_dim that is not supported; in the backward, a gradient asked of lse or a second
            derivative.

    Example:
        >>> q = torch.randn(1, 128, 8, 64, dtype=torch.bfloat16, requires_grad=True)
        >>> k, v = torch.randn(2, 1, 128, 2, 64, dtype=torch.bfloat16)
        >>> dm_attn_func(q, k, v, causal=True).float().square().mean().backward()

    Source: docs/method.md and docs/numerics.md; arXiv 2609.37852 for "matched", "consistent" and the paper numerics.
    """
    _refuse("dm_attn_func", unsupported)
    _check_tensors(q=q, k=k, v=v)
    # The lengths are read off the tensors, so there is nothing to say about them here.
    return _attention(q, k, v, None, None, 0, 0, softmax_scale, causal, mode, numerics, centre, return_lse)


@overload
def dm_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = ...,
    mode: Mode = ...,
    softmax_scale: float | None = ...,
    numerics: Numerics = ...,
    centre: Centre | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def dm_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = ...,
    mode: Mode = ...,
    softmax_scale: float | None = ...,
    numerics: Numerics = ...,
    centre: Centre | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def dm_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    mode: Mode = "matched",
    softmax_scale: float | None = None,
    numerics: Numerics = "hopper",
    centre: Centre | None = None,
    return_lse: bool = False,
    **unsupported: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`dm_attn_func` for sequences of different lengths, packed one after the other.

    Args:
        q: BF16 ``[total_q, q_heads, head_dim]``.
        k, v: BF16 ``[total_k, kv_heads, head_dim]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``, on the CPU or on q's device: sequence b has the rows
            ``cu_seqlens[b] ... cu_seqlens[b + 1] - 1``. They start at 0 and never fall. Rows past the last offset are
            padding: they are never read, and have o = 0, lse = -inf and gradients of zero. On a GPU the values are
            read back once, when a tensor is first seen or has been written to since; that waits for the device. While
            a CUDA graph is captured they are not checked, must lie on the device, and may be changed before a replay
            as long as they keep to ``max_seqlen_q`` and ``max_seqlen_k``.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, in rows. On a GPU they bound the workspace and the
            work, so keep them close.
        causal: as in :func:`dm_attn_func`, within each sequence.
        mode, softmax_scale, numerics, centre, return_lse: as in :func:`dm_attn_func`.

    Returns:
        ``o`` BF16 in q's shape; with ``return_lse`` also ``lse`` FP32 ``[q_heads, total_q]``.

    Raises:
        As :func:`dm_attn_func`; TypeError also for offsets that are not int32, ValueError for offsets that do not start
        at 0, fall, or end past the rows given, and for a ``max_seqlen`` below the longest sequence.

    Example:
        >>> offsets = torch.tensor([0, 100, 228], dtype=torch.int32)
        >>> q = torch.randn(228, 8, 64, dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 228, 2, 64, dtype=torch.bfloat16)
        >>> o = dm_attn_varlen_func(q, k, v, offsets, offsets, 128, 128, causal=True, mode="onepass")

    Source: docs/method.md and docs/numerics.md.
    """
    _refuse("dm_attn_varlen_func", unsupported)
    _check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    return _attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        mode,
        numerics,
        centre,
        return_lse,
    )
