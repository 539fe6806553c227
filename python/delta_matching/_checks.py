"""Validation that the real and the fake kernels share, so that tracing refuses what running refuses.

Plain ``if`` and ``raise``: an ``assert`` would vanish under ``python -O``. Every message names the argument, what was
expected and what came.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import _library, _saved_codes

_LAYOUT = {4: "[batch, length, heads, head_dim]", 3: "[total, heads, head_dim] with cu_seqlens"}


class Shape(NamedTuple):
    """Sizes of a call. With cu_seqlens ``q_len`` and ``k_len`` are rows in all. Elements may be SymInt in tracing."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    varlen: bool

    @property
    def row_vector(self) -> tuple[int, ...]:
        """Shape of lse and of the saved statistics."""
        if self.varlen:
            return (self.q_heads, self.q_len)
        return (self.batch, self.q_heads, self.q_len)


def _sizes(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def check_dtype(name: str, tensor: Tensor) -> None:
    """Errors: TypeError unless ``tensor`` is BF16."""
    if tensor.dtype != torch.bfloat16:
        raise TypeError(
            f"{name}: expected torch.bfloat16, got {tensor.dtype}; cast it, or call under torch.autocast, "
            "which casts it to BF16"
        )


def _check_offsets_form(name: str, offsets: Tensor, device: torch.device) -> None:
    # A meta tensor sends a call to the fake kernel, whose outputs nobody has written: never one among real ones.
    if offsets.device.type != "cpu" and offsets.device != device:
        expected = "a cpu tensor" if device.type == "cpu" else f"a tensor on {device}, as q, or on the cpu"
        raise RuntimeError(f"{name} is on {offsets.device}: expected {expected}")
    if offsets.dtype != torch.int32:
        raise TypeError(f"{name}: expected torch.int32, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name}: expected one dimension with batch + 1 offsets, got shape {_sizes(offsets)}")


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None
) -> Shape:
    """Check dtypes, dimensions, devices and the GQA ratio, and return the sizes.

    Errors: TypeError for a dtype, ValueError for a shape, RuntimeError for tensors on different devices.
    """
    varlen = cu_seqlens_q is not None
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k: expected both or neither, got one")
    dims = 3 if varlen else 4
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, tensor)
        if tensor.dim() != dims:
            raise ValueError(f"{name}: expected {dims} dimensions {_LAYOUT[dims]}, got shape {_sizes(tensor)}")
        if tensor.device != q.device:
            raise RuntimeError(f"{name} is on {tensor.device}, q on {q.device}: expected one device for q, k and v")
    if v.shape != k.shape:
        raise ValueError(f"v: expected k's shape {_sizes(k)}, got {_sizes(v)}")
    q_heads, head_dim = q.shape[-2], q.shape[-1]
    kv_heads = k.shape[-2]
    if k.shape[-1] != head_dim:
        raise ValueError(f"k: expected q's head_dim {head_dim}, got {k.shape[-1]}")
    if head_dim < 1:
        raise ValueError(f"q: expected head_dim of at least 1, got {head_dim}")
    if q_heads < 1 or kv_heads < 1 or q_heads % kv_heads != 0:
        raise ValueError(f"q has {q_heads} heads, k and v have {kv_heads}: expected a multiple of k's heads in q")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"k: expected q's batch {q.shape[0]}, got {k.shape[0]}")
        return Shape(q.shape[0], q_heads, kv_heads, q.shape[1], k.shape[1], head_dim, False)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_offsets_form(name, offsets, q.device)
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise ValueError(
            f"cu_seqlens_k: expected as many offsets as cu_seqlens_q, {cu_seqlens_q.shape[0]}, "
            f"got {cu_seqlens_k.shape[0]}"
        )
    return Shape(cu_seqlens_q.shape[0] - 1, q_heads, kv_heads, q.shape[0], k.shape[0], head_dim, True)


def check_backward(
    shape: Shape, d_o: Tensor, q: Tensor, o: Tensor, reference: Tensor, total: Tensor, o_low: Tensor, mode: str
) -> None:
    """Check what the backward takes beside q, k and v: the library trusts its pointers.

    Errors: TypeError for a dtype, ValueError for a shape, RuntimeError for another device.
    """
    for name, tensor, like in (("o", o, q), ("d_o", d_o, o)):
        check_dtype(name, tensor)
        if tensor.shape != like.shape:
            raise ValueError(
                f"{name}: expected {'q' if name == 'o' else 'o'}'s shape {_sizes(like)}, got {_sizes(tensor)}"
            )
    for name, tensor, expected in (("reference", reference, shape.row_vector), ("sum", total, (2, *shape.row_vector))):
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name}: expected torch.float32, got {tensor.dtype}")
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name}: expected shape {list(expected)}, got {_sizes(tensor)}")
    if mode == "onepass":
        check_dtype("o_low", o_low)
        if o_low.shape != o.shape:
            raise ValueError(f"o_low: expected o's shape {_sizes(o)} in onepass, got {_sizes(o_low)}")
    for name, tensor in (("d_o", d_o), ("o", o), ("reference", reference), ("sum", total), ("o_low", o_low)):
        if tensor.device != q.device:
            raise RuntimeError(f"{name} is on {tensor.device}, q on {q.device}: expected one device")


