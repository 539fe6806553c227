"""The exchange under :mod:`delta_matching.parallel`: rows of a sequence for units of heads, and back.

A unit is one KV head of one batch element with its query heads. Everything here moves BF16 numbers and computes none,
but for :class:`Repeat`'s gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Layout(NamedTuple):
    """Who holds what: rows of the sequence before the exchange, units after it; both in the order of the ranks."""

    group: dist.ProcessGroup
    rank: int
    rows: tuple[int, ...]
    units: tuple[int, ...]


def _fields(buffer: Tensor, rows: int, units: int, counts: Sequence[int], head_dim: int) -> list[Tensor]:
    """The tensors ``[rows, units, count, head_dim]`` that lie in a flat buffer, heads of a row side by side."""
    heads = buffer.view(rows, units * sum(counts), head_dim).split([units * count for count in counts], dim=1)
    return [part.unflatten(1, (units, count)) for part, count in zip(heads, counts, strict=True)]


def _all_to_all(layout: Layout, sent: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """Hand ``send[r]`` elements of ``sent`` to rank r and return what came, ``receive[r]`` elements from rank r."""
    received = sent.new_empty(sum(receive))
    width = sent.element_size()
    # As bytes, since not every backend moves BF16.
    dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [width * size for size in receive],
        [width * size for size in send],
        group=layout.group,
    )
    return received


def _rows_to_units(layout: Layout, tensors: Sequence[Tensor]) -> list[Tensor]:
    """``[own rows, all units, count, head_dim]`` of each tensor to ``[all rows, own units, count, head_dim]``."""
    counts, head_dim = [x.shape[2] for x in tensors], tensors[0].shape[3]
    rows, units, unit = layout.rows[layout.rank], layout.units[layout.rank], sum(counts) * head_dim
    send = [rows * number * unit for number in layout.units]
    sent = tensors[0].new_empty(sum(send))
    first = 0
    for part, number in zip(sent.split(send), layout.units, strict=True):
        for field, x in zip(_fields(part, rows, number, counts, head_dim), tensors, strict=True):
            field.copy_(x[:, first : first + number])
        first += number
    received = _all_to_all(layout, sent, send, [number * units * unit for number in layout.rows])
    return _fields(received, sum(layout.rows), units, counts, head_dim)


def _units_to_rows(layout: Layout, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The way back: the inverse of :func:`_rows_to_units`, and, as it only moves numbers, its transpose."""
    counts, head_dim = [x.shape[2] for x in tensors], tensors[0].shape[3]
    rows, units, unit = layout.rows[layout.rank], layout.units[layout.rank], sum(counts) * head_dim
    send = [number * units * unit for number in layout.rows]
    sent = tensors[0].new_empty(sum(send))
    for field, x in zip(_fields(sent, sum(layout.rows), units, counts, head_dim), tensors, strict=True):
        field.copy_(x)
    receive = [rows * number * unit for number in layout.units]
    received = _all_to_all(layout, sent, send, receive)
    results = [received.new_empty(rows, sum(layout.units), count, head_dim) for count in counts]
    first = 0
    for part, number in zip(received.split(receive), layout.units, strict=True):
        for field, result in zip(_fields(part, rows, number, counts, head_dim), results, strict=True):
            result[:, first : first + number].copy_(field)
        first += number
    return results


class Exchange(torch.autograd.Function):
    """One all-to-all for all tensors; its gradient is the way back. Every rank takes part in both."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, to_units: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.to_units = layout, to_units
        return tuple((_rows_to_units if to_units else _units_to_rows)(layout, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_units_to_rows if ctx.to_units else _rows_to_units)(ctx.layout, gradients)


class Repeat(torch.autograd.Function):
    """A KV head for each part of its query heads. The parts' gradients are added in FP32, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        return x.unsqueeze(-2).expand(*x.shape[:-1], parts, x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first, *others = gradient.unbind(-2)
        total = first.float()
        for other in others:
            total = total + other.float()
        return total.to(gradient.dtype), None


def shares(total: int, ranks: int) -> tuple[int, ...]:
    """``total`` units over the ranks, as evenly as it goes, the first ones with one more."""
    least, more = divmod(total, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


def parts_of(units: int, group_size: int, ranks: int) -> int:
    """Into how many parts to cut each unit's query heads: the fewest that leave the busiest rank fewest of them."""
    divisors = (parts for parts in range(1, group_size + 1) if group_size % parts == 0)
    return min(divisors, key=lambda parts: (-(-units * parts // ranks) * (group_size // parts), parts))
