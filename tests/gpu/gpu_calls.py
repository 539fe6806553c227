"""The C ABI on either device, with outputs that were poisoned and guarded before each call.

A :class:`Case` says what is computed, :class:`Inputs` on what (CPU tensors, BF16), :func:`forward` and
:func:`backward` compute it on ``DEVICE`` (the GPU) or on "cpu" (the twin).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from delta_matching import _library
from oracle import quantise as blocks

DEVICE = torch.device(os.environ.get("DMATTN_GPU_TESTS_DEVICE", "cuda:0"))
ON_GPU = DEVICE.type == "cuda"
MODES = ("matched", "onepass", "consistent", "stale")


@dataclasses.dataclass(frozen=True)
class Case:
    """Shape and options of one call; ``q_lengths`` and ``k_lengths`` make it one with cu_seqlens."""

    mode: str
    head_dim: int
    q_len: int
    k_len: int
    q_heads: int = 4
    kv_heads: int = 2
    batch: int = 1
    causal: bool = True
    centre: str | None = None
    softmax_scale: float | None = None
    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    bounds: bool = True  # give the longest sequences as max_q_len and max_k_len; else 0, the totals

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def varlen(self) -> bool:
        return self.q_lengths is not None

    @property
    def q_shape(self) -> tuple[int, ...]:
        return (*(() if self.varlen else (self.batch,)), self.q_len, self.q_heads, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        return (*(() if self.varlen else (self.batch,)), self.k_len, self.kv_heads, self.head_dim)

    @property
    def row_vector(self) -> tuple[int, ...]:
        return (self.q_heads, self.q_len) if self.varlen else (self.batch, self.q_heads, self.q_len)

    def document(self) -> dict[str, Any]:
        names = ("batch", "q_heads", "kv_heads", "head_dim", "q_len", "k_len", "causal")
        return {name: getattr(self, name) for name in names} | ({"varlen": True} if self.varlen else {})

    def seed(self) -> int:
        """The same for every mode, so that modes can be compared."""
        return zlib.crc32(repr(dataclasses.replace(self, mode="")).encode())

    def __str__(self) -> str:
        lengths = "varlen" if self.varlen else f"n{self.q_len}" + (f"x{self.k_len}" * (self.q_len != self.k_len))
        mask = "causal" if self.causal else "full"
        return f"{self.mode}-d{self.head_dim}-{lengths}-h{self.q_heads}x{self.kv_heads}-{mask}"


def square(mode: str, head_dim: int, length: int, heads: tuple[int, int] = (4, 2), **options: Any) -> Case:
    return Case(mode, head_dim, length, length, *heads, **options)


def ragged(mode: str, head_dim: int, q_lengths, k_lengths=None, padding: int = 0, **options: Any) -> Case:
    """Packed sequences with ``padding`` rows after them."""
    k_lengths = q_lengths if k_lengths is None else k_lengths
    return Case(
        mode,
        head_dim,
        sum(q_lengths) + padding,
        sum(k_lengths) + padding,
        batch=len(q_lengths),
        q_lengths=tuple(q_lengths),
        k_lengths=tuple(k_lengths),
        **options,
    )


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor

    def to(self, device: torch.device | str) -> Inputs:
        return Inputs(*(x.to(device) for x in self))

    def clone(self) -> Inputs:
        return Inputs(*(x.clone() for x in self))


def gaussian(case: Case, seed: int = 0) -> Inputs:
    draw = torch.Generator().manual_seed(case.seed() + seed)
    shapes = (case.q_shape, case.k_shape, case.k_shape, case.q_shape)
    return Inputs(*(torch.randn(shape, generator=draw).to(torch.bfloat16) for shape in shapes))


# --- Memory ----------------------------------------------------------------------------------------------------------

_GUARD = 4096  # bytes on either side of an output
_PATTERN = 0x5A


class Poisoned:
    """Outputs of a call: NaN inside (a byte of 0xff is a NaN in BF16, FP32 and E4M3), a pattern on either side."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.buffers: list[tuple[Tensor, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.empty((), dtype=dtype).element_size() * functools.reduce(int.__mul__, shape, 1)
        buffer = torch.full((2 * _GUARD + size,), 0xFF, dtype=torch.uint8, device=self.device)
        buffer[:_GUARD] = _PATTERN
        buffer[_GUARD + size :] = _PATTERN
        self.buffers.append((buffer, size))
        return buffer[_GUARD : _GUARD + size].view(dtype).view(shape)

    def intact(self) -> bool:
        """Whether nothing outside the outputs was written."""
        return all(
            bool((b[:_GUARD] == _PATTERN).all()) and bool((b[_GUARD + size :] == _PATTERN).all())
            for b, size in self.buffers
        )


