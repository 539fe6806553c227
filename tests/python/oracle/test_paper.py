"""Paper numerics against the oracle. It promises no bits: its order of summation is free."""

from __future__ import annotations

import numpy as np
import pytest

from attention64 import MODES
from oracle import arithmetic, inputs, paper, twin
from oracle.compare import distance, name, options
from oracle.inputs import Case, bits

CASES = [
    Case("gaussian", 200, 200, centre="k"),
    Case("gaussian", 100, 190, 48, causal=False, centre="none"),
    Case("gaussian", 90, 40, 20, centre="k"),
    Case("spread 4", 150, 150, 40, centre="k"),
    Case("sink", 200, 200, centre="k"),
    Case("zero blocks", 200, 150, causal=False, centre="none"),
    Case("outliers", 150, 150, centre="k"),
    Case("equal keys", 100, 100, centre="k"),
    Case("v and d_o huge", 100, 100, centre="k"),
]


@pytest.mark.parametrize("case", CASES, ids=name)
@pytest.mark.parametrize("mode", MODES)
def test_paper(case, mode):
    """The library works in FP32, the oracle in FP64. Scores x are off by at most 3 u |x| (three roundings of their
    factor; |x| < 50 here) and P by ln 2 of that plus 2.2 ulp: below 1e-5. A code flips where its argument is that close
    to a boundary, 2^4 * 2e-5 = 3e-4 of them at most, each by at most 2^-3 of itself: sqrt(3e-4) 2^-3 = 2e-3 of a
    product, the bound of the grade `bounded` too."""
    q, k, v, d_o = inputs.make(case)
    raw = [bits(x) for x in (q, k, v, d_o)]
    choice = options(case, mode, "paper")
    common = dict(softmax_scale=case.scale, causal=case.causal, mode=mode, centre=case.centre)
    left = twin.forward(*raw[:3], choice)
    library = twin.backward(*raw, left, choice)
    own = paper.forward(q, k, v, **common)
    result = paper.backward(q, k, v, d_o, left.o[:, 0], **common)

    finite = np.isfinite(own.lse)
    assert np.array_equal(np.isneginf(left.lse[0]), ~finite)
    assert (np.abs(left.lse[0, finite] - own.lse[finite]) <= 1e-6 * (4 + np.abs(own.lse[finite]))).all()
    assert np.abs(library.delta[0] - result.delta).max() <= 1e-5 * np.abs(result.delta).max()
    for value, expected in zip(
        (left.o, library.dq, library.dk, library.dv), (own.o, result.dq, result.dk, result.dv), strict=True
    ):
        expected = arithmetic.to_bf16(expected.astype(np.float32))
        assert distance(value[:, 0], expected) < 2e-3
        assert np.mean(value[:, 0] != expected) < 0.05
