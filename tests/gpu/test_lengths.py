"""Different numbers of queries and keys, rows without keys, packed sequences and their padding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_calls import DEVICE, MODES, Case, Inputs, backward, forward, gaussian, ragged, run
from gpu_compare import compare, mismatches, same_bits

PAIRS = [
    (1, 1000, 64),
    (1000, 1, 128),
    (200, 65, 256),
    (65, 200, 128),
    (300, 1000, 128),
    (1000, 300, 64),
    (129, 513, 256),
    (513, 129, 256),
    (700, 64, 128),
]


def _pair(mode: str, queries: int, keys: int, head_dim: int, causal: bool) -> Case:
    return Case(mode, head_dim, queries, keys, 4, 2, batch=2, causal=causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("queries,keys,head_dim", PAIRS)
@pytest.mark.parametrize("mode", MODES)
def test_other_lengths(judge, mode, queries, keys, head_dim, causal):
    case = _pair(mode, queries, keys, head_dim, causal)
    x = gaussian(case)
    compare(judge, case, x, run(case, x), run(case, x, "cpu"))


@pytest.mark.parametrize("queries,keys,batch", [(0, 5, 2), (5, 0, 2), (0, 0, 2), (200, 0, 1), (7, 7, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_on_one_side(judge, mode, queries, keys, batch):
    case = Case(mode, 64, queries, keys, 4, 2, batch=batch)
    x = gaussian(case)
    gpu, twin = run(case, x), run(case, x, "cpu")
    for name, value in gpu.tensors().items():
        judge.same_bits(name, mismatches(value, twin.tensors()[name]), case)


@pytest.mark.quick
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0**40])
@pytest.mark.parametrize("mode", MODES)
def test_rows_without_keys(judge, mode, value):
    """They see nothing, have no gradient whatever their dO holds, and touch no other row."""
    case = _pair(mode, 300, 170, 128, True)
    x = gaussian(case)
    silent = x.d_o.clone()
    silent[:, :130] = 0
    x.d_o[:, :130] = value
    gpu, without = run(case, x), run(case, x._replace(d_o=silent))
    for name, tensor in gpu.tensors().items():
        judge.same_bits(f"{name}, dO = {value}", mismatches(tensor, without.tensors()[name]), case)
    saved, gradients = gpu
    judge.true("O is zero", not saved.o[:, :130].any(), case)
    judge.true("lse is -infinity", bool((saved.lse[:, :, :130] == -torch.inf).all()), case)
    judge.true("M is -infinity", bool((saved.reference[:, :, :130] == -torch.inf).all()), case)
    judge.true("sums are zero", not saved.sum[..., :130].any(), case)
    judge.true("dQ is zero", not gradients.dq[:, :130].any(), case)
    judge.true("delta is zero", not gradients.delta[:, :, :130].any(), case)


SEGMENTS = {
    "empty": ((0,), (0,)),
    "one": ((1,), (1,)),
    "issue": ((0, 5, 0, 1208, 840), (0, 5, 0, 1208, 840)),
    "tiny": (tuple(range(64)), tuple(range(64))),
    "apart": ((5, 0, 130, 1, 64, 3), (7, 4, 150, 1, 64, 0)),
    "many keys": ((3, 600, 1), (700, 20, 0)),
}


def _unwritten(x: torch.Tensor) -> bool:
    return bool((x.contiguous().view(torch.uint8) == 0xFF).all())


# Every mode meets every head dimension and every division, onepass every pair of them.
PACKED = [
    (mode, segments, head_dim)
    for m, mode in enumerate(MODES)
    for s, segments in enumerate(SEGMENTS)
    for d, head_dim in enumerate((64, 128, 256))
    if mode == "onepass" or (m + s + d) % 3 == 0
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("mode,segments,head_dim", PACKED)
def test_packed(judge, mode, segments, head_dim, causal):
    """Against the twin; nine rows of padding hold NaN, and theirs of the outputs stay as they were."""
    q_lengths, k_lengths = SEGMENTS[segments]
    case = ragged(mode, head_dim, q_lengths, k_lengths, padding=9, causal=causal)
    x = gaussian(case)
    rows, keys = sum(q_lengths), sum(k_lengths)
    for tensor, end in ((x.q, rows), (x.d_o, rows), (x.k, keys), (x.v, keys)):
        tensor[end:] = torch.nan
    gpu, twin = run(case, x), run(case, x, "cpu")
    for name, tensor in gpu.tensors().items():
        dim, end = (0, keys) if name in ("dk", "dv") else (0, rows) if name in ("o", "o_low", "dq") else (-1, rows)
        judge.true(f"padding of {name} is left alone", _unwritten(tensor.narrow(dim, end, 9)), case)
    inner = gaussian(dataclasses.replace(case, q_len=rows, k_len=keys))  # sizes alone
    compare(judge, case, inner, *(_without_padding(r, rows, keys) for r in (gpu, twin)))


def _without_padding(result, rows: int, keys: int):
    saved, gradients = result
    saved = saved._replace(
        o=saved.o[:rows],
        o_low=None if saved.o_low is None else saved.o_low[:rows],
        lse=saved.lse[:, :rows],
        reference=saved.reference[:, :rows],
        sum=saved.sum[..., :rows],
    )
    gradients = gradients._replace(
        dq=gradients.dq[:rows], dk=gradients.dk[:keys], dv=gradients.dv[:keys], delta=gradients.delta[:, :rows]
    )
    return type(result)(saved, gradients)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_alone_has_the_same_bits(judge, mode):
    q_lengths, k_lengths = SEGMENTS["apart"]
    case = ragged(mode, 128, q_lengths, k_lengths)
    x = gaussian(case)
    whole = run(case, x)
    first_q = first_k = 0
    for n, m in zip(q_lengths, k_lengths, strict=True):
        rows, keys = slice(first_q, first_q + n), slice(first_k, first_k + m)
        first_q, first_k = rows.stop, keys.stop
        alone = run(
            Case(mode, 128, n, m, case.q_heads, case.kv_heads),
            Inputs(x.q[rows][None], x.k[keys][None], x.v[keys][None], x.d_o[rows][None]),
        )
        for name, tensor in alone.tensors().items():
            part = whole.tensors()[name]
            if name in ("dk", "dv"):
                part = part[keys]
            else:
                part = part[rows] if name in ("o", "o_low", "dq") else part[..., rows]
            tensor = tensor[:, 0] if name == "sum" else tensor[0]
            judge.same_bits(f"{name} of {n} x {m}", mismatches(part, tensor), case)


# Enough queries for dQ's CTAs of 256 (kernels/query_gradients.cu), whose last block is ragged; the heads alone are few
# enough for those of 128, which the twin is compared with elsewhere. In the packed one a cap cuts the keys, so that dQ
# goes on from FP32 sums.
MANY_HEADS = {
    "causal": Case("onepass", 64, 1990, 1990, 32, 8),
    "long keys": Case("onepass", 128, 2000, 2300, 32, 8),
    "full": Case("matched", 128, 1857, 1857, 32, 8, causal=False),
    "few keys": Case("stale", 64, 2100, 300, 32, 8, causal=False),
    "packed": ragged("onepass", 128, (2040, 70, 1), q_heads=32, kv_heads=1),
}


@pytest.mark.cuda_only
@pytest.mark.quick
@pytest.mark.parametrize("name", MANY_HEADS)
def test_few_heads_of_many_have_the_same_bits(judge, name):
    case = MANY_HEADS[name]
    x = gaussian(case)
    many = run(case, x, cap=32 << 20 if case.varlen else 0)
    few_q, few_k = case.q_heads // 4, max(1, case.kv_heads // 4)
    for first in range(4):
        q, k = slice(first * few_q, (first + 1) * few_q), slice(first * few_k, (first + 1) * few_k)
        if case.kv_heads == 1:
            k = slice(0, 1)
        part = Inputs(x.q[..., q, :], x.k[..., k, :], x.v[..., k, :], x.d_o[..., q, :])
        few = run(dataclasses.replace(case, q_heads=few_q, kv_heads=few_k), part)
        pairs = dict(o=(many.saved.o, few.saved.o, q), dq=(many.gradients.dq, few.gradients.dq, q))
        if case.kv_heads > 1:
            pairs |= {n: (getattr(many.gradients, n), getattr(few.gradients, n), k) for n in ("dk", "dv")}
        for output, (whole, own, heads) in pairs.items():
            judge.same_bits(output, mismatches(whole[..., heads, :].contiguous(), own), case)


@pytest.mark.parametrize("mode", MODES)
def test_bounds_do_not_change_bits(judge, mode):
    """max_q_len and max_k_len: exact, or 0 for the totals."""
    case = ragged(mode, 64, (300, 0, 700, 21))
    x = gaussian(case)
    tight, loose = run(case, x), run(dataclasses.replace(case, bounds=False), x)
    for name, tensor in tight.tensors().items():
        judge.same_bits(name, mismatches(tensor, loose.tensors()[name]), case)


@pytest.mark.cuda_only
@pytest.mark.parametrize("offsets", [(0, 9, 5, 20), (3, 5, 9, 20), (0, 5, 9, 4000), (0, -5, 9, 20), (0, 30, 30, 30)])
def test_wrong_offsets_touch_nothing_outside(offsets):
    """The C ABI cannot read them: results are meaningless, but guards stay intact and the next call is right."""
    case = ragged("onepass", 64, (5, 4, 11))
    x = gaussian(case).to(DEVICE)
    expected = forward(case, x)
    wrong = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    saved = forward(case, x, offsets=(wrong, wrong))
    backward(case, x, saved, offsets=(wrong, wrong))
    torch.cuda.synchronize()
    assert same_bits(forward(case, x).o, expected.o)


@pytest.mark.cuda_only
@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_longer_than_announced(judge, mode):
    """The C ABI cannot see it on the device. Its results mean nothing; those of the others are right, and nothing is
    written outside."""
    case = ragged(mode, 64, (300, 300, 424))
    x = gaussian(case).to(DEVICE)
    offsets = torch.tensor([0, 10, 20, 1024], dtype=torch.int32, device=DEVICE)  # 1,004 where 424 were announced
    pair = (offsets, offsets)
    saved = forward(case, x, offsets=pair)
    gradients = backward(case, x, saved, offsets=pair)
    short = Case(mode, 64, 10, 10, case.q_heads, case.kv_heads)
    for rows in (slice(0, 10), slice(10, 20)):
        alone = run(short, Inputs(*(tensor[rows][None] for tensor in x)))
        judge.same_bits("o", mismatches(saved.o[rows], alone.saved.o[0]), case)
        for name in ("dq", "dk", "dv"):
            part, whole = getattr(alone.gradients, name)[0], getattr(gradients, name)[rows]
            judge.same_bits(name, mismatches(whole, part), case)
