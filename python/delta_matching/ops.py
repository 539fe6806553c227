"""Torch operators ``delta_matching::forward``, ``delta_matching::backward`` and ``delta_matching::backward_from_codes``
(torch.library). The last follows an eager forward on a GPU, which leaves codes in place of k and v
(:mod:`._saved_codes`).

All are functional: they read their inputs and return new, contiguous tensors, so they trace, checkpoint and replay
without side effects. The real kernels run the shared library on CPU tensors, or queue its kernels on the current stream
of the tensors' GPU; the fake kernels allocate through the same functions as the real ones, so sizes, dtypes and strides
cannot drift apart. Inductor's cache on disk does not see a fake kernel: a change of an output's shape needs another
operator name. Users call :mod:`delta_matching.functional`.

Layout, BF16: q, o, d_o, dq ``[batch, q_len, q_heads, head_dim]`` and k, v, dk, dv ``[batch, k_len, kv_heads,
head_dim]``; with cu_seqlens ``[total, heads, head_dim]``. Row vectors (lse, reference), FP32: ``[batch, q_heads,
q_len]`` or ``[q_heads, total_q]``; sum holds two of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from . import _checks, _device, _library, _record, _saved_codes, _workspace
from ._checks import Shape
from ._device import Offsets

_AS_IT_IS = contextlib.nullcontext()

# Kept alive for the life of the process: the operators vanish with it.
_OPERATORS = torch.library.Library("delta_matching", "DEF")


def _rows(tensor: Tensor) -> Tensor:
    """``tensor`` itself if its last dimension is contiguous (any other strides will do, 0 included), else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _argument(tensor: Tensor) -> _library.TensorArg:
    strides = tensor.stride()
    if len(strides) == 3:
        return _library.TensorArg(tensor.data_ptr(), 0, strides[0], strides[1])
    return _library.TensorArg(tensor.data_ptr(), strides[0], strides[1], strides[2])


@functools.lru_cache(maxsize=1024)
def _template(
    shape: Shape, softmax_scale: float | None, causal: bool, mode: str, numerics: str, centre: str | None
) -> _library.Problem:
    """What calls of one shape and options share; to be copied. A layer makes the same call again and again."""
    return _library.Problem(
        batch=shape.batch,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        q_len=shape.q_len,
        k_len=shape.k_len,
        head_dim=shape.head_dim,
        softmax_scale=_checks.resolve_scale(softmax_scale, shape.head_dim),
        causal=int(causal),
        mode=_library.code_of("mode", mode, _library.MODES),
        numerics=_library.code_of("numerics", numerics, _library.NUMERICS),
        centre=_library.centre_code(centre),
        device=_library.DEVICES["cpu"],
    )


