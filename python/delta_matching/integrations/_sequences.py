"""Which sequences a layer computes: those of the plan, of offsets, or of position_ids that start again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _device
from ._masks import (
    PADDED_AND_PACKED,
    Plan,
    Rows,
    positions_agree,
    positions_rise,
    require_one_sequence,
    rows_of,
    rows_of_positions,
)

# Each layer of a pass gets the same position_ids, and to look at their values waits for a GPU. Keys are weak and
# compare by identity; the version rises when Torch writes to the tensor.
_seen = WeakTensorKeyDictionary()  # position_ids: what they were, and the rows that they make
_ended = WeakTensorKeyDictionary()  # offsets that end where they should: their version, and the rows
_agreed = WeakTensorKeyDictionary()  # offsets of a plan: the position_ids that agree with it, and their version


def _rows_of_positions(position_ids: Tensor, batch: int, device: torch.device) -> Rows | None:
    if position_ids.is_inference():  # its writes are not counted
        return rows_of_positions(position_ids, batch, device)
    state = (position_ids._version, position_ids.data_ptr(), batch, device)
    known = _seen.get(position_ids)
    # NumPy and .data write without being counted; on the CPU the values themselves are compared.
    if known is None or known[0] != state or (known[2] is not None and not known[2].equal(position_ids)):
        values = position_ids.clone() if position_ids.device.type == "cpu" else None
        known = _seen[position_ids] = (state, rows_of_positions(position_ids, batch, device), values)
    rows: Rows | None = known[1]
    return rows


OTHER_SEQUENCES = "position_ids: expected the sequences of cu_seq_lens_q, got one that starts within one of those"


def _check_agreement(position_ids: Tensor, rows: Rows, batch: int, message: str = PADDED_AND_PACKED) -> None:
    """Errors: TypeError for a sequence that starts within one of the plan's."""
    if torch.compiler.is_compiling() or _device.capturing(position_ids.device):
        torch._assert_async(positions_agree(position_ids, rows, batch), message)
        return
    version = None if position_ids.is_inference() else position_ids._version
    known = _agreed.get(rows.cu_seqlens_q)
    if version is not None and known is not None and known[0] is position_ids and known[1] == version:
        return
    if not bool(positions_agree(position_ids, rows, batch)):
        raise TypeError(message)
    _agreed[rows.cu_seqlens_q] = (position_ids, version)


def _packed_by_position(position_ids: Tensor | None, plan: Plan, batch: int, device: torch.device) -> Rows | None:
    q_len, k_len = plan.q_len, plan.k_len
    if position_ids is None or q_len <= 1:
        return plan.rows
    if position_ids.dim() != 2 or position_ids.shape[-1] != q_len:
        raise TypeError(f"position_ids: expected shape [batch, {q_len}], got {list(position_ids.shape)}")
    if plan.rows is not None:
        _check_agreement(position_ids, plan.rows, batch)
        return plan.rows
    if torch.compiler.is_compiling() or _device.capturing(device):
        require_one_sequence(positions_rise(position_ids))
        return None
    rows = _rows_of_positions(position_ids, batch, device)
    if rows is not None and k_len != q_len:
        raise TypeError(f"position_ids: packed sequences after {k_len - q_len} cached tokens are not supported")
    return rows


def _packed_by_offsets(given: dict[str, Any], plan: Plan) -> Rows | None:
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise TypeError(f"{missing[0]}: expected beside {', '.join(x for x in given if x not in missing)}, got None")
    # Without padding the plan has all rows; sequences that it found by position are the same ones.
    if plan.rows is not None and (plan.rows.q_rows is not None or plan.rows.k_rows is not None):
        raise TypeError("cu_seq_lens_q: expected without padding, got an attention_mask with zeros too")
    cu_q, cu_k = (given[name].to(torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    return Rows(None, None, cu_q, cu_k, int(given["max_length_q"]), int(given["max_length_k"]))


def _check_end(name: str, offsets: Tensor, rows: int) -> None:
    """Offsets speak of all rows of the batch, cached keys included. Errors: ValueError."""
    if torch.compiler.is_compiling() or _device.capturing(offsets.device):
        torch._assert_async(offsets[-1] == rows, f"{name}: expected {rows}, all rows of the batch, as the last offset")
        return
    state = None if offsets.is_inference() else (offsets._version, rows)
    if state is not None and _ended.get(offsets) == state:
        return
    if (last := int(offsets[-1])) != rows:
        raise ValueError(f"{name}: expected {rows}, all rows of the batch, as the last offset, got {last}")
    _ended[offsets] = state


def plan_of(mask: object, query: Tensor, key: Tensor, causal: bool, explicit: bool) -> Plan:
    """The plan that the mask function made, or one for a model that makes no mask or hands the padding mask through.

    Args:
        causal: what the module or the call says; ``explicit`` if the call did.
    """
    q_len, k_len = query.shape[2], key.shape[2]
    if isinstance(mask, Plan):
        if (mask.q_len, mask.k_len) != (q_len, k_len):
            raise TypeError(
                f"attention_mask: made for {mask.q_len} queries and {mask.k_len} keys, got {q_len} and {k_len}; caches "
                "of a fixed size (StaticCache) are not supported"
            )
        if explicit and causal != mask.causal:
            raise TypeError(f"is_causal: expected {mask.causal}, as the model's mask is, got {causal}")
        return mask
    plan = Plan(q_len, k_len, causal, None, None)
    if mask is None:
        return plan
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        found = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"attention_mask: expected a padding mask [batch, keys], got {found}; other masks are not supported"
        )
    if tuple(mask.shape) != (query.shape[0], k_len):
        raise ValueError(f"attention_mask: expected shape {[query.shape[0], k_len]}, got {list(mask.shape)}")
    return plan._replace(rows=rows_of(mask.detach().cpu().bool().long(), q_len, not causal, query.device))


def sequences(plan: Plan, offsets: dict[str, Any], position_ids: Tensor | None, query: Tensor) -> Rows | None:
    """Packed sequences of a layer, None where every row of the batch is one sequence.

    Args:
        offsets: ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k`` by name; they come first.
        position_ids: ``[batch or 1, q_len]``.

    Errors: TypeError for arguments that are missing or contradict each other, ValueError for positions that jump.
    """
    rows = _packed_by_offsets(offsets, plan)
    if rows is not None:
        batch = query.shape[0]
        _check_end("cu_seq_lens_q", rows.cu_seqlens_q, batch * plan.q_len)
        _check_end("cu_seq_lens_k", rows.cu_seqlens_k, batch * plan.k_len)
        if position_ids is not None and plan.q_len == plan.k_len and position_ids.shape[-1] == plan.q_len > 1:
            _check_agreement(position_ids, rows, batch, OTHER_SEQUENCES)
        return rows
    if plan.unread is not None:
        require_one_sequence(plan.unread)
    return _packed_by_position(position_ids, plan, query.shape[0], query.device)
