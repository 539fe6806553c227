"""GPU against twin over modes, head dimensions, masks, ratios of heads and lengths."""

from __future__ import annotations

import pytest
from gpu_calls import MODES, Case, gaussian, run, square
from gpu_compare import compare, compare_errors, exact, mismatches

HEADS = {"mha": (2, 2), "gqa": (8, 2), "mqa": (3, 1)}
SMALL = (1, 63, 64, 65, 127, 128, 129, 200)


def _small(mode: str, head_dim: int, causal: bool, heads: str, length: int) -> Case:
    return square(mode, head_dim, length, HEADS[heads], causal=causal, batch=2)


QUICK = [
    *(_small(mode, head_dim, True, "gqa", 200) for mode in MODES for head_dim in (64, 128, 256)),
    *(_small(mode, 128, False, "mqa", 65) for mode in MODES),
    square("onepass", 128, 1100, (2, 1), causal=False),
    square("matched", 64, 1100, (2, 1)),
]


@pytest.mark.quick
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_quick(judge, case):
    x = gaussian(case)
    compare(judge, case, x, run(case, x), run(case, x, "cpu"))


@pytest.mark.matrix
@pytest.mark.parametrize("length", SMALL)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mode", MODES)
def test_small(judge, mode, head_dim, causal, heads, length):
    case = _small(mode, head_dim, causal, heads, length)
    x = gaussian(case)
    compare(judge, case, x, run(case, x), run(case, x, "cpu"))


# Every value of every axis with every mode; 8300 rows have two blocks of 128 to a mean of q.
LARGE = [
    (1000, 64, False, (8, 2)),
    (1000, 256, True, (2, 2)),
    (2048, 128, True, (8, 2)),
    (2048, 64, False, (3, 1)),
    (4097, 128, False, (2, 2)),
    (4097, 256, True, (3, 1)),
    (4097, 64, True, (4, 1)),
    (8300, 64, True, (1, 1)),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length,head_dim,causal,heads", LARGE)
def test_large(judge, length, head_dim, causal, heads, mode):
    case = square(mode, head_dim, length, heads, causal=causal)
    x = gaussian(case)
    gpu, twin = run(case, x), run(case, x, "cpu")
    compare(judge, case, x, gpu, twin)
    compare_errors(judge, case, gpu, twin, exact(case, x))


@pytest.mark.parametrize("centre", ["none", "k"])
@pytest.mark.parametrize("mode", MODES)
def test_centre(judge, mode, centre):
    case = square(mode, 128, 700, causal=True, centre=centre)
    x = gaussian(case)
    compare(judge, case, x, run(case, x), run(case, x, "cpu"))


@pytest.mark.parametrize("mode", MODES)
def test_softmax_scale(judge, mode):
    case = square(mode, 64, 300, causal=True, softmax_scale=0.37)
    x = gaussian(case)
    compare(judge, case, x, run(case, x), run(case, x, "cpu"))


@pytest.mark.parametrize("needed", ["q", "k", "v", "qk", "kv", ""])
@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_only_some_gradients(judge, mode, needed):
    """The same bits as with all of them."""
    case = square(mode, 128, 300)
    x = gaussian(case)
    whole, part = run(case, x), run(case, x, needed=needed)
    for name, value in part.tensors().items():
        judge.same_bits(name, mismatches(value, whole.tensors()[name]), case)
    judge.true("the others are left out", all(f"d{n}" not in part.tensors() for n in "qkv" if n not in needed), case)
