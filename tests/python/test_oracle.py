"""The library against a second implementation of docs/numerics.md (tests/python/oracle), written from the page.

Hopper numerics is compared bit by bit: codes, scales, means, M, the rounded sums, O and its remainder, delta of stale,
consistent and onepass, and, from the library's saved statistics, dQ, dK and dV. Two orders of summation are not part
of the contract: that of the unrounded p (l, lse) and of matched's delta. Where they matter, the tolerance holds for any
order, and the gradients are compared bit by bit once both sides are given the same delta. oracle/test_itself.py checks
the oracle's arithmetic, oracle/test_paper.py compares paper numerics.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from attention64 import MODES
from oracle import arithmetic, hopper, inputs, twin
from oracle import quantise as blocks
from oracle.compare import distance, name, options, same
from oracle.inputs import Case, bits

U = 2.0**-24  # half an ulp of FP32, relative

CASES = [
    Case("gaussian", 200, 200),
    Case("gaussian", 150, 190, 128, causal=False, centre="k"),
    Case("gaussian", 90, 40, centre="none"),  # 50 rows without keys
    Case("gaussian", 70, 200, softmax_scale=0.37),
    Case("gaussian", 129, 65, 256),
    Case("spread 4", 200, 200),
    Case("spread 4", 1, 200, 128),
    Case("spread 4", 200, 1),
    Case("spread 4", 3, 1, causal=False),
    Case("spread 4", 3, 0),
    Case("spread 4", 0, 3),
    Case("logits beyond 5e4", 150, 150),
    Case("logits beyond 5e4", 90, 140, causal=False, centre="none"),
    Case("sink", 200, 200),
    Case("sink", 130, 190, 128, causal=False, centre="k"),
    Case("zero blocks", 200, 200),
    Case("zero blocks", 200, 150, causal=False, centre="none"),
    Case("all zero", 100, 100),
    Case("448 and powers of two", 150, 140),
    Case("448 and powers of two", 100, 100, centre="none"),
    Case("constant q", 200, 150),
    Case("large means", 200, 150, causal=False),
    Case("bias just fits", 120, 150),
    Case("bias just does not", 120, 150),
    Case("equal keys", 100, 150, centre="k"),
    Case("outliers", 150, 150),
    Case("loud rows without keys", 150, 100),
    Case("gaussian", 1100, 600),  # two intervals of queries
    Case("gaussian", 1100, 70, causal=False, centre="k"),
    Case("turning", 3200, 70, causal=False, centre="k"),  # the fourth interval goes on with the third's exponents
    Case("gaussian", 1072, 100),  # the first row with keys is in the midst of an interval
    Case("turning", 1100, 600),
    Case("turning", 1100, 90, 128, causal=False, centre="none"),
    Case("turning far", 1112, 100, causal=False),
    Case("sink", 1200, 130, causal=False),
    Case("outliers", 1050, 540, centre="none"),
    Case("q and k huge", 90, 90),
    Case("q huge, k tiny", 100, 100),
    Case("v and d_o huge", 150, 100),
    Case("d_o tiny", 100, 100),
    Case("v and d_o tiny", 150, 150),
    Case("all tiny", 150, 150),
    Case("subnormal", 150, 150),
]
# Scales whose product with another is subnormal: what is left of it depends on the order of the factors.
SUBNORMAL_SCALES = ("v and d_o tiny", "all tiny", "subnormal")
# Scores of 1e36: rows outside the domain are NaN, and so is what they touch.
BEYOND = "q and k huge"


every_case = pytest.mark.parametrize("case", CASES, ids=name)


@functools.cache
def tensors(case):
    return inputs.make(case)


@functools.cache
def saved(case, mode):
    return twin.forward(*(bits(x) for x in tensors(case)[:3]), options(case, mode))


def gradients(case, mode, delta=None):
    """The library's and, from its saved statistics, the oracle's; the latter's Backward too."""
    left = saved(case, mode)
    library = twin.backward(*(bits(x) for x in tensors(case)), left, options(case, mode), delta)
    own = hopper.backward(
        *tensors(case),
        left.o[:, 0],
        left.o_low[:, 0],
        left.reference[0],
        left.sums[:, 0],
        mode=mode,
        softmax_scale=case.scale,
        causal=case.causal,
        centre=case.centre,
        delta=None if delta is None else delta[0],
    )
    return library, own


def assert_same_gradients(library, own, scale):
    (dq,), dk, dv = hopper.outputs([own], scale)
    assert same(dq, library.dq[:, 0])
    assert same(dk, library.dk[:, 0])
    assert same(dv, library.dv[:, 0])


