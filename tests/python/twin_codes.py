"""Saved codes on the twin, which keeps none: what surrounds them can then be tested without a GPU.

The codes of this stand-in are copies of k and v. Its forward fills them, and its backward takes k and v from there
alone, so that results are the twin's, bit for bit, exactly if what the forward left has reached the backward.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from unittest import mock

import numpy as np

from delta_matching import _device, _library, _saved_codes


def _shape(problem: _library.Problem) -> tuple[int, ...]:
    batch = () if problem.cu_seqlens_q else (problem.batch,)
    return (*batch, problem.k_len, problem.kv_heads, problem.head_dim)


def _nbytes(problem: _library.Problem) -> int:
    """Of one of the two copies."""
    return 2 * int(np.prod(_shape(problem)))


def _contiguous(problem: _library.Problem, data: int) -> _library.TensorArg:
    row = problem.kv_heads * problem.head_dim
    return _library.TensorArg(data, problem.k_len * row, row, problem.head_dim)


def _read(problem: _library.Problem, tensor: _library.TensorArg) -> np.ndarray:
    shape = _shape(problem)
    strides = (*((tensor.batch_stride,) if len(shape) == 4 else ()), tensor.seq_stride, tensor.head_stride, 1)
    if 0 in shape:
        return np.zeros(shape, np.uint16)
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint16 * reach).from_address(tensor.data))
    return np.lib.stride_tricks.as_strided(memory, shape, [2 * stride for stride in strides])


class Stand:
    """In the library's place; counts the calls that had codes."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self._call = _library.call

    def saved_codes_size(self, problem: _library.Problem) -> int:
        return 2 * _nbytes(problem)

    def call(self, function: str, problem: _library.Problem, *args: object) -> None:
        if function in ("forward", "backward", "delta"):
            raw = args[0]._obj
            if raw.saved.codes:
                self._with_codes(function, problem, raw)
        self._call(function, problem, *args)

    def _with_codes(self, function: str, problem: _library.Problem, raw) -> None:
        nbytes = _nbytes(problem)
        if raw.saved.codes_bytes < 2 * nbytes:
            raise ValueError(f"saved.codes_bytes: expected at least {2 * nbytes}, got {raw.saved.codes_bytes}")
        places = (raw.saved.codes, raw.saved.codes + nbytes)
        if function == "forward":
            self.forwards += 1
            for place, tensor in zip(places, (raw.k, raw.v), strict=True):
                copied = np.ascontiguousarray(_read(problem, tensor))
                ctypes.memmove(place, copied.ctypes.data, copied.nbytes)
        else:
            self.backwards += 1
            assert not raw.k.data and not raw.v.data, "a backward with codes was given k and v"
            raw.k, raw.v = (_contiguous(problem, place) for place in places)


@contextlib.contextmanager
def codes_on_the_twin() -> Iterator[Stand]:
    stand = Stand()
    with (
        mock.patch.object(_library, "call", stand.call),
        mock.patch.object(_library, "saved_codes_size", stand.saved_codes_size),
        mock.patch.object(_saved_codes, "KEEPERS", ("cpu", "cuda")),
        mock.patch.object(_device, "_sizes", {}),
    ):
        yield stand
