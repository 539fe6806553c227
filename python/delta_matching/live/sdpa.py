"""What a call of torch.nn.functional.scaled_dot_product_attention means, in the library's own terms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .window import NotMeasured, Sample, take


class Call(NamedTuple):
    """The arguments, by Torch's names. query ``[batch, q_heads, q_len, head_dim]``, key and value likewise."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def understood(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call's arguments. Errors: NotMeasured for what attention without mask and dropout does not reproduce."""
    try:
        call = Call(*args, **kwargs)
    except TypeError as error:
        raise NotMeasured(f"scaled_dot_product_attention: unknown arguments: {error}") from None
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested or tensor.layout != torch.strided:
            raise NotMeasured(f"{name}: expected a plain tensor, got {type(tensor).__name__} of layout {tensor.layout}")
        if tensor.dim() != 4:
            raise NotMeasured(f"{name}: expected 4 dimensions [batch, heads, length, head_dim], got {tensor.dim()}")
    if call.attn_mask is not None:
        raise NotMeasured("attn_mask: expected None, since is_causal and full attention alone are reproduced, got one")
    if call.dropout_p:
        raise NotMeasured(f"dropout_p: expected 0, got {call.dropout_p}")
    _check_shapes(call)
    return call


def _check_shapes(call: Call) -> None:
    batch, q_heads, q_len, head_dim = call.query.shape
    kv_heads, k_len = call.key.shape[1], call.key.shape[2]
    if call.value.shape != call.key.shape or call.key.shape[3] != head_dim:
        raise NotMeasured(
            f"value: expected key's shape and query's head_dim {head_dim}, got key {list(call.key.shape)} and value "
            f"{list(call.value.shape)}"
        )
    if batch < 1 or call.key.shape[0] != batch:
        raise NotMeasured(f"key: expected query's batch {batch}, of at least 1, got {call.key.shape[0]}")
    if kv_heads < 1 or q_heads % kv_heads or (q_heads != kv_heads and not call.enable_gqa):
        raise NotMeasured(f"key: expected query's {q_heads} heads, or with enable_gqa a divisor, got {kv_heads}")
    if call.is_causal and q_len != k_len:
        raise NotMeasured(
            f"is_causal: expected as many queries as keys, since Torch aligns top-left, got {q_len} and {k_len}"
        )


def first_sequence(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Batch entry 0 of query, key and value as ``[length, heads, head_dim]``."""
    q, k, v = (x.detach()[0].transpose(0, 1) for x in (call.query, call.key, call.value))
    return q, k, v


def gradient(d_o: Tensor, sample: Sample) -> Tensor:
    """The part of the output's gradient ``[batch, heads, length, head_dim]`` that belongs to ``sample``."""
    return take(d_o.detach()[0].transpose(0, 1), sample.q.shape[0], sample.heads)
