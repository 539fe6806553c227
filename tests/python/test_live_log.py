"""What a live probe writes: its log, what it appends to and refuses, TensorBoard, QK-norm gains, pushed channels."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attention64 import bf16
from cli_helpers import document
from delta_matching import probe
from delta_matching.live.measure import Pushes
from live_models import HEAD_DIM, KV_HEADS, Q_HEADS, Attention, Gemma3RMSNorm, Model, RMSNorm, train_step


def train(model: nn.Module, steps: int, **options: Any) -> Any:
    with probe(model, **options) as live:
        for _ in range(steps):
            train_step(model)
            live.step()
    return live


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


# ---- the log -------------------------------------------------------------------------------------------------------


def test_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    live = train(Model("dm", "sdpa"), 5, every=2, path=path)
    found = lines(path)
    assert [line["step"] for line in found] == [0, 2, 4]
    assert list(found[0])[:5] == ["schema", "version", "numerics", "centre", "device"]
    assert ["run" in line for line in found] == [True, False, False]
    run = found[0]["run"]
    assert (run["model"], run["every"], run["start"], run["heads"]) == ("Model", 2, 0, 2)
    assert found[-1] == live.last
    assert found[0]["seconds"] > 0


def test_the_command_reads_it(tmp_path):
    path = tmp_path / "log.jsonl"
    live = train(Model("dm", "sdpa", norm=RMSNorm), 3, every=2, path=path)
    report = document("report", path)
    assert report["steps"] == [0, 2]
    assert [layer["layer"] for layer in report["layers"]] == ["layers.0", "layers.1"]
    for layer, measured in zip(report["layers"], live.last["layers"], strict=True):
        entropies = [head["entropy"] for head in measured["heads"]]
        assert layer["entropy"][-1] == pytest.approx(sum(entropies) / 2, rel=1e-3)  # four digits are printed
        assert layer["gain_share"] == [pytest.approx(1 / HEAD_DIM, rel=1e-3)] * 2
        for mode, series in layer["modes"].items():
            errors = [head["modes"][mode]["error"]["dk"] for head in measured["heads"]]
            assert series["error"]["dk"][-1] == pytest.approx(max(errors), rel=1e-3)


def test_a_resumed_training_appends(tmp_path):
    path = tmp_path / "log.jsonl"
    model = Model("dm")
    train(model, 3, every=2, path=path)
    train(model, 3, every=2, path=path, start=3)
    found = lines(path)
    assert [line["step"] for line in found] == [0, 2, 4]
    assert ["run" in line for line in found] == [True, False, True]
    assert found[2]["run"]["start"] == 3


@pytest.mark.parametrize("cut", [1, 300])
def test_half_a_line_is_cut_off(tmp_path, cut):
    path = tmp_path / "log.jsonl"
    train(Model("dm"), 2, every=1, path=path)
    content = path.read_bytes()
    path.write_bytes(content[:-cut])  # the process was killed as it wrote step 1
    train(Model("dm"), 1, every=1, path=path, start=7)
    assert [line["step"] for line in lines(path)] == [0, 7]
    path.write_bytes(content[:200])  # and here as it wrote the first
    train(Model("dm"), 1, every=1, path=path, start=8)
    assert [line["step"] for line in lines(path)] == [8]


@pytest.mark.parametrize("content", ["# notes\n", '{"schema": "dmattn.probe/1"}\n', "[1]\n", "3", '{"schema"'])
def test_other_files_are_not_appended_to(tmp_path, content):
    path = tmp_path / "notes.md"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"notes.md' exists and is not a log of schema dmattn.live/1"):
        probe(nn.Linear(1, 1), path=path).__enter__()
    assert path.read_text() == content


def test_what_cannot_be_written_is_known_at_once(tmp_path):
    model = Model("dm")
    for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "none" / "log", FileNotFoundError)):
        with pytest.raises(error, match="path: cannot write"):
            probe(model, path=path).__enter__()
    assert sum(len(m._forward_hooks) for m in model.modules()) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_reported(tmp_path):
    path = tmp_path / "log.jsonl"
    path.symlink_to("/dev/full")
    model = Model("dm")
    with (
        pytest.raises(OSError, match=r"path: cannot write .*log.jsonl.*No space left"),
        probe(model, path=path) as live,
    ):
        train_step(model)
        live.step()
    assert sum(len(m._forward_hooks) for m in model.modules()) == 0


# ---- TensorBoard ---------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[float, int]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((value, step))


def test_scalars():
    writer = Writer()
    live = train(Model("dm"), 3, every=2, tensorboard=writer)
    assert all([step for _, step in values] == [0, 2] for values in writer.scalars.values())
    heads = live.last["layers"][0]["heads"]
    entropy = sum(head["entropy"] for head in heads) / 2
    assert writer.scalars["delta_matching/entropy/layers.0"][-1][0] == pytest.approx(entropy)
    worst = max(head["modes"]["matched"]["error"]["dq"] for head in heads)
    assert writer.scalars["delta_matching/matched/largest_error_dq/layers.0"][-1][0] == worst
    assert not any("gain" in tag for tag in writer.scalars)  # no QK-norm, no number


def test_without_tensorboard_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ImportError, match="tensorboard"):
        probe(nn.Linear(1, 1), tensorboard=tmp_path).__enter__()
    assert os.listdir(tmp_path) == []


# ---- gains ---------------------------------------------------------------------------------------------------------


def gains_of(model: nn.Module, **options: Any) -> list[dict[str, Any] | None]:
    live = train(model, 1, heads=Q_HEADS, **options)
    return [head["gain"] for head in live.last["layers"][0]["heads"]]


@pytest.mark.parametrize(("norm", "offset"), [(RMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
def test_gain_concentration(norm, offset):
    model = Model("dm", norm=norm)
    layer = model.layers[0]
    with torch.no_grad():
        layer.q_norm.weight[7] = 3 - offset
        layer.k_norm.weight[7] = 2 - offset
    share = 36 / (36 + HEAD_DIM - 1)
    assert gains_of(model) == [{"channel": 7, "share": pytest.approx(share)}] * Q_HEADS
    # Said by hand it is the same; said wrongly it is not.
    assert gains_of(model, gain_offset=offset)[0]["share"] == pytest.approx(share)
    assert gains_of(model, gain_offset=offset + 1)[0]["share"] != pytest.approx(share)


def test_gains_of_every_head():
    model = Model("dm", norm=RMSNorm)
    layer = model.layers[0]
    q_weight, k_weight = torch.ones(Q_HEADS, HEAD_DIM), torch.ones(KV_HEADS, HEAD_DIM)
    q_weight[1, 5], k_weight[1, 9] = 2, 3  # query heads 2 and 3 share key head 1
    with probe(model, heads=Q_HEADS) as live:
        train_step(model)
        layer.q_norm.weight = nn.Parameter(q_weight.flatten())
        layer.k_norm.weight = nn.Parameter(k_weight.flatten())
        live.step()
    found = [head["gain"] for head in live.last["layers"][0]["heads"]]
    rest = HEAD_DIM - 1
    assert [gain["share"] for gain in found] == pytest.approx(
        [1 / HEAD_DIM, 4 / (4 + rest), 9 / (9 + rest), 9 / (9 + rest)]
    )
    assert [gain["channel"] for gain in found[1:]] == [5, 9, 9]


@pytest.mark.parametrize("weight", [torch.ones(3), torch.zeros(HEAD_DIM), torch.full((HEAD_DIM,), math.nan), None])
def test_gains_that_cannot_be_read_are_null(weight):
    model = Model("dm", norm=RMSNorm)
    with probe(model) as live:
        train_step(model)
        model.layers[0].q_norm.weight = None if weight is None else nn.Parameter(weight)
        live.step()
    assert [head["gain"] for head in live.last["layers"][0]["heads"]] == [None, None]


def test_gains_of_a_module_around_the_call():
    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, *args: Any) -> Any:
            return self.inner.attend(*args)

    model = nn.ModuleDict({"block": nn.Module()})
    model["block"].core = Core()
    model["block"].q_norm, model["block"].k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)
    q, k = bf16(1, 8, 4, 64, grad=True), bf16(1, 8, 2, 64)
    with probe(model) as live:
        model["block"].core(q, k, k).sum().backward()
        live.step()
    (layer,) = live.last["layers"]
    assert layer["layer"] == "block.core" and layer["heads"][0]["gain"]["share"] == pytest.approx(1 / HEAD_DIM)


# ---- pushed channels -----------------------------------------------------------------------------------------------


def test_pushes_add_up_over_steps():
    pushes = Pushes()
    pushes.add("a", 0, "stale", [0.0, 0.1, -0.3, 0.0, 0.01, 0.02])
    found = pushes.add("a", 0, "stale", [0.0, 0.1, 0.2, 0.0, 0.01, -0.02])
    assert [entry["channel"] for entry in found] == [1, 2, 4]  # channels that never moved are left out
    assert [entry["share"] for entry in found] == [0.1, 0.2, 0.01]  # this step's
    assert [entry["consistency"] for entry in found] == pytest.approx([1, 0.1 / 0.5, 1])
    assert pushes.add("b", 0, "stale", [0.5])[0]["consistency"] == 1.0  # other heads, layers and modes are others
    assert pushes.add("a", 0, "stale", [None] * 6) == []


def test_pushes_of_a_training():
    live = train(Model("dm", mode="stale"), 3, every=1)
    numbers = live.last["layers"][0]["heads"][0]["modes"]["stale"]
    assert len(numbers["columns_after_cast"]) == HEAD_DIM
    assert len(numbers["pushed"]) == 4
    for entry in numbers["pushed"]:
        assert entry["share"] == numbers["columns_after_cast"][entry["channel"]]
        assert 0 <= entry["consistency"] <= 1
