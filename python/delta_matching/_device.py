"""What a call on a GPU needs beside its tensors: the stream, the workspace, memory for the codes that a forward leaves,
and cu_seqlens on the device.

CPU tensors need none of it. Nothing waits for the device but the first look at the values of cu_seqlens that lie there
(:func:`offsets_on_device`), and nothing does while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import _checks, _library

_AS_IT_IS = contextlib.nullcontext()


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which ``device`` is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device``, the current device, is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def describe(problem: _library.Problem, device: torch.device, cap: int) -> None:
    """Fill in the fields of ``problem`` that say on which GPU and stream it runs.

    Args:
        cap: most bytes of dS held at a time, 0 for the library's own limit.
    """
    problem.device = _library.DEVICES["cuda"]
    problem.device_index = torch.cuda.current_device() if device.index is None else device.index
    problem.stream = torch.cuda.current_stream(device).cuda_stream
    problem.workspace_cap = cap


class Workspace(NamedTuple):
    """Device memory of one call. It may go as soon as the call has returned: Torch gives it out again in the order of
    the stream, so whatever takes it next runs later."""

    memory: Tensor | None
    pointer: int | None
    nbytes: int


_NO_WORKSPACE = Workspace(None, None, 0)


class _Sizes(NamedTuple):
    forward: int
    backward: int
    codes: int


# What the library answered, by all that the answer depends on. A layer asks the same in every call.
_sizes: dict[Hashable, _Sizes] = {}
_MOST_SIZES = 1024


def _sizes_of(problem: _library.Problem, call: Hashable) -> _Sizes:
    key = (call, problem.device, problem.device_index, problem.workspace_cap, problem.max_q_len, problem.max_k_len)
    sizes = _sizes.get(key)
    if sizes is None:
        if len(_sizes) >= _MOST_SIZES:
            _sizes.clear()  # lengths that change all the time
        sizes = _sizes[key] = _Sizes(*_library.workspace_size(problem), _library.saved_codes_size(problem))
    return sizes


def saved_codes(problem: _library.Problem, call: Hashable, device: torch.device) -> Tensor:
    """Memory for the codes that a forward of ``problem`` leaves on ``device``: uint8 ``[bytes]``. ``call``: as for
    :func:`workspace`."""
    return torch.empty(_sizes_of(problem, call).codes, dtype=torch.uint8, device=device)


def workspace(
    problem: _library.Problem, call: Hashable, device: torch.device, phase: int, has_codes: bool = False
) -> Workspace:
    """What ``problem`` needs on ``device``, from Torch's allocator; nothing for CPU tensors.

    Args:
        call: the shape and the options of ``problem``: all of it but the device, its limits and pointers.
        phase: 0 for the forward, 1 for the backward.
        has_codes: the call gets saved codes, which a backward then needs no room for.
    """
    if device.type != "cuda":
        return _NO_WORKSPACE
    sizes = _sizes_of(problem, call)
    nbytes = sizes.forward if phase == 0 else sizes.backward - (sizes.codes if has_codes else 0)
    if nbytes == 0:
        return _NO_WORKSPACE
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return Workspace(memory, memory.data_ptr(), nbytes)


# --- cu_seqlens ------------------------------------------------------------------------------------------------------


class Offsets(NamedTuple):
    """cu_seqlens as the library takes them."""

    tensor: Tensor  # int32 [batch + 1], contiguous, on the device of the call
    end: int | None  # the last offset; None: not known on the host, because a CUDA graph is being captured


class _Seen(NamedTuple):
    """What was found in a tensor, and how to tell that it is still there."""

    state: tuple[int, ...]
    facts: _checks.OffsetFacts


# Offsets on a GPU whose values were looked at: the same tensor serves every layer of a step, and each look waits for
# the device. Keys are weak and compare by identity.
_seen = WeakTensorKeyDictionary()


def _state(offsets: Tensor) -> tuple[int, ...] | None:
    """Changes whenever Torch writes to ``offsets``; None where Torch does not count writes."""
    if offsets.is_inference():
        return None
    return offsets._version, offsets.data_ptr(), offsets.shape[0], offsets.stride(0)


def _facts(name: str, offsets: Tensor) -> _checks.OffsetFacts:
    if offsets.device.type == "cpu":
        return _checks.offset_facts(name, offsets)
    state = _state(offsets)
    seen: _Seen | None = _seen.get(offsets)
    if seen is not None and seen.state == state:
        return seen.facts
    facts = _checks.offset_facts(name, offsets)
    if state is not None:
        _seen[offsets] = _Seen(state, facts)
    return facts


def offsets_on_device(
    name: str, offsets: Tensor, device: torch.device, total: int, max_name: str, max_seqlen: int | None
) -> Offsets:
    """Check cu_seqlens and bring them to ``device``.

    Args:
        total: rows of the tensor that they divide.
        max_seqlen: the bound that the caller gave, None to leave the longest sequence unchecked.

    Errors: as :func:`_checks.offset_facts` and :func:`_checks.check_offsets`. While a CUDA graph is captured nothing
    can be read back, so the values go unchecked (the kernels keep to the tensors whatever they are); RuntimeError then
    for offsets on the CPU, since a replay would not copy them again.
    """
    if capturing(device):
        if offsets.device != device:
            raise RuntimeError(
                f"{name} is on {offsets.device}: expected a tensor on {device} while a CUDA graph is captured"
            )
        return Offsets(offsets.contiguous(), None)
    facts = _facts(name, offsets)
    _checks.check_offsets(name, facts, total, max_name, facts.longest if max_seqlen is None else max_seqlen)
    # From pageable memory the copy has read its source when it returns; from pinned memory it would still be reading.
    moved = offsets.to(device, non_blocking=not offsets.is_pinned()) if offsets.device != device else offsets
    return Offsets(moved.contiguous(), facts.end)
