"""A forward that nobody asks for lse: the same bits, but that onepass leaves out the sum which it alone needs."""

from __future__ import annotations

import pytest
import torch
from gpu_calls import DEVICE, MODES, Case, backward, forward, gaussian, ragged, square
from gpu_compare import mismatches

from delta_matching import dm_attn_func, dm_attn_varlen_func

CASES = [
    (64, lambda mode, d: square(mode, d, 333, (4, 2))),
    (128, lambda mode, d: square(mode, d, 1100, (2, 1))),
    (128, lambda mode, d: Case(mode, d, 200, 131, causal=True)),  # rows without keys
    (256, lambda mode, d: square(mode, d, 129, (2, 2), causal=False)),
    (64, lambda mode, d: ragged(mode, d, (0, 5, 0, 130, 64), padding=3)),
]


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", range(len(CASES)))
def test_bits(mode, index):
    head_dim, make = CASES[index]
    case = make(mode, head_dim)
    x = gaussian(case).to(DEVICE)
    asked, unasked = forward(case, x), forward(case, x, lse=False)
    of_sequences = slice(0, None if not case.varlen else sum(case.q_lengths))
    for name in ("o", "reference", "o_low"):
        a, b = getattr(asked, name), getattr(unasked, name)
        assert (a is None) == (b is None)
        assert a is None or mismatches(a, b) == 0, name
    assert mismatches(asked.sum[1], unasked.sum[1]) == 0, "the rounded sum"
    unrounded = unasked.sum[0][..., of_sequences]
    if mode == "onepass":
        assert bool(unrounded.isnan().all()), "not NaN where nothing was summed"
    else:
        assert mismatches(asked.sum[0], unasked.sum[0]) == 0, "the unrounded sum"
    with_lse, without = backward(case, x, asked), backward(case, x, unasked)
    for name in ("dq", "dk", "dv", "delta"):
        assert mismatches(getattr(with_lse, name), getattr(without, name)) == 0, name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_in_torch(mode, varlen, grad):
    case = ragged(mode, 64, (7, 130, 0, 61)) if varlen else square(mode, 128, 190)
    x = gaussian(case).to(DEVICE)
    results = []
    for return_lse in (False, True):
        q, k, v = (t.clone().requires_grad_(grad) for t in (x.q, x.k, x.v))
        if varlen:
            ends = torch.tensor([0, *case.q_lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
            out = dm_attn_varlen_func(q, k, v, ends, ends, 130, 130, causal=True, mode=mode, return_lse=return_lse)
        else:
            out = dm_attn_func(q, k, v, causal=True, mode=mode, return_lse=return_lse)
        o, lse = out if return_lse else (out, None)
        assert lse is None or bool(lse.isfinite().all())
        if grad:
            o.backward(x.d_o)
        results.append([t for t in (o.detach(), q.grad, k.grad, v.grad) if t is not None])
    for a, b in zip(*results, strict=True):
        assert mismatches(a, b) == 0
