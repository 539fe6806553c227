"""Hugging Face Transformers: :func:`register` makes delta_matching a choice of ``attn_implementation``.

    from delta_matching.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="delta_matching")

Nothing else changes: the model trains, generates and checkpoints as before. Padding masks become packed sequences once
per forward pass; what this attention does not compute is refused by name and never ignored. docs/guide.md is a tour.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from .. import _checks
from ..functional import Centre, Mode, dm_attn_func, dm_attn_varlen_func
from ._masks import Plan, make_plan
from ._sequences import plan_of, sequences

__all__ = ["attention_name", "register"]

_MODES: tuple[Mode, ...] = get_args(Mode)

_NEEDED = "delta_matching.integrations.transformers needs Transformers 4.56 or newer: pip install 'transformers>=4.56'"

# What Transformers hands to attention and exact attention does not depend on.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",  # it always is
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
    }
)

_REFUSED = {
    "head_mask": "masked heads are not supported",
    "output_attentions": "attention probabilities are never formed; use attn_implementation='eager' to see them",
    "position_bias": "an additive bias is not supported",
    "s_aux": "learned attention sinks are not supported",
    "sinks": "learned attention sinks are not supported",
    "softcap": "capped logits are not supported",
}


def _refuse(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        raise TypeError(f"{name}: {_REFUSED.get(name, 'not an argument that delta_matching attention knows')}")


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if torch.is_autocast_enabled(query.device.type):
        return  # the operator casts
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"{name}: expected torch.bfloat16, got {tensor.dtype}; load the model with dtype=torch.bfloat16, or "
                "run it under torch.autocast(device, dtype=torch.bfloat16)"
            )


# --- Attention -------------------------------------------------------------------------------------------------------


def _take(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Packed rows ``[total, heads, head_dim]`` of ``[batch, length, heads, head_dim]``."""
    flat = tensor.flatten(0, 1)
    return flat if rows is None else flat.index_select(0, rows)


def _put(packed: Tensor, rows: Tensor | None, batch: int, length: int) -> Tensor:
    """The opposite of :func:`_take`; rows of padding are zero."""
    if rows is not None:
        packed = packed.new_zeros(batch * length, *packed.shape[1:]).index_copy(0, rows, packed)
    return packed.view(batch, length, *packed.shape[1:])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Plan | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    *,
    mode: Mode,
    centre: Centre | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it.

    Args:
        query: ``[batch, q_heads, q_len, head_dim]``.
        key, value: ``[batch, kv_heads, k_len, head_dim]``, never repeated.
        attention_mask: what :func:`make_plan` made.
        is_causal: None: what the plan says, or the module. Aligned bottom-right, as decoding with a cache needs.
        position_ids: packed sequences where they start again; cu_seq_lens and max_length say the same outright.

    Returns: ``[batch, q_len, q_heads, head_dim]``, zero in rows of padding, and None for the probabilities.
    """
    _refuse(others)
    if dropout:
        raise TypeError(f"dropout: expected 0, got {dropout}; set attention_dropout=0.0 in the model's config")
    _check_dtypes(query, key, value)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    plan = plan_of(attention_mask, query, key, causal, is_causal is not None)
    offsets = {
        "cu_seq_lens_q": cu_seq_lens_q,
        "cu_seq_lens_k": cu_seq_lens_k,
        "max_length_q": max_length_q,
        "max_length_k": max_length_k,
    }
    rows = sequences(plan, offsets, position_ids, query)
    longest = plan.k_len if rows is None else rows.longest_k
    for window in (sliding_window, plan.window):
        if window is not None and longest > window:
            raise TypeError(f"sliding_window: expected at least the longest sequence, {longest} keys, got {window}")
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if rows is None:
        o = dm_attn_func(query, key, value, causal=plan.causal, mode=mode, softmax_scale=scaling, centre=centre)
        return o, None
    packed = dm_attn_varlen_func(
        _take(query, rows.q_rows),
        _take(key, rows.k_rows),
        _take(value, rows.k_rows),
        rows.cu_seqlens_q,
        rows.cu_seqlens_k,
        rows.longest_q,
        rows.longest_k,
        causal=plan.causal,
        mode=mode,
        softmax_scale=scaling,
        centre=centre,
    )
    return _put(packed, rows.q_rows, query.shape[0], plan.q_len), None


# --- Registration ----------------------------------------------------------------------------------------------------

# Reading a mask needs its values: in a compiled model one break of the graph per forward pass, none per layer.
_mask_function = torch.compiler.disable(make_plan)


@functools.cache
def _function(mode: Mode, centre: Centre | None) -> Callable[..., tuple[Tensor, None]]:
    return functools.partial(_attention, mode=mode, centre=centre)


def _interfaces() -> tuple[Any, Any]:
    try:
        modelling = importlib.import_module("transformers.modeling_utils")
        masking = importlib.import_module("transformers.masking_utils")
        return modelling.AttentionInterface, masking.AttentionMaskInterface
    except (ModuleNotFoundError, AttributeError) as error:
        # A Transformers that is there but broken must say so itself.
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "transformers":
            raise
        raise ImportError(_NEEDED) from None


def attention_name(mode: Mode = "matched", centre: Centre | None = None) -> str:
    """The ``attn_implementation`` of a mode: "delta_matching" for the defaults, "delta_matching_onepass",
    "delta_matching_onepass_centre_k" and so on for the rest.

    Errors: ValueError that lists the choices for an unknown name.
    """
    _checks.check_choices(mode, "hopper", centre)
    name = "delta_matching" if mode == "matched" else f"delta_matching_{mode}"
    return name if centre is None else f"{name}_centre_{centre}"


def register(mode: Mode = "matched", centre: Centre | None = None) -> str:
    """Make delta_matching known to Transformers, for attention and for masks, and return a name to ask for it by.

    A name means the same options for ever, so calls may be repeated, in any order. One call registers the names of all
    four modes: after ``register()``, ``attn_implementation`` may be "delta_matching" (matched),
    "delta_matching_onepass", "delta_matching_consistent" or "delta_matching_stale". Numerics are "hopper": head_dim 64,
    128 or 256.

    Args:
        mode: which name to return: "matched", "onepass", "consistent" or "stale" (docs/method.md).
        centre: "none", "k" or "qk" registers the modes with that centring too; None is the default, "qk".

    Returns: the name, for ``from_pretrained(..., attn_implementation=name)`` or
        ``model.set_attn_implementation(name)``.

    Raises:
        ImportError: Transformers is missing or older than 4.56.
        ValueError: an unknown name (the message lists the choices).

    Example:
        >>> model.set_attn_implementation(register("onepass"))

    What a model then may do: grouped queries, any softmax scale, padding masks (left or right; rows of padding come out
    as zero), packed sequences (position_ids that start again, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and
    max_length_k), caches that grow (DynamicCache), gradient checkpointing, torch.compile, torch.autocast. Refused with
    TypeError by name, in the forward pass: FP32 and FP16 without autocast, dropout, softcap, attention sinks,
    output_attentions, head_mask, position_bias, caches of a fixed size, masks that are not padding, and a
    sliding_window that is smaller than the longest sequence of the batch (a larger one changes nothing).
    """
    wanted = attention_name(mode, centre)
    attention, masks = _interfaces()
    for centring in dict.fromkeys((None, centre)):
        for each in _MODES:
            name = attention_name(each, centring)
            attention.register(name, _function(each, centring))
            masks.register(name, _mask_function)
    return wanted
