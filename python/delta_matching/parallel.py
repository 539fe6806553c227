"""Attention over a sequence that several processes hold: Ulysses sequence parallelism, :func:`dm_attn_ulysses`.

Each rank of a process group holds a slice of the sequence of q, k and v, all heads of it. An all-to-all trades rows for
heads, so that each rank attends the whole sequence in some of the heads, and another brings the rows of O back; the
backward goes the same way round. Both only move BF16 numbers, so nothing is rounded on the way.

What a rank attends are *units*: a KV head of one batch element (of the pack, with cu_seqlens) with all its query heads.
They stay together because their dK and dV are one FP32 sum (docs/numerics.md, section 4): whole units give every bit
that one process gives. Fewer units than ranks leave ranks idle; ``split_groups`` trades bits of dK and dV for them.

Source: the all-to-all scheme is that of DeepSpeed-Ulysses (arXiv 2309.14509); units and their bits are this project's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from . import _checks, _device, _dtensor, functional
from ._checks import Shape
from ._exchange import Exchange, Layout, Repeat, parts_of, shares
from .functional import Centre, Mode, Numerics

_P = ParamSpec("_P")

__all__ = ["dm_attn_ulysses", "dm_attn_ulysses_varlen", "gather_lengths"]


def _eager(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """``function``, never traced: a compiled caller is cut here, and refused with ``fullgraph=True``. Tracing would
    turn the exchange into collectives that run beside the code which uses their results."""
    reason = "delta_matching.parallel runs eagerly: its all-to-all is not traced"
    disabled: Callable[_P, Tensor] = torch.compiler.disable(function, reason=reason)
    return disabled


def _process_group(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, int, int]:
    """The group, this process's rank in it and its size."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group: no process group, call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: expected a torch.distributed.ProcessGroup that has this process in it, got {type(group).__name__}"
        )
    return group, dist.get_rank(group), dist.get_world_size(group)


