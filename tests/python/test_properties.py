"""Properties that hold for every shape, mode and mask, on small random problems (hypothesis)."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.optests import fake_check

from attention64 import MODES, TOLERANCE, bf16, error, gradients64, same_bits
from delta_matching import dm_attn_func, dm_attn_varlen_func

lengths = st.integers(0, 140)
modes = st.sampled_from(MODES)
seeds = st.integers(0, 2**31)
heads = st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)])
# Hopper numerics has three head_dims; paper numerics takes any.
kinds = st.one_of(st.just(("hopper", 64)), st.tuples(st.just("paper"), st.integers(1, 20)))


def tensors(seed, batch, q_len, k_len, heads, head_dim):
    torch.manual_seed(seed)
    q = bf16(batch, q_len, heads[0], head_dim, grad=True)
    k, v = (bf16(batch, k_len, heads[1], head_dim, grad=True) for _ in range(2))
    return q, k, v, bf16(*q.shape)


def run(q, k, v, d_o, **options):
    o, lse = dm_attn_func(q, k, v, return_lse=True, **options)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), d_o)


@given(seeds, st.integers(0, 2), lengths, lengths, heads, kinds, modes, st.booleans())
def test_close_to_float64_and_clean(seed, batch, q_len, k_len, heads, kind, mode, causal):
    numerics, head_dim = kind
    q, k, v, d_o = tensors(seed, batch, q_len, k_len, heads, head_dim)
    o, lse, dq, dk, dv = run(q, k, v, d_o, causal=causal, mode=mode, numerics=numerics)
    exact_o, exact_lse, *exact = gradients64(q, k, v, d_o, causal)
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    for value in (o, dq, dk, dv):
        assert value.isfinite().all()
    # A few rows, keys or channels average nothing out, and every gradient is a sum that may cancel: twice the tolerance
    # of a large problem, and the size of the terms beside that of what is left of them as the measure.
    d_o, v = d_o.double(), v.detach().double()
    weighted = d_o.norm() * v.norm() / head_dim**0.5
    terms = {"o": 0.3 * o.numel() ** 0.5, "dv": 0.5 * d_o.norm(), "dq": 0.1 * weighted, "dk": 0.1 * weighted}
    if head_dim == 1:
        del terms["dq"], terms["dk"]  # S itself is one product then, and its rounding is anything relative to it
    results = {"o": (o, exact_o)} | dict(zip(("dq", "dk", "dv"), zip((dq, dk, dv), exact, strict=True), strict=True))
    for name, size in terms.items():
        value, expected = results[name]
        assert (value.double() - expected).norm() <= 2 * TOLERANCE[name] * (expected.norm() + size), name


@given(seeds, st.lists(st.tuples(lengths, lengths), max_size=4), heads, kinds, modes, st.booleans(), st.integers(0, 5))
def test_varlen_is_each_sequence_alone(seed, pairs, heads, kind, mode, causal, padding):
    numerics, head_dim = kind
    options = dict(causal=causal, mode=mode, numerics=numerics)
    q_end, k_end = (sum(pair[i] for pair in pairs) for i in (0, 1))
    q, k, v, d_o = (
        x[0].detach().requires_grad_() for x in tensors(seed, 1, q_end + padding, k_end + padding, heads, head_dim)
    )
    offsets = [
        torch.tensor([0, *(sum(p[i] for p in pairs[: n + 1]) for n in range(len(pairs)))], dtype=torch.int32)
        for i in (0, 1)
    ]
    o = dm_attn_varlen_func(q, k, v, *offsets, 140, 140, **options)
    grads = torch.autograd.grad(o, (q, k, v), d_o)
    for n in range(len(pairs)):
        rows, keys = (slice(x[n], x[n + 1]) for x in offsets)
        alone = [x.detach()[None, part].requires_grad_() for x, part in ((q, rows), (k, keys), (v, keys))]
        o1, _, *grads1 = run(*alone, d_o.detach()[None, rows], **options)
        assert same_bits(o[rows], o1[0])
        for whole, part, one in zip(grads, (rows, keys, keys), grads1, strict=True):
            assert same_bits(whole[part], one[0])
    assert not o[q_end:].any() and not grads[0][q_end:].any()
    assert not grads[1][k_end:].any() and not grads[2][k_end:].any()


@given(seeds, lengths, lengths, modes, st.booleans())
def test_grouped_heads_are_repeated_heads(seed, q_len, k_len, mode, causal):
    q, k, v, d_o = tensors(seed, 1, q_len, k_len, (4, 2), 64)
    o, lse, dq, dk, dv = run(q, k, v, d_o, causal=causal, mode=mode)
    repeated = [x.detach().repeat_interleave(2, dim=2).requires_grad_() for x in (k, v)]
    o2, lse2, dq2, dk2, dv2 = run(q, *repeated, d_o, causal=causal, mode=mode)
    assert same_bits(o, o2) and same_bits(lse, lse2) and same_bits(dq, dq2)
    for grouped, parts in ((dk, dk2), (dv, dv2)):
        total = parts.double().unflatten(2, (2, 2)).sum(3)
        # The library adds in FP32 and rounds to BF16 once; here every part has been rounded.
        assert error(grouped, total) < 2.0**-7


@given(seeds, st.integers(1, 2), lengths, lengths, modes, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_a_subset_of_gradients_has_the_same_bits(seed, batch, q_len, k_len, mode, needed):
    q, k, v, d_o = tensors(seed, batch, q_len, k_len, (2, 1), 64)
    _, _, *full = run(q, k, v, d_o, mode=mode)
    leaves = [x.detach().requires_grad_(need) for x, need in zip((q, k, v), needed, strict=True)]
    o = dm_attn_func(*leaves, mode=mode)
    assert o.requires_grad == any(needed)
    if any(needed):
        o.backward(d_o)
    for leaf, need, expected in zip(leaves, needed, full, strict=True):
        assert same_bits(leaf.grad, expected) if need else leaf.grad is None


@given(
    seeds,
    st.integers(0, 2),
    st.integers(0, 70),
    st.integers(0, 70),
    modes,
    st.permutations(range(4)),
    st.integers(1, 2),
)
def test_strides_do_not_matter(seed, batch, q_len, k_len, mode, order, step):
    q, k, v, d_o = tensors(seed, batch, q_len, k_len, (2, 1), 64)
    expected = run(q, k, v, d_o, mode=mode, causal=True)
    inverse = [order.index(i) for i in range(4)]

    def restride(x):
        spread = x.detach().permute(order).repeat_interleave(step, dim=-1).contiguous()[..., ::step].permute(inverse)
        assert torch.equal(spread, x)
        return spread

    strided = [restride(x).requires_grad_() for x in (q, k, v)]
    result = run(*strided, restride(d_o), mode=mode, causal=True)
    assert all(same_bits(a, b) for a, b in zip(result, expected, strict=True))


@given(
    seeds, st.integers(0, 3), st.integers(0, 70), st.integers(0, 70), heads, kinds, modes, st.booleans(), st.booleans()
)
def test_fake_kernels_agree(seed, batch, q_len, k_len, heads, kind, mode, causal, varlen):
    numerics, head_dim = kind
    ops = torch.ops.delta_matching
    q, k, v, d_o = (x.detach() for x in tensors(seed, batch, q_len, k_len, heads, head_dim))
    offsets = (None, None)
    if varlen:
        offsets = tuple(torch.arange(batch + 1, dtype=torch.int32) * n for n in (q_len, k_len))
        q, k, v, d_o = (x.flatten(0, 1) for x in (q, k, v, d_o))
    options = (None, causal, mode, numerics, None)
    fake_check(ops.forward.default, (q, k, v, *offsets, q_len, k_len, *options), {})
    o, _, *saved = ops.forward(q, k, v, *offsets, q_len, k_len, *options)
    fake_check(ops.backward.default, (d_o, q, k, v, o, *saved, *offsets, *options, True, causal, True), {})
