"""What FP8 does to one attention layer, or to those of a model that trains: :func:`probe`.

Needs neither Torch nor NumPy unless given their arrays.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from . import _library

if TYPE_CHECKING:
    import numpy
    import torch

    from .live import LiveProbe

    Array = numpy.ndarray | torch.Tensor


class _Bits(NamedTuple):
    """BF16 bits in memory, ``[batch, length, heads, head_dim]``, contiguous."""

    pointer: int
    shape: tuple[int, ...]
    owner: object  # keeps the memory alive

    def argument(self) -> _library.TensorArg:
        _, length, heads, head_dim = self.shape
        return _library.TensorArg(self.pointer, length * heads * head_dim, heads * head_dim, head_dim)


def _torch_bits(name: str, tensor: torch.Tensor) -> tuple[Any, int]:
    import torch

    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {tensor.dtype}")
    bits = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
    return bits, bits.data_ptr()


def _numpy_bits(name: str, array: numpy.ndarray) -> tuple[Any, int]:
    import numpy

    if array.dtype == numpy.uint16:
        bits = array
    elif array.dtype.name == "bfloat16":  # of the ml_dtypes package
        bits = array.view(numpy.uint16)
    elif array.dtype.kind == "f":
        with numpy.errstate(over="ignore"):  # beyond FP32 becomes infinite, and is reported as non-finite
            words = numpy.ascontiguousarray(array, numpy.float32).reshape(array.shape).view(numpy.uint32)
        # Round to nearest, ties to even. The sum would make infinities of some NaNs, so they take a code of their own.
        rounded = (words + numpy.uint32(0x7FFF) + ((words >> 16) & numpy.uint32(1))) >> 16
        bits = numpy.where(numpy.isnan(array), numpy.uint32(0x7FC0), rounded).astype(numpy.uint16)
    else:
        raise TypeError(f"{name}: expected a floating dtype, or uint16 for BF16 bits, got {array.dtype}")
    bits = numpy.ascontiguousarray(bits)
    return bits, bits.ctypes.data


def _bits(name: str, array: Any) -> _Bits:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        owner, pointer = _torch_bits(name, array)
    elif numpy is not None and isinstance(array, numpy.ndarray):
        owner, pointer = _numpy_bits(name, array)
    else:
        raise TypeError(f"{name}: expected a torch.Tensor or a numpy.ndarray, got {type(array).__name__}")
    shape = tuple(owner.shape)
    if len(shape) == 3:
        shape = (1, *shape)
    if len(shape) != 4:
        raise ValueError(f"{name}: expected 3 or 4 dimensions [batch,] length, heads, head_dim, got shape {shape}")
    # An empty array may have no memory at all; any address does, since none of it is read.
    return _Bits(pointer or id(owner), shape, owner)


def _check_shapes(q: _Bits, k: _Bits, v: _Bits, d_o: _Bits) -> None:
    if v.shape != k.shape:
        raise ValueError(f"v: expected k's shape {k.shape}, got {v.shape}")
    if d_o.shape != q.shape:
        raise ValueError(f"d_o: expected q's shape {q.shape}, got {d_o.shape}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k: expected q's batch {q.shape[0]} and head_dim {q.shape[3]}, got shape {k.shape}")
    q_heads, kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    if q_heads < 1 or kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"q has {q_heads} heads, k and v have {kv_heads}: expected a multiple of k's heads in q")
    if head_dim < 1:
        raise ValueError(f"q: expected head_dim of at least 1, got {head_dim}")


@overload
def probe(
    q: Array,
    k: Array,
    v: Array,
    d_o: Array,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    numerics: str = ...,
    centre: str | None = ...,
    modes: Iterable[str] | None = ...,
    threads: int = ...,
) -> dict[str, Any]: ...
@overload
def probe(
    model: torch.nn.Module,
    /,
    *,
    every: int = ...,
    path: str | os.PathLike[str] | None = ...,
    tensorboard: Any = ...,
    heads: int | Sequence[int] = ...,
    max_tokens: int = ...,
    modes: Iterable[str] | None = ...,
    numerics: str = ...,
    centre: str | None = ...,
    sdpa: bool = ...,
    gain_offset: float | None = ...,
    start: int = ...,
    background: bool | None = ...,
    threads: int = ...,
) -> LiveProbe: ...
def probe(*arrays: Any, **options: Any) -> Any:
    """Measure what FP8 does to attention: to one layer's tensors, or to a model while it trains.

    ``probe(q, k, v, d_o, ...)`` runs one layer in every mode on the CPU, compares it with FP64 and returns the numbers.
    ``probe(model, ...)``, with a ``torch.nn.Module`` first, is a context manager that does so every so many steps of a
    training for a sample of every attention layer. Which of the two is meant is told by the first argument's type.

    Args, of one layer:
        q, d_o: ``[batch, q_len, q_heads, head_dim]``, or without batch; d_o is the gradient of the loss by o.
        k, v: ``[batch, k_len, kv_heads, head_dim]``, or without batch. Each a Torch tensor (any floating dtype, any
            device: it is copied) or a NumPy array (any floating dtype, or uint16 for BF16 bits). Values are rounded to
            BF16 first, and FP64 sees the rounded values.
        causal: aligned bottom-right.
        softmax_scale: finite and > 0; None means ``1 / sqrt(head_dim)``.
        numerics: "hopper" (head_dim 64, 128 or 256) or "paper" (any head_dim).
        centre: "none", "k" or "qk"; None means "qk" in hopper, "k" in paper.
        modes: names of the modes to run; None means all four.
        threads: CPU threads, 0 = all; never changes a bit.

    Args, of a model (docs/probe.md):
        model: calls of ``dm_attn_func`` and ``dm_attn_varlen_func`` are recorded, and with ``sdpa`` those of
            ``torch.nn.functional.scaled_dot_product_attention`` without mask and dropout; what cannot be measured is
            named in the line's ``not_measured``. Results of the training keep their bits.
        every: steps from one measured step to the next; steps between them run no code of the probe's.
        path: file for one JSON line of schema ``dmattn.live/1`` a measured step (docs/schemas.md), appended.
        tensorboard: a ``SummaryWriter``, or a folder for a new one.
        heads: number of query heads to measure in each layer, evenly spaced, or their numbers.
        max_tokens: what is longer is cut to its first tokens; at least 2. Of a batch its first entry is measured, of
            packed sequences the longest.
        modes: as above; None means the mode of the call, for SDPA stale and matched.
        numerics, centre: of SDPA calls; ours are measured in their own.
        sdpa: False leaves torch.nn.functional.scaled_dot_product_attention alone.
        gain_offset: what q_norm and k_norm add to their weights; None means 1 for norms known to (Gemma, Qwen3-Next).
        start: number of the first step, when a training is resumed.
        background: measure in a thread beside the training; None means where the model is on a GPU.
        threads: as above; 0 in the background means half of the CPUs, at most 8.

    Returns:
        Of a model, a :class:`delta_matching.live.LiveProbe`: call its ``step()`` after each optimiser step.

        Of one layer, the document of schema ``dmattn.probe/1`` (docs/schemas.md): per mode and query head the row-sum
        residual of dS before and after its cast (median, p95 and max over rows, relative to the row's sum of \\|dS\\|),
        the column sum of dK, and the relative Frobenius errors of o, dq, dk, dv against FP64. Heads with non-finite
        input have null numbers and are listed in ``nonfinite_heads``.

    Raises:
        TypeError: not an array, or a dtype that is not floating; an option of the other form. ValueError: shapes that
        disagree, an unknown name, a scale out of its domain. RuntimeError: a head_dim that the numerics does not offer;
        two live probes that record at once. OSError: a log that cannot be written, when the with block is entered.

    Example:
        >>> q, k, v, d_o = (torch.randn(256, 4, 64) for _ in range(4))
        >>> probe(q, k, v, d_o)["modes"]["stale"]["residual"]["median"]
        >>> with probe(model, every=100, path="probe.jsonl") as live:
        ...     for batch in batches:
        ...         train_step(model, batch)
        ...         live.step()

    Source: docs/method.md.
    """
    torch = sys.modules.get("torch")
    if torch is not None and arrays and isinstance(arrays[0], torch.nn.Module):
        from .live import LiveProbe

        return LiveProbe(*arrays, **options)
    return probe_tensors(*arrays, **options)


def probe_tensors(
    q: Array,
    k: Array,
    v: Array,
    d_o: Array,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    numerics: str = "hopper",
    centre: str | None = None,
    modes: Iterable[str] | None = None,
    threads: int = 0,
) -> dict[str, Any]:
    """:func:`probe` of one layer's tensors."""
    operands = [_bits(name, array) for name, array in (("q", q), ("k", k), ("v", v), ("d_o", d_o))]
    _check_shapes(*operands)
    batch, q_len, q_heads, head_dim = operands[0].shape
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(head_dim)
    problem = _library.Problem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=operands[1].shape[2],
        q_len=q_len,
        k_len=operands[1].shape[1],
        head_dim=head_dim,
        softmax_scale=softmax_scale,
        causal=int(causal),
        numerics=_library.code_of("numerics", numerics, _library.NUMERICS),
        centre=_library.centre_code(centre),
        threads=threads,
    )
    names = _library.MODES if modes is None else [modes] if isinstance(modes, str) else list(modes)
    if not names:
        raise ValueError(f"modes: expected at least one of {', '.join(_library.MODES)}, got none")
    mask = 0
    for name in names:
        mask |= 1 << _library.code_of("modes", name, _library.MODES)
    arguments = dict(zip(("q", "k", "v", "d_o"), (operand.argument() for operand in operands), strict=True))
    text = ctypes.c_char_p()
    args = _library.ProbeArgs(**arguments, modes=mask)
    _library.call("probe", problem, ctypes.byref(args), ctypes.byref(text))
    try:
        document: dict[str, Any] = json.loads(text.value or b"null")
        return document
    finally:
        _library.library().dmattn_free(text)
