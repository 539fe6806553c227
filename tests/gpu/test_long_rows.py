"""Long rows: one head of 8192 and 32768 tokens, diffuse or with a sink that holds nine tenths of a row.

Long rows are where the exponents of P's codes decide: with one for a whole row onepass would lose its invariant, and dV
its accuracy (docs/numerics.md, section 4).
"""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch
from gpu_calls import Case, Inputs, Result, gaussian, problem_of, run, square
from gpu_compare import Exact, compare, exact, median_row_error
from gpu_emulation import Head

from delta_matching import _library

pytestmark = pytest.mark.slow

#: The twin's stand-in keeps lengths short (DMATTN_GPU_TESTS_DEVICE=cpu).
SHORT = os.environ.get("DMATTN_GPU_TESTS_DEVICE") == "cpu"
LENGTHS = (1024, 2048) if SHORT else (8192, 32768)
RESIDUAL = 4e-3 if SHORT else 2e-3
DV_SHARE = 1.05


def _with_sink(case: Case, share: float) -> Inputs:
    """Key 0 holds about ``share`` of the last row: as tests/cpp/heads.h has it."""
    x = gaussian(case)
    if share > 0:
        logit = math.log(case.k_len * share / (1 - share)) + 0.5
        x.q[..., 0], x.k[..., 0], x.k[:, 0] = 4, 0, 0
        x.k[:, 0, :, 0] = logit * math.sqrt(case.head_dim) / 4
    return x


@functools.cache
def _setting(head_dim: int, length: int, share: float) -> tuple[Case, Inputs, Result, Exact]:
    case = square("onepass", head_dim, length, (1, 1))
    x = _with_sink(case, share)
    return case, x, run(case, x), exact(case, x)


@pytest.mark.parametrize("share", [0.0, 0.9], ids=["diffuse", "sink"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", LENGTHS)
def test_onepass(judge, length, head_dim, share):
    case, x, gpu, truth = _setting(head_dim, length, share)
    head = Head(case, x, gpu)
    residual = float(head.residuals(gpu.gradients.delta[0, 0]).nanmedian())
    judge.at_most("residual of the median row", residual, RESIDUAL, case, "property")
    got = median_row_error(gpu.gradients.dv[0, :, 0], truth.dv[0, :, 0])
    # The forward's own codes with exact sums: what the C++ tests hold the twin to as well.
    floor = median_row_error(head.dv_of_forward_codes(), truth.dv[0, :, 0])
    what, detail = "dV of the median key beside that of the forward's codes", f"{got:.4f} and {floor:.4f}"
    judge.at_most(what, got / floor, DV_SHARE, case, "property", detail)


@pytest.mark.parametrize("share", [0.0, 0.9], ids=["diffuse", "sink"])
@pytest.mark.parametrize("length,head_dim", [(LENGTHS[0], 64), (LENGTHS[0], 128), (LENGTHS[1], 64)])
def test_against_the_twin(judge, length, head_dim, share):
    case, x, gpu, truth = _setting(head_dim, length, share)
    torch.set_num_threads(max(torch.get_num_threads(), min(4, os.cpu_count() or 1)))  # minutes with one thread
    twin = run(case, x, "cpu")
    compare(judge, case, x, gpu, twin)
    ours, theirs = (median_row_error(r.gradients.dv[0, :, 0], truth.dv[0, :, 0]) for r in (gpu, twin))
    detail = f"{ours:.4f} and {theirs:.4f}"
    judge.at_most("dV of the median key beside the twin's", abs(ours / theirs - 1), 0.05, case, detail=detail)
    # O, too, in the long rows alone: the last eighth.
    late = slice(-(length // 8), None)
    ours, theirs = (median_row_error(r.saved.o[0, late, 0], truth.o[0, late, 0]) for r in (gpu, twin))
    detail = f"{ours:.4f} and {theirs:.4f}"
    judge.at_most("O of long rows beside the twin's", abs(ours / theirs - 1), 0.05, case, detail=detail)


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_memory_is_linear(judge, mode):
    """Four times the rows take about four times the workspace; sixteen times if dS were kept whole."""
    cap = 1 << 28
    sizes = []
    for length in (32768, 131072):
        problem = problem_of(square(mode, 128, length, (8, 2)), "cuda:0", cap).problem
        sizes.append(_library.workspace_size(problem)[1])
    judge.at_most("ratio", sizes[1] / sizes[0], 5, None, "property")