def gather_lengths(
    length: int, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> list[int]:
    """How many rows of the sequence each rank of ``group`` holds, for ``lengths``; every rank has to call it.

    Args:
        length: rows that this rank holds.
        group: the process group; None for the default one.
        device: where the backend takes its tensors from; None: the current GPU for NCCL, else the CPU. Waits for it.

    Raises:
        RuntimeError: there is no process group.
    """
    group, _, ranks = _process_group(group)
    if device is None:
        nccl = dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    lengths = torch.empty(ranks, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(lengths, torch.tensor([length], device=device), group=group)
    return [int(value) for value in lengths.tolist()]


# Groups whose ranks were found to hold equal lengths. On a GPU they are asked once, since the answer has to be waited
# for; weak, so that a group may go.
_equal: WeakSet[dist.ProcessGroup] = WeakSet()


def _lengths(given: Sequence[int] | None, own: int, device: torch.device, group: dist.ProcessGroup) -> tuple[int, ...]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if given is None:
        if device.type == "cpu" or group not in _equal:
            found = gather_lengths(own, group, device)
            if found != [own] * ranks:
                raise ValueError(
                    f"lengths: expected every rank's number of rows where they differ, got None; the ranks hold {found}"
                )
            _equal.add(group)
        return (own,) * ranks
    lengths = tuple(operator.index(length) for length in given)
    if len(lengths) != ranks or min(lengths) < 0:
        raise ValueError(f"lengths: expected {ranks} numbers of rows, one for each rank, got {list(lengths)}")
    if lengths[rank] != own:
        raise ValueError(
            f"lengths: expected the {own} rows that rank {rank} holds at index {rank}, got {list(lengths)}"
        )
    return lengths


def _options(*values: object) -> dict[str, Any]:
    return dict(zip(("causal", "mode", "softmax_scale", "numerics", "centre"), values, strict=True))


def _local(
    function: str,
    unsupported: dict[str, object],
    options: dict[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Shape]:
    """Refuse what one rank can refuse before any exchange, where the others would wait for it."""
    functional._refuse(function, unsupported)
    functional._check_tensors(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if _dtensor.is_dtensor(tensor):
            raise TypeError(f"{name}: expected this rank's rows as a plain tensor, got a DTensor; use its to_local()")
    q, k, v = functional._autocast(q, k, v)
    functional._refuse_forward_mode(q=q, k=k, v=v)
    shape = _checks.check_inputs(q, k, v, *more)
    if shape.q_len != shape.k_len:
        raise ValueError(f"k: expected as many rows as q, {shape.q_len}, got {shape.k_len}")
    _checks.check_device(q.device, options["numerics"])
    _checks.check_choices(options["mode"], options["numerics"], options["centre"])
    _checks.resolve_scale(options["softmax_scale"], shape.head_dim)
    return q, k, v, shape


def _attend(units: Sequence[Tensor], varlen: tuple[Tensor, Tensor, int, int] | None, options: dict[str, Any]) -> Tensor:
    """This rank's units, each ``[rows, units, count, head_dim]``, as one call."""
    q, k, v = units
    if varlen is None or q.shape[1] == 0:
        # Each unit is a batch element with one KV head. No unit is a batch of none, which keeps the rank in the graph.
        o: Tensor = functional.dm_attn_func(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), **options)
        return o.transpose(0, 1)
    flat_q, flat_k, flat_v = (x.flatten(1, 2) for x in units)
    o = functional.dm_attn_varlen_func(flat_q, flat_k, flat_v, *varlen, **options)
    return o.view(q.shape)


def _ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    parts: int,
    varlen: tuple[Tensor, Tensor, int, int] | None,
    options: dict[str, Any],
) -> Tensor:
    """``[own rows, batch, heads, head_dim]`` to O in q's shape."""
    rows, batch, q_heads, head_dim = q.shape
    pieces = sum(layout.units)
    needed = tuple(x.requires_grad for x in (q, k, v))
    if parts > 1:
        k, v = Repeat.apply(k, parts), Repeat.apply(v, parts)
    count = batch * q_heads // pieces
    packed = (q.reshape(rows, pieces, count, head_dim), *(x.reshape(rows, pieces, 1, head_dim) for x in (k, v)))
    units = Exchange.apply(layout, True, *packed)
    if units[0].shape[1] > 0:  # all of them share the exchange's graph: leave out again what nobody needs
        units = tuple(x if need else x.detach() for x, need in zip(units, needed, strict=True))
    o: Tensor
    (o,) = Exchange.apply(layout, False, _attend(units, varlen, options))
    return o.view(rows, batch, q_heads, head_dim)


@_eager
def dm_attn_ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    lengths: Sequence[int] | None = None,
    split_groups: bool = False,
    causal: bool = False,
    mode: Mode = "matched",
    softmax_scale: float | None = None,
    numerics: Numerics = "hopper",
    centre: Centre | None = None,
    **unsupported: object,
) -> Tensor:
    """:func:`delta_matching.dm_attn_func` of a sequence whose rows the ranks of ``group`` hold, in their order.

    Every rank has to make the call, and the backward, with the same options, batch, heads and needs of gradients.

    Args:
        q: BF16 ``[batch, rows, q_heads, head_dim]``, this rank's rows.
        k, v: BF16 ``[batch, rows, kv_heads, head_dim]``, the same rows.
        group: the process group, None for the default one. Its backend has to have all-to-all (NCCL, Gloo).
        lengths: rows that each rank holds; 0 will do. None where all hold as many: on the CPU each call checks that,
            on a GPU the first one of a group. :func:`gather_lengths` asks the ranks.
        split_groups: query heads of one KV head may be divided among ranks where that leaves fewer of them on the
            busiest one. O and dQ keep their bits; dK and dV are then sums, in FP32 and in a fixed order, of each part's
            BF16 values, off by at most 2^-8 of the parts' sum of magnitudes and two roundings of their own.
        causal, mode, softmax_scale, numerics, centre: as in :func:`delta_matching.dm_attn_func`.

    Returns:
        ``o`` BF16 in q's shape, contiguous: the rows of what one process with the whole sequence gets, bit for bit in
        every mode, and so are the gradients, unless ``split_groups`` divided a group.

    Raises:
        RuntimeError: no process group. ValueError: q and k of different lengths; lengths that are not equal and not
        given, or given and wrong. TypeError: a DTensor. Else as :func:`delta_matching.dm_attn_func`.

    Example:
        >>> o = dm_attn_ulysses(q, k, v, causal=True)  # q, k, v: rows rank * n ... (rank + 1) * n - 1 of the sequence
    """
    options = _options(causal, mode, softmax_scale, numerics, centre)
    group, rank, ranks = _process_group(group)
    q, k, v, shape = _local("dm_attn_ulysses", unsupported, options, q, k, v)
    rows = _lengths(lengths, shape.q_len, q.device, group)
    units = shape.batch * shape.kv_heads
    parts = parts_of(units, shape.q_heads // shape.kv_heads, ranks) if split_groups and units else 1
    layout = Layout(group, rank, rows, shares(units * parts, ranks))
    if units == 0:  # a batch of none has nothing to trade
        empty: Tensor = functional.dm_attn_func(q, k, v, **options)
        return empty
    o = _ulysses(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), layout, parts, None, options)
    return o.transpose(0, 1).contiguous()


@_eager
def dm_attn_ulysses_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    group: dist.ProcessGroup | None = None,
    lengths: Sequence[int] | None = None,
    split_groups: bool = False,
    causal: bool = False,
    mode: Mode = "matched",
    softmax_scale: float | None = None,
    numerics: Numerics = "hopper",
    centre: Centre | None = None,
    **unsupported: object,
) -> Tensor:
    """As :func:`dm_attn_ulysses` for packed sequences; the ranks' slices may cut through them.

    Args:
        q: BF16 ``[rows, q_heads, head_dim]``, this rank's rows of the pack.
        k, v: BF16 ``[rows, kv_heads, head_dim]``.
        cu_seqlens: int32 ``[batch + 1]``, offsets into the rows of all ranks together, the same on every rank; as in
            :func:`delta_matching.dm_attn_varlen_func`.
        max_seqlen: at least the longest sequence.
        group, lengths, split_groups and the rest: as in :func:`dm_attn_ulysses`.

    Returns:
        ``o`` BF16 in q's shape. Raises: as :func:`dm_attn_ulysses` and :func:`delta_matching.dm_attn_varlen_func`.
    """
    options = _options(causal, mode, softmax_scale, numerics, centre)
    group, rank, ranks = _process_group(group)
    functional._check_tensors(cu_seqlens=cu_seqlens)
    q, k, v, shape = _local("dm_attn_ulysses_varlen", unsupported, options, q, k, v, cu_seqlens, cu_seqlens)
    if not isinstance(max_seqlen, int) or isinstance(max_seqlen, bool):
        raise TypeError(f"max_seqlen: expected an int, got {type(max_seqlen).__name__}")
    rows = _lengths(lengths, shape.q_len, q.device, group)
    with _device.current(q.device):
        # On every rank, also one that will have nothing to attend.
        _device.offsets_on_device("cu_seqlens", cu_seqlens, q.device, sum(rows), "max_seqlen", max_seqlen)
    parts = parts_of(shape.kv_heads, shape.q_heads // shape.kv_heads, ranks) if split_groups else 1
    layout = Layout(group, rank, rows, shares(shape.kv_heads * parts, ranks))
    varlen = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _ulysses(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), layout, parts, varlen, options).squeeze(1)
