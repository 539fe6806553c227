"""The figures of the article and of an independent simulation, reached through the command line.

tests/data/targets.json holds them with their sources. Limits: 15 % for the sweep's residuals and errors (medians over
a few seeds of random heads move by about 5 % from seed to seed), 10 % for the shipped layer (the same input, so only
the simulation's own choices differ), 30 % for its saturated head, whose errors hang on single roundings.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = json.loads((ROOT / "tests/data/targets.json").read_text())
LAYER = ROOT / "examples/qwen_l15_kv1_n512.safetensors"
MODES = ("stale", "consistent", "matched", "onepass")
SATURATED = 1  # head of the layer whose logits reach 1,400


def dmattn(*arguments: str) -> dict:
    binary = os.environ.get("DMATTN_BIN", str(ROOT / "build/release/cli/dmattn"))
    run = subprocess.run([binary, *arguments, "--json"], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def paper_sweep() -> dict:
    rows = dmattn("sweep", "--numerics", "paper")["rows"]
    return {(row["inputs"], row["spread"], row["mode"]): row for row in rows}


def near(got: float, target: float, share: float) -> bool:
    return abs(got / target - 1) <= share


def test_sweep_reaches_the_articles_table(paper_sweep: dict) -> None:
    for spread, target in TARGETS["sweep"]["gaussian"].items():
        rows = {mode: paper_sweep["gaussian", float(spread), mode] for mode in MODES}
        assert near(rows["stale"]["residual"], target["stale"], 0.15)
        assert near(rows["consistent"]["residual"], target["consistent"], 0.15)
        assert rows["matched"]["residual"] <= 4 * target["matched"]
        assert near(rows["matched"]["residual_after_cast"], target["matched_post_cast"], 0.15)
        assert near(rows["matched"]["error_o"], target["o_error"], 0.15)
        assert near(rows["matched"]["error_dq"], target["dq_error"], 0.15)
    for spread, target in TARGETS["sweep"]["outlier"].items():
        assert near(paper_sweep["outlier", float(spread), "stale"]["residual"], target["stale"], 0.15)


def test_sweep_keeps_orderings_ratios_and_column_sums(paper_sweep: dict) -> None:
    ratios = TARGETS["sweep"]["post_cast_ratio"]
    columns = TARGETS["sweep"]["column_sum"]
    for inputs in ("gaussian", "outlier"):
        for spread in (1.0, 2.0, 4.0):
            rows = {mode: paper_sweep[inputs, spread, mode] for mode in MODES}
            assert rows["stale"]["residual"] > rows["consistent"]["residual"] > rows["matched"]["residual"]
            after = {mode: rows[mode]["residual_after_cast"] for mode in MODES}
            assert after["stale"] > after["consistent"] > after["matched"]
            low, high = ratios["stale_over_matched"]
            assert low - 0.3 <= after["stale"] / after["matched"] <= high + 0.3
            low, high = ratios["consistent_over_matched"]
            assert low - 0.3 <= after["consistent"] / after["matched"] <= high + 0.3
            if inputs == "gaussian":
                low, high = columns["stale"]
                assert low / 1.5 <= rows["stale"]["column_sum"] <= high * 1.5
                assert columns["consistent"] / 1.5 <= rows["consistent"]["column_sum"] <= columns["consistent"] * 1.5
                assert rows["matched"]["column_sum"] <= 1e-7


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("paper", ("--numerics", "paper")),
        ("hopper_k", ("--numerics", "hopper", "--centre", "k")),
        ("hopper_qk", ("--numerics", "hopper")),
    ],
)
def test_sink_demonstration(key: str, options: tuple[str, ...]) -> None:
    rows = {row["mode"]: row for row in dmattn("sweep", "--inputs", "sink", *options)["rows"]}
    for mode in MODES:
        share = 0.20 if key != "paper" and mode in ("consistent", "onepass") else 0.10
        assert near(rows[mode]["error_dq"], TARGETS["sink"][key][mode], share), (mode, rows[mode]["error_dq"])


def test_shipped_layer_in_paper_numerics() -> None:
    layer = dmattn("probe", str(LAYER), "--numerics", "paper")
    for mode in MODES:
        target, got = TARGETS["qwen_l15_kv1"]["paper"][mode], layer["modes"][mode]
        if mode in ("stale", "consistent"):
            assert near(got["residual"]["median"], target["residual"], 0.10)
        else:
            assert got["residual"]["median"] <= 5e-7
        assert near(got["residual_after_cast"]["median"], target["residual_after_cast"], 0.10)
        for name in ("o", "dq", "dk", "dv"):
            assert near(got["error"][name], target[name], 0.10), (mode, name)
        for head in layer["heads"]:
            share = 0.30 if head["head"] == SATURATED else 0.10
            errors = head["modes"][mode]["error"]
            assert near(errors["dq"], target["dq_per_head"][head["head"]], share), (mode, head["head"])
            assert near(errors["o"], target["o_per_head"][head["head"]], 0.10), (mode, head["head"])
        assert got["worst_head"]["head"] == SATURATED


def test_shipped_layer_in_hopper_numerics() -> None:
    layer = dmattn("probe", str(LAYER))
    for mode in MODES:
        target, got = TARGETS["qwen_l15_kv1"]["q_centred"][mode], layer["modes"][mode]
        for name in ("o", "dq", "dk", "dv"):
            # Not above 15 %; below is better than the simulation (stale's dK, which one saturated head decides).
            assert got["error"][name] <= 1.15 * target[name], (mode, name)
            if mode != "stale":
                assert near(got["error"][name], target[name], 0.15), (mode, name)
        assert got["worst_head"]["head"] == SATURATED
    assert layer["modes"]["matched"]["worst_head"]["dq"] < 0.25
