"""The library's own results as NumPy arrays, through its C ABI. One head or several; BF16 as uint16 bits."""

from __future__ import annotations

import ctypes
from typing import ClassVar, NamedTuple

import numpy as np

from delta_matching import _library

from .quantise import FLUSH_ROWS, K_ROWS


class Options(NamedTuple):
    softmax_scale: float
    causal: bool = False
    mode: str = "matched"
    numerics: str = "hopper"
    centre: str | None = None


class Saved(NamedTuple):
    o: np.ndarray  # uint16 [rows, heads, head_dim]
    o_low: np.ndarray
    lse: np.ndarray  # float32 [heads, rows]
    reference: np.ndarray
    sums: np.ndarray  # float32 [2, heads, rows]


class Gradients(NamedTuple):
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    delta: np.ndarray


# An empty array may have any pointer, but a null one would mean "left out".
_NOTHING = ctypes.create_string_buffer(64)


def _pointer(array):
    return array.ctypes.data or ctypes.addressof(_NOTHING)


def _tensor(array):
    """uint16 [rows, heads, head_dim], contiguous."""
    assert array.flags.c_contiguous and array.dtype == np.uint16
    rows, heads, head_dim = array.shape
    return _library.TensorArg(_pointer(array), rows * heads * head_dim, heads * head_dim, head_dim)


def _problem(q, k, options):
    return _library.Problem(
        batch=1,
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        q_len=q.shape[0],
        k_len=k.shape[0],
        head_dim=q.shape[2],
        softmax_scale=options.softmax_scale,
        causal=int(options.causal),
        mode=_library.MODES[options.mode],
        numerics=_library.NUMERICS[options.numerics],
        centre=_library.centre_code(options.centre),
        threads=1,
    )


def forward(q, k, v, options):
    rows = (q.shape[1], q.shape[0])
    out = Saved(
        np.full_like(q, 0x7FFF),
        np.full_like(q, 0x7FFF),
        np.full(rows, np.nan, np.float32),
        np.full(rows, np.nan, np.float32),
        np.full((2, *rows), np.nan, np.float32),
    )
    low = _tensor(out.o_low) if options.mode == "onepass" else _library.TensorArg()
    saved = _library.Saved(reference=_pointer(out.reference), sum=_pointer(out.sums), o_low=low)
    args = _library.ForwardArgs(
        q=_tensor(q), k=_tensor(k), v=_tensor(v), o=_tensor(out.o), lse=_pointer(out.lse), saved=saved
    )
    _library.call("forward", _problem(q, k, options), ctypes.byref(args))
    return out


def _backward_args(q, k, v, d_o, saved, options, delta, out):
    low = _tensor(saved.o_low) if options.mode == "onepass" else _library.TensorArg()
    return _library.BackwardArgs(
        q=_tensor(q),
        k=_tensor(k),
        v=_tensor(v),
        o=_tensor(saved.o),
        d_o=_tensor(d_o),
        saved=_library.Saved(reference=_pointer(saved.reference), sum=_pointer(saved.sums), o_low=low),
        delta=None if delta is None else _pointer(delta),
        delta_out=_pointer(out),
    )


def backward(q, k, v, d_o, saved, options, delta=None):
    out = Gradients(*(np.full_like(x, 0x7FFF) for x in (q, k, v)), np.full(saved.lse.shape, np.nan, np.float32))
    args = _backward_args(q, k, v, d_o, saved, options, delta, out.delta)
    args.dq, args.dk, args.dv = _tensor(out.dq), _tensor(out.dk), _tensor(out.dv)
    _library.call("backward", _problem(q, k, options), ctypes.byref(args))
    return out


def delta(q, k, v, d_o, saved, options):
    out = np.full(saved.lse.shape, np.nan, np.float32)
    args = _backward_args(q, k, v, d_o, saved, options, None, out)
    _library.call("delta", _problem(q, k, options), ctypes.byref(args))
    return out


OPERANDS = {"q": 0, "k": 1, "v": 2, "d_o": 3}


class _QuantiseArgs(_library._Sized):
    """dmattn_quantise_args."""

    _fields_: ClassVar = [
        ("struct_size", ctypes.c_size_t),
        ("operand", ctypes.c_int32),
        ("x", _library.TensorArg),
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("k", _library.TensorArg),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
    ]


def scale_rows(operand):
    """Rows that share a scale."""
    return K_ROWS if operand in ("k", "v") else FLUSH_ROWS


def quantise(x, operand, options):
    """(codes [rows, heads, head_dim], scale [heads, blocks], mean [heads, head_dim]); hopper numerics."""
    rows, heads, head_dim = x.shape
    blocks = -(-rows // scale_rows(operand))
    codes = np.full(x.shape, 0xEE, np.uint8)
    scale, mean = np.full((heads, blocks), -1, np.float32), np.full((heads, head_dim), -1, np.float32)
    args = _QuantiseArgs(
        operand=OPERANDS[operand], x=_tensor(x), codes=_pointer(codes), scale=_pointer(scale), mean=_pointer(mean)
    )
    _library.call("quantise", _problem(x, x, options), ctypes.byref(args))
    return codes, scale, mean
