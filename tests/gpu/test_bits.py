"""What the contract calls bitwise: codes, scales and means; delta of stale, consistent and onepass from equal inputs.
Beside it what hangs on codes alone but for the biases: M and the rows' sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_calls import DEVICE, ON_GPU, Case, Inputs, backward, forward, gaussian, quantise, run, square
from gpu_compare import bits, mismatches

from oracle import arithmetic
from oracle import quantise as blocks

SHAPES = [(64, 200, 2), (128, 513, 2), (256, 129, 1), (64, 1, 2)]
LONG = (128, 8300, 1)  # two blocks of 128 rows to a mean of q


def _case(head_dim: int, length: int, batch: int, centre: str | None = None, mode: str = "matched") -> Case:
    return square(mode, head_dim, length, (4, 2) if length < 4096 else (1, 1), batch=batch, centre=centre)


def _varied(case: Case) -> Inputs:
    """Gaussian with means, an outlier channel, rows of different size and a block of zeros."""
    x = gaussian(case)
    draw = torch.Generator().manual_seed(1)
    for t in x:
        t += 3 * torch.randn(t.shape[-1], generator=draw).to(torch.bfloat16)
        t[..., 0] *= 8
        t *= torch.exp2(torch.randint(-4, 4, t.shape[:2], generator=draw))[..., None, None].to(torch.bfloat16)
        t[:, 64:128] = 0
    return x


@pytest.mark.quick
@pytest.mark.parametrize("centre", ["none", "qk"])
@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize("head_dim,length,batch", SHAPES)
def test_codes_of_keys(judge, operand, head_dim, length, batch, centre):
    case = _case(head_dim, length, batch, centre)
    x = _varied(case)
    source = x.k if operand == "k" else x.v
    gpu, twin = quantise(case, operand, source.to(DEVICE)), quantise(case, operand, source, "cpu")
    for name in ("codes", "scale", "mean"):
        judge.same_bits(name, mismatches(getattr(gpu, name), getattr(twin, name)), case)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("operand", ["k", "v"])
def test_codes_of_a_block_with_nan(judge, operand, value):
    case = _case(64, 300, 1, "none")
    x = gaussian(case).k
    x[0, 100, 1, 3] = value
    gpu, twin = quantise(case, operand, x.to(DEVICE)), quantise(case, operand, x, "cpu")
    judge.same_bits("codes", mismatches(gpu.codes, twin.codes), case)
    judge.same_bits("scale", mismatches(gpu.scale, twin.scale), case)


@pytest.mark.cuda_only
@pytest.mark.parametrize("centre", ["none", "k", "qk"])
@pytest.mark.parametrize("varied", [False, True], ids=["gaussian", "varied"])
@pytest.mark.parametrize("head_dim,length,batch", [(64, 200, 2), (128, 513, 1), (256, 129, 1), (64, 8300, 1)])
def test_codes_of_queries(judge, head_dim, length, batch, varied, centre):
    """Codes of q as S takes them, against the oracle: means, and scales that the bias raises."""
    case = _case(head_dim, length, batch, centre)
    x = _varied(case) if varied else gaussian(case)
    gpu = quantise(case, "q_scores", x.q.to(DEVICE), k=x.k.to(DEVICE))
    wrong = dict.fromkeys(("codes", "scale", "mean"), 0)
    for b in range(batch):
        for h in range(case.q_heads):
            q, k = (t[b, :, i].float().numpy() for t, i in ((x.q, h), (x.k, h * case.kv_heads // case.q_heads)))
            ops = blocks.operands(q, k, k, centre)
            codes = torch.from_numpy(arithmetic.e4m3_bits(ops.q.codes))
            wrong["codes"] += mismatches(gpu.codes[b, :, h].cpu(), codes)
            wrong["scale"] += mismatches(gpu.scale[b, h].cpu(), torch.from_numpy(ops.q.scale))
            means = blocks.query_means(q)[1] if centre == "qk" else np.zeros_like(gpu.mean[b, h].cpu().numpy())
            wrong["mean"] += mismatches(gpu.mean[b, h].cpu(), torch.from_numpy(means))
    for name, count in wrong.items():
        judge.same_bits(name, count, case)


@pytest.mark.quick
@pytest.mark.parametrize("function", ["delta", "backward"])
@pytest.mark.parametrize("mode", ["stale", "consistent", "onepass"])
@pytest.mark.parametrize("head_dim,length,batch", [*SHAPES, (128, 1300, 1)])
def test_delta(judge, head_dim, length, batch, mode, function):
    """From the twin's O and saved statistics."""
    case = _case(head_dim, length, batch, mode=mode)
    x = _varied(case) if length > 1 else gaussian(case)
    twin = run(case, x, "cpu")
    gpu = backward(case, x.to(DEVICE), twin.saved.to(DEVICE), function=function)
    judge.same_bits("delta", mismatches(gpu.delta, twin.gradients.delta), case)


@pytest.mark.parametrize("head_dim,length,batch", [*SHAPES, LONG])
def test_row_references(judge, head_dim, length, batch):
    """M, and sums relative to it. Products of codes are modelled bit by bit; but the biases of centred q are not (they
    are off by 2^-20 of their terms), so a score may end in another unit of the accumulator, and a few M with it."""
    case = _case(head_dim, length, batch)
    for what, x in (("", gaussian(case)), (" of varied inputs", _varied(case))):
        gpu, twin = forward(case, x.to(DEVICE)).to("cpu"), forward(case, x, "cpu")
        differing = mismatches(gpu.reference, twin.reference) / gpu.reference.numel()
        judge.at_most(f"share of M that differ{what}", differing, 1e-3, case)
        seen = twin.reference.isfinite()
        shift = torch.exp2((gpu.reference - twin.reference)[seen].double())
        # A flipped code of P moves a sum of codes by an eighth of its term at most.
        for index, (name, worst, typical) in enumerate((("p", 1e-2, 1e-5), ("codes", 0.125, 1e-5))):
            ratio = gpu.sum[index][seen].double() * shift / twin.sum[index][seen].double() - 1
            judge.at_most(f"sums of {name}{what}", float(ratio.abs().max()), worst, case)
            judge.at_most(f"sums of {name}{what}, the median row", float(ratio.abs().median()), typical, case)


@pytest.mark.parametrize("length", [200, 1300])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_codes_of_p(judge, head_dim, length):
    """At least 99.9 % of the forward's codes of P agree: where all of a row's do, so do the bits of its rounded sum."""
    case = square("stale", head_dim, length, (2, 1), batch=1)
    x = gaussian(case)
    gpu, twin = forward(case, x.to(DEVICE)), forward(case, x, "cpu")
    rows = float((bits(gpu.sum[1].cpu()) != bits(twin.sum[1])).double().mean())
    # A row of n keys whose codes flip with probability p differs with about n p, and half a row is masked.
    judge.at_most("share of rows with a flipped code", rows, min(0.5, 1e-3 * length / 2), case)
    assert ON_GPU or rows == 0
