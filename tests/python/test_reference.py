"""dmattn_reference, the FP64 oracle behind every published error, against Torch autograd in float64 and by finite
differences. Both are written independently of it."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from attention64 import attention64, bf16, error, gradients64
from delta_matching import _library

CASES = {
    "full": dict(),
    "causal": dict(causal=True),
    "GQA": dict(causal=True, q_heads=6, kv_heads=2),
    "more keys": dict(causal=True, q_len=5, k_len=19),
    "more keys, full": dict(q_len=5, k_len=19),
    "rows without keys": dict(causal=True, q_len=19, k_len=5),
    "no keys": dict(q_len=4, k_len=0),
    "no queries": dict(q_len=0, k_len=4),
    "one of each": dict(q_len=1, k_len=1),
    "D 1": dict(head_dim=1, causal=True),
    "D 300": dict(head_dim=300),
    "beyond a tile": dict(q_len=150, k_len=200, causal=True, batch=1, q_heads=2, kv_heads=1, head_dim=64),
    "scale": dict(softmax_scale=0.7, causal=True),
    "sharp": dict(spread=30.0, causal=True),
    "hopper's problem": dict(numerics="hopper", head_dim=64, causal=True),
}


NOTHING = torch.zeros(1)


def argument(x: Tensor) -> _library.TensorArg:
    strides = x.stride()
    # Without elements a tensor has a null pointer, which would mean "left out".
    return _library.TensorArg(x.data_ptr() or NOTHING.data_ptr(), *(strides[:3] if x.dim() == 4 else (0, *strides[:2])))


def reference(q, k, v, d_o=None, *, causal=False, scale=None, numerics="paper", offsets=(None, None)):
    """o, lse (, dq, dk, dv) of the library, in float64."""
    varlen = offsets[0] is not None
    length = 0 if varlen else 1
    problem = _library.Problem(
        batch=len(offsets[0]) - 1 if varlen else q.shape[0],
        q_heads=q.shape[-2],
        kv_heads=k.shape[-2],
        q_len=q.shape[length],
        k_len=k.shape[length],
        head_dim=q.shape[-1],
        softmax_scale=q.shape[-1] ** -0.5 if scale is None else scale,
        causal=int(causal),
        numerics=_library.NUMERICS[numerics],
        cu_seqlens_q=offsets[0].data_ptr() if varlen else None,
        cu_seqlens_k=offsets[1].data_ptr() if varlen else None,
    )
    rows = (q.shape[1], q.shape[0]) if varlen else (q.shape[0], q.shape[2], q.shape[1])
    # NaN shows what was not written.
    lse = torch.full((q.shape[-2], q.shape[0]) if varlen else rows, torch.nan, dtype=torch.float64)
    o, dq, dk, dv = (torch.full(x.shape, torch.nan, dtype=torch.float64) for x in (q, q, k, v))
    args = _library.ReferenceArgs(q=argument(q), k=argument(k), v=argument(v), o=o.data_ptr(), lse=lse.data_ptr())
    if d_o is not None:
        args.d_o = argument(d_o)
        args.dq, args.dk, args.dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
    _library.call("reference", problem, ctypes.byref(args))
    return (o, lse) if d_o is None else (o, lse, dq, dk, dv)


def close(value: Tensor, exact: Tensor, relative: float = 1e-12) -> None:
    """Relative to the norm, and infinities in the same places."""
    infinite = exact.isinf()
    assert torch.equal(value[infinite], exact[infinite])
    assert error(value[~infinite], exact[~infinite]) < relative


@pytest.mark.parametrize("case", CASES)
def test_against_autograd(case):
    options = dict(batch=2, q_heads=3, kv_heads=3, q_len=13, k_len=None, head_dim=8, causal=False, spread=1.0)
    options |= CASES[case]
    b, n, h, g, d = (options[x] for x in ("batch", "q_len", "q_heads", "kv_heads", "head_dim"))
    m = n if options["k_len"] is None else options["k_len"]
    # A float32 scale, as the ABI carries it.
    scale = torch.tensor(options.get("softmax_scale", d**-0.5), dtype=torch.float32).item()
    q, k, v, d_o = bf16(b, n, h, d, scale=options["spread"]), bf16(b, m, g, d), bf16(b, m, g, d), bf16(b, n, h, d)
    result = reference(q, k, v, d_o, causal=options["causal"], scale=scale, numerics=options.get("numerics", "paper"))
    for value, exact in zip(result, gradients64(q, k, v, d_o, options["causal"], scale), strict=True):
        close(value, exact)


def test_without_gradients():
    q, k, v = (bf16(1, 5, 1, 4) for _ in range(3))
    for value, exact in zip(reference(q, k, v, scale=0.5), attention64(q, k, v, False, 0.5), strict=True):
        close(value, exact)


def test_strides():
    q, k, v, d_o = (bf16(2, 3, 9, 8).transpose(1, 2) for _ in range(4))
    assert not q.is_contiguous()
    for value, exact in zip(reference(q, k, v, d_o, scale=0.25), gradients64(q, k, v, d_o, False, 0.25), strict=True):
        close(value, exact)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_varlen(causal):
    q_lengths, k_lengths = [5, 0, 1, 9], [7, 3, 1, 4]
    offsets = tuple(
        torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32) for x in (q_lengths, k_lengths)
    )
    q, k, v, d_o = bf16(15, 4, 8), bf16(15, 2, 8), bf16(15, 2, 8), bf16(15, 4, 8)
    o, lse, dq, dk, dv = reference(q, k, v, d_o, causal=causal, scale=0.25, offsets=offsets)
    for i in range(len(q_lengths)):
        rows, keys = (slice(x[i], x[i + 1]) for x in offsets)
        exact = gradients64(q[None, rows], k[None, keys], v[None, keys], d_o[None, rows], causal, 0.25)
        for value, expected in zip((o[rows], lse[:, rows], dq[rows], dk[keys], dv[keys]), exact, strict=True):
            close(value, expected[0])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_finite_differences(operand, causal):
    """Central differences of <dO, O>, extrapolated from two steps so that the error is of fourth order."""
    # Sixteenths between 1 and 2 in size: a step of 2^-7 or 2^-6 up and down stays exact in BF16's seven fraction bits.
    sign = torch.randint(0, 2, (4, 1, 6, 2, 3)) * 2 - 1
    grid = (1.0625 + torch.randint(0, 14, sign.shape) / 16) * sign
    tensors = dict(zip(("q", "k", "v", "d_o"), grid.to(torch.bfloat16), strict=True))
    d_o = tensors["d_o"].double()
    gradient = reference(**tensors, causal=causal)[{"q": 2, "k": 3, "v": 4}[operand]]

    def loss(index, step):
        moved = tensors[operand].clone()
        moved[index] += step
        assert moved[index].item() == tensors[operand][index].item() + step
        q, k, v = (moved if name == operand else tensors[name] for name in ("q", "k", "v"))
        return (reference(q, k, v, causal=causal)[0] * d_o).sum().item()

    for index in [(0, 0, 0, 0), (0, 2, 1, 1), (0, 5, 0, 2), (0, 3, 1, 0)]:
        small, large = ((loss(index, h) - loss(index, -h)) / (2 * h) for h in (2.0**-7, 2.0**-6))
        slope = (4 * small - large) / 3
        assert abs(slope - gradient[index].item()) < 1e-6 * max(1.0, abs(slope)), index
