"""The dmattn program: its documents, its exit codes, and one clear line for every bad input."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_helpers import ROOT, dmattn, document, encode, layer_file, refused

EXAMPLE = ROOT / "examples" / "qwen_l15_kv1_n512.safetensors"
MODES = ["stale", "consistent", "matched", "onepass"]


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    return layer_file(tmp_path / "layer.safetensors")


# ---- documents -----------------------------------------------------------------------------------------------------


def statistic(value: dict) -> None:
    assert list(value) == ["median", "p95", "max"]
    assert 0 <= value["median"] <= value["p95"] <= value["max"]


def test_probe_document(layer: Path) -> None:
    found = document("probe", layer)
    assert (found["schema"], found["numerics"], found["centre"]) == ("dmattn.probe/1", "hopper", "qk")
    assert found["input"] == {
        "file": str(layer), "tokens": 24, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "softmax_scale": 0.125,
        "causal": True,
    }  # fmt: skip
    assert list(found["modes"]) == MODES
    assert [head["head"] for head in found["heads"]] == [0, 1, 2, 3]
    for mode, whole in found["modes"].items():
        statistic(whole["residual"])
        statistic(whole["residual_after_cast"])
        worst = max(found["heads"], key=lambda head: head["modes"][mode]["error"]["dq"])
        assert whole["worst_head"] == {"head": worst["head"], "dq": worst["modes"][mode]["error"]["dq"]}
        assert all(0 < whole["error"][name] < 0.3 for name in ("o", "dq", "dk", "dv"))
    assert found["modes"]["matched"]["residual"]["median"] < 1e-6 < found["modes"]["stale"]["residual"]["median"]
    assert found["nonfinite_heads"] == []


def test_row_document() -> None:
    found = document("row")
    assert (found["schema"], found["numerics"], found["centre"]) == ("dmattn.row/1", "paper", "k")
    assert found["row"] == {"tokens": 8, "head_dim": 4, "query": 7}
    assert list(found["modes"]) == MODES
    stale = found["modes"]["stale"]
    assert stale["row_sum"] == pytest.approx(stale["sum_positive"] + stale["sum_negative"], abs=1e-12)
    assert sum(found["split"].values()) == pytest.approx(stale["row_sum"], abs=1e-6)  # FP32 round-off
    assert abs(found["modes"]["matched"]["share"]) < 1e-6


def test_row_ablations_add_keys() -> None:
    found = document("row", "--ablation", "bf16_dp,max_shift", "--ablation", "per_tensor", "--mode", "matched")
    assert list(found["modes"]) == ["matched", "bf16_dp", "max_shift", "per_tensor"]


def test_sweep_document() -> None:
    found = document("sweep", "--tokens", 64, "--seeds", 2, "--spread", 1, "--spread", 2)
    assert found["schema"] == "dmattn.sweep/1"
    assert [(row["inputs"], row["spread"], row["mode"]) for row in found["rows"]] == [
        (inputs, spread, mode) for inputs in ("gaussian", "outlier") for spread in (1, 2) for mode in MODES
    ]
    sink = document("sweep", "--inputs", "sink", "--tokens", 64, "--seeds", 1, "--mode", "stale")
    assert [row["inputs"] for row in sink["rows"]] == ["sink"]


def test_info_document() -> None:
    found = document("info")
    assert found["schema"] == "dmattn.info/1"
    assert "cpu" in found["backends"]
    assert found["numerics_version"] >= 1


def test_tables_are_for_people(layer: Path) -> None:
    for arguments in (["probe", layer], ["row"], ["sweep", "--tokens", 16, "--seeds", 1], ["info"]):
        done = dmattn(*arguments)
        assert done.returncode == 0 and done.stderr == ""
        assert max(map(len, done.stdout.splitlines())) <= 132
    assert "Worst: head" in dmattn("probe", layer).stdout


def test_options_reach_the_measurement(layer: Path) -> None:
    one = document("probe", layer)
    assert document("probe", layer, "--threads", 1) == one  # threads never change a number
    assert document("probe", layer, "--full")["input"]["causal"] is False
    assert document("probe", layer, "--softmax-scale", "0.5")["input"]["softmax_scale"] == 0.5
    assert list(document("probe", "--mode", "onepass", "--mode", "stale", layer)["modes"]) == ["stale", "onepass"]
    paper = document("probe", layer, "--numerics", "paper", "--centre", "none")
    assert (paper["numerics"], paper["centre"]) == ("paper", "none")


def test_heads_are_selected_by_number(layer: Path) -> None:
    whole = document("probe", layer)
    some = document("probe", layer, "--heads", "1-2")
    assert [head["head"] for head in some["heads"]] == [1, 2]
    assert some["heads"] == whole["heads"][1:3]
    assert some["input"]["q_heads"] == 2


def test_metadata_gives_the_scale(tmp_path: Path) -> None:
    path = layer_file(tmp_path / "l", metadata={"softmax_scale": "0.25"})
    assert document("probe", path)["input"]["softmax_scale"] == 0.25


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_dtypes_are_rounded_first(tmp_path: Path, dtype: str) -> None:
    def to_bf16(_: str, values: list[float]) -> None:
        values[:] = [struct.unpack("<f", b"\0\0" + encode(value, "BF16"))[0] for value in values]
        values[:] = [value if abs(value) > 0.01 else 0.25 for value in values]  # keeps them in FP16's normal range

    bf16 = document("probe", layer_file(tmp_path / "a", change=to_bf16))
    other = document("probe", layer_file(tmp_path / "b", change=to_bf16, dtype=dtype))
    assert other["modes"] == bf16["modes"]


@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"batch": 0}])
def test_nothing_is_a_valid_layer(tmp_path: Path, sizes: dict) -> None:
    path = layer_file(tmp_path / "l", **sizes)
    found = document("probe", path)
    assert found["modes"]["stale"]["residual"]["median"] is None
    page = tmp_path / "page.html"
    assert dmattn("probe", path, "--html", page).returncode == 0
    assert page.is_file()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_heads_are_listed_and_left_out(tmp_path: Path, value: float) -> None:
    def plant(name: str, values: list[float]) -> None:
        if name == "q":
            values[64] = value  # token 0, head 1

    path = layer_file(tmp_path / "l", change=plant)
    done = dmattn("probe", path, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "1" in done.stderr
    assert found["nonfinite_heads"] == [1]
    assert found["modes"]["stale"]["error"]["dq"] is not None
    assert all(
        entry["error"]["dq"] is None for head in found["heads"] if head["head"] == 1 for entry in head["modes"].values()
    )


# ---- bad input -----------------------------------------------------------------------------------------------------


def test_files_that_are_none(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = tmp_path / "text.txt"
    text.write_text("These are words, not tensors.\n")
    pickle = tmp_path / "model.bin"
    pickle.write_bytes(b"PK\x03\x04" + bytes(64))
    refused("probe", empty, says="is empty")
    refused("probe", tmp_path / "none", says="no such file")
    refused("probe", tmp_path, says="is a directory")
    refused("probe", fifo, says="not a regular file")
    refused("probe", text, says="not a safetensors file")
    refused("probe", pickle, says="safetensors")


def test_names_cannot_break_the_line(tmp_path: Path) -> None:
    refused("probe", tmp_path / "new\nline\x1b[31m", says="new\\x0aline\\x1b[31m")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(layer: Path) -> None:
    layer.chmod(0)
    refused("probe", layer, says="cannot be opened")


def broken(path: Path, edit: Callable[[dict], None]) -> Path:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return path


def test_broken_headers(layer: Path, tmp_path: Path) -> None:
    content = layer.read_bytes()
    huge = tmp_path / "huge"
    huge.write_bytes(struct.pack("<Q", 2**63) + content[8:])
    refused("probe", huge, says="header length must be at most")
    long = tmp_path / "long"
    long.write_bytes(struct.pack("<Q", 50_000_000) + content[8:])
    refused("probe", long, says="truncated")

    def overlap(header: dict) -> None:
        header["v"]["data_offsets"] = header["k"]["data_offsets"]

    refused("probe", broken(layer, overlap), says="overlap")


def test_every_cut_of_a_file(layer: Path, tmp_path: Path) -> None:
    content = layer.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    numbers = random.Random(1)
    cuts = {0, 1, 7, 8, 9, 8 + size - 1, 8 + size, 8 + size + 1, len(content) - 1}
    cuts |= {numbers.randrange(len(content)) for _ in range(60)} | {numbers.randrange(8 + size) for _ in range(30)}
    cut = tmp_path / "cut"
    for at in sorted(cuts):
        cut.write_bytes(content[:at])
        refused("probe", cut, says="cut'")
    cut.write_bytes(content + b"\0")
    refused("probe", cut, says="after the last tensor")


def test_every_cut_of_the_example(tmp_path: Path) -> None:
    content = EXAMPLE.read_bytes()
    cut = tmp_path / "cut"
    for at in [*range(0, 700, 37), *range(1000, len(content), 90_000), len(content) - 1]:
        cut.write_bytes(content[:at])
        refused("probe", cut, says="cut'")


def test_layers_that_do_not_fit_together(tmp_path: Path) -> None:
    path = tmp_path / "l"
    refused("probe", layer_file(path, leave_out="d_o"), says="has no tensor 'd_o'")
    refused("probe", layer_file(path, dtype="I32"), says="dtype must be BF16, F16 or F32, got I32")
    refused("probe", layer_file(path, q_heads=3), says="must be a multiple")
    refused("probe", layer_file(path, head_dim=32), says="head_dim must be 64, 128 or 256")
    refused("probe", layer_file(path, shapes={"d_o": [24, 4, 32]}), says="'q' and 'd_o'")
    refused("probe", layer_file(path, shapes={"v": [23, 2, 64]}), says="'k' and 'v'")
    refused("probe", layer_file(path, shapes={"q": [96, 64]}), says="tensor 'q': shape must be")
    refused("probe", layer_file(path, metadata={"softmax_scale": "-1"}), says="softmax_scale must be")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no command given: the commands are row, sweep"),
        (["prove"], "unknown command or option 'prove'"),
        (["--bogus"], "unknown command or option '--bogus'"),
        (["probe"], "FILE is required"),
        (["probe", "FILE", "--mode", "mached"], "the modes are stale, consistent, matched, onepass"),
        (["probe", "FILE", "--mode", "bf16_dp"], "see --ablation"),
        (["probe", "FILE", "--ablation", "bf16_dp"], "paper numerics only"),
        (["row", "--ablation", "none"], "the ablations are bf16_dp, max_shift, per_tensor"),
        (["probe", "FILE", "--numerics", "fp8"], "paper or hopper"),
        (["probe", "FILE", "--centre", "q"], "none, k or qk"),
        (["row", "--centre", "qk"], "paper numerics centres none or k"),
        (["probe", "FILE", "--device", "tpu"], "cpu or cuda"),
        (["probe", "FILE", "--threads", "-1"], "--threads: must be a whole number from 0 to 1024"),
        (["probe", "FILE", "--threads", "1e9"], "--threads: must be a whole number"),
        (["probe", "FILE", "--seed", "x"], "--seed: must be a whole number"),
        (["probe", "FILE", "--softmax-scale", "nan"], "--softmax-scale: must be a finite number above 0"),
        (["probe", "FILE", "--softmax-scale", "0"], "--softmax-scale: must be a finite number above 0"),
        (["probe", "FILE", "--heads", "4"], "--heads: must be below 4"),
        (["probe", "FILE", "--heads", "a-b"], "--heads: must be numbers or ranges"),
        (["probe", "FILE", "FILE"], "not expected"),
        (["probe", "FILE", "--bogus"], "--bogus"),
        (["row", "--tokens", "0"], "--tokens: must be a whole number from 1"),
        (["row", "--head-dim", "99999999999999999999"], "--head-dim: must be a whole number"),
        (["row", "--numerics", "hopper"], "--head-dim must be 64, 128 or 256"),
        (["sweep", "--inputs", "uniform"], "gaussian, outlier or sink"),
        (["sweep", "--spread", "inf"], "--spread: must be a finite number"),
        (["sweep", "--heads", "64", "--tokens", "65536", "--head-dim", "4096"], "must be at most"),
        (["certify", "--seed", "-1"], "--seed: must be a whole number"),
        (["certify", "--device-index", "x"], "--device-index: must be a whole number"),
    ],
)
def test_bad_arguments(layer: Path, arguments: list[str], says: str) -> None:
    refused(*[str(layer) if argument == "FILE" else argument for argument in arguments], says=says)


def has_backend() -> bool:
    return "cuda" in document("info")["backends"]


def has_hopper() -> bool:
    return any(gpu["capability"] == "9.0" for gpu in document("info")["gpus"])


@pytest.mark.parametrize("command", ["row", "sweep"])
def test_the_twin_is_what_is_measured(command: str) -> None:
    refused(command, "--device", "cuda", says="expected cpu, got cuda" if has_backend() else "no CUDA backend")
    refused(command, "--device-index", "0", says="--device-index")
    assert document("row", "--device", "cpu") == document("row")


def test_probe_of_the_gpu_is_refused(layer: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = ["probe", str(layer), "--device", "cuda", "--html", str(page)]
    if not has_backend():
        refused(*command, says="--device: no CUDA backend in this build")
        return
    refused(*command, "--numerics", "paper", says="--numerics: expected hopper with --device cuda, got paper")
    refused(*command, "--ablation", "bf16_dp", says="--ablation: the GPU's kernels have no ablations")
    refused(*command, "--device-index", "1023", says="needs a Hopper GPU (see --device-index)")
    if not has_hopper():
        refused(*command, says="needs a Hopper GPU (see --device-index)")
        reason = dmattn("certify").stderr.partition("(see --device-index)")[2]
        assert reason and dmattn(*command).stderr.endswith(reason)
    assert not page.exists()
    assert document("probe", layer, "--device", "cpu") == document("probe", layer)


def test_probe_of_the_gpu(tmp_path: Path) -> None:
    if not has_hopper():
        pytest.skip("needs a Hopper GPU")
    page = tmp_path / "page.html"
    found, twin = document("probe", EXAMPLE, "--device", "cuda", "--html", page), document("probe", EXAMPLE)
    assert (found["device"], twin["device"]) == ("cuda", "cpu")
    assert list(found) == list(twin) and found["input"] == twin["input"]
    assert '"device":"cuda"' in page.read_text().replace(" ", "")
    stale = twin["modes"]["stale"]["residual"]["median"]
    for mode in MODES:
        ours, theirs = found["modes"][mode], twin["modes"][mode]
        assert ours["error"] == pytest.approx(theirs["error"], rel=0.05)
        if mode == "matched":
            assert ours["residual"]["median"] < stale / 100
        else:
            assert ours["residual"]["median"] == pytest.approx(theirs["residual"]["median"], rel=0.05)
    for ours, theirs in zip(found["heads"], twin["heads"], strict=True):
        assert ours["entropy"] == theirs["entropy"]
        assert ours["modes"]["matched"]["error"] == pytest.approx(theirs["modes"]["matched"]["error"], rel=0.1)


def test_certify(tmp_path: Path) -> None:
    out = tmp_path / "certificate.json"
    if not has_hopper():
        for options in ([], ["--json"], ["--quick", "--device-index", "1", "--out", out]):
            refused("certify", *options, says="CUDA")
        assert not out.exists()
        return
    found = document("certify", "--quick", "--out", out)
    assert json.loads(out.read_text()) == found
    assert (found["schema"], found["numerics"], found["device"]) == ("dmattn.certificate/1", "hopper", "cuda")
    assert list(found["cases"][0]) == ["name", "shape", "mode", "grade", "value", "limit", "mismatches", "pass"]
    assert {case["grade"] for case in found["cases"]} == {"bitwise", "bounded"}
    assert {case["mode"] for case in found["cases"]} == {None, *MODES}
    assert {case["shape"]["head_dim"] for case in found["cases"]} == {64, 128, 256}
    assert all(case["pass"] for case in found["cases"])


@pytest.mark.parametrize("command", ["", "row", "sweep", "probe", "report", "certify", "info"])
def test_help(command: str) -> None:
    done = dmattn(*filter(None, [command]), "--help")
    assert done.returncode == 0 and done.stderr == ""
    if command != "info":
        assert "Examples:" in done.stdout
    assert ("--device-index" in done.stdout) == (command in ("probe", "certify"))
    assert ("--device cuda" in done.stdout) == (command == "probe")
