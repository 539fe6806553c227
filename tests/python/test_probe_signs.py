"""What the probe's signed numbers mean, from first principles: residuals, column sums, entropy, sharpening."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention64 import attention64, bf16
from delta_matching import dm_attn_func, probe

TOKENS, DIM = 48, 64


def head(document: dict, at: int = 0) -> dict:
    return document["heads"][at]


def probabilities(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """``[tokens, keys]`` in FP64 of one head."""
    s = q.double() @ k.double().T / DIM**0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -torch.inf)
    return s.softmax(-1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_entropy(causal, spread):
    q, k, v, d_o = (bf16(150, 1, DIM, scale=spread if i == 0 else 1.0) for i in range(4))
    p = probabilities(q[:, 0], k[:, 0], causal)
    rows = torch.special.entr(p).sum(-1)[1 if causal else 0 :]  # a row with one key is left out
    # FP64 against FP64: 150 terms and the softmax's own round-off.
    assert head(probe(q, k, v, d_o, causal=causal, modes="stale"))["entropy"] == pytest.approx(
        rows.mean().item(), rel=1e-11
    )


def test_entropy_is_of_the_batch():
    q, k, v, d_o = (bf16(2, 20, 2, DIM) for _ in range(4))
    alone = [probe(q[b], k[b], v[b], d_o[b], modes="stale")["heads"] for b in range(2)]
    together = probe(q, k, v, d_o, modes="stale")["heads"]
    for h in range(2):
        assert together[h]["entropy"] == pytest.approx((alone[0][h]["entropy"] + alone[1][h]["entropy"]) / 2)


def with_row_sums(mode: str) -> tuple[dict, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """A head whose keys are 4 in channel 0, so that dQ's channel 0 is 4 softmax_scale times the row sum of dS after
    its cast; no other key is larger, so 4 is exact in E4M3."""
    q, k, v, d_o = (bf16(1, TOKENS, 1, DIM) for _ in range(4))
    k = k.clamp(-3.9, 3.9)
    k[..., 0] = 4.0
    options = {"numerics": "paper", "centre": "none", "causal": True}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dm_attn_func(*leaves, mode=mode, **options).backward(d_o)
    q, k, v = (x.detach() for x in leaves)
    numbers = head(probe(q, k, v, d_o, modes=mode, **options))["modes"][mode]
    row_sum = leaves[0].grad[0, :, 0, 0].double() / (4 * DIM**-0.5)
    return numbers, row_sum, leaves[0].grad, leaves[1].grad, (q, k, v, d_o)


def exact_d_s(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> Tensor:
    p = probabilities(q[0, :, 0], k[0, :, 0], True)
    d_p = d_o[0, :, 0].double() @ v[0, :, 0].double().T
    return p * (d_p - (p * d_p).sum(-1, keepdim=True))


@pytest.mark.parametrize("mode", ["stale", "matched", "onepass"])
def test_signed_residual_after_cast(mode):
    numbers, row_sum, _, _, tensors = with_row_sums(mode)
    d_s = exact_d_s(*tensors)
    residual = (row_sum / d_s.abs().sum(-1))[1:]  # the first row sees one key
    found = numbers["signed_residual_after_cast"]
    # dQ's BF16 rounds a row sum by 2^-9 of it; sum |dS| is the exact one, off by FP8's 10 % (attention64.TOLERANCE's
    # 8 roundings are 18 % of an element, which have mixed signs in a sum).
    assert found["rms"] == pytest.approx(residual.square().mean().sqrt().item(), rel=0.1)
    assert found["mean"] == pytest.approx(residual.mean().item(), abs=0.1 * found["rms"])
    assert numbers["residual_after_cast"]["max"] >= found["rms"] >= abs(found["mean"])


def test_columns_after_cast_are_those_of_dk():
    numbers, _, _, d_k, _ = with_row_sums("stale")
    d_k = d_k[0, :, 0].double()
    columns = torch.tensor(numbers["columns_after_cast"], dtype=torch.float64)
    expected = d_k.sum(0) / d_k.abs().sum()
    # BF16 rounds each dK by 2^-9 / sqrt(3) of it (root mean square), with mixed signs; four times what that makes of a
    # channel is allowed. The probe's sum |dK| is that of dS before its cast, which FP8 moves by at most 6 %.
    rounding = 4 * 2**-9 / 3**0.5 * d_k.square().sum(0).sqrt() / d_k.abs().sum()
    assert ((columns - expected).abs() < rounding + 0.06 * expected.abs()).all()
    assert columns.abs().mean() > 5 * rounding.mean()  # there is something to see
    assert numbers["column_sum_after_cast"] == pytest.approx(columns.abs().sum().item(), rel=1e-3)  # four digits


@pytest.mark.parametrize(("value", "sign"), [(17.5, 1), (16.5, -1)])
def test_a_rounded_d_o_of_one_sign_flattens_or_sharpens_every_row(value, sign):
    """dO's 17.5 is 18 in E4M3 at scale 1, 16.5 is 16. With one channel of V, 1 everywhere, dP is the rounded value and
    the stale delta the value itself times O, which P's rounding moves from 1 by far less than 0.5 / 17.5: dS is P times
    the difference in every row."""
    q, k = bf16(TOKENS, 1, DIM), bf16(TOKENS, 1, DIM)
    v, d_o = torch.zeros(2, TOKENS, 1, DIM)
    v[..., 1] = 1
    d_o[..., 0], d_o[..., 1] = 448, value  # channel 0 sets the scale, and V has nothing there
    numbers = head(probe(q, k, v, d_o, numerics="paper", modes="stale"))["modes"]["stale"]["signed_residual"]
    assert numbers == {
        "rms": pytest.approx(1), "mean": pytest.approx(sign),
        "sharpens": float(sign < 0), "flattens": float(sign > 0),
    }  # fmt: skip


@pytest.mark.parametrize("epsilon", [0.1, -0.1])
def test_a_positive_residual_flattens(epsilon):
    """docs/probe.md: dS = P epsilon, followed downhill, raises the entropy where epsilon > 0, and lowers it else."""
    s = torch.randn(200, 30, dtype=torch.float64) * 2
    p = s.softmax(-1)
    moved = (s - 1e-3 * epsilon * p).softmax(-1)
    change = torch.special.entr(moved).sum(-1) - torch.special.entr(p).sum(-1)
    assert bool((change * epsilon > 0).all())


def test_rms_and_mean_agree_with_the_magnitudes():
    q, k, v, d_o = (bf16(30, 2, DIM) for _ in range(4))
    document = probe(q, k, v, d_o)
    for mode, numbers in (item for one in document["heads"] for item in one["modes"].items()):
        signed = numbers["signed_residual"]
        assert abs(signed["mean"]) <= signed["rms"] <= numbers["residual"]["max"]
        # Rows that sum to zero exactly do neither. matched leaves round-off alone, and a row of few keys may have none:
        # up to three of the 29 in 300 draws.
        neither = 1 - signed["sharpens"] - signed["flattens"]
        assert neither == pytest.approx(0) or (mode == "matched" and 0 < neither < 6 / 29), (mode, neither)
    assert "columns_after_cast" not in document["modes"]["stale"]
    assert len(document["heads"][1]["modes"]["stale"]["columns_after_cast"]) == DIM


def test_exact_o_is_what_the_entropy_goes_with():
    """A row that looks at one key alone has entropy 0, and O is that key's v."""
    q = k = torch.eye(DIM).mul(60).view(DIM, 1, DIM)
    v, d_o = bf16(DIM, 1, DIM), bf16(DIM, 1, DIM)
    o, _ = attention64(q[None], k[None], v[None], causal=False)
    assert (o[0] - v.double()).abs().max() < 1e-12
    assert head(probe(q, k, v, d_o, causal=False, modes="stale"))["entropy"] < 1e-12
