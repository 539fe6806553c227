"""Packed sequences: the same bits as each sequence alone, padding that is never read, offsets that are checked."""

from __future__ import annotations

import pytest
import torch

from attention64 import MODES, bf16, same_bits
from delta_matching import dm_attn_func, dm_attn_varlen_func

Q_LENGTHS, K_LENGTHS = [5, 0, 130, 1, 64, 3], [7, 4, 150, 1, 64, 0]


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed(padding: int = 0, heads: int = 4, kv_heads: int = 2):
    """q, k, v with ``padding`` rows of NaN at the end."""
    sizes = ((sum(Q_LENGTHS), heads), (sum(K_LENGTHS), kv_heads), (sum(K_LENGTHS), kv_heads))
    tensors = []
    for rows, count in sizes:
        x = torch.full((rows + padding, count, 64), torch.nan, dtype=torch.bfloat16)
        x[:rows] = bf16(rows, count, 64)
        tensors.append(x.requires_grad_())
    return tensors


def run(q, k, v, d_o, **options):
    o, lse = dm_attn_varlen_func(
        q, k, v, offsets(Q_LENGTHS), offsets(K_LENGTHS), max(Q_LENGTHS), max(K_LENGTHS), return_lse=True, **options
    )
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), d_o)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_as_each_sequence_alone(mode, causal):
    q, k, v = packed()
    d_o = bf16(*q.shape)
    o, lse, dq, dk, dv = run(q, k, v, d_o, mode=mode, causal=causal)
    assert o.shape == q.shape and lse.shape == (4, q.shape[0])
    for i0, n, j0, m in zip(offsets(Q_LENGTHS), Q_LENGTHS, offsets(K_LENGTHS), K_LENGTHS, strict=False):
        rows, keys = slice(i0, i0 + n), slice(j0, j0 + m)
        alone = [x.detach()[part][None].requires_grad_() for x, part in ((q, rows), (k, keys), (v, keys))]
        o1, lse1 = dm_attn_func(*alone, mode=mode, causal=causal, return_lse=True)
        grads = torch.autograd.grad(o1, alone, d_o[rows][None])
        assert same_bits(o[rows], o1[0]) and same_bits(lse[:, rows], lse1[0])
        for whole, part, one in zip((dq, dk, dv), (rows, keys, keys), grads, strict=True):
            assert same_bits(whole[part], one[0])


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_harmless(mode):
    q, k, v = packed()
    d_o = bf16(*q.shape)
    expected = run(q, k, v, d_o, mode=mode, causal=True)

    def pad(x):
        return torch.cat([x.detach(), torch.full((9, *x.shape[1:]), torch.nan, dtype=x.dtype)]).requires_grad_()

    o, lse, *grads = run(pad(q), pad(k), pad(v), pad(d_o).detach(), mode=mode, causal=True)
    rows = q.shape[0]
    assert same_bits(o[:rows], expected[0]) and not o[rows:].any() and not o.isnan().any()
    assert same_bits(lse[:, :rows], expected[1]) and (lse[:, rows:] == -torch.inf).all()
    for padded, grad in zip(grads, expected[2:], strict=True):
        assert same_bits(padded[: grad.shape[0]], grad)
        assert padded.shape[0] == grad.shape[0] + 9 and not padded[grad.shape[0] :].any() and not padded.isnan().any()


def test_only_some_gradients():
    q, k, v = packed(padding=2)
    d_o = bf16(*q.shape)
    *_, dk, _ = run(q, k, v, d_o, causal=True)
    alone = k.detach().requires_grad_()
    o = dm_attn_varlen_func(
        q.detach(), alone, v.detach(), offsets(Q_LENGTHS), offsets(K_LENGTHS), 130, 150, causal=True
    )
    o.backward(d_o)
    assert same_bits(alone.grad, dk)


