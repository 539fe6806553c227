"""What Transformers asks of attention in one forward pass of a model, as the packed sequences that the kernels take.

Transformers describes a mask as a function of indices plus a padding mask, and lets each attention implementation make
of it what it needs, once per forward pass (``AttentionMaskInterface``). Here that is a :class:`Plan`, which every layer
of the pass then gets in the place of ``attention_mask``. A mask function that is not known piece by piece is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _device


class Rows(NamedTuple):
    """Packed sequences. Rows are those of ``[batch * length, heads, head_dim]``."""

    q_rows: Tensor | None  # int64 [total_q]; None: all rows, as they lie
    k_rows: Tensor | None  # int64 [total_k]; None: all rows, as they lie
    cu_seqlens_q: Tensor  # int32 [sequences + 1]
    cu_seqlens_k: Tensor  # int32 [sequences + 1]
    longest_q: int
    longest_k: int


class Plan(NamedTuple):
    """What the layers of one forward pass compute."""

    q_len: int
    k_len: int
    causal: bool
    window: int | None  # keys that a query sees at most; None: all
    rows: Rows | None  # None: every row of the batch is one sequence, without padding
    unread: Tensor | None = None  # true if that holds indeed, where it could not be read


# --- From sequence numbers to rows -----------------------------------------------------------------------------------


def _offsets(counts: Tensor, device: torch.device) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(device, torch.int32)


def rows_of(ids: Tensor, q_len: int, every_query: bool, device: torch.device) -> Rows | None:
    """Packed sequences for numbered keys.

    Args:
        ids: integers ``[batch, k_len]`` on the CPU: 0 for padding, else the number of the key's sequence within its row
            of the batch, from 1 and never falling. The queries are those of the last ``q_len`` keys.
        every_query: queries are never padding (what attends both ways may have other queries than keys); needs rows of
            one sequence.
        device: where the tensors go.

    Returns: None where every row of the batch is one sequence without padding.
    """
    batch, k_len = ids.shape
    most = max(1, int(ids.max())) if ids.numel() else 1
    k_valid = ids > 0
    if most == 1 and bool(k_valid.all()):
        return None
    first = torch.arange(batch, device=ids.device)[:, None] * most  # the number of a batch row's first sequence
    sequence = first + (ids - 1).clamp(min=0)
    if every_query:
        q_valid, q_sequence = torch.ones(batch, q_len, dtype=torch.bool, device=ids.device), first.expand(batch, q_len)
    else:
        q_valid, q_sequence = k_valid[:, k_len - q_len :], sequence[:, k_len - q_len :]
    counts = [
        torch.bincount(numbers[valid], minlength=batch * most)
        for numbers, valid in ((q_sequence, q_valid), (sequence, k_valid))
    ]
    used = (counts[0] + counts[1]) > 0
    q_counts, k_counts = (x[used] for x in counts)
    q_rows, k_rows = (
        None if bool(valid.all()) else valid.flatten().nonzero().squeeze(1).to(device) for valid in (q_valid, k_valid)
    )
    longest = [int(x.max()) if x.numel() else 0 for x in (q_counts, k_counts)]
    return Rows(q_rows, k_rows, _offsets(q_counts, device), _offsets(k_counts, device), *longest)


# --- position_ids ----------------------------------------------------------------------------------------------------


def positions_rise(position_ids: Tensor) -> Tensor:
    """Whether nothing is packed, a bool tensor without dimensions. ``position_ids``: ``[batch or 1, length]``."""
    return (position_ids.diff(dim=-1) == 1).all()


def require_one_sequence(is_one: Tensor) -> None:
    """Where values cannot be read (in a traced graph, or while a CUDA graph is captured): have the device check."""
    torch._assert_async(
        is_one,
        "position_ids: packed sequences in a compiled or captured model need cu_seq_lens_q, cu_seq_lens_k, "
        "max_length_q and max_length_k",
    )


PADDED_AND_PACKED = "position_ids: sequences that start again beside an attention_mask with zeros are not supported"


def positions_agree(position_ids: Tensor, rows: Rows, batch: int) -> Tensor:
    """Whether positions fall at most where ``rows`` start a sequence, a bool tensor without dimensions."""
    positions = position_ids.to(rows.cu_seqlens_q.device).expand(batch, -1).flatten()
    if rows.q_rows is not None:
        positions = positions.index_select(0, rows.q_rows)
    ends = torch.zeros(positions.shape[0] + 1, dtype=torch.bool, device=positions.device)
    ends = ends.index_fill(0, rows.cu_seqlens_q.long(), True)
    return ((positions.diff() > 0) | ends[1:-1]).all()


def rows_of_positions(position_ids: Tensor, batch: int, device: torch.device) -> Rows | None:
    """Sequences packed into rows of the batch, found where positions start again; None where nothing is packed.

    Errors: ValueError for positions that do anything else: it is not clear what then belongs together.
    """
    positions = position_ids.detach().cpu().expand(batch, -1)
    starts = torch.nn.functional.pad(positions.diff(dim=-1) != 1, (1, 0))
    if not bool(starts.any()):
        return None
    if not bool((positions == positions[:, :1])[starts].all()):
        found = positions[starts & (positions != positions[:, :1])][0]
        raise ValueError(
            "position_ids: expected positions that rise by one, or start again at the first where sequences are "
            f"packed, got a jump to {int(found)}"
        )
    return rows_of(starts.cumsum(-1) + 1, positions.shape[1], False, device)


# --- The mask function of Transformers -------------------------------------------------------------------------------

_UNKNOWN = {
    "or_masks": "or_mask_function or block_sequence_ids: attention that looks ahead in places is not supported",
    "chunked_overlay": "attention_chunk_size: chunked attention is not supported",
    "_legacy_chunked_overlay": "attention_chunk_size: chunked attention is not supported",
}


# What else Transformers tells a mask function: how to write a mask down, and what the mask function itself says too.
_HARMLESS = frozenset(
    {
        "allow_is_bidirectional_skip",
        "allow_is_causal_skip",
        "allow_torch_fix",
        "config",
        "device",
        "dtype",
        "local_size",
        "use_vmap",
    }
)


class _Pattern(NamedTuple):
    causal: bool
    window: int | None
    packed: Tensor | None  # [batch, length], the number of each token's sequence, from 0


def _pattern(mask_function: Callable[..., Any]) -> _Pattern:
    """Take a mask function of Transformers apart. Errors: TypeError for a piece that is not known."""
    causal, window, packed = False, None, None
    pieces = [mask_function]
    while pieces:
        piece = pieces.pop()
        name = getattr(piece, "__qualname__", repr(piece)).partition(".")[0]
        code, cells = getattr(piece, "__code__", None), getattr(piece, "__closure__", None) or ()
        held = {} if code is None else dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=False))
        if getattr(piece, "__module__", None) != "transformers.masking_utils":
            raise TypeError(f"and_mask_function: a mask function of one's own is not supported, got {name}")
        if name == "and_masks" and "mask_functions" in held:
            pieces.extend(held["mask_functions"])
        elif name == "remap_positions_for_packed_sequence" and "mask_function" in held:
            pieces.append(held["mask_function"])
        elif name == "packed_sequence_mask_function" and "packed_sequence_mask" in held:
            if packed is not None:
                raise TypeError("packed_sequence_mask_function: expected one, got several")
            packed = held["packed_sequence_mask"]
        elif name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay") and "sliding_window" in held:
            window = held["sliding_window"] if window is None else min(window, held["sliding_window"])
        elif name == "causal_mask_function":
            causal = True
        elif name != "bidirectional_mask_function":
            raise TypeError(_UNKNOWN.get(name, f"mask_function: {name} of Transformers is not supported"))
    return _Pattern(causal, window, packed)


def _check_cache(q_len: int, k_end: int, q_offset: Any, cache_position: Tensor | None) -> None:
    """The queries have to be the last keys. A cache of fixed size hands over keys that were never written.

    Errors: TypeError.
    """
    if cache_position is not None:
        q_end = int(cache_position[-1]) + 1 if k_end != q_len else q_len
    else:
        q_end = int(q_offset) + q_len
    if q_end != k_end:
        raise TypeError(
            f"cache: expected one that grows (DynamicCache), got {k_end} keys where {q_end} tokens were seen; caches "
            "of a fixed size (StaticCache, cache_implementation='static') are not supported"
        )


def _padding(attention_mask: Tensor, k_len: int, k_offset: int) -> Tensor:
    if attention_mask.dim() != 2:
        raise TypeError(
            f"attention_mask: expected a padding mask [batch, keys], got shape {list(attention_mask.shape)}; other "
            "masks are not supported"
        )
    if attention_mask.shape[1] != k_len + k_offset:
        raise ValueError(f"attention_mask: expected {k_len + k_offset} columns, got {attention_mask.shape[1]}")
    return attention_mask[:, k_offset:].detach().bool().cpu()


def _check_span(valid: Tensor, window: int) -> None:
    """A window counts padding between tokens too, which packed rows leave out. Errors: TypeError."""
    inner = (valid.cumsum(-1) > 0) & (valid.flip(-1).cumsum(-1).flip(-1) > 0)
    holes = (inner & ~valid).any(-1)
    span = int((inner.sum(-1) * holes).max()) if valid.numel() else 0
    if span > window:
        raise TypeError(
            f"sliding_window: expected at least the span of tokens with padding between them, {span} keys, got {window}"
        )


def make_plan(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **others: object,
) -> Plan:
    """The mask function of the integration: called by Transformers once per forward pass and kind of layer.

    Args:
        batch_size, q_length, kv_length: sizes of the pass; before 5.0 Transformers gave ``cache_position``, the
            positions of the queries, in place of ``q_length`` and ``q_offset``.
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: who sees whom, by index.
        attention_mask: ``[batch, keys]``, true or 1 where there is a token.

    Errors: TypeError for a mask or a cache that is not supported, ValueError for a mask of another size; RuntimeError
    for a padding mask while a CUDA graph is captured.
    """
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise TypeError(f"{unknown[0]}: not an argument of masks that delta_matching knows")
    if q_length is None:
        q_length = kv_length if cache_position is None else cache_position.shape[0]
    pattern = _pattern(mask_function)
    if pattern.causal:
        _check_cache(q_length, kv_offset + kv_length, q_offset, cache_position)
    rows, unread = None, None
    source = pattern.packed if attention_mask is None else attention_mask
    if source is not None:
        if _device.capturing(source.device):
            if attention_mask is not None:
                raise RuntimeError("attention_mask: a padding mask cannot be read while a CUDA graph is captured")
            unread = (source == source[:, :1]).all()
        else:
            ids = torch.ones(batch_size, kv_length, dtype=torch.int64, device="cpu")  # whatever Torch's default
            if attention_mask is not None:
                ids *= _padding(attention_mask, kv_length, kv_offset)
            if pattern.packed is not None:
                ids *= pattern.packed.detach().cpu() + 1
            if bool(((ids.diff(dim=-1) < 0) & (ids[:, 1:] > 0)).any()):
                raise TypeError("packed_sequence_mask: expected numbers that never fall")
            if pattern.window is not None and attention_mask is not None:
                _check_span(ids > 0, pattern.window)
            every_query = not pattern.causal and pattern.packed is None
            rows = rows_of(ids, q_length, every_query, source.device)
    return Plan(q_length, kv_length, pattern.causal, pattern.window, rows, unread)
