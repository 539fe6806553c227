"""Which part of a call is measured: one sequence, its first tokens, a few heads. What bounds a measurement's cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Sample(NamedTuple):
    """What was recorded of one call. q and d_o ``[tokens, heads, head_dim]``, k and v ``[k_tokens, heads, head_dim]``:
    copies, where every query head has its own copy of its key head."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor  # empty until the backward has come
    heads: tuple[int, ...]  # numbers of the query heads in the model's layer
    q_heads: int
    kv_heads: int
    q_len: int  # of the sequence before it was cut
    k_len: int
    causal: bool


class NotMeasured(Exception):
    """A call that cannot be reproduced, or lies beyond the limits; the text says why."""


def sampled_heads(wanted: int | Sequence[int], q_heads: int) -> tuple[int, ...]:
    """Query heads to measure: evenly spaced from head 0 for a count, else those named.

    Errors: NotMeasured for a head that the layer does not have.
    """
    if isinstance(wanted, int):
        count = min(wanted, q_heads)
        return tuple(i * q_heads // count for i in range(count))
    for head in wanted:
        if head >= q_heads:
            raise NotMeasured(f"heads: the layer has {q_heads} query heads, expected heads below that, got {head}")
    return tuple(wanted)


def window(q_len: int, k_len: int, causal: bool, limit: int) -> tuple[int, int]:
    """Queries and keys that are measured of a sequence: all, or the first ``limit``.

    The first queries of causal self-attention see the first keys alone, so their o and dq are those of the whole.
    Without causality the cut is another softmax, over the keys that are left.

    Errors: NotMeasured where there is nothing, or where the cut would move the causal diagonal.
    """
    if q_len < 1 or k_len < 1:
        raise NotMeasured(f"no tokens: {q_len} queries and {k_len} keys")
    if max(q_len, k_len) <= limit:
        return q_len, k_len
    if causal and q_len != k_len:
        raise NotMeasured(
            f"causal attention of {q_len} queries to {k_len} keys: expected equal numbers, or at most max_tokens = "
            f"{limit} of each"
        )
    return min(q_len, limit), min(k_len, limit)


def longest_sequence(cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int]) -> tuple[slice, slice]:
    """Rows of the sequence with the most queries, the first of equals. Errors: NotMeasured for an empty batch."""
    batch = len(cu_seqlens_q) - 1
    if batch < 1:
        raise NotMeasured("no tokens: a batch of 0 sequences")
    at = max(range(batch), key=lambda b: cu_seqlens_q[b + 1] - cu_seqlens_q[b])
    return slice(cu_seqlens_q[at], cu_seqlens_q[at + 1]), slice(cu_seqlens_k[at], cu_seqlens_k[at + 1])


def take(x: Tensor, rows: int, heads: Sequence[int]) -> Tensor:
    """A copy of ``x[:rows, heads]`` of ``[length, heads, head_dim]``, made without waiting for the device."""
    return torch.stack([x[:rows, head] for head in heads], dim=1)


def sample(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor | None, causal: bool, heads: int | Sequence[int], limit: int
) -> Sample:
    """Copy what is measured of one sequence: q, d_o ``[q_len, q_heads, head_dim]``, k, v ``[k_len, kv_heads, ...]``.

    Errors: NotMeasured.
    """
    q_len, q_heads = q.shape[0], q.shape[1]
    k_len, kv_heads = k.shape[0], k.shape[1]
    q_rows, k_rows = window(q_len, k_len, causal, limit)
    chosen = sampled_heads(heads, q_heads)
    keys = [head // (q_heads // kv_heads) for head in chosen]
    with torch.no_grad():
        return Sample(
            take(q, q_rows, chosen),
            take(k, k_rows, keys),
            take(v, k_rows, keys),
            q.new_empty(0) if d_o is None else take(d_o, q_rows, chosen),
            chosen,
            q_heads,
            kv_heads,
            q_len,
            k_len,
            causal,
        )