def argument(tensor: Tensor | None) -> _library.TensorArg:
    if tensor is None:
        return _library.TensorArg()
    strides = tensor.stride()
    strides = (0, *strides[:2]) if tensor.dim() == 3 else strides[:3]
    return _library.TensorArg(tensor.data_ptr(), *strides)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Call(NamedTuple):
    """A problem, and what must live as long as it is used."""

    problem: _library.Problem
    owned: tuple[Tensor, ...]


def problem_of(
    case: Case, device: torch.device | str, cap: int = 0, offsets: tuple[Tensor, Tensor] | None = None
) -> Call:
    """``offsets`` replace those made from the case's lengths."""
    device = torch.device(device)
    problem = _library.Problem(
        batch=case.batch,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        q_len=case.q_len,
        k_len=case.k_len,
        head_dim=case.head_dim,
        softmax_scale=case.scale,
        causal=int(case.causal),
        mode=_library.MODES[case.mode],
        centre=_library.centre_code(case.centre),
        threads=torch.get_num_threads(),
        workspace_cap=cap,
    )
    if device.type == "cuda":
        problem.device = _library.DEVICES["cuda"]
        problem.device_index = 0 if device.index is None else device.index
        problem.stream = torch.cuda.current_stream(device).cuda_stream
    if not case.varlen:
        return Call(problem, ())
    if offsets is None:
        offsets = tuple(
            torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
            for lengths in (case.q_lengths, case.k_lengths)
        )
    problem.cu_seqlens_q, problem.cu_seqlens_k = (x.data_ptr() for x in offsets)
    if case.bounds:
        problem.max_q_len = max(case.q_lengths, default=0)
        problem.max_k_len = max(case.k_lengths, default=0)
    return Call(problem, offsets)


# --- Calls -----------------------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What a forward leaves."""

    o: Tensor
    lse: Tensor | None
    reference: Tensor
    sum: Tensor
    o_low: Tensor | None
    codes: Tensor | None = None  # belong to their device

    def to(self, device: torch.device | str) -> Saved:
        return Saved(*(None if x is None else x.to(device) for x in self[:5]))


class Gradients(NamedTuple):
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    delta: Tensor


class Result(NamedTuple):
    saved: Saved
    gradients: Gradients

    def tensors(self) -> dict[str, Tensor]:
        s, g = self
        named = dict(o=s.o, lse=s.lse, reference=s.reference, sum=s.sum, o_low=s.o_low)
        named |= dict(dq=g.dq, dk=g.dk, dv=g.dv, delta=g.delta)
        return {name: x for name, x in named.items() if x is not None}


def _workspace(out: Poisoned, nbytes: int) -> dict[str, Any]:
    if nbytes == 0:
        return {}
    return dict(workspace=out.empty((nbytes,), torch.uint8).data_ptr(), workspace_bytes=nbytes)


def _codes(saved: Saved) -> tuple[int | None, int]:
    return (None, 0) if saved.codes is None else (saved.codes.data_ptr(), saved.codes.shape[0])


def forward(
    case: Case,
    x: Inputs,
    device: torch.device | str = DEVICE,
    low: bool = True,
    offsets: tuple[Tensor, Tensor] | None = None,
    check: bool = True,
    codes: bool = False,
    lse: bool = True,
) -> Saved:
    """``x`` on ``device``, any strides; ``low``: in onepass, ask for O's remainder; ``offsets``: other cu_seqlens than
    the case's; ``check``: look at the guards, which waits for the GPU; ``codes``: leave them, for a backward that then
    gets neither k nor v; ``lse``: ask for it."""
    out = Poisoned(device)
    wants_low = low and case.mode == "onepass"
    saved = Saved(
        out.empty(case.q_shape, torch.bfloat16),
        out.empty(case.row_vector, torch.float32) if lse else None,
        out.empty(case.row_vector, torch.float32),
        out.empty((2, *case.row_vector), torch.float32),
        out.empty(case.q_shape, torch.bfloat16) if wants_low else None,
    )
    call = problem_of(case, device, offsets=offsets)
    if codes:
        saved = saved._replace(codes=out.empty((_library.saved_codes_size(call.problem),), torch.uint8))
    args = _library.ForwardArgs(
        q=argument(x.q),
        k=argument(x.k),
        v=argument(x.v),
        o=argument(saved.o),
        lse=pointer(saved.lse),
        saved=_library.Saved(pointer(saved.reference), pointer(saved.sum), argument(saved.o_low), *_codes(saved)),
        **_workspace(out, _library.workspace_size(call.problem)[0]),
    )
    _library.call("forward", call.problem, ctypes.byref(args))
    if check:
        assert out.intact(), "the forward wrote outside its outputs or its workspace"
    return saved