def check_codes(codes: Tensor, q: Tensor) -> None:
    """Check the form of what a forward left; the library asks for the bytes.

    Errors: TypeError for a dtype, ValueError for a shape, RuntimeError for a device that keeps none, or another one.
    """
    if q.device.type not in (*_saved_codes.KEEPERS, "meta"):
        raise RuntimeError(f"codes: expected tensors on one of {', '.join(_saved_codes.KEEPERS)}, got q on {q.device}")
    if codes.device != q.device:
        raise RuntimeError(f"codes is on {codes.device}, q on {q.device}: expected one device")
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes: expected torch.uint8, got {codes.dtype}")
    if codes.dim() != 1:
        raise ValueError(f"codes: expected one dimension, got shape {_sizes(codes)}")


def check_choices(mode: str, numerics: str, centre: str | None) -> None:
    """Errors: ValueError that lists the choices for an unknown name."""
    _library.code_of("mode", mode, _library.MODES)
    _library.code_of("numerics", numerics, _library.NUMERICS)
    _library.centre_code(centre)


def resolve_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The scale of S: 1 / sqrt(head_dim) for None. Errors: ValueError unless finite and > 0."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    # Comparisons instead of math.isfinite, since they also hold for a symbolic float; NaN fails both.
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: expected a finite value above 0, got {softmax_scale}")
    return softmax_scale


_SUPPORTED = (
    "this version of delta_matching runs on cpu tensors and on CUDA GPUs of compute capability 9.0 (Hopper: H100, H200)"
)


@functools.cache
def _gpu_fault(index: int) -> str | None:
    """Why GPU ``index`` will not do, None if it will. Asked once: a process's GPUs do not change."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "Torch finds no CUDA GPU here"
    if index >= torch.cuda.device_count():
        return f"Torch finds {torch.cuda.device_count()} of them here"
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) != (9, 0):
        return f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}"
    if not _library.device_available("cuda"):
        return "the shared library was built without CUDA, or its runtime finds no GPU"
    return None


def check_device(device: torch.device, numerics: str) -> None:
    """Errors: RuntimeError that names the device and what is supported, or numerics that the device does not offer."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise RuntimeError(f"device {device} is not supported: {_SUPPORTED}")
    fault = _gpu_fault(0 if device.index is None else device.index)
    if fault is not None:
        raise RuntimeError(f"device {device} is not supported: {fault}; {_SUPPORTED}")
    if numerics == "paper":
        raise RuntimeError(f"numerics: expected hopper on {device}, got paper (it runs on cpu tensors alone)")


class OffsetFacts(NamedTuple):
    """What the values of cu_seqlens amount to: the last offset and the length of the longest sequence."""

    end: int
    longest: int


def offset_facts(name: str, offsets: Tensor) -> OffsetFacts:
    """Read the values of cu_seqlens, which only the real kernel can see; on a GPU this waits for the device.

    Errors: ValueError unless they start at 0 and never fall.
    """
    values = offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}: expected a first offset of 0, got {values[0]}")
    longest = 0
    for index in range(1, len(values)):
        length = values[index] - values[index - 1]
        if length < 0:
            raise ValueError(
                f"{name}: expected offsets that never fall, got {values[index]} after {values[index - 1]} "
                f"at index {index}"
            )
        longest = max(longest, length)
    return OffsetFacts(values[-1], longest)


def check_offsets(name: str, facts: OffsetFacts, total: int, max_name: str, max_seqlen: int) -> None:
    """Errors: ValueError unless cu_seqlens end at or below ``total`` and no sequence is longer than ``max_seqlen``."""
    if facts.end > total:
        raise ValueError(f"{name}: expected a last offset of at most the {total} rows given, got {facts.end}")
    if facts.longest > max_seqlen:
        raise ValueError(f"{max_name}: expected at least the longest sequence, {facts.longest}, got {max_seqlen}")