def _problem(
    shape: Shape,
    device: torch.device,
    options: tuple[Any, ...],
    offsets: tuple[Offsets, Offsets] | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> _library.Problem:
    problem = _library.Problem.from_buffer_copy(_template(shape, *options))
    # As many threads as Torch itself would use; never changes a bit.
    problem.threads = torch.get_num_threads()
    if offsets is not None:
        problem.cu_seqlens_q, problem.cu_seqlens_k = (side.tensor.data_ptr() for side in offsets)
        # A bound may be generous; the library takes none above the rows given.
        problem.max_q_len, problem.max_k_len = min(max_seqlen_q, shape.q_len), min(max_seqlen_k, shape.k_len)
    if device.type == "cuda":
        _device.describe(problem, device, _workspace.workspace_cap())
    return problem


def _offsets(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    shape: Shape,
    device: torch.device,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[Offsets, Offsets] | None:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    return (
        _device.offsets_on_device("cu_seqlens_q", cu_seqlens_q, device, shape.q_len, "max_seqlen_q", max_seqlen_q),
        _device.offsets_on_device("cu_seqlens_k", cu_seqlens_k, device, shape.k_len, "max_seqlen_k", max_seqlen_k),
    )


class _ForwardOutputs(NamedTuple):
    o: Tensor
    lse: Tensor
    reference: Tensor
    sum: Tensor
    o_low: Tensor


def _allocate_forward(q: Tensor, shape: Shape, mode: str, wants_lse: bool = True) -> _ForwardOutputs:
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    reference = q.new_empty(shape.row_vector, dtype=torch.float32)
    lse = torch.empty_like(reference) if wants_lse else q.new_empty((0,), dtype=torch.float32)
    total = q.new_empty((2, *shape.row_vector), dtype=torch.float32)  # of unrounded P, then of rounded P
    # Only onepass keeps what rounding O to BF16 left over.
    o_low = torch.empty_like(o) if mode == "onepass" else q.new_empty((0,))
    return _ForwardOutputs(o, lse, reference, total, o_low)


def _saved(reference: Tensor, total: Tensor, o_low: Tensor, codes: Tensor | None, mode: str) -> _library.Saved:
    return _library.Saved(
        reference=reference.data_ptr(),
        sum=total.data_ptr(),
        o_low=_argument(o_low) if mode == "onepass" else _library.TensorArg(),
        codes=None if codes is None else codes.data_ptr(),
        codes_bytes=0 if codes is None else codes.shape[0],
    )


def _allocate_gradient(like: Tensor, needed: bool) -> Tensor:
    return like.new_empty(like.shape if needed else (0,))


def _clear_padding(tensor: Tensor, dim: int, side: Offsets, value: float = 0.0) -> None:
    """Fill the rows of ``tensor`` that belong to no sequence, which the library does not touch: fresh memory may hold
    anything. To be called before the library writes, since all rows are filled where the end is not known."""
    rows = tensor.shape[dim]
    start = 0 if side.end is None else side.end
    if start < rows:
        tensor.narrow(dim, start, rows - start).fill_(value)


def _clear_forward_padding(out: _ForwardOutputs, side: Offsets) -> None:
    _clear_padding(out.o, 0, side)
    if out.o_low.dim() > 1:
        _clear_padding(out.o_low, 0, side)
    # A padding row sees no key; its statistics are never read, zero keeps them the same in every run.
    if out.lse.dim() > 1:
        _clear_padding(out.lse, 1, side, -torch.inf)
    _clear_padding(out.reference, 1, side)
    _clear_padding(out.sum, 2, side)


def _run_forward(
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
    *,
    keeps_codes: bool = False,
    wants_lse: bool = True,
) -> tuple[_ForwardOutputs, Tensor | None]:
    """The forward operator's outputs, and the codes for :func:`_backward_from_codes` if the caller keeps them. Without
    lse, which is empty then, onepass leaves out the sum that nothing else of it reads."""
    shape = _checks.check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
    _checks.check_device(q.device, numerics)
    with _device.current(q.device):
        offsets = _offsets(cu_seqlens_q, cu_seqlens_k, shape, q.device, max_seqlen_q, max_seqlen_k)
        options = (softmax_scale, causal, mode, numerics, centre)
        problem = _problem(shape, q.device, options, offsets, max_seqlen_q, max_seqlen_k)
        q, k, v = _rows(q), _rows(k), _rows(v)
        out = _allocate_forward(q, shape, mode, wants_lse)
        if offsets is not None:
            _clear_forward_padding(out, offsets[0])
        codes = _device.saved_codes(problem, (shape, options), q.device) if keeps_codes else None
        workspace = _device.workspace(problem, (shape, options), q.device, 0)
        args = _library.ForwardArgs(
            q=_argument(q),
            k=_argument(k),
            v=_argument(v),
            o=_argument(out.o),
            lse=out.lse.data_ptr() if wants_lse else None,
            saved=_saved(out.reference, out.sum, out.o_low, codes, mode),
            workspace=workspace.pointer,
            workspace_bytes=workspace.nbytes,
        )
        _library.call("forward", problem, ctypes.byref(args))
    if (record := _record.active) is not None:  # read once: another thread may end it
        record.forward(out.reference)
    return out, codes


def _forward(
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
) -> tuple[Tensor, ...]:
    options = (softmax_scale, causal, mode, numerics, centre)
    out, _ = _run_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)
    return tuple(out)


def _forward_fake(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = _checks.check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
    if q.device.type != "meta":  # meta tensors ask for shapes alone
        _checks.check_device(q.device, numerics)
    _checks.check_choices(mode, numerics, centre)
    _checks.resolve_scale(softmax_scale, shape.head_dim)
    out = _allocate_forward(q, shape, mode)
    return out.o, out.lse, out.reference, out.sum, out.o_low


def _run_backward(
    d_o: Tensor,
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    codes: Tensor | None,
    o: Tensor,
    reference: Tensor,
    sum: Tensor,
    o_low: Tensor,
    offsets: tuple[Tensor | None, Tensor | None],
    lengths: tuple[int, int],
    options: tuple[Any, ...],
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """``keys``: k and v; with ``codes`` they stand for shapes alone and are not read."""
    k, v = keys
    _, _, mode, numerics, _ = options
    shape = _checks.check_inputs(q, k, v, *offsets)
    _checks.check_backward(shape, d_o, q, o, reference, sum, o_low, mode)
    _checks.check_device(q.device, numerics)
    if codes is not None:
        _checks.check_codes(codes, q)
    with _device.current(q.device):
        # The forward checked the lengths, and autograd refuses tensors that were written to since.
        sides = _offsets(*offsets, shape, q.device, None, None)
        problem = _problem(shape, q.device, options, sides, *lengths)
        # The copies must outlive the call, hence the names.
        q, o, d_o = _rows(q), _rows(o), _rows(d_o)
        reference, sum, o_low = reference.contiguous(), sum.contiguous(), _rows(o_low)
        if codes is None:
            k, v = _rows(k), _rows(v)
        elif not codes.is_contiguous() or codes.data_ptr() % _ALIGNMENT != 0:
            codes = codes.clone(memory_format=torch.contiguous_format)  # of a caller of the operator
        dq, dk, dv = (_allocate_gradient(x, need) for x, need in zip((q, k, v), needed, strict=True))
        if sides is not None:
            for gradient, side in ((dq, sides[0]), (dk, sides[1]), (dv, sides[1])):
                if gradient.dim() > 1:
                    _clear_padding(gradient, 0, side)
        workspace = _device.workspace(problem, (shape, options), q.device, 1, codes is not None)
        args = _library.BackwardArgs(
            q=_argument(q),
            k=_argument(k) if codes is None else _library.TensorArg(),
            v=_argument(v) if codes is None else _library.TensorArg(),
            o=_argument(o),
            d_o=_argument(d_o),
            saved=_saved(reference, sum, o_low, codes, mode),
            # A null pointer leaves the gradient out.
            dq=_argument(dq) if needed[0] else _library.TensorArg(),
            dk=_argument(dk) if needed[1] else _library.TensorArg(),
            dv=_argument(dv) if needed[2] else _library.TensorArg(),
            workspace=workspace.pointer,
            workspace_bytes=workspace.nbytes,
        )
        _library.call("backward", problem, ctypes.byref(args))
    # While something records, no forward leaves codes (_keeps_codes): this one ran before, and has nothing to show.
    if codes is None and (record := _record.active) is not None:
        record.backward(_record.Call(q, k, v, d_o, reference, *offsets, *options))
    return dq, dk, dv


# What the library asks of saved.codes; Torch's allocator gives it.
_ALIGNMENT = 256


def _backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    reference: Tensor,
    sum: Tensor,
    o_low: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    mode: str,
    numerics: str,
    centre: str | None,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    return _run_backward(
        d_o,
        q,
        (k, v),
        None,
        o,
        reference,
        sum,
        o_low,
        (cu_seqlens_q, cu_seqlens_k),
        (max_seqlen_q, max_seqlen_k),
        (softmax_scale, causal, mode, numerics, centre),
        (need_dq, need_dk, need_dv),
    )


def _backward_fake(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    reference: Tensor,
    sum: Tensor,
    o_low: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    mode: str,
    numerics: str,
    centre: str | None,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _checks.check_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k)
    _checks.check_backward(shape, d_o, q, o, reference, sum, o_low, mode)
    return _allocate_gradient(q, need_dq), _allocate_gradient(k, need_dk), _allocate_gradient(v, need_dv)


def _keys_of(q: Tensor, k_len: int, kv_heads: int) -> Tensor:
    """A tensor of k's shape without its memory."""
    return q.new_empty(()).expand((*q.shape[:-3], k_len, kv_heads, q.shape[-1]))


def _backward_from_codes(
    d_o: Tensor,
    q: Tensor,
    codes: Tensor,
    o: Tensor,
    reference: Tensor,
    sum: Tensor,
    o_low: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    k_len: int,
    kv_heads: int,
    softmax_scale: float | None,
    causal: bool,
    mode: str,
    numerics: str,
    centre: str | None,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    keys = _keys_of(q, k_len, kv_heads)
    return _run_backward(
        d_o,
        q,
        (keys, keys),
        codes,
        o,
        reference,
        sum,
        o_low,
        (cu_seqlens_q, cu_seqlens_k),
        (max_seqlen_q, max_seqlen_k),
        (softmax_scale, causal, mode, numerics, centre),
        (need_dq, need_dk, need_dv),
    )


def _backward_from_codes_fake(
    d_o: Tensor,
    q: Tensor,
    codes: Tensor,
    o: Tensor,
    reference: Tensor,
    sum: Tensor,
    o_low: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    k_len: int,
    kv_heads: int,
    softmax_scale: float | None,
    causal: bool,
    mode: str,
    numerics: str,
    centre: str | None,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    keys = _keys_of(q, k_len, kv_heads)
    shape = _checks.check_inputs(q, keys, keys, cu_seqlens_q, cu_seqlens_k)
    _checks.check_backward(shape, d_o, q, o, reference, sum, o_low, mode)
    _checks.check_codes(codes, q)
    return _allocate_gradient(q, need_dq), _allocate_gradient(keys, need_dk), _allocate_gradient(keys, need_dv)


def _forward_setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], codes: Tensor | None = None
) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *lengths = inputs[:7]
    ctx.lengths, ctx.options = lengths, inputs[7:]
    o, lse, reference, total, o_low = output
    # Without this, autograd would hand over zeros for a missing gradient, which cannot be told from a real one.
    ctx.set_materialize_grads(False)
    # lse leaves through lse_out below, which refuses its gradient; the other three never leave.
    ctx.mark_non_differentiable(lse, reference, total, o_low)
    if codes is None:
        ctx.keys = ()
        ctx.save_for_backward(q, k, v, o, reference, total, o_low, cu_seqlens_q, cu_seqlens_k)
    else:
        ctx.keys = k.shape[-3:-1]
        ctx.save_for_backward(q, codes, o, reference, total, o_low, cu_seqlens_q, cu_seqlens_k)


def _forward_backward(ctx: Any, d_o: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    no_gradient = (None,) * 9
    if d_o is None:
        return (None, None, None, *no_gradient)
    needed = ctx.needs_input_grad[:3]
    tensors = (d_o, *ctx.saved_tensors)
    # With gradients on somebody wants to differentiate again, which is the operator's to refuse.
    direct = not torch.is_grad_enabled() and _nobody_watches(tensors)
    backward: Callable[..., tuple[Tensor, ...]]
    if ctx.keys:
        backward = _backward_from_codes if direct else torch.ops.delta_matching.backward_from_codes.default
    else:
        backward = _backward if direct else torch.ops.delta_matching.backward.default
    gradients = backward(*tensors, *ctx.keys, *ctx.options, *needed, *ctx.lengths)
    return (*(gradient if need else None for gradient, need in zip(gradients, needed, strict=True)), *no_gradient)


def _nobody_watches(tensors: tuple[Any, ...]) -> bool:
    """Whether an operator's function may be called for the operator: plain tensors with memory, the first of them on a
    device that it serves, and no mode, trace or profiler that would have seen it. The way through the dispatcher takes
    a third of the host's time."""
    return _plain(tensors) and not torch._C._autograd._profiler_enabled()


def _plain(tensors: tuple[Any, ...]) -> bool:
    """As :func:`_nobody_watches`, whatever a profiler does."""
    return (
        tensors[0].device.type in ("cpu", "cuda")
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and all(x is None or (type(x) in _PLAIN and not _wrapped(x)) for x in tensors)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _wrapped(tensor: Tensor) -> bool:
    """What only the dispatcher resolves: a sign that is not in memory, zeros without memory, a batch of vmap (the
    legacy one is that of torch.autograd.grad(is_grads_batched=True))."""
    return (
        tensor.is_neg()
        or tensor._is_zerotensor()
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or torch._C._functorch.is_legacy_batchedtensor(tensor)
    )


def forward_without_graph(*inputs: Any, wants_lse: bool = True) -> tuple[Tensor, ...]:
    """The forward operator where nothing is differentiated; its arguments. Without ``wants_lse`` lse may be empty."""
    if _nobody_watches(inputs[:5]):
        return tuple(_run_forward(*inputs, wants_lse=wants_lse)[0])
    outputs: tuple[Tensor, ...] = torch.ops.delta_matching.forward.default(*inputs)
    return outputs


def _keeps_codes(tensors: tuple[Any, ...]) -> bool:
    """Whether the forward of these tensors leaves codes: its operator, for whoever would see that, has no output for
    them, and a recorder wants to see k and v in the backward. Where saved tensors go through hooks it does not: a
    checkpoint without reentry compares what it saved with what the forward that is run again saves, and what is true
    here may have changed by then."""
    device = tensors[0].device
    if device.type not in _saved_codes.KEEPERS or not _saved_codes.save_codes():
        return False
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not hooked and _record.active is None and _plain(tensors)


class Differentiable(torch.autograd.Function):
    """The forward operator with the gradient that is registered for it, for plain eager calls: the wrapper that
    torch.library builds reads the operator's schema anew in every call, which takes longer than the rest together. Its
    inputs are the operator's, then whether lse is wanted: else it may be empty."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *inputs, wants_lse = arguments
        # Gradients are off in here, so the operator adds no graph of its own.
        output: tuple[Tensor, ...]
        codes: Tensor | None = None
        if _keeps_codes(tuple(inputs[:5])):
            # A profiler shall see what runs without it, under the operator's name.
            profiled = torch._C._autograd._profiler_enabled()
            with torch.autograd.profiler.record_function("delta_matching::forward") if profiled else _AS_IT_IS:
                output, codes = _run_forward(*inputs, keeps_codes=True, wants_lse=wants_lse)
        else:
            output = forward_without_graph(*inputs, wants_lse=wants_lse)
        _forward_setup_context(ctx, tuple(inputs), output, codes)
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*_forward_backward(ctx, gradients[0]), None)


def _backward_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Nothing is saved: the backward of the backward only refuses."""


def _refuse_double_backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        "double backward is not supported by delta_matching: the gradients of dm_attn_func and dm_attn_varlen_func "
        "cannot be differentiated again"
    )


# --- lse: returned, never differentiated ---------------------------------------------------------------------------
# An output marked non-differentiable would drop out of a loss without a word. This identity makes lse part of the graph
# (o is the anchor that says whether there is one) and refuses when a gradient arrives.

_LSE_REFUSAL = "lse is not differentiable in delta_matching: a gradient was asked of it; use lse.detach()"


def _lse_out(lse: Tensor, o: Tensor) -> Tensor:
    return lse.clone()


def _lse_out_fake(lse: Tensor, o: Tensor) -> Tensor:
    return torch.empty_like(lse)


def _lse_out_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.o_shape, ctx.o_dtype = inputs[1].shape, inputs[1].dtype


def _lse_out_backward(ctx: Any, d_lse: Tensor | None) -> tuple[None, Tensor | None]:
    if d_lse is None:
        return None, None
    # Torch 2.11 does not call it compiling when it traces a backward.
    if not torch.compiler.is_compiling() and not isinstance(d_lse, (FakeTensor, FunctionalTensor)):
        raise RuntimeError(_LSE_REFUSAL)
    # A traced backward sees a gradient for every output of the graph, zero where the caller asks for none. Whether one
    # was asked shows at run time only, so the check has to be an operator whose (zero) result is used.
    refused = torch.ops.delta_matching.refuse_lse_gradient(d_lse)
    return None, refused.to(ctx.o_dtype).expand(ctx.o_shape)


def _refuse_lse_gradient(d_lse: Tensor) -> Tensor:
    if _device.capturing(d_lse.device):
        # A graph cannot raise: where a gradient was asked, the one of o becomes NaN.
        return torch.where(d_lse.any(), torch.nan, 0.0).to(d_lse.dtype)
    if bool(d_lse.any()):
        raise RuntimeError(_LSE_REFUSAL)
    return d_lse.new_zeros(())


def _refuse_lse_gradient_fake(d_lse: Tensor) -> Tensor:
    return d_lse.new_empty(())


_FORWARD_SCHEMA = (
    "forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float? softmax_scale, bool causal, str mode, str numerics, str? centre) "
    "-> (Tensor o, Tensor lse, Tensor reference, Tensor sum, Tensor o_low)"
)
_BACKWARD_SCHEMA = (
    "backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor reference, Tensor sum, Tensor o_low, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float? softmax_scale, bool causal, str mode, str numerics, "
    "str? centre, bool need_dq, bool need_dk, bool need_dv, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)

_BACKWARD_FROM_CODES_SCHEMA = (
    "backward_from_codes(Tensor d_o, Tensor q, Tensor codes, Tensor o, Tensor reference, Tensor sum, Tensor o_low, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt k_len, SymInt kv_heads, float? softmax_scale, bool causal, "
    "str mode, str numerics, str? centre, bool need_dq, bool need_dk, bool need_dv, SymInt max_seqlen_q=0, "
    "SymInt max_seqlen_k=0) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def _register() -> None:
    operators = (
        (_FORWARD_SCHEMA, _forward, _forward_fake),
        (_BACKWARD_SCHEMA, _backward, _backward_fake),
        (_BACKWARD_FROM_CODES_SCHEMA, _backward_from_codes, _backward_from_codes_fake),
        ("lse_out(Tensor lse, Tensor o) -> Tensor", _lse_out, _lse_out_fake),
        ("refuse_lse_gradient(Tensor d_lse) -> Tensor", _refuse_lse_gradient, _refuse_lse_gradient_fake),
    )
    for schema, real, fake in operators:
        name = schema.partition("(")[0]
        _OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        # For every backend, so that an unsupported device meets our message and not the dispatcher's.
        _OPERATORS.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"delta_matching::{name}", fake, lib=_OPERATORS)
    for name, backward, setup_context in (
        ("forward", _forward_backward, _forward_setup_context),
        ("backward", _refuse_double_backward, _backward_setup_context),
        ("backward_from_codes", _refuse_double_backward, _backward_setup_context),
        ("lse_out", _lse_out_backward, _lse_out_setup_context),
    ):
        torch.library.register_autograd(
            f"delta_matching::{name}", backward, setup_context=setup_context, lib=_OPERATORS
        )


_register()
