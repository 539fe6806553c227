"""The shared library behind the C ABI (include/delta_matching/delta_matching.h), through ctypes alone.

Nothing here needs Torch or NumPy, so that one wheel serves every version of both. The structures mirror the header
field by field; each carries its own size, so a library of another version refuses the call instead of misreading it.
ctypes releases the GIL while a function of the library runs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Final

#: Names of the modes and their codes in the ABI; the order is that of the reports.
MODES: Final = {"stale": 3, "consistent": 2, "matched": 0, "onepass": 1}
NUMERICS: Final = {"hopper": 0, "paper": 1}
CENTRES: Final = {"none": 1, "k": 2, "qk": 3}
#: What ``centre=None`` means: K in paper numerics, Q and K in hopper numerics.
CENTRE_DEFAULT: Final = 0
ACCUMULATORS: Final = {"tensor_core": 0, "fp32": 1}
DEVICES: Final = {"cpu": 0, "cuda": 1}
OPERANDS: Final = {"q": 0, "k": 1, "v": 2, "d_o": 3, "q_scores": 4}

#: Environment variable that names a library to use in place of the packaged one.
LIBRARY_VARIABLE: Final = "DELTA_MATCHING_LIBRARY"

_STATUS_ERRORS: Final = {1: ValueError, 2: RuntimeError, 3: MemoryError, 4: RuntimeError, 5: RuntimeError}


class TensorArg(ctypes.Structure):
    """dmattn_tensor: BF16 data and element strides; the last dimension is contiguous."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("seq_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    ]


class _Sized(ctypes.Structure):
    """A structure whose first field is its own size, filled in here."""

    def __init__(self, **fields: object) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class Problem(_Sized):
    """dmattn_problem: everything about a call but its tensors."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("batch", ctypes.c_int64),
        ("q_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("q_len", ctypes.c_int64),
        ("k_len", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("softmax_scale", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("numerics", ctypes.c_int32),
        ("centre", ctypes.c_int32),
        ("accumulator", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p),
        ("max_q_len", ctypes.c_int64),
        ("max_k_len", ctypes.c_int64),
        ("workspace_cap", ctypes.c_size_t),
    ]


class Saved(ctypes.Structure):
    """dmattn_saved: what the forward leaves for the backward."""

    _fields_ = [
        ("reference", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("o_low", TensorArg),
        ("codes", ctypes.c_void_p),
        ("codes_bytes", ctypes.c_size_t),
    ]


class ForwardArgs(_Sized):
    """dmattn_forward_args."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("q", TensorArg),
        ("k", TensorArg),
        ("v", TensorArg),
        ("o", TensorArg),
        ("lse", ctypes.c_void_p),
        ("saved", Saved),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
    ]


class BackwardArgs(_Sized):
    """dmattn_backward_args."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("q", TensorArg),
        ("k", TensorArg),
        ("v", TensorArg),
        ("o", TensorArg),
        ("d_o", TensorArg),
        ("lse", ctypes.c_void_p),
        ("saved", Saved),
        ("delta", ctypes.c_void_p),
        ("delta_out", ctypes.c_void_p),
        ("dq", TensorArg),
        ("dk", TensorArg),
        ("dv", TensorArg),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
    ]


class QuantiseArgs(_Sized):
    """dmattn_quantise_args: ``k`` for the operand "q_scores" alone."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("operand", ctypes.c_int32),
        ("x", TensorArg),
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("k", TensorArg),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
    ]


class ReferenceArgs(_Sized):
    """dmattn_reference_args: outputs are contiguous doubles."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("q", TensorArg),
        ("k", TensorArg),
        ("v", TensorArg),
        ("d_o", TensorArg),
        ("o", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("dq", ctypes.c_void_p),
        ("dk", ctypes.c_void_p),
        ("dv", ctypes.c_void_p),
    ]


class ProbeArgs(_Sized):
    """dmattn_probe_args: ``modes`` is a bit mask of 1 << mode, 0 = all."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("q", TensorArg),
        ("k", TensorArg),
        ("v", TensorArg),
        ("d_o", TensorArg),
        ("modes", ctypes.c_uint32),
    ]


def code_of(name: str, value: object, table: dict[str, int]) -> int:
    """The ABI's code of a named choice.

    Errors: ValueError that names the argument ``name``, lists the choices and shows what came.
    """
    code = table.get(value) if isinstance(value, str) else None
    if code is None:
        raise ValueError(f"{name}: expected one of {', '.join(table)}, got {value!r}")
    return code


def centre_code(value: object) -> int:
    """As :func:`code_of` for ``centre``, where None leaves the choice to the numerics."""
    return CENTRE_DEFAULT if value is None else code_of("centre", value, CENTRES)


def _library_path() -> Path:
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        path = Path(named)
        if not path.is_file():
            raise RuntimeError(f"{LIBRARY_VARIABLE} names {named!r}, which is not a file")
        return path
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    path = Path(__file__).parent / "lib" / f"libdelta_matching{suffix}"
    if not path.is_file():
        raise RuntimeError(
            f"delta_matching has no shared library: {path} does not exist. "
            f"Install the package with 'pip install .', or set {LIBRARY_VARIABLE} to a libdelta_matching that you built"
        )
    return path


@functools.cache
def library() -> ctypes.CDLL:
    """The shared library, loaded on first use: ``DELTA_MATCHING_LIBRARY`` if set, else the packaged one.

    Errors: RuntimeError that says where it looked and what to do.
    """
    path = _library_path()
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.dmattn_version.restype = ctypes.c_char_p
        loaded.dmattn_last_error.restype = ctypes.c_char_p
        loaded.dmattn_free.argtypes = [ctypes.c_void_p]
        loaded.dmattn_free.restype = None
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"delta_matching cannot use the shared library {path}: {error}") from error
    return loaded


def call(function: str, problem: Problem, *args: object) -> None:
    """Call ``dmattn_<function>`` and turn its status into an exception.

    Errors: ValueError (a value out of its domain), RuntimeError (not offered here, refused by the CUDA runtime, or a
    fault of the library), MemoryError; the text is the library's own line, which names the argument.
    """
    loaded = library()
    status = getattr(loaded, f"dmattn_{function}")(ctypes.byref(problem), *args)
    if status:
        # The message is the calling thread's own, and no other call of this thread can come between.
        text = loaded.dmattn_last_error().decode("utf-8", "replace")
        raise _STATUS_ERRORS.get(status, RuntimeError)(text or f"dmattn_{function} failed with status {status}")


def workspace_size(problem: Problem) -> tuple[int, int]:
    """Device bytes that the forward and the backward of ``problem`` need; 0 on the CPU. Errors: as :func:`call`."""
    forward, backward = ctypes.c_size_t(), ctypes.c_size_t()
    call("workspace_size", problem, ctypes.byref(forward), ctypes.byref(backward))
    return forward.value, backward.value


def saved_codes_size(problem: Problem) -> int:
    """Device bytes of the codes that a forward of ``problem`` leaves; 0 on the CPU. Errors: as :func:`call`."""
    nbytes = ctypes.c_size_t()
    call("saved_codes_size", problem, ctypes.byref(nbytes))
    return nbytes.value


def version() -> str:
    """Version of the shared library, for example "0.1.0"."""
    return str(library().dmattn_version().decode())


def numerics_version() -> int:
    """Version of the hopper numerics contract (docs/numerics.md): bits are comparable only where it agrees."""
    return int(library().dmattn_numerics_version())


def device_available(device: str) -> bool:
    """Whether calls on ``device`` ("cpu" or "cuda") can run here."""
    return bool(library().dmattn_device_available(code_of("device", device, DEVICES)))