def test_cast_of_every_bf16():
    """Every BF16 number up to 448 beside a 448, so that scale and inverse are 1; then where they are not."""
    numbers = np.arange(2**16, dtype=np.uint16)
    for largest in (448.0, 500.0, 3e-37):
        value = arithmetic.from_bf16(numbers)
        value = value[np.abs(value) <= largest]
        rows, held = blocks.FLUSH_ROWS, (blocks.FLUSH_ROWS - 2) * 64  # two rows of a block are full
        x = np.full((-(-len(value) // held) * rows, 64), inputs.round_to_bf16(largest))
        for block in range(len(x) // rows):
            part = value[block * held : (block + 1) * held]
            x[block * rows : (block + 1) * rows - 2].reshape(-1)[: len(part)] = part
        codes, scale, _ = twin.quantise(bits(x), "q", twin.Options(1.0))
        expected = blocks.quantise(x, rows)
        assert np.array_equal(codes[:, 0], arithmetic.e4m3_bits(expected.codes))
        assert same(scale[0], expected.scale)
        assert (scale == np.float32(largest) / np.float32(448)).all() or largest != 448.0


@every_case
def test_quantise(case):
    for operand, x in zip(("q", "k", "v", "d_o"), tensors(case), strict=True):
        codes, scale, mean = twin.quantise(bits(x), operand, options(case))
        centred = operand == "k" and case.centre != "none"
        expected_mean = blocks.mean(x) if centred else np.zeros(case.head_dim, np.float32)
        scale_of = blocks.power_scale_of if operand == "v" else blocks.scale_of
        expected = blocks.quantise(x - expected_mean, twin.scale_rows(operand), scale_of=scale_of)
        assert same(mean[0], expected_mean)
        assert same(scale[0], expected.scale)
        assert np.array_equal(codes[:, 0], arithmetic.e4m3_bits(expected.codes))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("operand", ["q", "k", "v", "d_o"])
def test_quantise_marks_a_block(operand, value):
    x = inputs.make(Case("gaussian", 1100, 1))[0]
    x[1050, 3] = value
    codes, scale, _ = twin.quantise(bits(x), operand, twin.Options(1.0, centre="none"))
    block = twin.scale_rows(operand)
    marked = np.arange(1100) // block == 1050 // block
    assert (codes[marked] == 0x7F).all() and not np.isin(codes[~marked], (0x7F, 0xFF)).any()
    assert np.array_equal(np.flatnonzero(np.isnan(scale[0])), [1050 // block])


@every_case
def test_forward(case):
    own = hopper.forward(*tensors(case)[:3], softmax_scale=case.scale, causal=case.causal, centre=case.centre)
    for mode in MODES:  # one forward serves them all
        library = saved(case, mode)
        assert same(own.o, library.o[:, 0])
        assert same(own.reference, library.reference[0])
        assert same(own.sums[1], library.sums[1, 0])
        # Positive terms: FP32 sums of n of them are off by at most (n - 1) u in any order, the oracle's by u.
        sums = U * case.keys
        assert np.allclose(library.sums[0, 0], own.sums[0], rtol=sums, atol=0, equal_nan=True)
        # Besides, a few roundings of lse and of what is added to it.
        finite = np.isfinite(own.lse)
        assert np.array_equal(library.lse[0, ~finite], own.lse[~finite], equal_nan=True)
        off = np.abs(library.lse[0, finite] - own.lse[finite])
        assert (off <= sums + 8 * U * (1 + np.abs(own.lse[finite]) + np.abs(own.reference[finite]))).all()
    assert same(own.o_low, saved(case, "onepass").o_low[:, 0])


def test_exp2():
    """With one key l is one exponential, so its bits show."""
    draw = np.random.default_rng(0)
    q, k, v = (inputs.round_to_bf16(draw.standard_normal((rows, 64))) for rows in (4000, 1, 1))
    own = hopper.forward(q, k, v, softmax_scale=0.37, causal=False, centre="none")
    library = twin.forward(bits(q), bits(k), bits(v), twin.Options(0.37, centre="none"))
    assert same(own.sums, library.sums[:, 0])
    assert same(own.reference, library.reference[0])


@every_case
@pytest.mark.parametrize("mode", ["stale", "consistent", "onepass"])
def test_backward(case, mode):
    library, own = gradients(case, mode)
    assert same(own.delta, library.delta[0])
    assert_same_gradients(library, own, case.scale)
    assert same(twin.delta(*(bits(x) for x in tensors(case)), saved(case, mode), options(case, mode)), library.delta)


@pytest.mark.parametrize("case", [case for case in CASES if case.kind != BEYOND], ids=name)
def test_matched(case):
    library, own = gradients(case, "matched")
    if case.kind not in SUBNORMAL_SCALES:
        # Numerator and denominator are sums of n terms in any order, off by at most (n + 1) u and (n - 1) u of their
        # terms' size; then two divisions and the oracle's own roundings.
        assert (np.abs(library.delta[0] - own.delta) <= (2 * case.keys + 5) * U * own.delta_size).all()
    given = np.ascontiguousarray(library.delta)
    library, own = gradients(case, "matched", given)
    assert same(own.delta, library.delta[0])
    assert_same_gradients(library, own, case.scale)


def test_nan_of_one_row():
    """A delta from outside that is NaN in one row: its tiles are lost, and with them dK of the interval."""
    case = Case("turning", 1072, 200)
    given = np.zeros_like(saved(case, "matched").lse)
    given[0, 912] = np.nan
    library, own = gradients(case, "matched", given)
    assert_same_gradients(library, own, case.scale)
    lost = np.isnan(arithmetic.from_bf16(library.dq[:, 0]))
    assert lost[896:960].all() and not lost[960:].any()
    assert not np.isnan(own.dv).any()


@pytest.mark.parametrize("kind", ["gaussian", "spread 4", "sink", "outliers"])
def test_matched_with_its_own_delta(kind):
    """A delta that is off in its last bit moves dS, and here and there its code: far inside the grade `bounded`."""
    case = Case(kind, 200, 200)
    library, own = gradients(case, "matched")
    (dq,), dk, dv = hopper.outputs([own], case.scale)
    assert distance(dq, library.dq[:, 0]) < 2e-3
    assert distance(dk, library.dk[:, 0]) < 2e-3
    assert same(dv, library.dv[:, 0])


def test_query_heads_add_up():
    """dK and dV of a KV head: one sum over its query heads in ascending order and their intervals of queries; dK is
    multiplied by softmax_scale (0.1, so that the product is rounded) once."""
    draw = np.random.default_rng(0)
    q, d_o = (inputs.round_to_bf16(draw.standard_normal((1100, 6, 64))) for _ in range(2))
    k, v = (inputs.round_to_bf16(draw.standard_normal((130, 2, 64))) for _ in range(2))
    raw = [arithmetic.to_bf16(x) for x in (q, k, v, d_o)]
    choice = twin.Options(0.1, causal=True, mode="onepass")
    left = twin.forward(*raw[:3], choice)
    library = twin.backward(*raw, left, choice)
    for group in range(2):
        heads = []
        for h in range(3 * group, 3 * group + 3):
            of_head = (q[:, h], k[:, group], v[:, group], d_o[:, h], left.o[:, h], left.o_low[:, h])
            rows = (left.reference[h], left.sums[:, h])
            start = heads[-1] if heads else None
            heads.append(
                hopper.backward(*of_head, *rows, mode="onepass", softmax_scale=0.1, causal=True, start=start)
            )
        dq, dk, dv = hopper.outputs(heads, 0.1)
        assert same(dk, library.dk[:, group])
        assert same(dv, library.dv[:, group])
        assert same(np.stack(dq, axis=1), library.dq[:, 3 * group : 3 * group + 3])


def test_means_of_a_long_sequence():
    """More than 8192 queries: q's means run over 256 rows, and scales still over 128."""
    draw = np.random.default_rng(0)
    q = inputs.round_to_bf16(draw.standard_normal((8300, 64)) + 3 * draw.standard_normal((1, 64)))
    k, v = (inputs.round_to_bf16(draw.standard_normal((20, 64))) for _ in range(2))
    own = hopper.forward(q, k, v, softmax_scale=0.125, causal=False)
    library = twin.forward(bits(q), bits(k), bits(v), twin.Options(0.125))
    assert same(own.o, library.o[:, 0])
    assert same(own.reference, library.reference[0])
    assert same(own.sums[1], library.sums[1, 0])


@pytest.mark.parametrize("centre", ["none", "qk"])
@pytest.mark.parametrize("operand, row", [("q", 900), ("q", 1040), ("k", 5), ("k", 199), ("v", 70), ("d_o", 900)])
def test_nan_spreads_no_further(operand, row, centre):
    case = Case("turning", 1072, 200, centre=centre)  # rows 872 ... 1071 see keys, in two intervals
    values = dict(zip(("q", "k", "v", "d_o"), tensors(case), strict=True))
    values[operand] = values[operand].copy()
    values[operand][row, 2] = np.nan
    raw = [bits(x) for x in values.values()]
    common = dict(softmax_scale=case.scale, causal=case.causal, centre=centre)
    own = hopper.forward(*list(values.values())[:3], **common)
    for mode in MODES:
        left = twin.forward(*raw[:3], options(case, mode))
        assert same(own.o, left.o[:, 0])
        assert np.array_equal(np.isnan(own.lse), np.isnan(left.lse[0]))
        library = twin.backward(*raw, left, options(case, mode))
        rows = (left.o[:, 0], left.o_low[:, 0], left.reference[0], left.sums[:, 0])
        given = library.delta[0] if mode == "matched" else None
        result = hopper.backward(*values.values(), *rows, mode=mode, delta=given, **common)
        assert_same_gradients(library, result, case.scale)
