"""What tells the modes apart, measured on the GPU's delta: identities, and the row-sum residual before the cast."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_calls import DEVICE, MODES, Case, Inputs, Result, backward, forward, gaussian, run, square
from gpu_compare import mismatches
from gpu_emulation import Head

#: Largest residuals, the median row. Those of consistent and stale are errors of codes: the twin's own.
RESIDUAL = {"matched": 1e-6, "onepass": 1e-3}


def _heads(case: Case, x: Inputs, result: Result) -> list[Head]:
    return [Head(case, x, result, h) for h in range(case.q_heads)]


def _median(case: Case, x: Inputs, result: Result) -> float:
    parts = [head.residuals(result.gradients.delta[0, h]) for h, head in enumerate(_heads(case, x, result))]
    return float(torch.cat(parts).nanmedian())


@pytest.mark.parametrize("head_dim,length", [(128, 2048), (64, 1100), (256, 700)])
@pytest.mark.parametrize("mode", MODES)
def test_residual(judge, mode, head_dim, length):
    case = square(mode, head_dim, length, (2, 1))
    x = gaussian(case)
    gpu = _median(case, x, run(case, x))
    if mode in RESIDUAL:
        judge.at_most("residual of the median row", gpu, RESIDUAL[mode], case, "property")
        return
    twin = _median(case, x, run(case, x, "cpu"))
    detail = f"{gpu:.3e} and {twin:.3e}"
    judge.at_most("residual of the median row beside the twin's", abs(gpu / twin - 1), 0.1, case, detail=detail)


@pytest.mark.quick
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_delta_identities(judge, causal):
    """stale - consistent = <dO - d^O, O>, onepass - consistent = <d^O, O_low> but for what the tensor core makes of
    O's codes, with d^O what dP was made from."""
    case = square("stale", 128, 600, (2, 1), causal=causal)
    x = gaussian(case)
    results = {mode: run(dataclasses.replace(case, mode=mode), x) for mode in MODES}
    for h in range(case.q_heads):
        stale = Head(case, x, results["stale"], h)
        of_onepass = Head(dataclasses.replace(case, mode="onepass"), x, results["onepass"], h)
        delta = {mode: r.gradients.delta[0, h].to(DEVICE).double() for mode, r in results.items()}
        saved = results["onepass"].saved
        o, low = (t[0, :, h].to(DEVICE).double() for t in (saved.o, saved.o_low))
        d_o = x.d_o[0, :, h].to(DEVICE).double()
        # Before w is divided out, codes of w dO are what the product sees; consistent and stale share w.
        hat = stale.d_o_hat() / stale.w.double()[:, None]
        size = d_o.norm(dim=1) * o.norm(dim=1)
        pairs = {
            "stale": (delta["stale"], (d_o * o).sum(dim=1)),
            "consistent": (delta["consistent"], (hat * o).sum(dim=1)),
            "onepass": (delta["onepass"], of_onepass.onepass_delta(o + low)),
            "stale - consistent": (delta["stale"] - delta["consistent"], ((d_o - hat) * o).sum(dim=1)),
        }
        for name, (got, expected) in pairs.items():
            judge.at_most(f"{name}, head {h}", float(((got - expected).abs() / size).max()), 2e-6, case, "property")
        judge.true(f"O is the same in every mode, head {h}", _same_o(results, h), case)


def _same_o(results: dict[str, Result], head: int) -> bool:
    o = [r.saved.o[0, :, head].view(torch.int16) for r in results.values()]
    return all(torch.equal(o[0], other) for other in o[1:])


@pytest.mark.parametrize("mode", MODES)
def test_matched_delta_is_the_mean_of_dp(judge, mode):
    """matched's delta is the mean of dP under P; the others' are off by what they neglect, but near."""
    case = square(mode, 64, 700, (1, 1))
    x = gaussian(case)
    result = run(case, x)
    head = Head(case, x, result)
    above, below, size = (torch.zeros(case.q_len, dtype=torch.float64, device=DEVICE) for _ in range(3))
    for tile in head.tiles():
        above[tile.rows] = (tile.p * tile.dp).sum(dim=1)
        below[tile.rows] = tile.p.sum(dim=1)
        size[tile.rows] = (tile.p * tile.dp.abs()).sum(dim=1)
    difference = (above / below - result.gradients.delta[0, 0].to(DEVICE).double() * head.w.double()).abs()
    worst = float((difference / (size / below)).max())
    judge.at_most("distance from the mean of dP", worst, 1e-5 if mode == "matched" else 0.1, case, "property")


@pytest.mark.parametrize("mode", MODES)
def test_given_delta(judge, mode):
    """A delta that is handed in is used as it is: the mode's own changes nothing, and it comes back."""
    case = square(mode, 128, 400)
    x = gaussian(case).to(DEVICE)
    saved = forward(case, x)
    own = backward(case, x, saved)
    alone = backward(case, x, saved, function="delta")
    judge.same_bits("delta alone", mismatches(alone.delta, own.delta), case)
    given = backward(case, x, saved, delta=own.delta)
    # delta w is rounded once more on the way back in.
    for name in ("dq", "dk", "dv"):
        a, b = (getattr(g, name).double() for g in (given, own))
        judge.at_most(f"{name} with its own delta given", float((a - b).norm() / b.norm()), 2e-3, case)
    judge.at_most("delta comes back", float((given.delta - own.delta).abs().max() / own.delta.abs().max()), 1e-6, case)


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_an_infinite_delta_stays_in_its_tile(judge, mode):
    """dS of the 64 queries around it is lost; the exponent that later tiles of the interval share is not."""
    case = square(mode, 128, 320, (1, 1))
    x = gaussian(case)
    own = run(case, x, "cpu")
    delta = own.gradients.delta.clone()
    delta[0, 0, 5] = torch.inf
    twin = backward(case, x, own.saved, "cpu", delta=delta)
    on_device = x.to(DEVICE)
    gpu = backward(case, on_device, own.saved.to(DEVICE), delta=delta.to(DEVICE))
    rows = slice(64, None)
    ours, theirs = gpu.dq[0, rows].cpu().double(), twin.dq[0, rows].double()
    assert bool(ours.isfinite().all()), "rows of other tiles"
    judge.at_most("dq of other tiles", float((ours - theirs).norm() / theirs.norm()), 2e-3, case)
    assert bool(gpu.dq[0, :64].isnan().any()), "an infinite delta must not turn into plausible numbers"
    judge.at_most("dv", float((gpu.dv.cpu().double() - twin.dv.double()).norm() / twin.dv.double().norm()), 2e-3, case)