def backward(
    case: Case,
    x: Inputs,
    saved: Saved,
    device: torch.device | str = DEVICE,
    *,
    cap: int = 0,
    needed: str = "qkv",
    delta: Tensor | None = None,
    from_lse: bool = False,
    function: str = "backward",
    check: bool = True,
    offsets: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """``needed``: which of dq, dk, dv; ``delta``: true delta to use; ``from_lse``: without the saved statistics;
    ``function``: "delta" for delta alone; ``check``: look at the guards, which waits for the GPU."""
    out = Poisoned(device)
    shapes = dict(q=case.q_shape, k=case.k_shape, v=case.k_shape)
    wanted = "" if function == "delta" else needed
    dq, dk, dv = (out.empty(shapes[n], torch.bfloat16) if n in wanted else None for n in "qkv")
    gradients = Gradients(dq, dk, dv, out.empty(case.row_vector, torch.float32))
    call = problem_of(case, device, cap, offsets)
    statistics = (None, None) if from_lse else (pointer(saved.reference), pointer(saved.sum))
    codes = _codes(saved)
    nbytes = _library.workspace_size(call.problem)[1]
    if nbytes > 0:  # not on the CPU
        nbytes -= codes[1]
    args = _library.BackwardArgs(
        q=argument(x.q),
        k=argument(x.k if saved.codes is None else None),
        v=argument(x.v if saved.codes is None else None),
        o=argument(saved.o),
        d_o=argument(x.d_o),
        lse=pointer(saved.lse) if from_lse else None,
        saved=_library.Saved(*statistics, argument(None if from_lse else saved.o_low), *codes),
        delta=pointer(delta),
        delta_out=pointer(gradients.delta),
        dq=argument(dq),
        dk=argument(dk),
        dv=argument(dv),
        **_workspace(out, nbytes),
    )
    _library.call(function, call.problem, ctypes.byref(args))
    if check:
        assert out.intact(), "the backward wrote outside its outputs or its workspace"
    return gradients


def run(case: Case, x: Inputs, device: torch.device | str = DEVICE, **options: Any) -> Result:
    """Forward and backward; ``x`` is moved to ``device``."""
    x = x.to(device)
    saved = forward(case, x, device)
    return Result(saved, backward(case, x, saved, device, **options))


class Quantised(NamedTuple):
    codes: Tensor  # uint8, x's shape
    scale: Tensor  # FP32 [batch, heads, blocks]
    mean: Tensor  # FP32 [batch, heads, head_dim]; q_scores: [batch, heads, means, head_dim]


def quantise(
    case: Case, operand: str, x: Tensor, device: torch.device | str = DEVICE, k: Tensor | None = None
) -> Quantised:
    """Equal lengths alone."""
    query = operand in ("q", "d_o", "q_scores")
    heads, length = (case.q_heads, case.q_len) if query else (case.kv_heads, case.k_len)
    rows = {"q": blocks.FLUSH_ROWS, "d_o": blocks.FLUSH_ROWS, "q_scores": blocks.Q_ROWS}.get(operand, blocks.K_ROWS)
    means = (case.batch, heads, case.head_dim)
    if operand == "q_scores":
        count = -(-length // (128 * max(1, -(-length // 8192))))
        means = (case.batch, heads, count, case.head_dim)
    out = Poisoned(device)
    result = Quantised(
        out.empty(tuple(x.shape), torch.uint8),
        out.empty((case.batch, heads, -(-length // rows)), torch.float32),
        out.empty(means, torch.float32),
    )
    call = problem_of(case, device)
    args = _library.QuantiseArgs(
        operand=_library.OPERANDS[operand],
        x=argument(x),
        codes=pointer(result.codes),
        scale=pointer(result.scale),
        mean=pointer(result.mean),
        k=argument(k),
        **_workspace(out, _library.workspace_size(call.problem)[0]),
    )
    _library.call("quantise", call.problem, ctypes.byref(args))
    assert out.intact(), "quantise wrote outside its outputs or its workspace"
    return result