@pytest.mark.parametrize("mode", MODES)
def test_strided(mode):
    q, k, v = packed()
    d_o = bf16(*q.shape)
    expected = run(q, k, v, d_o, mode=mode)
    heads_first = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, d_o)]
    assert not heads_first[0].is_contiguous()
    result = run(*(x.requires_grad_() for x in heads_first[:3]), heads_first[3], mode=mode)
    assert all(same_bits(a, b) for a, b in zip(result, expected, strict=True))


def test_strided_offsets():
    q, k, v = packed()
    d_o = bf16(*q.shape)
    pairs = torch.stack([offsets(Q_LENGTHS), offsets(K_LENGTHS)], dim=1)
    assert not pairs[:, 0].is_contiguous()
    o = dm_attn_varlen_func(q, k, v, pairs[:, 0], pairs[:, 1], 130, 150, causal=True)
    grads = torch.autograd.grad(o, (q, k, v), d_o)
    expected = run(q, k, v, d_o, causal=True)
    assert same_bits(o, expected[0]) and all(same_bits(a, b) for a, b in zip(grads, expected[2:], strict=True))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_do(lengths):
    q, k, v = (x.detach()[: 3 if lengths else 0].requires_grad_() for x in packed())
    o, lse = dm_attn_varlen_func(q, k, v, offsets(lengths), offsets(lengths), 0, 0, return_lse=True)
    assert o.shape == q.shape and not o.any() and (lse == -torch.inf).all()
    o.sum().backward()
    assert not any(x.grad.any() for x in (q, k, v))


def _call(q=(10, 2, 64), cu_q=(0, 4, 10), cu_k=(0, 4, 10), max_q=6, max_k=6, dtype=torch.int32):
    x = bf16(*q)
    return dm_attn_varlen_func(x, x, x, torch.tensor(cu_q, dtype=dtype), torch.tensor(cu_k, dtype=dtype), max_q, max_k)


@pytest.mark.parametrize(
    "options,kind,message",
    [
        (dict(cu_q=(1, 4, 10)), ValueError, r"cu_seqlens_q: expected a first offset of 0, got 1"),
        (
            dict(cu_k=(0, 11, 10)),
            ValueError,
            r"cu_seqlens_k: expected offsets that never fall, got 10 after 11 at index 2",
        ),
        (
            dict(cu_q=(0, 4, 11)),
            ValueError,
            r"cu_seqlens_q: expected a last offset of at most the 10 rows given, got 11",
        ),
        (dict(cu_k=(0, 10)), ValueError, r"cu_seqlens_k: expected as many offsets as cu_seqlens_q, 3, got 2"),
        (dict(cu_q=(), cu_k=()), ValueError, r"cu_seqlens_q: expected one dimension"),
        (dict(cu_q=((0, 4), (4, 10))), ValueError, r"cu_seqlens_q: expected one dimension"),
        (dict(max_q=5), ValueError, r"max_seqlen_q: expected at least the longest sequence, 6, got 5"),
        (dict(max_k=5), ValueError, r"max_seqlen_k: expected at least the longest sequence, 6, got 5"),
        (dict(max_q=-1), ValueError, r"max_seqlen_q: expected at least the longest sequence, 6, got -1"),
        (dict(max_q=6.0), TypeError, r"max_seqlen_q: expected an int, got float"),
        (dict(dtype=torch.int64), TypeError, r"cu_seqlens_q: expected torch\.int32, got torch\.int64"),
        (dict(q=(1, 10, 2, 64)), ValueError, r"q: expected 3 dimensions \[total, heads, head_dim\] with cu_seqlens"),
    ],
)
def test_bad_offsets(options, kind, message):
    with pytest.raises(kind, match=message):
        _call(**options)


def test_a_larger_max_seqlen_is_harmless():
    torch.manual_seed(1)
    expected = _call()
    torch.manual_seed(1)
    assert same_bits(_call(max_q=1000, max_k=2000), expected)


def test_offsets_that_are_not_tensors():
    x = bf16(10, 2, 64)
    with pytest.raises(TypeError, match=r"cu_seqlens_q: expected a torch\.Tensor, got list"):
        dm_attn_varlen_func(x, x, x, [0, 10], [0, 10], 10, 10)
